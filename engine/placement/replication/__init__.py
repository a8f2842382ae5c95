"""Experts with replicas: DeepSeek's EPLB and a stronger search with bounds."""

from engine.placement.replication.kernel import (
    ReplicationInstance,
    balancedness,
    imbalance_gap,
    replicate,
    share_of_slot,
)

__all__ = ["ReplicationInstance", "balancedness", "imbalance_gap", "replicate", "share_of_slot"]

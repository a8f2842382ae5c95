"""Experts with replicas: DeepSeek's EPLB and a stronger search with bounds."""

from engine.placement.replication.instance import ReplicationInstance, Split, balancedness, share_of_slot
from engine.placement.replication.kernel import Algorithm, replicate

"""Is this answer legal, and what is it worth? Recomputed from scratch; knows no optimiser and calls none.

Every `check_` function returns what it measured and raises `IllegalError` with the first broken rule. The tests of every
kernel go through here. One module a family of problems. `refuse_broken` is for plans that come in or go out: wherever one is
read, opened, launched or exported.
"""

from engine.errors import IllegalError
from engine.validate.affinity import check_affinity
from engine.validate.assignment import check_assignment
from engine.validate.coactivation import check_coactivation
from engine.validate.colocation import check_colocation, check_colocation_heterogeneous
from engine.validate.communication import check_flows, check_relayed, check_schedule
from engine.validate.devices import check_devices, check_popularity
from engine.validate.joint import check_joint
from engine.validate.partition import check_axes, check_partition
from engine.validate.pipeline import check_pipeline
from engine.validate.plan import check_plan, check_timeline
from engine.validate.priority import check_streams
from engine.validate.refusal import refuse_broken, refuse_broken_launch
from engine.validate.replication import check_replication, check_transfers
from engine.validate.training import check_step
from engine.validate.weight_gradients import check_weight_gradients

__all__ = [
    "IllegalError",
    "check_affinity",
    "check_assignment",
    "check_axes",
    "check_coactivation",
    "check_colocation",
    "check_colocation_heterogeneous",
    "check_devices",
    "check_flows",
    "check_joint",
    "check_partition",
    "check_pipeline",
    "check_plan",
    "check_popularity",
    "check_relayed",
    "check_replication",
    "check_schedule",
    "check_step",
    "check_streams",
    "check_timeline",
    "check_transfers",
    "check_weight_gradients",
    "refuse_broken",
    "refuse_broken_launch",
]

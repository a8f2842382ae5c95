"""The plan that runs now, where only its placement is known."""

from engine.plan import Placement, Plan, SendOrder
from engine.result import Provenance


def running(placement: Placement, plan: Plan, name: str = "deployed") -> Plan:
    """A bare placement as a plan that differs from the one in question in nothing that engines settle elsewhere: its tokens
    travel alike, and where it has no replicas they are carried or return alike. All GPUs send at once, as engines do."""
    return Plan(
        name=name,
        placement=placement,
        send_order=SendOrder(mode="concurrent"),
        execution=plan.execution if placement.single else "vanilla",
        travel=plan.travel,
        provenance=Provenance(optimiser="file"),
    )

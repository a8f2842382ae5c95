"""Plans that tests of the team's database save."""

from engine.plan import Placement, Plan, SendOrder
from engine.result import Provenance


def plan_of(name: str = "a plan", seed: int = 0, parent: str | None = None) -> Plan:
    placement = Placement(experts=2, experts_of_gpu=(((0,), (1,)),), model_layers=(0,))
    return Plan(
        name=name,
        placement=placement,
        send_order=SendOrder(mode="concurrent"),
        provenance=Provenance(optimiser="test", seed=seed),
        parent=parent,
    )

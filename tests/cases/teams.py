"""Plans that tests of the team's database save."""

from engine.plan import Placement, Plan
from engine.result import Provenance
from tests.cases.launch_plans import plan_with


def plan_of(name: str = "a plan", seed: int = 0, parent: str | None = None) -> Plan:
    placement = Placement(experts=2, experts_of_gpu=(((0,), (1,)),), model_layers=(0,))
    return plan_with(placement, name=name, provenance=Provenance(optimiser="test", seed=seed), parent=parent)

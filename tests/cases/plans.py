"""Plans made by hand."""

from engine.plan import Placement, Plan, SendOrder
from tests.cases.launch_plans import plan_with


def plan_of(placement: Placement, second: Placement | None = None, **parts) -> Plan:
    """A plan with concurrent sends. second: the second model's placement; parts: other fields of `Plan`"""
    more = {} if second is None else {"placement_b": second, "send_order_b": SendOrder(mode="concurrent")}
    return plan_with(placement, **{"name": "plan"} | more | parts)

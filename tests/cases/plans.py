"""Plans made by hand."""

from engine.plan import Placement, Plan, SendOrder
from engine.result import Provenance


def plan_of(placement: Placement, second: Placement | None = None, **parts) -> Plan:
    """A plan of a placement with concurrent sends.

    placement: where the experts are.
    second: the same for the second model.
    parts: further fields of the plan, in place of the usual ones.
    """
    order = SendOrder(mode="concurrent")
    fields = {"name": "plan", "placement": placement, "send_order": order, "provenance": Provenance(optimiser="test")}
    if second is not None:
        fields |= {"placement_b": second, "send_order_b": order}
    return Plan(**fields | parts)

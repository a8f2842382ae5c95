"""What of a plan no file of a serving engine can say: everything but where the experts are."""

from engine.plan import Plan

_ORDERS = {
    "sequential": "one send after another",
    "matched": "phases in which each GPU has one peer",
    "shared": "phases that share the ports",
    "joint": "phases of two models together",
    "two-tier": "phases between nodes",
}


def not_carried(plan: Plan) -> tuple[str, ...]:
    """A line for people for every part of the plan that stays behind."""
    parts = []
    if plan.send_order.mode != "concurrent":
        parts.append(f"the order of its sends ({_ORDERS[plan.send_order.mode]}): engines send all at once")
    if plan.execution != "vanilla":
        parts.append("context-coherent execution: the engine brings tokens back after every layer")
    if plan.travel is not None:
        parts.append(f"how tokens travel ({plan.travel.in_words}): the engine's own dispatch decides")
    if plan.placement_b is not None:
        parts.append("the second model's placement")
    if plan.reaction is not None:
        parts.append("the reaction at run time: the placement stays as it is")
    if plan.priority is not None:
        parts.append("the schedule of the training step")
    return tuple(f"not carried: {part}" for part in parts)

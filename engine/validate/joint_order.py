"""Whether the joint order of two models is one: both models' sends together are matchings, and no phase waits for itself."""

import numpy as np

from engine.errors import IllegalError
from engine.network import Network
from engine.plan import Plan, Schedule
from engine.validate.schedules import Ports, Sends, check_durations, check_matching


def check_joint_order(plan: Plan, network: Network | None, timed: bool) -> None:
    """Raise IllegalError unless, layer by layer, all four schedules count the same phases, what both models send in a phase is
    a matching together, and the combine of a model comes after what it waits for: its own dispatch, and for the second model
    the dispatch of the first as well.

    network: whose ports, None where it is unknown which GPUs have links of their own; timed: whether phases must be long
    enough for it. Each model's own bytes are checked with its part of the plan.
    """
    order_a, order_b = plan.send_order, plan.send_order_b
    layers = zip(order_a.dispatch, order_b.dispatch, order_a.combine, order_b.combine, strict=True)
    for layer, schedules in enumerate(layers):
        try:
            _check_layer(schedules, network, timed)
        except IllegalError as error:
            raise IllegalError(f"layer {layer}, both models together: {error}") from None


def _check_layer(schedules: tuple[Schedule, ...], network: Network | None, timed: bool) -> None:
    dispatch_a, dispatch_b, combine_a, combine_b = schedules
    if any(not np.array_equal(schedule.duration, dispatch_a.duration) for schedule in schedules):
        raise IllegalError("the dispatches and combines of a joint order have the same phases")
    for name, combine, waits_for in (
        ("first", combine_a, (dispatch_a,)),
        ("second", combine_b, (dispatch_a, dispatch_b)),
    ):
        last = max(int(schedule.phase.max(initial=-1)) for schedule in waits_for)
        if combine.sends and combine.phase.min() <= last:
            raise IllegalError(
                f"the combine of the {name} model begins in phase {combine.phase.min()}, but waits for a dispatch that ends "
                f"in phase {last}"
            )
    sends = _together(schedules)
    ports = Ports(*network.ports(sends.src, sends.dst), network.capacity) if network is not None else None
    check_matching(sends, ports)
    if timed:
        check_durations(sends, "joint", ports)


def _together(schedules: tuple[Schedule, ...]) -> Sends:
    """The sends of all four; what two GPUs send each other in one phase counts as one transfer."""
    src, dst, phase, size = (
        np.concatenate([getattr(schedule, name) for schedule in schedules]) for name in ("src", "dst", "phase", "bytes")
    )
    gpus = int(max(src.max(initial=0), dst.max(initial=0))) + 1
    keys, which = np.unique((phase.astype(np.int64) * gpus + src) * gpus + dst, return_inverse=True)
    return Sends(
        keys // gpus % gpus, keys % gpus, np.bincount(which, size, len(keys)), keys // gpus**2, schedules[0].duration
    )

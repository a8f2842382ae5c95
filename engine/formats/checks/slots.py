"""Ids of physical slots where ids of experts belong: what engines record that run with redundant experts."""

from collections.abc import Iterator

from engine import units
from engine.finding import Finding
from engine.model import MoEModel
from engine.workload import ExpertLoad, RoutingTrace


def check_slots(workload: RoutingTrace | ExpertLoad, model: MoEModel | None) -> Iterator[Finding]:
    """More experts than the model has."""
    if model is None or workload.num_experts <= model.experts:
        return
    spare = workload.num_experts - model.experts
    share = workload.load[:, model.experts :].sum() / max(workload.load.sum(), 1)
    yield Finding(
        severity="error",
        code="slot-ids",
        message=(
            f"The recording counts {workload.num_experts} experts per layer, {model.name} has {model.experts}: these "
            f"are physical slots, {spare} of them redundant, as engines with a load balancer count them ({units.share(share)} "
            f"of the token copies went to ids from {model.experts} on). Loads of slots look sound but are not those "
            "of experts: fold them with the plan that ran."
        ),
        remedy="fold-slots",
    )

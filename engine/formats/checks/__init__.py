"""Can a recording be trusted? Findings that a person should know before planning on it, with the remedy of each."""

from collections.abc import Iterator

from engine.formats.checks.copies import (
    check_choices,
    check_groups,
    check_load_copies,
    check_token_copies,
    ids_outside,
    limited_groups,
)
from engine.formats.checks.layers import check_layers, check_numbering
from engine.formats.checks.profile_rows import check_phases, check_profile_rows, check_ranks
from engine.formats.checks.totals import check_slots, check_totals, check_traffic
from engine.model import MoEModel
from engine.workload import ExpertLoad, Finding, RoutingTrace, TrafficMatrix, Workload

__all__ = ["check_recording", "limited_groups"]


def check_recording(workload: Workload, model: MoEModel | None = None) -> list[Finding]:
    """The findings on a workload, those of its reader first, never empty. Layers are MoE layers, as in the workload.

    model: the model that was recorded; without it slot ids and the numbering of layers cannot be checked
    """
    seen = workload.origin.findings if workload.origin else ()
    match workload:
        case RoutingTrace():
            return [*seen, *_of_trace(workload, model)]
        case ExpertLoad():
            return [*seen, *_of_loads(workload, model)]
        case TrafficMatrix():
            return [*seen, *check_traffic(workload)]


def _of_trace(trace: RoutingTrace, model: MoEModel | None) -> Iterator[Finding]:
    if outside := ids_outside(trace):
        yield outside
        return
    yield from check_slots(trace, model)
    yield from check_numbering(trace, model)
    yield from check_choices(trace)
    yield from check_layers(trace)
    yield from check_profile_rows(trace)
    yield from check_token_copies(trace)
    yield from check_phases(trace)
    yield from check_groups(trace)
    yield from check_ranks(trace)


def _of_loads(loads: ExpertLoad, model: MoEModel | None) -> Iterator[Finding]:
    yield from check_slots(loads, model)
    yield from check_numbering(loads, model)
    yield from check_totals(loads)
    yield from check_layers(loads)
    yield from check_load_copies(loads)

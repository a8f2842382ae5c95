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
    return [*(workload.origin.findings if workload.origin else ()), *_checked(workload, model)]


def _checked(workload: Workload, model: MoEModel | None) -> Iterator[Finding]:
    if isinstance(workload, TrafficMatrix):
        yield from check_traffic(workload)
        return
    if isinstance(workload, RoutingTrace) and (outside := ids_outside(workload)):
        yield outside
        return
    yield from check_slots(workload, model)
    yield from check_numbering(workload, model)
    if isinstance(workload, ExpertLoad):
        yield from check_totals(workload)
        yield from check_layers(workload)
        yield from check_load_copies(workload)
        return
    yield from check_choices(workload)
    yield from check_layers(workload)
    yield from check_profile_rows(workload)
    yield from check_token_copies(workload)
    yield from check_phases(workload)
    yield from check_groups(workload)
    yield from check_ranks(workload)

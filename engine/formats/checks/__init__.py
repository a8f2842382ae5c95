"""Can a recording be trusted? Findings that a person should know before planning on it, with the remedy of each."""

from itertools import chain

from engine.formats.checks.copies import (
    check_choices,
    check_groups,
    check_load_copies,
    check_token_copies,
    has_no_computation,
    ids_outside,
    limited_groups,
)
from engine.formats.checks.layers import check_layers, check_numbering, ranks_not_counted
from engine.formats.checks.profile_rows import check_padding_rows, check_phases, check_profile_rows, check_ranks
from engine.formats.checks.totals import check_slots, check_totals, check_traffic, of_one_rank
from engine.model import MoEModel
from engine.workload import Finding, RoutingTrace, TrafficMatrix, Workload

# The first is left out where layers may count other numbers.
_OF_LOADS = (check_totals, check_layers, check_load_copies)
_OF_TOKENS = (
    *(check_layers, check_profile_rows, check_padding_rows, check_token_copies),
    *(check_phases, check_groups, check_ranks),
)


def check_recording(workload: Workload, model: MoEModel | None = None) -> list[Finding]:
    """The findings on a workload, those of its reader first, never empty. Layers are MoE layers, as in the workload.

    model: the model that was recorded; without it slot ids and the numbering of layers cannot be checked
    """
    more = model is not None and not isinstance(workload, TrafficMatrix) and workload.num_experts > model.experts
    if isinstance(workload, TrafficMatrix):
        found = check_traffic(workload)
    elif isinstance(workload, RoutingTrace) and (outside := ids_outside(workload)):
        found = [outside]
    elif part := of_one_rank(workload, model) or (not more and ranks_not_counted(workload.load)):
        found = [part]
    else:
        own = _OF_TOKENS if isinstance(workload, RoutingTrace) else _OF_LOADS[has_no_computation(workload, model) :]
        choices = check_choices(workload, model) if isinstance(workload, RoutingTrace) else ()
        numbering = list(check_numbering(workload, model))
        # More experts in other layers are those of another model, not slots of this one.
        slots = () if any(each.code == "other-layers" for each in numbering) else check_slots(workload, model)
        found = chain(slots, numbering, choices, *(check(workload) for check in own))
    return [*(workload.origin.findings if workload.origin else ()), *found]

"""Lina's packing coordinator (§6.1, §7.1) over the steps of a training run: it looks at measured micro-ops now and then, and
doubles the experts on every GPU for as long as the experts are the shorter ones.

It looks first after `FIRST` steps and then every `EVERY`. At every GPU's side it has the mean micro-op of the experts and of
an all-to-all in the forward pass, from a step's timeline, simulated or of a launch. To double, two GPUs half a group apart give
each other their experts, in one exchange that the next step waits for; weights and momentum go, gradients do not. New process
groups are not priced.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.plan import Placement, Plan, expert_groups
from engine.problem import Problem
from engine.result import Provenance
from engine.simulate.training.step import bytes_per_parameter, simulate_step
from engine.systems.base import Draft
from engine.timeline import Timeline

FIRST, EVERY = 10, 4


@dataclass(frozen=True)
class Look:
    """One look of the coordinator.

    step: steps done by then
    experts: on every GPU so far
    ffn, alltoall: seconds of a micro-op
    seconds: of a step
    exchange: seconds of the exchange that follows; 0: the packing stays
    moved: bytes that each GPU receives in it
    draft: of the packing so far
    """

    step: int
    experts: int
    ffn: float
    alltoall: float
    seconds: float
    exchange: float
    moved: float
    draft: Draft

    @property
    def packs(self) -> bool:
        return self.moved > 0


def coordinate(
    problem: Problem,
    begin: Placement,
    draft_of: Callable[[Placement], Draft | None],
    timed: Callable[[Plan, Problem], Timeline] = simulate_step,
) -> Iterator[Look]:
    """The looks of the coordinator from a first placement on, up to the one at which the packing stays.

    draft_of: the parts of a plan with a placement; None: it does not fit the memory
    timed: the timeline of a plan's step, with labels
    """
    placement, draft, step = begin, draft_of(begin), FIRST
    while draft is not None:
        timeline = timed(draft.plan("coordinator", Provenance(optimiser="lina")), problem)
        ffn, alltoall = micro_ops(timeline)
        wider = grown(placement) if ffn < alltoall else None
        following = None if wider is None else draft_of(wider)
        seconds, moved = (0.0, 0.0) if following is None else exchange(problem, placement, wider)
        yield Look(step, int(placement.slots.max()), ffn, alltoall, timeline.total, seconds, moved, draft)
        placement, draft, step = wider, following, step + EVERY


def micro_ops(timeline: Timeline) -> tuple[float, float]:
    """Mean seconds of a micro-op of the experts and of a dispatch in the forward pass, on the slowest GPUs."""
    events = timeline.events
    forward = np.array([not label.startswith("dx.") for label in timeline.labels], dtype=bool)
    of_kind = {kind: events[forward & (events["kind"] == kind).to_numpy()] for kind in ("ffn", "dispatch")}
    spent = {kind: (found["end"] - found["start"]).groupby(found["resource"]).sum() for kind, found in of_kind.items()}
    exchanges = of_kind["dispatch"]["resource"].value_counts().max() if len(of_kind["dispatch"]) else 1
    return tuple(float(spent[kind].max()) / exchanges if len(spent[kind]) else 0.0 for kind in of_kind)


def grown(placement: Placement) -> Placement | None:
    """Twice the experts on every GPU: of a group that holds every expert once, the first GPU of one half has those of the first
    of the other half too, and so on, which makes two groups. None where a group is one GPU or does not halve."""
    groups = expert_groups(placement)
    size = placement.gpus // groups
    if size < 2 or size % 2 or not (placement.slots == placement.slots[0, 0]).all():
        return None
    partner = [gpu + size // 2 if gpu % size < size // 2 else gpu - size // 2 for gpu in range(placement.gpus)]
    rows = [[sorted({*row[gpu], *row[partner[gpu]]}) for gpu in range(placement.gpus)] for row in placement.experts_of_gpu]
    held = placement.slots[0] * 2
    slots = np.array([[expert for experts in row for expert in experts] for row in rows])
    return Placement.from_slots(slots, held, placement.experts, placement.model_layers)


def exchange(problem: Problem, before: Placement, after: Placement) -> tuple[float, float]:
    """Seconds and bytes of a GPU of the exchange from one packing to the next: every expert that a GPU lacks comes from the
    GPU of its group that has it, with weights and momentum, all layers at once. Experts in the host's memory pass through
    the same ports, which are slower than the link to the host."""
    model, gpus = problem.model, before.gpus
    each = model.bytes_per_expert / model.bytes_per_number * (bytes_per_parameter(model) - model.bytes_per_number)
    traffic, size = np.zeros((gpus, gpus)), gpus // expert_groups(before)
    for old, new in zip(before.experts_of_gpu, after.experts_of_gpu, strict=True):
        for gpu in range(gpus):
            for expert in set(new[gpu]) - set(old[gpu]):
                first = gpu // size * size
                source = next(other for other in range(first, first + size) if expert in old[other])
                traffic[source, gpu] += each
    return problem.network.bound(traffic), float(traffic.sum(axis=0).max())

"""All knobs of a training step in one search: experts on a GPU, cuts of layers and of stretches, weight gradients under
all-to-alls, and the rule and the units of the network.

The other systems turn a few of these knobs each. The search begins at the fastest of their plans and turns one knob after
another as long as the simulated step gets shorter, so that its plan is never slower than the best of theirs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.goal import Goal
from engine.overlap.partition import partition
from engine.overlap.pipeline_degree import pipeline_seconds
from engine.overlap.weight_gradients import WeightGradientInstance, schedule_weight_gradients
from engine.overlap.weight_gradients.bounds import closest_sums
from engine.overlap.weight_gradients.instance import without_idle
from engine.plan import Offload, Overlap, PartitionRange, Pipeline, Placement, Plan, Priority, SendOrder
from engine.problem import Problem
from engine.result import Limits, Provenance, Stop, never, relative_gap
from engine.simulate.streams import POLICIES
from engine.simulate.training import MAX_PARTS, PricedStep, bound_of_step, check_step_parts, price_step, step_seconds
from engine.simulate.training.program import gradients_of
from engine.systems.base import Draft, Note, Notes, Report, System, silent
from engine.systems.options import Options
from engine.systems.pieces import linear_placement
from engine.systems.training import baselines, lancet, lina, pipemoe
from engine.systems.training.baselines import Bucket
from engine.units import at_most, seconds

DEGREES = (1, 2, 3, 4, 6, 8, 12, 16)
SIZES = 5
"""Sizes of buckets and of micro-ops that are tried at first, from one gradient to all."""
MOST_PIECES = 4
"""Micro-ops of a gradient, on average."""
FINER = (0.5, 0.7, 1.4, 2.0)
"""Factors of a size that are tried once the search has come round to it again."""


class BestStepOptions(Options):
    evaluations: int = Field(
        200, ge=10, le=100_000, title="Simulated steps", description="steps that the search simulates: the limit of its work"
    )
    packing: bool = Field(True, description="several copies of experts may be packed on the GPUs, as Lina does")
    irregular: bool = Field(
        True, title="Irregular all-to-alls", description="all-to-alls may carry only real tokens (Lancet §6), if that is faster"
    )
    bucket_mb: Bucket = 25.0


@dataclass(frozen=True)
class Knobs:
    """The parts of a plan for a training step.

    forward, backward: parts of every MoE layer
    under: (weight gradient, all-to-all that it runs under), by name
    """

    placement: Placement
    priority: Priority
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    order: str = "dispatch-first"
    ranges: tuple[PartitionRange, ...] = ()
    irregular: bool = False
    under: tuple[tuple[str, str], ...] = ()
    offload: Offload | None = None

    @classmethod
    def of(cls, parts: Draft | Plan) -> "Knobs":
        """Those of a plan for a training step."""
        pipeline, overlap, whole = parts.pipeline, parts.overlap or Overlap(), (1,) * parts.placement.layers
        return cls(
            placement=parts.placement,
            priority=parts.priority,
            forward=pipeline.forward if pipeline else whole,
            backward=pipeline.backward if pipeline else whole,
            order=pipeline.order if pipeline else "dispatch-first",
            ranges=overlap.ranges,
            irregular=overlap.irregular,
            under=tuple(sorted(overlap.under.items())),
            offload=parts.offload,
        )

    @property
    def draft(self) -> Draft:
        cut = max(self.forward + self.backward, default=1) > 1
        pipeline = Pipeline(forward=self.forward, backward=self.backward, order=self.order) if cut else None
        overlap = Overlap(ranges=self.ranges, under=dict(self.under), irregular=self.irregular)
        parts = {"overlap": None if overlap == Overlap() else overlap, "priority": self.priority, "pipeline": pipeline}
        parts |= {"offload": self.offload}
        return Draft(self.placement, SendOrder(mode="concurrent"), **parts)

    @property
    def plan(self) -> Plan:
        return self.draft.plan("trial", Provenance(optimiser=""))


class Saving(NamedTuple):
    """Seconds of a step with this knob alone turned from the deployed plan, and with all knobs up to this one."""

    knob: str
    alone: float
    after: float


KNOBS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("packing", ("placement",)),
    ("experts in the host's memory", ("offload",)),
    ("parts of layers", ("forward", "backward", "order")),
    ("stretches of the forward pass", ("ranges",)),
    ("only real tokens", ("irregular",)),
    ("weight gradients under all-to-alls", ("under",)),
    ("rule of the network", ("policy",)),
    ("buckets and micro-ops", ("sizes",)),
)
"""The knobs in the order in which they are turned, with their fields; of `priority` a policy, and the sizes."""


def waterfall(
    problem: Problem, plan: Plan | Draft, deployed: Plan | Draft | None = None, stop: Stop = never
) -> tuple[float, tuple[Saving, ...]]:
    """(seconds of the deployed plan, the knobs in which `plan` differs from it). The last knob ends at the plan's own time.
    Asked to stop, it ends early.

    deployed: by default DeepSpeed's
    """
    first = Knobs.of(deployed or baselines.deepspeed(problem, baselines.BucketOptions(), never, silent))
    last, after, rows = Knobs.of(plan), first, []
    timed = cache(lambda knobs: step_seconds(knobs.plan, problem))
    for knob, fields in KNOBS:
        turned = _turned(after, last, fields)
        if stop():
            break
        if turned != after:
            after = turned
            rows.append(Saving(knob, timed(_turned(first, last, fields)), timed(after)))
    return timed(first), tuple(rows)


def _turned(knobs: Knobs, to: Knobs, fields: tuple[str, ...]) -> Knobs:
    """The knobs with some fields of another's."""
    if fields == ("policy",):
        return replace(knobs, priority=knobs.priority.model_copy(update={"policy": to.priority.policy}))
    if fields == ("sizes",):
        return replace(knobs, priority=to.priority.model_copy(update={"policy": knobs.priority.policy}))
    return replace(knobs, **{field: getattr(to, field) for field in fields})


def _packings(problem: Problem) -> list[Placement]:
    """One expert after another on the GPUs, and all packings that fit."""
    found = lina.packings(problem, lina.LinaOptions(), {})
    return list(dict.fromkeys([linear_placement(problem), *found.values()]))


def least_of(problem: Problem) -> float:
    """Seconds below which no plan brings the step, in any packing that fits."""
    return min(bound_of_step(problem, placement) for placement in _packings(problem))


class _Search:
    """Knobs turned one after another; all work is counted in simulated steps."""

    def __init__(self, problem: Problem, options: BestStepOptions, stop: Stop, report: Report) -> None:
        self.problem, self.options, self.stop, self.report = problem, options, stop, report
        self.timed: dict[Knobs, float] = {}
        self.least, self.now, self.round = np.inf, None, 0
        self.linear = linear_placement(problem)
        self.placements = _packings(problem) if options.packing else [self.linear]

    @property
    def over(self) -> bool:
        return len(self.timed) >= self.options.evaluations or self.stop()

    def judge(self, knobs: Knobs) -> bool:
        """True if these are the fastest so far."""
        if knobs in self.timed or (self.over and self.now is not None):
            return False
        self.timed[knobs] = took = step_seconds(knobs.plan, self.problem)
        if better := took < self.least * (1 - 1e-12):
            self.least, self.now = took, knobs
        return better

    def run(self) -> None:
        """Turn all knobs, of ever smaller blocks of layers, until none gains any more, or the work is done."""
        turns = [self.stretches, self.priorities, self.packings, self.degrees, self.backwards, self.gradients]
        before, last = np.inf, int(np.ceil(np.log2(max(len(self.now.forward), 1))))
        while (self.least < before or self.round <= last) and not self.over:
            before = self.least
            for turn in turns:
                for knobs in turn():
                    if self.over:
                        return
                    self.judge(knobs)
                    done = min(len(self.timed) / self.options.evaluations, 1.0)
                    self.report(0.2 + 0.7 * done, "turning knobs", self.least, None)
            self.round += 1

    def priced(self, placement: Placement | None = None) -> PricedStep:
        return price_step(self.problem, placement or self.now.placement, self.now.irregular)

    # Each of these yields knobs to try from the fastest so far, which may change while it does.

    def priorities(self) -> Iterator[Knobs]:
        """All rules of the network with sizes from one gradient to all; later the rules and other sizes by themselves."""
        now, priced = self.now.priority, self.priced()
        places = {operator.name: place for place, operator in enumerate(priced.graph.operators)}
        gradients = gradients_of(priced.graph, self.problem, priced.expert_groups, places)
        sent = [gradient.sent for gradient in gradients if gradient.sent > 0]
        own = now.bucket or now.micro_op
        sizes = [own * factor for factor in FINER] if self.round or not sent else np.geomspace(min(sent), sum(sent), SIZES)
        units = [{unit: float(size)} for size in sizes for unit in ("bucket", "micro_op")]
        # So many pieces of gradients would take longer to start than to send.
        units = [unit for unit in units if sum(sent) / unit.get("micro_op", np.inf) <= MOST_PIECES * len(sent)]
        for policy in POLICIES:
            yield replace(self.now, priority=self.now.priority.model_copy(update={"policy": policy}))
        for policy in (self.now.priority.policy,) if self.round else POLICIES:
            for unit in units:
                yield replace(self.now, priority=Priority(policy=policy, **unit))

    def stretches(self) -> Iterator[Knobs]:
        """Lancet's stretches for several limits of their parts, or none; and those of now with other ends and parts."""
        # Full buffers need no exchange of sizes: where they are hardly fuller than what is sent, they are the faster ones.
        for irregular in dict.fromkeys((self.now.irregular, self.options.irregular, False)):
            now = replace(self.now, irregular=irregular)
            yield now
            priced = price_step(self.problem, now.placement, irregular)
            forward = priced.graph.of_phase("forward")
            for most in (2, 4, 8, MAX_PARTS):
                found = partition(lancet.forward_chain(self.problem, priced, most), stop=self.stop).solution
                cut = (stretch for stretch in found if stretch.parts > 1)
                named = (PartitionRange(first=forward[a.first].name, last=forward[a.last].name, parts=a.parts) for a in cut)
                yield self.with_ranges(now, tuple(named))
        names = [operator.name for operator in self.priced().graph.of_phase("forward")]
        for number, stretch in enumerate(self.now.ranges[:4]):
            ends = names.index(stretch.first), names.index(stretch.last)
            edits = [(*ends, stretch.parts + more) for more in (-1, 1, -2, 2)]
            edits += [(ends[0] + more, ends[1], stretch.parts) for more in (-2, -1, 1, 2)]
            edits += [(ends[0], ends[1] + more, stretch.parts) for more in (-2, -1, 1, 2)]
            for first, last, parts in edits:
                if 0 <= first < last < len(names) and 2 <= parts <= MAX_PARTS and number < len(self.now.ranges):
                    edited = PartitionRange(first=names[first], last=names[last], parts=parts)
                    ranges = (*self.now.ranges[:number], edited, *self.now.ranges[number + 1 :])
                    if self.legal(ranges):
                        yield self.with_ranges(self.now, ranges)

    def with_ranges(self, knobs: Knobs, ranges: tuple[PartitionRange, ...]) -> Knobs:
        """The knobs with these stretches; layers in them are cut with them alone."""
        place = {operator.name: place for place, operator in enumerate(self.priced().graph.operators)}
        spans = [(place[stretch.first], place[stretch.last]) for stretch in ranges]
        forward = list(knobs.forward)
        for number, ends in enumerate(self.exchanges["forward"]):
            if any(first <= place[end] <= last for first, last in spans for end in ends):
                forward[number] = 1
        return replace(knobs, ranges=ranges, forward=tuple(forward))

    def legal(self, ranges: tuple[PartitionRange, ...]) -> bool:
        plan = self.with_ranges(replace(self.now, under=()), ranges).plan
        try:
            check_step_parts(plan, self.problem, self.priced().graph)
        except InputError:
            return False
        return True

    @cached_property
    def exchanges(self) -> dict[str, list[list[str]]]:
        """The all-to-alls of every MoE layer, by phase."""
        operators = price_step(self.problem, self.linear, False).graph.operators
        return {
            phase: [
                [
                    one.name
                    for one in operators
                    if one.layer == layer and one.phase == phase and one.kind in ("dispatch", "combine")
                ]
                for layer in self.linear.model_layers
            ]
            for phase in ("forward", "dx")
        }

    def free(self) -> list[int]:
        """MoE layers that are in no stretch."""
        open_now = self.with_ranges(replace(self.now, forward=(2,) * len(self.now.forward)), self.now.ranges)
        return [layer for layer, degree in enumerate(open_now.forward) if degree > 1]

    def cut(self, layers: list[int], now: Callable[[], tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Parts of all layers, other ones for the layers of a block than now."""
        size = -(-len(layers) // 2**self.round)
        for block in (layers[first : first + size] for first in range(0, len(layers), max(size, 1))):
            own = now()[block[0]]
            for degree in (1, own - 1, own + 1, own + 2, 2 * own) if self.round else DEGREES:
                if 1 <= degree <= MAX_PARTS:
                    yield tuple(degree if layer in block else before for layer, before in enumerate(now()))

    def degrees(self) -> Iterator[Knobs]:
        """Other numbers of parts in the forward pass."""
        for forward in self.cut(self.free(), lambda: self.now.forward):
            yield replace(self.now, forward=forward)

    def backwards(self) -> Iterator[Knobs]:
        """Layers of the backward pass cut or whole, with the weight gradients under the all-to-alls that are left open. The
        first layers have the fewest gradients to run under theirs."""
        for backward in self.cut(list(range(len(self.now.backward)))[::-1], lambda: self.now.backward):
            yield self.scheduled(replace(self.now, backward=backward))

    def packings(self) -> Iterator[Knobs]:
        """Other numbers of experts on a GPU, with weight gradients and parts as they then fit best."""
        for placement in self.placements if self.round < 2 else ():
            packed, free = replace(self.now, placement=placement), self.free()
            yield packed
            for degree in DEGREES[:4]:
                backward = (degree,) * len(packed.backward)
                forward = tuple(degree if layer in free else 1 for layer in range(len(packed.forward)))
                yield self.scheduled(replace(packed, forward=forward, backward=(1,) * len(backward)))
                yield self.scheduled(replace(packed, forward=forward, backward=backward))

    def gradients(self) -> Iterator[Knobs]:
        yield replace(self.now, under=())
        for inside in (True, False):
            yield self.scheduled(self.now, inside, thorough=True)

    @cached_property
    def both(self) -> lancet.BackwardExchanges:
        return lancet.weight_gradient_problem(price_step(self.problem, self.linear, False))

    def scheduled(self, knobs: Knobs, inside: bool = True, thorough: bool = False) -> Knobs:
        """The knobs with weight gradients under the all-to-alls as far as these last with layers cut so: of a cut layer only
        after its last computation.

        inside: True to leave the gradients of its own experts in it
        thorough: True to search longer
        """
        priced, both = price_step(self.problem, knobs.placement, knobs.irregular), self.both
        lasts = dict.fromkeys(both.exchanges, 0.0) | {name: priced.whole(name) for name in both.exchanges}
        stays = np.zeros(len(both.gradients), dtype=bool)
        for ends, degree in zip(self.exchanges["dx"], knobs.backward, strict=True):
            if degree == 1 or len(ends) != 2:
                continue
            first, last = (priced.index[name] for name in ends)
            there, back = (priced.seconds[place].max(axis=1) for place in (first, last))
            between = [place for place in range(first + 1, last) if inside or priced.graph.operators[place].phase == "dx"]
            experts = priced.seconds[between].sum(axis=0).max(axis=1)
            least, part = pipeline_seconds(there, experts, back)[degree - 1], degree - 1
            busy = max(there[part] + degree * experts[part], degree * there[part] + experts[part])
            lasts[ends[0]], lasts[ends[1]] = 0.0, max(0.0, float(least - busy))
            if inside:
                stays |= np.isin(both.gradients, [priced.graph.operators[place].name for place in between])
        instance = WeightGradientInstance(
            np.array([lasts[name] for name in both.exchanges]),
            np.array([priced.whole(name) for name in both.gradients]),
            both.instance.allowed & ~stays[:, None],
        )
        if thorough:
            found = schedule_weight_gradients(instance, Limits(1.0, wall=np.inf, exact=False), self.stop).solution
        else:
            found = without_idle(instance, closest_sums(instance, self.stop))
        under = ((both.gradients[one], both.exchanges[at]) for one, at in enumerate(found.tolist()) if at >= 0)
        return replace(knobs, under=tuple(sorted(under)))


def best(problem: Problem, options: BestStepOptions, stop: Stop, report: Report) -> Draft:
    """The fastest of the other systems' plans, and of what turning its knobs makes of it."""
    search, titles = _Search(problem, options, stop, report), {}
    for number, system in enumerate(others := [*lancet.SYSTEMS, *pipemoe.SYSTEMS, *lina.SYSTEMS, *baselines.SYSTEMS]):
        if titles and stop():
            break
        fastest = search.least if titles else None
        report(0.2 * number / len(others), f"planning with {system.title}", fastest, None)
        known = system.options.model_fields
        settings = {name: value for name, value in options.model_dump().items() if name in known and name != "packing"}
        if not options.packing and "packing" in known:
            settings["packing"] = "off"
        try:
            knobs = Knobs.of(system.recipe(problem, system.settings(settings), stop, silent))
        except InputError:  # cannot plan this
            continue
        titles.setdefault(knobs, system.title)
        search.judge(knobs)
    if search.now is None:
        raise InputError("no system can plan this step; run one of them to see why")
    single, of = search.least, titles[search.now]
    search.run()
    report(0.9, "bounding", search.least, None)
    notes: Notes = {"best of the other systems": Note(f"{of}, {seconds(single)}")}
    notes["found by"] = Note(titles.get(search.now, f"turning knobs, in {len(search.timed)} simulated steps"))
    notes["against the best of the other systems"] = Note(single / search.least if search.least else 1.0, "×")
    deployed, rows = waterfall(problem, search.now.draft, stop=stop)
    before = deployed
    for row in rows:
        text = (
            f"{seconds(row.alone)} alone, {seconds(row.after)} after those above; DeepSpeed without overlap {seconds(deployed)}"
        )
        notes[row.knob] = Note(f"saves {seconds(max(0.0, before - row.after))}: {text}")
        before = row.after
    if not stop():
        least = min(bound_of_step(problem, placement) for placement in search.placements)
        notes["left"] = Note(f"{at_most(relative_gap(search.least, least))}: no plan is below {seconds(least)} (proven)")
    return replace(search.now.draft, notes=notes, cancelled=stop())


SYSTEMS = (
    System(
        name="best",
        title="Best of all (training)",
        summary="the fastest of the other systems' plans, and a search from there over all knobs by simulated time",
        paper="Switchyard",
        recipe=best,
        options=BestStepOptions,
        goals=(Goal.TRAINING,),
        preselected=True,
    ),
)

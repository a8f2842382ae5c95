"""A plan's training step as tasks: operators in the order in which they are issued, cut where the plan cuts them.

The gradients of a step on their way through the network: fused to buckets or cut to micro-ops.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np

from engine.errors import InputError
from engine.overlap.operator_axes import range_is_valid
from engine.overlap.operator_graph import Operator, OperatorGraph
from engine.plan import Plan, Priority
from engine.problem import Problem
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, COMPUTE, HOST_IN, HOST_OUT, HOST_WORK, Tasks
from engine.simulate.training.offload import Copies, copies_of, visits
from engine.simulate.training.pricing import MAX_PARTS, PricedStep, all_reduce_seconds


@dataclass(frozen=True)
class Gradient:
    """One gradient.

    sent: bytes
    after: the tasks that make it
    groups: number of expert groups among which it is summed; 1: over all GPUs
    seconds: the measured time of the sum; None: not measured
    """

    name: str
    sent: float
    after: tuple[int, ...]
    groups: int = 1
    seconds: float | None = None


@dataclass(frozen=True)
class Piece:
    """A unit for the network: several whole gradients, or one of `parts` equal parts of a single one, counted from 0."""

    label: str
    gradients: tuple[Gradient, ...]
    parts: int = 1
    part: int = 0

    @property
    def sent(self) -> float:
        """Bytes."""
        return sum(gradient.sent for gradient in self.gradients) / self.parts

    @property
    def known(self) -> float:
        """Seconds of the gradients that were measured."""
        return sum(gradient.seconds or 0.0 for gradient in self.gradients) / self.parts

    @property
    def unknown(self) -> float:
        """Bytes of those that were not."""
        return sum(gradient.sent for gradient in self.gradients if gradient.seconds is None) / self.parts


def gradients_of(graph: OperatorGraph, problem: Problem, groups: int, task_of: dict[str, int]) -> list[Gradient]:
    """All gradients that are summed over GPUs, in the order in which the backward pass makes them.

    groups: expert groups of the placement, over which the gradients of packed experts are summed too
    task_of: the last task of every operator
    """
    before: dict[str, list[str]] = {}
    for dependency in graph.dependencies:
        before.setdefault(dependency.after, []).append(dependency.before)
    gradients = []
    for operator in graph.of_phase("all_reduce"):
        after = tuple(task_of[name] for name in before[operator.name])
        gradients.append(Gradient(operator.name, operator.sent, after, seconds=operator.seconds))
    if groups > 1:
        parameters = {operator.name: operator.parameters for operator in graph.of_phase("forward")}
        for operator in graph.of_phase("dw"):
            if operator.kind == "experts":
                own = operator.name.removeprefix("dw.")
                size = parameters[own] * problem.model.bytes_per_number
                gradients.append(Gradient(f"all_reduce.{own}", size, (task_of[operator.name],), groups))
    return sorted(gradients, key=lambda gradient: max(gradient.after))


def pieces(priority: Priority, gradients: list[Gradient]) -> Iterator[Piece]:
    """Gradients fused to buckets as they come, or each cut into equal micro-ops."""
    if (limit := priority.micro_op) is not None:
        for gradient in gradients:
            parts = max(1, int(np.ceil(gradient.sent / limit)))
            for part in range(parts):
                piece = f" · piece {part + 1} of {parts}" if parts > 1 else ""
                yield Piece(gradient.name + piece, (gradient,), parts, part)
        return
    for groups in sorted({gradient.groups for gradient in gradients}):
        fused: list[Gradient] = []
        own = [gradient for gradient in gradients if gradient.groups == groups]
        for index, gradient in enumerate(own):
            fused.append(gradient)
            if sum(part.sent for part in fused) >= priority.bucket or index == len(own) - 1:
                more = f" and {len(fused) - 1} more gradients" if len(fused) > 1 else ""
                yield Piece(fused[0].name + more, tuple(fused))
                fused = []


@dataclass(frozen=True, eq=False)
class Program:
    """Tasks with the operator and the name of each.

    operators: int64[task], -1 for an all-reduce, a copy between GPU and host or work of the host
    pieces: the gradients of each all-reduce, by task
    sizes: the exchange of sizes of an all-to-all, both by their tasks
    copied: the model layer of each copy and work of the host, by task
    part: int64[task], the part of the operator, counted from 0
    parts: int64[task], the number of its parts
    stretch: int64[task]: tasks of operators that are cut together have the same number; -1: not cut
    """

    tasks: Tasks
    labels: tuple[str, ...]
    operators: np.ndarray
    sent: np.ndarray
    part: np.ndarray
    parts: np.ndarray
    stretch: np.ndarray
    pieces: dict[int, Piece]
    sizes: dict[int, int]
    copied: dict[int, int]


@dataclass
class _Builder:
    """Collects tasks in issue order."""

    priced: PricedStep
    operators: list[int] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    seconds: list[np.ndarray] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    cut: list[tuple[int, int, int]] = field(default_factory=list)
    pieces: dict[int, Piece] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    copied: dict[int, int] = field(default_factory=dict)
    edges: list[tuple[int, int]] = field(default_factory=list)
    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    parts: dict[str, list[int]] = field(default_factory=dict)
    blocking: int | None = None

    def add(self, operator: Operator, part: int = 0, parts: int = 1, stretch: int = -1) -> int:
        """One part of an operator in a stretch that is cut, behind its exchange of sizes if it has one; returns its task."""
        place = self.priced.index[operator.name]
        label = operator.name if parts == 1 else f"{operator.name} · part {part + 1} of {parts}"
        stream, sent = ALL_TO_ALL if operator.network else COMPUTE, self.priced.sent[place] / parts
        seconds, cut = self.priced.of_part(operator.name, part, parts), (part, parts, stretch)
        sizes = self.priced.sizes.get(operator.name)
        if sizes is not None:
            before = np.full_like(seconds, sizes.seconds)
            exchange = self.raw(place, f"sizes of {label}", stream, before, sizes.sent, cut)
            self.sizes[exchange + 1] = exchange
            seconds = seconds - before
        task = self.raw(place, label, stream, seconds, sent, cut)
        self.first.setdefault(operator.name, task)
        self.last[operator.name] = task
        self.parts.setdefault(operator.name, []).append(task)
        return task

    def raw(self, operator: int, label: str, stream: int, seconds: np.ndarray, sent: float, cut: tuple[int, int, int]) -> int:
        """A task; cut: part, parts and stretch."""
        self.operators.append(operator)
        self.labels.append(label)
        self.stream.append(stream)
        self.seconds.append(seconds)
        self.sent.append(sent)
        self.cut.append(cut)
        return len(self.labels) - 1


def program_of(plan: Plan, problem: Problem, priced: PricedStep, known: bool = False) -> Program:
    """The tasks of a plan's step. Raises InputError where the plan names operators that the step does not have.

    known: True if the parts of the plan are known to be legal, which then is not looked at
    """
    graph, build = priced.graph, _Builder(priced)
    if not known:
        check_step_parts(plan, problem, graph)
    cut = _cuts(plan, graph)
    under = plan.overlap.under if plan.overlap else {}
    before: dict[str, list[str]] = {operator.name: [] for operator in graph.operators}
    for dependency in graph.dependencies:
        before[dependency.after].append(dependency.before)
    waiting: list[Operator] = []  # weight gradients that are put off until the all-to-all that they run under
    moved = {name: [] for name in under.values()}
    for operator in graph.operators:
        if operator.name in under:
            moved[under[operator.name]].append(operator)
    ordered = _issued(graph, under)
    for number, (start, stop, parts, interleaved) in enumerate(_stretches(ordered, cut)):
        stretch = ordered[start:stop]
        tasks = [
            build.add(operator, part, parts, number if parts > 1 else -1)
            for operator, part in _emission(stretch, parts, interleaved)
        ]
        # Frameworks let the compute stream wait for an all-to-all as soon as it is issued: the next task of the program starts
        # after it, needed or not, except for weight gradients that a plan moves under it and the parts of its own stretch
        first = next((task for task in tasks if build.stream[task] == COMPUTE), None)
        if build.blocking is not None and first is not None:
            build.edges.append((build.blocking, first))
            build.blocking = None
        if build.stream[tasks[-1]] == ALL_TO_ALL:
            build.blocking = tasks[-1]
        waiting += [gradient for operator in stretch for gradient in moved.get(operator.name, ())]
        # A weight gradient goes right behind its all-to-all, but never before its inputs are issued.
        ready = [gradient for gradient in waiting if all(name in build.last for name in before[gradient.name])]
        for gradient in ready:
            build.add(gradient)
        waiting = [gradient for gradient in waiting if gradient not in ready]
    _join(build, graph, cut)
    reduced = _all_reduces(build, plan, problem, graph)
    if plan.offload is not None:
        _copies(build, plan, problem, graph)
    update = next((operator for operator in graph.operators if operator.phase == "update"), None)
    if update is not None:
        task = build.add(update)
        others = (build.last[name] for name in before[update.name] if name in build.last)
        build.edges += [(other, task) for other in (*reduced, *others)]
    return _finish(build, graph)


def check_step_parts(plan: Plan, problem: Problem, graph: OperatorGraph) -> None:
    """Raise InputError unless the plan cuts and moves operators of the step (`graph`) that may be cut and moved so."""
    _check_ranges(plan, problem, graph)
    under = plan.overlap.under if plan.overlap else {}
    _check_moves(under, graph)
    list(_stretches(_issued(graph, under), _cuts(plan, graph)))


def _issued(graph: OperatorGraph, under: dict[str, str]) -> list[Operator]:
    """The operators that are issued in their place in the program; the others run where the plan moves them."""
    return [
        operator for operator in graph.operators if operator.phase in ("forward", "dx", "dw") and operator.name not in under
    ]


Cut = tuple[str, str, int, bool]
"""First and last operator, parts, and True if the network takes the parts interleaved."""


def _cuts(plan: Plan, graph: OperatorGraph) -> list[Cut]:
    """All stretches that the plan cuts, those of the MoE layers' pipelines among them."""
    stretches = plan.overlap.ranges if plan.overlap else ()
    cuts: list[Cut] = [(stretch.first, stretch.last, stretch.parts, False) for stretch in stretches]
    if plan.pipeline is not None:
        interleaved = plan.pipeline.order == "interleaved"
        for layer, forward, backward in zip(
            plan.placement.model_layers, plan.pipeline.forward, plan.pipeline.backward, strict=True
        ):
            for phase, parts in (("forward", forward), ("dx", backward)):
                ends = [
                    operator.name
                    for operator in graph.operators
                    if operator.layer == layer and operator.phase == phase and operator.kind in ("dispatch", "combine")
                ]
                if parts > 1 and len(ends) == 2:
                    cuts.append((*ends, parts, interleaved))
    return cuts


def _check_ranges(plan: Plan, problem: Problem, graph: OperatorGraph) -> None:
    """A stretch of the forward pass may be cut if the axes along which its operators can be cut fit each other (Lancet §5.2);
    into no more parts than there are sequences, unless only the buffers of the experts are cut."""
    forward = graph.of_phase("forward")
    place = {operator.name: index for index, operator in enumerate(forward)}
    for cut in plan.overlap.ranges if plan.overlap else ():
        stretch = f"the plan cuts from {cut.first} to {cut.last}"
        if cut.first not in place or cut.last not in place:
            raise InputError(f"{stretch}, which the step does not have in its forward pass")
        kinds = [operator.kind for operator in forward[place[cut.first] : place[cut.last] + 1]]
        if not range_is_valid(kinds, problem.step.gate):
            raise InputError(f"{stretch}, but with the gate {problem.step.gate} these cannot be cut together")
        if cut.parts > problem.step.batch and not set(kinds) <= {"dispatch", "experts", "combine"}:
            raise InputError(f"{stretch} in {cut.parts} parts, but a GPU has only {problem.step.batch} sequences")


def _stretches(ordered: list[Operator], cuts: list[Cut]) -> Iterator[tuple[int, int, int, bool]]:
    """Cut stretches and single operators of the program in order: (start, stop, parts, interleaved)."""
    place = {operator.name: index for index, operator in enumerate(ordered)}
    begins: dict[int, tuple[int, int, bool]] = {}
    for first, last, parts, interleaved in cuts:
        if first not in place or last not in place:
            raise InputError(f"the plan cuts from {first} to {last}, which the step does not have in its program")
        if place[last] < place[first]:
            raise InputError(f"the plan cuts from {first} to {last}, but {last} comes first in the program")
        if parts > MAX_PARTS:
            raise InputError(f"the plan cuts {first} into {parts} parts; at most {MAX_PARTS} are priced")
        if place[first] in begins:
            raise InputError(f"the plan cuts {first} twice")
        begins[place[first]] = (place[last] + 1, parts, interleaved)
    at = 0
    for begin in [*sorted(begins), len(ordered)]:
        if begin < at:
            raise InputError(f"the plan cuts {ordered[begin].name} twice")
        yield from ((index, index + 1, 1, False) for index in range(at, begin))
        if begin < len(ordered):
            at, parts, interleaved = begins[begin]
            yield begin, at, parts, interleaved


def _emission(stretch: list[Operator], parts: int, interleaved: bool) -> Iterator[tuple[Operator, int]]:
    """The order in which the parts of a stretch are issued: stage by stage (Lancet §5.3), or for a pipeline of dispatch,
    experts and combine D1 D2 E1 C1 D3 E2 C2 …"""
    stages = [list(same) for _, same in groupby(stretch, key=lambda operator: operator.network)]
    if interleaved and len(stages) == 3:
        for step in range(parts + 1):
            if step < parts:
                yield from ((operator, step) for operator in stages[0])
            if step > 0:
                yield from ((operator, step - 1) for stage in stages[1:] for operator in stage)
        return
    for stage in stages:
        for part in range(parts):
            yield from ((operator, part) for operator in stage)


def _join(build: _Builder, graph: OperatorGraph, cuts: list[Cut]) -> None:
    """Dependencies between tasks: part on part inside a stretch, and from a whole operator otherwise. Parts run in order on
    their stream, so the first and the last stand for all of them: all-to-alls go one after another as they are issued, as
    in a communicator's stream."""
    exchanges = [task for task, stream in enumerate(build.stream) if stream == ALL_TO_ALL]
    build.edges += pairwise(exchanges)
    inside: dict[str, int] = {}
    place = {operator.name: index for index, operator in enumerate(graph.operators)}
    for number, (first, last, _, _) in enumerate(cuts):
        inside |= {operator.name: number for operator in graph.operators[place[first] : place[last] + 1]}
    for dependency in graph.dependencies:
        if dependency.before not in build.last or dependency.after not in build.first:
            continue
        same = inside.get(dependency.before, -1) == inside.get(dependency.after, -2)
        before, after = build.parts[dependency.before], build.parts[dependency.after]
        if same and len(before) == len(after):
            build.edges += zip(before, after, strict=True)
        else:
            build.edges.append((build.last[dependency.before], build.first[dependency.after]))
    # Sizes are known, and may go, as soon as the rows that they count.
    build.edges += [(before, build.sizes[after]) for before, after in build.edges if before < build.sizes.get(after, -1)]


def _all_reduces(build: _Builder, plan: Plan, problem: Problem, graph: OperatorGraph) -> list[int]:
    """The all-reduces of all gradients, fused or cut as the plan says; returns their tasks."""
    tasks, found = [], list(pieces(plan.priority, gradients_of(graph, problem, build.priced.expert_groups, build.last)))
    among, took = np.array([piece.gradients[0].groups for piece in found]), np.array([piece.known for piece in found])
    sizes = np.array([piece.unknown for piece in found])
    for groups in set(among.tolist()):  # all at once, as a source of costs takes as long for one
        took[among == groups] += all_reduce_seconds(problem, sizes[among == groups], groups)
    for piece, alone in zip(found, took.tolist(), strict=True):
        seconds = np.repeat(alone, len(build.priced.groups))
        task = build.raw(-1, piece.label, ALL_REDUCE, seconds, piece.sent, (piece.part, piece.parts, -1))
        build.pieces[task] = piece
        build.edges += [(other, task) for gradient in piece.gradients for other in gradient.after]
        tasks.append(task)
    return tasks


def _copies(build: _Builder, plan: Plan, problem: Problem, graph: OperatorGraph) -> None:
    """The copies of experts in the host's memory: weights in before a layer's experts, gradients out when they are complete."""
    if plan.priority.policy == "fixed" and build.priced.expert_groups > 1:
        raise InputError(
            f"the plan {plan.name} starts no all-reduce while a pair of all-to-alls is open, and an open pair may wait for "
            "room that the gradients of packed experts hold until they are reduced; choose another policy, or offload=off"
        )
    firsts = [members[0] for members in build.priced.groups]
    of_layer = {copies.layer: copies for copies in copies_of(problem, plan.placement, plan.offload, firsts)}
    experts: dict[tuple[str, int], list[str]] = {}
    for operator in graph.operators:
        if operator.kind == "experts":
            experts.setdefault((operator.phase, operator.layer), []).append(operator.name)
    summed: dict[str, list[int]] = {}
    for task, piece in build.pieces.items():
        for gradient in piece.gradients:
            summed.setdefault(gradient.name.removeprefix("all_reduce."), []).append(task)
    over: dict[tuple[str, int], list[int]] = {}
    for phase, layer, before, there in visits(list(plan.placement.model_layers)):
        copies, names = of_layer[layer], experts[phase, layer]

        def add(stream: int, label: str, seconds: np.ndarray, after: list[int], copies: Copies = copies) -> int:
            sent = 0.0 if stream == HOST_WORK else copies.sent
            task = build.raw(-1, f"{copies.layer}.{label}", stream, seconds, sent, (0, 1, -1))
            build.copied[task] = copies.layer
            build.edges += [(other, task) for other in after]
            return task

        if not there:
            task = add(HOST_IN, f"experts in, {phase}", copies.moved, over[before] if before else [])
            build.edges += [(task, build.first[name]) for name in names]
        over[phase, layer] = [build.last[name] for name in names]
        if phase == "dx":
            made = experts["dw", layer]
            complete = [task for name in made for task in (build.last[name], *summed.get(name.removeprefix("dw."), ()))]
            left = add(HOST_OUT, "gradients of experts out", copies.moved, complete)
            add(HOST_WORK, "experts updated by the host", copies.updated, [left])
            over[phase, layer] = [*over[phase, layer], left]


def _check_moves(under: dict[str, str], graph: OperatorGraph) -> None:
    """A weight gradient may run under an all-to-all if no path leads from one to the other (Lancet §4.1)."""
    import networkx as nx

    phase = {operator.name: operator for operator in graph.operators}
    needs = graph.graph() if under else None
    after: dict[str, set[str]] = {}
    for gradient, exchange in under.items():
        if gradient not in phase or phase[gradient].phase != "dw":
            raise InputError(f"the plan moves {gradient}, which is no weight gradient of this step")
        if exchange not in phase or phase[exchange].kind not in ("dispatch", "combine"):
            raise InputError(f"the plan runs {gradient} under {exchange}, which is no all-to-all of this step")
        if exchange not in after:
            after[exchange] = nx.descendants(needs, exchange) | nx.ancestors(needs, exchange)
        if gradient in after[exchange]:
            raise InputError(f"the plan runs {gradient} under {exchange}, but one of them needs the other")


def _finish(build: _Builder, graph: OperatorGraph) -> Program:
    pairs: dict[tuple, int] = {}
    pair, holds = [], []
    for place, stream in zip(build.operators, build.stream, strict=True):
        operator = graph.operators[place]
        own = (operator.layer, operator.phase)
        pair.append(pairs.setdefault(own, len(pairs)) if stream == ALL_TO_ALL else -1)
        # Lina's combine of the backward pass is the gradient of the aggregation: an all-to-all is imminent.
        holds.append(stream == COMPUTE and operator.kind == "aggregate" and operator.phase == "dx")
    edges, release = sorted(set(build.edges)), np.zeros(len(build.labels))
    tasks = Tasks(build.stream, np.stack(build.seconds), edges, release, pair, holds)
    columns = (np.array(column) for column in (build.operators, build.sent))
    cut = np.array(build.cut, dtype=np.int64).T
    return Program(tasks, tuple(build.labels), *columns, *cut, build.pieces, build.sizes, build.copied)

"""Checks of training steps: every operator runs in full, after its inputs, and no stream does two things at once; and the
fastest of all schedules of a small one."""

import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations, pairwise, product

import networkx as nx

from engine.errors import IllegalError, InputError
from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Plan
from engine.problem import Problem
from engine.timeline import Timeline
from tests.oracles.rules import illegal_if

PART = re.compile(r"^(.*) · part (\d+) of (\d+)$")
Span = tuple[float, float]


def check_step(timeline: Timeline, plan: Plan, problem: Problem, graph: OperatorGraph) -> float:
    """Check the simulated timeline of a training step against the operators (`graph`) and return its seconds. Raises
    IllegalError with the first broken rule. Operators that take no time leave no event and are not looked for."""
    total, ran, wanted = 0.0, defaultdict(set), {}
    gradients = _gradients(plan, problem, graph)
    for resource in range(len(timeline.resources)):
        mine = timeline.events[timeline.events["resource"] == resource]
        columns = (mine[name].tolist() for name in ("start", "end", "kind", "bytes"))
        spans = list(zip((timeline.labels[row] for row in mine.index), *columns, strict=True))
        total = max([total, *(end for _, _, end, *_ in spans)])
        copies = {label: (start, end, size) for label, start, end, kind, size in spans if kind == "host_copy"}
        sized = [span for span in spans if span[3] == "sizes"]
        spans = [span for span in spans if span[3] not in ("host_copy", "sizes")]
        parts, cut = _parts(spans)
        slack = 1e-9 * timeline.total
        wanted |= cut
        for name, own in parts.items():
            ran[name] |= set(own)
        _check_order(parts, cut, graph, slack)
        _check_sizes(sized, parts, cut, _sizing(plan, problem), graph, slack)
        _check_lanes(spans, plan, slack)
        reduced = [(label, start, end, size) for label, start, end, kind, size in spans if kind == "all_reduce"]
        _check_gradients(reduced, parts, gradients, graph, slack)
        _check_host(copies, reduced, parts, plan, problem, slack)
    _check_whole(ran, wanted, graph)
    return total


NETWORK = ("dispatch", "combine", "all_reduce", "sizes")
MOE = ("dispatch", "experts", "combine")


def _parts(spans: list) -> tuple[dict[str, dict[int, Span]], dict[str, int]]:
    """Operator -> part -> when it ran, and into how many parts it is said to be cut; all-reduces are looked at elsewhere.
    A part that takes no time on a GPU leaves no event there."""
    span_of_part: dict[str, dict[int, Span]] = defaultdict(dict)
    cut: dict[str, int] = {}
    for label, start, end, kind, _ in spans:
        if kind == "all_reduce":
            continue
        match = PART.match(label)
        name, part, parts = (match[1], int(match[2]), int(match[3])) if match else (label, 1, 1)
        illegal_if(part in span_of_part[name], f"{label} runs twice")
        illegal_if(not 1 <= part <= parts or cut.setdefault(name, parts) != parts, f"{label}: there is no such part")
        span_of_part[name][part] = (start, end)
    return span_of_part, cut


def _check_whole(ran: dict[str, set[int]], cut: dict[str, int], graph: OperatorGraph) -> None:
    """Every operator with work runs somewhere, in all its parts. A GPU without experts spends no time on any, and neither
    does a part with tokens that find all experts full."""
    known = {operator.name: operator for operator in graph.operators}
    for name in ran:
        illegal_if(name not in known, f"{name} is no operator of the step")
    for operator in graph.operators:
        if (operator.gemms or operator.moved) and operator.phase != "all_reduce" and operator.name not in ran:
            raise IllegalError(f"{operator.name} never runs")
        if operator.name in ran and len(ran[operator.name]) < cut[operator.name] and operator.kind not in MOE:
            raise IllegalError(f"{operator.name}: not every part of it runs")


def _check_order(parts: dict[str, dict[int, Span]], cut: dict[str, int], graph: OperatorGraph, slack: float) -> None:
    for dependency in graph.dependencies:
        before, after = parts.get(dependency.before), parts.get(dependency.after)
        if not before or not after:
            continue
        if cut[dependency.before] == cut[dependency.after] > 1:
            # Cut alike, so in one stretch: part follows part. (Two stretches of equal parts follow each other anyway.)
            late = any(after[part][0] < before[part][1] - slack for part in before if part in after)
        else:
            late = min(start for start, _ in after.values()) < max(end for _, end in before.values()) - slack
        illegal_if(late, f"{dependency.after} starts before {dependency.before} has ended")


def _sizing(plan: Plan, problem: Problem) -> tuple[set[str], int]:
    if plan.overlap is not None and plan.overlap.irregular:
        return {"dispatch", "combine"}, 8 * problem.model.experts
    return set() if problem.step.capacity_factor else {"dispatch"}, 8 * problem.model.experts


def _check_sizes(
    sized: list, parts: dict, cut: dict[str, int], sizing: tuple[set[str], int], graph: OperatorGraph, slack
) -> None:
    """Real tokens only are sent in the forward pass once their sizes are exchanged, every part's behind its own inputs; full
    buffers need none. sizing: kinds of all-to-alls with real tokens only, and the bytes of the sizes at the least"""
    kinds, least = sizing
    exchanges, _ = _parts([(label.removeprefix("sizes of "), start, end, kind, 0.0) for label, start, end, kind, _ in sized])
    illegal_if(any(size < least for *_, size in sized), "sizes of too few experts are exchanged")
    for operator in graph.operators:
        if operator.phase != "forward" or not operator.network or operator.name not in parts:
            continue
        own = exchanges.pop(operator.name, {})
        if operator.kind not in kinds:
            illegal_if(bool(own), f"{operator.name} exchanges sizes that are known")
            continue
        before = [edge.before for edge in graph.dependencies if edge.after == operator.name and edge.before in parts]
        for part, (start, _) in parts[operator.name].items():
            illegal_if(part not in own, f"{operator.name} sends part {part} before its sizes")
            illegal_if(own[part][1] > start + slack, f"{operator.name} sends part {part} before its sizes are there")
            alike = [part if cut[name] == cut[operator.name] > 1 else max(parts[name]) for name in before]
            ends = [parts[name][which][1] for name, which in zip(before, alike, strict=True) if which in parts[name]]
            late = any(end > own[part][0] + slack for end in ends)
            illegal_if(late, f"sizes of {operator.name} go before they are known")
    illegal_if(any(name not in parts for name in exchanges), "sizes of nothing are exchanged")


def _check_lanes(spans: list, plan: Plan, slack: float) -> None:
    """No two computations run at once, no two all-to-alls, nor two all-reduces; one of each of these only if the policy shares
    the network."""
    alone = plan.priority.policy in ("priority", "fifo")
    lanes = defaultdict(list)
    for label, start, end, kind, _ in spans:
        network = "collectives" if alone else "all-reduces" if kind == "all_reduce" else "all-to-alls"
        lanes[network if kind in NETWORK else "computations"].append((start, end, label))
    for lane, own in lanes.items():
        for (_, end, first), (start, _, second) in pairwise(sorted(own)):
            illegal_if(start < end - slack, f"two {lane} at once: {first} and {second}")


def _gradients(plan: Plan, problem: Problem, graph: OperatorGraph) -> list[tuple[str, float, list[str]]]:
    """Name, bytes and makers of every gradient that is reduced; where every expert is held several times, theirs too."""
    gradients = [
        (operator.name, operator.sent, [edge.before for edge in graph.dependencies if edge.after == operator.name])
        for operator in graph.operators
        if operator.phase == "all_reduce"
    ]
    if plan.placement.slots[0].sum() > plan.placement.experts:
        gradients += [
            (f"all_reduce.{operator.name}", operator.parameters * problem.model.bytes_per_number, [f"dw.{operator.name}"])
            for operator in graph.operators
            if operator.kind == "experts" and operator.phase == "forward"
        ]
    return gradients


def _check_gradients(
    reduced: list[tuple[str, float, float, float]],
    parts: dict[str, dict[int, Span]],
    gradients: list[tuple[str, float, list[str]]],
    graph: OperatorGraph,
    slack: float,
) -> None:
    """All gradients are reduced, to the byte, none before it is there, and the update waits for all of them."""
    if not reduced:  # one GPU, or no time
        return
    update = next((operator.name for operator in graph.operators if operator.phase == "update"), None)
    if update in parts and parts[update][1][0] < max(end for _, _, end, _ in reduced) - slack:
        raise IllegalError("the update starts before the last all-reduce has ended")
    wanted, reduced_bytes = sum(size for _, size, _ in gradients), sum(size for *_, size in reduced)
    if abs(reduced_bytes - wanted) > 1e-9 * wanted:
        raise IllegalError(f"{reduced_bytes:g} bytes of gradients are reduced, but there are {wanted:g}")
    there = {
        name: max([end for maker in makers if maker in parts for _, end in parts[maker].values()], default=0.0)
        for name, _, makers in gradients
    }
    sent = 0.0
    for label, start, _, size in sorted(reduced, key=lambda all_reduce: all_reduce[1]):
        if start < there[label.split(" · ")[0].split(" and ")[0]] - slack:
            raise IllegalError(f"{label} starts before its gradient is there")
        sent += size
        if sent > (1 + 1e-9) * sum(own for name, own, _ in gradients if there[name] <= start + slack):
            raise IllegalError(f"{label} reduces more than the gradients that are there")


def _check_host(
    copies: dict[str, tuple[float, float, float]],
    reduced: list[tuple[str, float, float, float]],
    parts: dict[str, dict[int, Span]],
    plan: Plan,
    problem: Problem,
    slack: float,
) -> None:
    """Experts in the host's memory are there when their layer runs, no more than two layers at a time, their gradients leave
    when they are complete, and the host's update comes after that."""
    layers = plan.placement.model_layers
    if plan.offload is None:
        illegal_if(copies, "experts are copied that the plan leaves on the GPUs")
        return
    fullest = max(min(plan.offload.experts, count) for count in plan.placement.slots.max(axis=1))

    def span(phase: str, layer: int) -> Span:
        prefix = "" if phase == "forward" else f"{phase}."
        own = [each for name in ("up", "down") for each in parts.get(f"{prefix}{layer}.experts_{name}", {}).values()]
        return min(start for start, _ in own), max(end for _, end in own)

    turns = [("forward", layer) for layer in layers] + [("dx", layer) for layer in reversed(layers)]
    over = []
    for number, (phase, layer) in enumerate(turns):
        begin, end = span(phase, layer)
        arrives = copies.pop(f"{layer}.experts in, {phase}", None)
        if arrives is None:
            used = list(dict.fromkeys(other for _, other in reversed(turns[:number])))
            illegal_if(layer not in used[:2], f"layer {layer} is not there")
        else:
            illegal_if(begin < arrives[1] - slack, f"experts of layer {layer} run before they are there")
            illegal_if(any(arrives[0] < late - slack for late in over[:-1]), f"no room yet for the experts of layer {layer}")
            illegal_if(abs(arrives[2] - fullest * problem.model.bytes_per_expert) > 1, "another number of bytes is copied")
        if phase == "dx":
            leaves, updated = (
                copies.pop(f"{layer}.gradients of experts out"),
                copies.pop(f"{layer}.experts updated by the host"),
            )
            made = [span("dw", layer)[1], *(last for label, _, last, _ in reduced if f".{layer}.experts" in label)]
            illegal_if(leaves[0] < max(made) - slack, f"gradients of layer {layer} leave before they are complete")
            illegal_if(updated[0] < leaves[1] - slack, f"the host updates layer {layer} before it has the gradients")
            end = max(end, leaves[1])
        over.append(end)
    illegal_if(copies, f"not expected: {sorted(copies)[:2]}")


def fastest_step(problem: Problem, graph: OperatorGraph, time: Callable[..., float], parts: tuple[int, ...]) -> float:
    """Seconds of the fastest of very many schedules of a small step with one MoE layer.

    Every stretch of the forward pass in every number of parts; then, with the two fastest of these, every number of parts of
    the MoE layer in the backward pass and every choice of an all-to-all for every weight gradient.

    time: seconds of a schedule, from its stretches, parts of the backward pass and weight gradients; raises InputError for one
        that is not allowed
    """
    names = [operator.name for operator in graph.operators if operator.phase == "forward"]
    forward: list[tuple[float, tuple]] = [(time((), 1, {}), ())]
    for first, last in combinations(range(len(names)), 2):
        for count in parts:
            with suppress(InputError):
                cut = ((names[first], names[last], count),)
                forward.append((time(cut, 1, {}), cut))
    needs, fastest = graph.graph(), min(forward)[0]
    exchanges = [operator.name for operator in graph.operators if operator.phase == "dx" and operator.network]
    apart = {}
    for operator in graph.operators:
        if operator.phase == "dw":
            tied = nx.ancestors(needs, operator.name) | nx.descendants(needs, operator.name)
            apart[operator.name] = [None, *(name for name in exchanges if name not in tied)]
    for (_, cut), count in product(sorted(forward)[:2], (1, *parts)):
        for chosen in product(*apart.values()):
            under = {gradient: exchange for gradient, exchange in zip(apart, chosen, strict=True) if exchange}
            fastest = min(fastest, time(cut, count, under))
    return fastest

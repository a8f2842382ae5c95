"""Checks of overlapped work: pipelined layers, chains cut into parts, weight gradients under all-to-alls, axes of tensors.

Recomputed without any optimiser; each check raises `IllegalError` with the first broken rule.
"""

from collections.abc import Mapping, Sequence
from math import inf

from engine.errors import IllegalError
from tests.oracles.rules import illegal_if


def check_pipeline(
    dispatch: Sequence[float],
    experts: Sequence[float],
    combine: Sequence[float],
    streams: int = 1,
    order: str = "dispatch-first",
) -> float:
    """Seconds from the start of the first dispatch to the end of the last combine; raises IllegalError for no parts.

    dispatch, experts, combine: [part] seconds
    streams: 2 if dispatches have a network of their own and combines another, as equations 9-12 read; 1 for one network
    order: of one network, D1 … Dr C1 … Cr ("dispatch-first") or D1 D2 C1 D3 C2 … Dr Cr-1 Cr ("interleaved")
    """
    parts = len(dispatch)
    if parts < 1 or len(experts) != parts or len(combine) != parts:
        raise IllegalError(f"{parts} dispatches, {len(experts)} expert parts and {len(combine)} combines; wanted as many")
    if order == "interleaved":
        sends = [("D", 0)]
        for part in range(parts):
            sends += [("D", part + 1)] * (part + 1 < parts) + [("C", part)]
    else:
        sends = [("D", part) for part in range(parts)] + [("C", part) for part in range(parts)]
    network = {"D": 0.0, "C": 0.0}
    compute = end = 0.0
    computed = [0.0] * parts
    for kind, part in sends:
        free = network[kind] if streams == 2 else max(network.values())
        if kind == "D":
            network["D"] = free + dispatch[part]
            compute = computed[part] = max(compute, network["D"]) + experts[part]
        else:
            network["C"] = end = max(free, computed[part]) + combine[part]
    return end


def check_partition(
    ranges: Sequence[tuple[int, int, int]],
    network: Sequence[bool],
    times: Sequence[Sequence[float]],
    latest_last: Sequence[int] | None = None,
    max_range: int | None = None,
) -> float:
    """Check ranges (first, last, parts) of a chain and return its end-to-end seconds, replayed part by part.

    network: [op]
    times: [op][K] seconds of one part in 1 ... K parts
    latest_last: [op], the last operator of a range from here that may be cut
    max_range: the most operators in a range
    """
    expected, seconds = 0, 0.0
    for first, last, parts in ranges:
        illegal_if(first != expected or last < first, f"the range {first}..{last} does not start at operator {expected}")
        illegal_if(last >= len(network), f"the range {first}..{last} goes beyond the {len(network)} operators")
        if not 1 <= parts <= len(times[first]):
            raise IllegalError(f"the range {first}..{last} has {parts} parts instead of 1 to {len(times[first])}")
        if max_range is not None and last - first + 1 > max_range:
            raise IllegalError(f"the range {first}..{last} has more than {max_range} operators")
        if parts > 1 and latest_last is not None and last > latest_last[first]:
            raise IllegalError(f"a range from operator {first} may be cut up to {latest_last[first]}, not {last}")
        seconds += _replay(first, last, parts, network, times)
        expected = last + 1
    illegal_if(expected != len(network), f"the ranges end at operator {expected - 1} of {len(network)}")
    illegal_if(seconds == inf, "an operator is cut into a number of parts that it cannot be cut into")
    return seconds


def _replay(first: int, last: int, parts: int, network: Sequence[bool], times: Sequence[Sequence[float]]) -> float:
    """Both streams work through their queues; a task without its input waits and holds up its stream."""
    stages: list[list[int]] = []
    for op in range(first, last + 1):
        if op == first or network[op] != network[op - 1]:
            stages.append([])
        stages[-1].append(op)
    queues: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for stage, ops in enumerate(stages):
        queues[bool(network[ops[0]])] += [(stage, part) for part in range(parts)]
    free = {True: 0.0, False: 0.0}
    end: dict[tuple[int, int], float] = {}
    while queues[True] or queues[False]:
        for stream, queue in queues.items():
            if queue and (queue[0][0] == 0 or (queue[0][0] - 1, queue[0][1]) in end):
                stage, part = queue.pop(0)
                now = max(free[stream], end.get((stage - 1, part), 0.0))
                for op in stages[stage]:
                    now += times[op][parts - 1]
                free[stream] = end[stage, part] = now
    return max(end.values())


def check_axes(
    axis_of_tensor: Mapping[str, int | str],
    domains: Mapping[str, Sequence[int | str]],
    constraints: Sequence[tuple[Sequence[str], Sequence[Sequence[int | str]]]],
) -> None:
    """Check that every tensor has an axis of its domain and every constraint (tensors, allowed) an allowed tuple."""
    illegal_if(set(axis_of_tensor) != set(domains), "not every tensor has an axis, or a tensor that does not exist has one")
    for tensor, axis in axis_of_tensor.items():
        illegal_if(axis not in domains[tensor], f"tensor {tensor} is cut along {axis!r}, which it does not have")
    for number, (tensors, allowed) in enumerate(constraints):
        chosen = [axis_of_tensor[tensor] for tensor in tensors]
        if chosen not in [list(axes) for axes in allowed]:
            raise IllegalError(f"constraint {number} does not allow {chosen} for {list(tensors)}")


def check_weight_gradients(
    alltoall: Sequence[float], dw: Sequence[float], allowed: Sequence[Sequence[int]], alltoall_of_dw: Sequence[int]
) -> float:
    """Check that every dW runs where it may and return the seconds of all-to-all that they hide (Lancet, section 4.2).

    alltoall, dw: seconds of each
    allowed: [dW][all-to-all] 0 or 1
    alltoall_of_dw: one all-to-all each, -1 for none
    """
    illegal_if(len(alltoall_of_dw) != len(dw), f"{len(alltoall_of_dw)} weight gradients instead of {len(dw)}")
    beside = [0.0] * len(alltoall)
    for gradient, under in enumerate(alltoall_of_dw):
        illegal_if(int(under) != under, f"weight gradient {gradient} runs under all-to-all {under}, which is no whole number")
        if under == -1:
            continue
        if not 0 <= under < len(alltoall):
            raise IllegalError(f"weight gradient {gradient} runs under all-to-all {under}, which does not exist")
        if not allowed[gradient][int(under)]:
            raise IllegalError(f"weight gradient {gradient} runs under all-to-all {under}, which it depends on or needs it")
        beside[int(under)] += float(dw[gradient])
    return sum(min(float(alltoall[j]), beside[j]) for j in range(len(alltoall)))

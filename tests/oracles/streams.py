"""Checks of steps on streams: computations in program order, collectives on one shared network."""

from itertools import pairwise

import numpy as np

from engine.errors import IllegalError
from tests.oracles.rules import illegal_if

ALL_TO_ALL, ALL_REDUCE, LOCAL = 1, 2, (0, 3, 4, 5)


def check_streams(tasks, policy: str, use: tuple[float, float], start: np.ndarray, end: np.ndarray) -> float:
    """Check an execution of `tasks` (see `engine.simulate.streams.Tasks`) and return its makespan in seconds.

    Checked: every task waits for its inputs and for nothing else, a group computes one thing at a time in the order of the
    list, every collective gets exactly its work out of the network's shares, and the policy chose the next to start.

    start, end: float64[task, group] seconds
    """
    count, groups = tasks.seconds.shape
    slack = 1e-9 * (1 + float(end.max(initial=0)))
    before = [[] for _ in range(count)]
    for earlier, other in tasks.edges.tolist():
        before[other].append(earlier)
    ready = np.zeros((count, groups))
    for task in range(count):
        for group in range(groups):
            ends = [tasks.release[task]]
            for earlier in before[task]:
                local = tasks.stream[task] in LOCAL and tasks.stream[earlier] in LOCAL
                ends.append(end[earlier, group] if local else max(end[earlier]))
            ready[task, group] = max(ends)
    for group in range(groups):
        free = dict.fromkeys(LOCAL, 0.0)
        for task in range(count):
            if (stream := int(tasks.stream[task])) in LOCAL:
                if abs(start[task, group] - max(ready[task, group], free[stream])) > slack:
                    raise IllegalError(f"computation {task} does not start on group {group} when it can and may")
                if abs(end[task, group] - start[task, group] - tasks.seconds[task, group]) > slack:
                    raise IllegalError(f"computation {task} takes another time than its own on group {group}")
                free[stream] = end[task, group]
    network = [task for task in range(count) if tasks.stream[task] not in LOCAL]
    for task in network:
        illegal_if(np.ptp(start[task]) > 0 or np.ptp(end[task]) > 0, f"collective {task} does not run on all groups at once")
        illegal_if(start[task, 0] < max(ready[task]) - slack, f"collective {task} starts before it is ready")
    span = {task: (max(ready[task]), start[task, 0], end[task, 0]) for task in network}
    holding = [task for task in range(count) if tasks.holds[task] and policy == "priority"]
    held = [(start[task, group], end[task, group]) for task in holding for group in range(groups)]
    opened = _open_pairs(tasks, span) if policy == "fixed" else []
    _check_work(tasks, policy, use, span, held + opened, slack)
    _check_choices(tasks, policy, span, held + opened, slack)
    return float(end.max(initial=0))


def _open_pairs(tasks, span: dict) -> list[tuple[float, float]]:
    """From the first start to the last end of every pair."""
    members: dict = {}
    for task in span:
        if tasks.stream[task] == ALL_TO_ALL:
            name = ("alone", task) if tasks.pair[task] < 0 else ("pair", int(tasks.pair[task]))
            members.setdefault(name, []).append(span[task])
    return [(min(span[1] for span in spans), max(span[2] for span in spans)) for spans in members.values()]


def _check_work(tasks, policy: str, use, span: dict, blocked: list, slack: float) -> None:
    """Between two neighbouring times of the run nothing changes: who is in flight, at which rate, who waits and why."""
    times = sorted({time for triple in span.values() for time in triple} | {time for pair in blocked for time in pair})
    done = dict.fromkeys(span, 0.0)
    for left, right in pairwise(times):
        middle = (left + right) / 2
        flying = [task for task, (_, begin, finish) in span.items() if begin < middle < finish]
        kinds = sorted(int(tasks.stream[task]) for task in flying)
        if right - left > slack:
            if len(set(kinds)) < len(kinds) or (policy in ("priority", "fifo") and len(kinds) > 1):
                raise IllegalError(f"collectives {flying} are in flight together at {middle:g}")
            for task, (since, begin, _) in span.items():
                if not since < middle < begin:
                    continue
                kind = tasks.stream[task]
                busy = bool(kinds) if policy in ("priority", "fifo") else kind in kinds
                reason = kind == ALL_REDUCE and any(first <= middle < last for first, last in blocked)
                illegal_if(not busy and not reason, f"collective {task} waits at {middle:g} for nothing")
        for task in flying:
            done[task] += (right - left) * _rate(int(tasks.stream[task]), kinds, use)
    for task, work in done.items():
        if abs(work - tasks.seconds[task, 0]) > slack:
            raise IllegalError(f"collective {task} gets {work:g} s of work done instead of {tasks.seconds[task, 0]:g}")


def _rate(kind: int, kinds: list[int], use: tuple[float, float]) -> float:
    """Speed relative to a collective alone: the network is dealt out in equal parts until each has enough or all is gone."""
    if len(kinds) == 1:
        return 1.0
    least, most = sorted(use)
    share = {least: min(least, 0.5)}
    share[most] = min(most, 1 - share[least])
    own = use[0] if kind == ALL_TO_ALL else use[1]
    return share[own] / own


def _check_choices(tasks, policy: str, span: dict, blocked: list, slack: float) -> None:
    """Whenever a collective starts, none that the policy prefers is ready and waiting."""
    for task, (since, begin, _) in span.items():
        kind = tasks.stream[task]
        for other, (ready, later, _) in span.items():
            if other == task or not (ready < begin - slack and later > begin + slack):
                continue
            first_come = (ready, other) < (since, task) and (ready < since - slack or ready == since)
            same = tasks.stream[other] == kind
            if policy == "fifo" and first_come:
                raise IllegalError(f"collective {task} starts at {begin:g} although {other} was ready first")
            if policy != "fifo" and same and (other < task if kind == ALL_TO_ALL else first_come):
                raise IllegalError(f"collective {task} starts at {begin:g} although it is {other}'s turn")
            if policy == "priority" and kind == ALL_REDUCE and tasks.stream[other] == ALL_TO_ALL:
                raise IllegalError(f"all-reduce {task} starts at {begin:g} although all-to-all {other} waits")
        if kind == ALL_REDUCE and any(first < begin - slack and begin < last - slack for first, last in blocked):
            raise IllegalError(f"all-reduce {task} starts at {begin:g}, where none may start")

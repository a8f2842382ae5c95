"""The gain of a plan on recordings that it was not made from, beside the deployed plan, no plan at all, and no replicas."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from engine.errors import InputError, StoppedError
from engine.plan import Plan
from engine.result import Stop
from engine.schema import Frozen
from engine.studies.held_out import by_time
from engine.studies.judge import Judge, gain_of, ratio_gain, same_work
from engine.systems import SYSTEMS, usual_plan
from engine.systems.base import Report
from engine.verdict.maker import Maker, maker_of, replicating_without_replicas
from engine.workload import Workload

UNKNOWN = "unknown"
"""Stands for the recordings that a plan was made from where these are not here."""


class HeldOut(Frozen):
    """One part of the recordings that the plan was not made from. All gains are over the deployed plan, as shares.

    by: "time": the later half of a recording, judged with the plan that the same system makes of the earlier one;
        "recording": another recording, judged with the plan as it is
    tokens: held out; seconds_deployed, seconds: of a step or a pass; error: standard error of the gain, see `gain_of`
    made_for_it: gain of the plan that the same system makes of this very part; linear: of contiguous blocks;
        without_replicas: of the same system without spare slots, made of the same recordings as the plan. None: unknown
    """

    part: str
    by: Literal["time", "recording"]
    tokens: float
    planned_on: str
    seconds_deployed: float
    seconds: float
    gain: float
    error: float
    made_for_it: float | None = None
    linear: float | None = None
    without_replicas: float | None = None


@dataclass(frozen=True, eq=False)
class Candidates:
    """The plans that are judged. own: recordings that the plan was made from, the one it was planned for first; others: those
    it has not seen; maker, bare: makes it again, with and without replicas, None where nothing does."""

    plan: Plan
    deployed: Plan
    own: tuple[Workload, ...]
    others: tuple[Workload, ...]
    maker: Maker | None
    bare: Maker | None
    linear: Plan | None


@dataclass(frozen=True, eq=False)
class Part:
    """A recording to judge on, and those that the plan judged on it is made from."""

    by: Literal["time", "recording"]
    recording: Workload
    made_from: tuple[Workload, ...]


def candidates_of(
    plan: Plan, deployed: Plan, own: tuple[Workload, ...], others: tuple[Workload, ...], judge: Judge
) -> Candidates:
    """The plan with the plans and makers that stand beside it."""
    problem = replace(judge.problem, in_use=deployed.placement)
    maker, bare = maker_of(plan, problem), None
    if replicas_of(plan):
        bare = (maker and maker.without_replicas()) or replicating_without_replicas(plan, problem)
    try:
        linear, _ = usual_plan(SYSTEMS["linear"], replace(problem, travel=plan.travel))
    except InputError:  # contiguous blocks do not fit every cluster
        linear = None
    return Candidates(plan, deployed, own, others, maker, bare, linear)


def replicas_of(plan: Plan) -> int:
    """Slots beyond one for every expert, in all layers."""
    return int(plan.placement.slots.sum()) - plan.placement.layers * plan.placement.experts


def held_out(
    parts: Sequence[Part], candidates: Candidates, judge: Judge, stop: Stop, report: Report
) -> Iterator[HeldOut]:
    """Part by part. Raises InputError where a plan does not fit a recording, and StoppedError when asked to stop."""
    for turn, part in enumerate(parts):
        if stop():
            raise StoppedError("stopped before there was a verdict")
        yield _judged(part, candidates, judge, stop, _report_of(part, turn / len(parts), report))
    if stop():
        raise StoppedError("stopped before there was a verdict")


def parts_of(candidates: Candidates) -> list[Part]:
    """The later halves of the plan's own recordings where its system can be run again on the earlier ones, then all others."""
    parts = []
    halves = [by_time(recording) for recording in candidates.own]
    if candidates.maker is not None and halves and halves[0] is not None:
        earlier = tuple(cut[0] if cut else whole for cut, whole in zip(halves, candidates.own, strict=True))
        parts += [Part("time", cut[1], earlier) for cut in halves if cut]
    return parts + [Part("recording", recording, candidates.own) for recording in candidates.others]


def _report_of(part: Part, share: float, report: Report) -> Report:
    """Of the systems that are run again for a part, of which nobody knows how much of it they are."""

    def report_part(done: float, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
        report(share, f"{part.recording.name}: {message}", None, None)

    report_part(0.0, "judging")
    return report_part


def _judged(part: Part, candidates: Candidates, judge: Judge, stop: Stop, report: Report) -> HeldOut:
    recording, deployed, plan = part.recording, candidates.deployed, candidates.plan
    if part.by == "time":
        plan = candidates.maker.plan(part.made_from, stop, report)
    gain = gain_of(judge, deployed, plan, recording, stop=stop)

    def over_deployed(other: Plan | None) -> float | None:
        if other is None or same_work(other, deployed):
            return None if other is None else 0.0
        return ratio_gain(gain.seconds_now, judge.seconds(other, recording, stop))

    fresh = _plan_by(candidates.maker, (recording,), stop, report)
    bare = _plan_by(candidates.bare, part.made_from, stop, report)
    return HeldOut(
        part=recording.name,
        by=part.by,
        tokens=copies_of(recording) / judge.problem.model.experts_per_token,
        planned_on=_names(part.made_from),
        seconds_deployed=gain.seconds_now,
        seconds=gain.seconds,
        gain=gain.gain,
        error=gain.error,
        made_for_it=over_deployed(fresh),
        linear=over_deployed(candidates.linear),
        without_replicas=over_deployed(bare),
    )


def _plan_by(maker: Maker | None, recordings: tuple[Workload, ...], stop: Stop, report: Report) -> Plan | None:
    """None without a maker or recordings, and where the system refuses, as one that follows tokens does for loads."""
    if maker is None or not recordings:
        return None
    try:
        return maker.plan(recordings, stop, report)
    except StoppedError:
        raise
    except InputError:
        return None


def copies_of(recording: Workload) -> float:
    """Token copies in the median layer."""
    return float(np.median(recording.load.sum(axis=1)))


def _names(recordings: Sequence[Workload]) -> str:
    return " and ".join(recording.name for recording in recordings) or UNKNOWN


def persistence_of(parts: Sequence[HeldOut], candidates: Candidates, judge: Judge, stop: Stop) -> float | None:
    """The part of the gain in sample that survives held out:

        sum over parts of `gain` / sum over parts of `made_for_it`

    the gain of another hour's plan in this hour, over that of a plan made for this hour. Where the system can be run again for
    none of the parts, the mean of `gain` over the mean gain on the plan's own recordings. 1: last hour's plan serves as well as
    a fresh one; 0: nothing of it is left; above 1 where the heuristic plans better for another hour. None where the plan gains
    nothing in sample, and where neither is known.
    """
    if not parts:
        return None
    if compared := [part for part in parts if part.made_for_it is not None]:
        kept, possible = sum(part.gain for part in compared), sum(part.made_for_it for part in compared)
    elif candidates.own:
        kept = sum(part.gain for part in parts) / len(parts)
        seconds = [
            [judge.seconds(plan, recording, stop) for plan in (candidates.deployed, candidates.plan)]
            for recording in candidates.own
        ]
        possible = sum(ratio_gain(*pair) for pair in seconds) / len(seconds)
    else:
        return None
    return kept / possible if possible > 0 else None

"""The gain of a plan on recordings that it was not made from, over the deployed plan, no plan at all, and no replicas.

Recordings are cut into a half to plan on and a half to score on. Tokens of one text resemble each other, so sequences stay
whole if a recording names them. On the earlier half the system that made the plan is run again.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.compare.baseline import baseline_of, travelling_like
from engine.compare.judge import Judge, gain_of, ratio_gain, same_work
from engine.errors import InputError, StoppedError
from engine.plan import Plan
from engine.problem import MEMORY_SHARE, Problem
from engine.result import Provenance, Stop
from engine.schema import Frozen
from engine.serving.step import Phase, recording_of_step
from engine.systems import SYSTEMS, System
from engine.systems.base import Report, silent
from engine.systems.options import Options
from engine.workload import DECODE, PREFILL, ExpertLoad, RoutingTrace, Workload


def halves(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace, str]:
    """(the half to plan on, the half to score on, "sequences" or "tokens"); tokens without any choice are left out.

    Every second sequence is held out where there are at least two, else the later tokens. Raises InputError for fewer than
    two tokens.
    """
    used = np.flatnonzero((trace.experts >= 0).any(axis=(1, 2)))
    if len(used) < 2:
        raise InputError(f"{trace.name}: {len(used)} tokens with a choice cannot be cut into two halves; record more")
    unit, held_out = "tokens", np.arange(len(used)) >= (len(used) + 1) // 2
    if trace.sequence is not None:
        number = np.unique(trace.sequence[used], return_inverse=True)[1]
        if number.max() > 0:
            unit, held_out = "sequences", number % 2 == 1
    return _cut(trace, used[~held_out], unit), _cut(trace, used[held_out], unit), unit


def by_time(recording: Workload) -> tuple[Workload, Workload] | None:
    """The earlier and the later half: of a routing log whole sequences in the order in which they were recorded, of loads the
    steps that they were kept by. None of other loads and of traffic, which have no order in time, and where a half has no
    choices."""
    match recording:
        case RoutingTrace():
            earlier, later = recording.halves()
        case ExpertLoad(by_step=steps) if steps is not None and len(steps) > 1:
            earlier, later = (
                replace(recording, load=half.sum(axis=0), by_step=half, by_source=None)
                for half in (steps[: (len(steps) + 1) // 2], steps[(len(steps) + 1) // 2 :])
            )
        case _:
            return None
    if not (earlier.load.any() and later.load.any()):
        return None
    return replace(earlier, name=f"{recording.name}, earlier half"), replace(later, name=f"{recording.name}, later half")


def _cut(trace: RoutingTrace, tokens: NDArray[np.int64], unit: str) -> RoutingTrace:
    return replace(trace if unit == "sequences" else replace(trace, sequence=None), source_rank=None).part(tokens)


def sample(trace: RoutingTrace, tokens: int, seed: int) -> NDArray[np.int16]:
    """int16[token, layer, k]: so many tokens drawn at random, sequence by sequence where they are known."""
    rng = np.random.default_rng(seed)
    if trace.sequence is None:
        return trace.experts[rng.permutation(trace.tokens)[:tokens]]
    number = np.unique(trace.sequence, return_inverse=True)[1]
    turn = rng.permutation(number.max() + 1)
    return trace.experts[np.argsort(turn[number], kind="stable")[:tokens]]


REPLICATING = "eplb"
"""The system whose balance without spare slots stands in for one that cannot leave replicas out."""


@dataclass(frozen=True, eq=False)
class Maker:
    """A system with its options, and the plans it has made so far by the recordings they are made from.

    problem: cluster, model, costs and the deployed placement; its recordings do not count. seconds of work are the system's.
    """

    system: System
    settings: Options
    problem: Problem
    made: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    def plan(self, recordings: tuple[Workload, ...], stop: Stop, report: Report) -> Plan:
        """The plan for the first recording; the others it must serve as well. Raises InputError where the system refuses, and
        StoppedError when asked to stop: an unfinished search is not the plan that the system makes."""
        key = tuple(recording.digest for recording in recordings)
        if key not in self.made:
            problem = replace(self.problem.with_workload(recordings[0]), others=recordings[1:])
            draft = self.system.recipe(problem, self.settings, stop, report)
            if stop():
                raise StoppedError("stopped before there was a verdict")
            provenance = Provenance(optimiser=self.system.name, options=self.settings.model_dump())
            self.made[key] = draft.plan(self.system.title, provenance, problem.travel)
        return self.made[key]

    def without_replicas(self) -> "Maker | None":
        """The same system with no spare slots; None where it has no such option."""
        if "redundant" not in self.system.options.model_fields:
            return None
        return Maker(self.system, self.settings.model_copy(update={"redundant": 0}), self.problem)


def _maker(name: str, options: Mapping[str, Any], problem: Problem, plan: Plan) -> Maker | None:
    """The system of this name; None where it is none of ours, or has other options by now."""
    system = SYSTEMS.get(name)
    if system is None or problem.goal not in system.goals:
        return None
    try:
        settings = system.settings(options)
    except InputError:
        return None
    return Maker(system, settings, replace(problem, travel=plan.travel))


MOST_SEQUENCES = 512
"""On a GPU, of the batches that are tried."""

UNKNOWN = "unknown"
"""Stands for the recordings that a plan was made from where these are not here."""


class HeldOut(Frozen):
    """One part of the recordings that the plan was not made from. All gains are over the deployed plan, as shares.

    by: "time": the later half of a recording, judged with the plan that the same system makes of the earlier one;
        "recording": another recording, judged with the plan as it is
    phase: see `phase_of`
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
    phase: Phase | None = None


class Batch(Frozen):
    """A step with so many sequences on every GPU, under the deployed plan and under the plan: seconds, mean over the parts."""

    sequences: int
    seconds_deployed: float
    seconds: float

    @property
    def gain(self) -> float:
        return ratio_gain(self.seconds_deployed, self.seconds)


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
    """The plan with the plans and makers that it is compared with."""
    problem = replace(judge.problem, in_use=deployed.placement)
    maker, bare = _maker(plan.provenance.optimiser, plan.provenance.options, problem, plan), None
    if replicas_of(plan):
        bare = (maker and maker.without_replicas()) or _maker(REPLICATING, {"redundant": 0}, problem, plan)
    try:
        linear = baseline_of(travelling_like(plan, replace(problem, in_use=None)))
    except InputError:  # contiguous blocks do not fit every cluster
        linear = None
    return Candidates(plan, deployed, own, others, maker, bare, linear)


def replicas_of(plan: Plan) -> int:
    """Slots beyond one for every expert, in all layers."""
    return int(plan.placement.slots.sum()) - plan.placement.layers * plan.placement.experts


def held_out(parts: Sequence[Part], candidates: Candidates, judge: Judge, stop: Stop, report: Report) -> Iterator[HeldOut]:
    """Part by part. Raises InputError where a plan does not fit a recording, and StoppedError when asked to stop."""
    for turn, part in enumerate(parts):
        if stop():
            raise StoppedError("stopped before there was a verdict")
        yield _judged(part, candidates, judge, stop, _report_of(part, turn / len(parts), report))
    if stop():
        raise StoppedError("stopped before there was a verdict")


def parts_of(candidates: Candidates, phase: Phase | None) -> list[Part]:
    """The later halves of the plan's own recordings where its system can be run again on the earlier ones, then all others; of
    these the ones of the phase, see `of_phase`."""
    parts = []
    halves = [by_time(recording) for recording in candidates.own]
    if candidates.maker is not None and halves and halves[0] is not None:
        earlier = tuple(cut[0] if cut else whole for cut, whole in zip(halves, candidates.own, strict=True))
        parts += [Part("time", cut[1], earlier) for cut in halves if cut]
    parts += [Part("recording", recording, candidates.own) for recording in candidates.others]
    return of_phase(parts, phase, lambda part: part.recording)


PHASES: dict[int, Phase] = {PREFILL: "prefill", DECODE: "decode"}
Sample = TypeVar("Sample")


def phase_of(recording: Workload) -> Phase | None:
    """The phase that a recording is of: all of its tokens, else by its name (`decode_in2000`); None: of both, or unknown."""
    if isinstance(recording, RoutingTrace) and recording.phase is not None and len(recording.phase):
        first = int(recording.phase[0])
        return PHASES[first] if (recording.phase == first).all() else None
    named = {phase for phase in PHASES.values() if re.search(rf"(?<![a-z]){phase}(?![a-z])", recording.name.lower())}
    return named.pop() if len(named) == 1 else None


def of_phase(samples: Sequence[Sample], phase: Phase | None, recording: Callable[[Sample], Workload]) -> list[Sample]:
    """Those with recordings of the phase where there are any; else all, since a judgement on the other phase is better than
    none. phase: None: any"""
    return [sample for sample in samples if phase is not None and phase_of(recording(sample)) == phase] or list(samples)


def other_phase(phases: Iterable[Phase | None], phase: Phase | None) -> str:
    """The phase that a plan is judged on if it is not that of its step, else nothing."""
    return next((judged for judged in phases if phase and judged and judged != phase), "")


def _report_of(part: Part, share: float, report: Report) -> Report:
    """The report of systems that are run again for a part; their share of its work is not known."""

    def report_part(done: float, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
        report(share, f"{part.recording.name}: {message}", None, None)

    report_part(0.0, "judging")
    return report_part


def _judged(part: Part, candidates: Candidates, judge: Judge, stop: Stop, report: Report) -> HeldOut:
    recording, deployed, plan = part.recording, candidates.deployed, _plan_for(part, candidates, stop, report)
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
        planned_on=" and ".join(source.name for source in part.made_from) or UNKNOWN,
        seconds_deployed=gain.seconds_now,
        seconds=gain.seconds,
        gain=gain.gain,
        error=gain.error,
        made_for_it=over_deployed(fresh),
        linear=over_deployed(candidates.linear),
        without_replicas=over_deployed(bare),
        phase=phase_of(recording),
    )


def _plan_for(part: Part, candidates: Candidates, stop: Stop, report: Report) -> Plan:
    """The plan that is judged on a part."""
    return candidates.maker.plan(part.made_from, stop, report) if part.by == "time" else candidates.plan


def batches_of(parts: Sequence[Part], candidates: Candidates, judge: Judge, stop: Stop, report: Report) -> Iterator[Batch]:
    """A step of 1, 2, 4, ... sequences on every GPU, as far as both plans have room for them; none of a pass. Raises
    StoppedError when asked to stop."""
    sequences = 0 if judge.serving is None or not parts else 2 if judge.serving.step.overlap == "two-batch" else 1
    plans = [_plan_for(part, candidates, stop, silent) for part in parts]
    while 0 < sequences <= MOST_SEQUENCES:
        here = judge.with_sequences(sequences)
        if max(float(here.memory_shares(plan).max()) for plan in (candidates.plan, candidates.deployed)) > MEMORY_SHARE:
            return
        seconds = [0.0, 0.0]
        for part, plan in zip(parts, plans, strict=True):
            if stop():
                raise StoppedError("stopped before there was a verdict")
            report(1.0, f"{part.recording.name}: {sequences} sequences on a GPU", None, None)
            for which, timed in enumerate((candidates.deployed, plan)):
                seconds[which] += here.seconds(timed, part.recording, stop) / len(parts)
        yield Batch(sequences=sequences, seconds_deployed=seconds[0], seconds=seconds[1])
        sequences *= 2


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


AT_STEP = ", at "
"""After the name of a recording that was brought to the tokens of a step, see `recording_of_step`."""


def split_by_origin(
    plan: Plan, recordings: Sequence[Workload], judge: Judge, at_step: Callable[[Workload, Judge], str] | None = None
) -> tuple[tuple[Workload, ...], tuple[Workload, ...]]:
    """(those that the plan was made from, the first of them the one it was planned for, none where one is missing; those that
    it has not seen), each once.

    A recording is known by a digest in the plan's provenance, its own or that of itself at the tokens of the judge's step; one
    at the tokens of another step, by its name.

    at_step: `step_digest`, for a caller that keeps its answers
    """

    def digests(recording: Workload) -> list[str]:
        return [recording.digest] + ([] if judge.serving is None else [(at_step or step_digest)(recording, judge)])

    roles = roles_of(plan)
    distinct = list({recording.digest: recording for recording in recordings}.values())
    known = {roles[digest]: recording for recording in distinct for digest in digests(recording) if digest in roles}
    own = {
        role: next((whole for whole in distinct if recording.name.startswith(whole.name + AT_STEP)), recording)
        for role, recording in known.items()
    }
    seen = {recording.digest for recording in (*known.values(), *own.values())}
    complete = set(own) == set(roles.values())
    unseen = tuple(other for other in distinct if other.digest not in seen)
    return tuple(own[role] for role in sorted(own)) if complete else (), unseen


def roles_of(plan: Plan) -> dict[str, str]:
    """The digests of the recordings that a plan was made from, each with its role."""
    return {
        digest: role
        for role, digest in plan.provenance.inputs.items()
        if role == "workload" or role.startswith("workload_also_")
    }


def step_digest(recording: Workload, judge: Judge) -> str:
    """The digest of a recording at the tokens of the judge's step."""
    return recording_of_step(recording, judge.serving.step, judge.problem.model, len(judge.problem.cluster.gpus)).digest

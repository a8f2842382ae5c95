"""The evidence on a plan, the thresholds that it has to reach, and the decision: one of four words.

No figure of the evidence depends on a threshold; whoever decides may set others. The decision is the table of docs/verdict.md,
rule by rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal

from pydantic import Field

from engine.compare.figures import migration
from engine.compare.held_out import (
    Batch,
    Candidates,
    HeldOut,
    batches_of,
    copies_of,
    held_out,
    other_phase,
    parts_of,
    persistence_of,
    replicas_of,
)
from engine.compare.judge import CONFIDENCE, Judge, interval, ratio_gain, same_work
from engine.compare.standing import Risk
from engine.errors import InputError
from engine.formats import check_recording
from engine.plan import Plan
from engine.problem import MEMORY_SHARE
from engine.result import Stop
from engine.schema import Frozen
from engine.systems.base import Report
from engine.systems.options import Options
from engine.training import balanced_load

SKEW = 1e-3
"""Cost of skew, as a share of a step, below which there is nothing to gain back."""


class Move(Frozen):
    """From the deployed placement to the plan's. copies: (layer, expert, GPU) that are new; bytes: of their weights; seconds:
    of the busiest port; steps: until that time is won back, None where it never is."""

    copies: int
    bytes: float
    seconds: float
    steps: float | None = None


class Balanced(Frozen):
    """A step with balanced routing under the deployed plan: the ceiling that an engine measures in a run with its routing
    forced to be even.

    seconds: of that step; cost: by what share today's step takes longer; recovered: the share of this that the plan gains back,
        None where skew costs less than `SKEW`, and where nothing is held out
    """

    seconds: float
    cost: float
    recovered: float | None

    @classmethod
    def of(cls, ceiling: float, now: float, then: float | None) -> "Balanced":
        """ceiling, now, then: seconds of the deployed plan with balanced routing and today, and of the plan"""
        cost = ratio_gain(now, ceiling)
        known = cost > SKEW and then is not None
        return cls(seconds=ceiling, cost=cost, recovered=(now - then) / (now - ceiling) if known else None)


class Evidence(Frozen):
    """Figures of a plan and of the deployed one. Gains are shares; None: unknown.

    plan, deployed: names; unit: of the time that counts, a whole serving step or a pass through the MoE layers
    same: the plan does the same as the deployed one; faults: errors of the recordings, a sentence each
    scarcest: the recording with the fewest tokens; tokens_per_expert: its mean count of an expert; tokens_for_each: tokens that
        give every expert one in the mean
    parts: the held-out recordings and halves; gain: mean over these; error: its standard error; worst: the one with the least
    persistence: see `persistence_of`; linear, without_replicas: mean gains of these over the deployed plan
    bare_system: the system that planned without replicas, None where the plan has none
    replica_bytes, deployed_bytes: of slots beyond one for every expert, on all GPUs, of the plan and of the deployed one
    added_bytes: most that a GPU holds more than under the deployed plan; memory: share of its memory that the fullest has taken
    balanced: None of a pass, and of recordings with errors
    move: None where nothing is held out; minutes: its steps until it pays off, at the plan's pace
    batches: steps of 1, 2, 4, ... sequences on every GPU, none of a pass; see `pays_from`
    other_phase: of the parts, where none is of the step's; empty: they are
    """

    plan: str
    deployed: str
    unit: str
    same: bool
    faults: tuple[str, ...]
    scarcest: str
    tokens_per_expert: float
    tokens_for_each: float
    parts: tuple[HeldOut, ...]
    persistence: float | None = None
    linear: float | None = None
    without_replicas: float | None = None
    bare_system: str | None = None
    replica_bytes: float
    deployed_bytes: float
    added_bytes: float
    memory: float
    balanced: Balanced | None = None
    move: Move | None = None
    batches: tuple[Batch, ...] = ()
    other_phase: str = ""

    @property
    def pays_from(self) -> Batch | None:
        """The smallest batch from which on the plan's step is faster than the deployed one's; None where the largest is not."""
        slower = [turn for turn, batch in enumerate(self.batches) if batch.gain <= 0]
        first = slower[-1] + 1 if slower else 0
        return self.batches[first] if first < len(self.batches) else None

    @property
    def gain(self) -> float | None:
        return _mean([part.gain for part in self.parts])

    @property
    def error(self) -> float:
        """Parts are independent samples."""
        return sqrt(sum(part.error**2 for part in self.parts)) / len(self.parts) if self.parts else 0.0

    def interval(self, confidence: float) -> tuple[float, float] | None:
        """In which the gain lies as far as its recordings are samples."""
        return None if self.gain is None else interval(self.gain, self.error, confidence)

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest gain of the parts; None of fewer than two."""
        gains = [part.gain for part in self.parts]
        return (min(gains), max(gains)) if len(gains) > 1 else None

    @property
    def risks(self) -> tuple[Risk, ...]:
        """The parts as the headline has them."""
        return tuple(Risk(part.part, part.seconds, part.seconds_deployed) for part in self.parts)

    @property
    def worst(self) -> HeldOut | None:
        return min(self.parts, key=lambda part: part.gain, default=None)

    @property
    def seconds(self) -> tuple[float, float]:
        """Under the deployed plan and under the plan, mean over the parts."""
        return tuple(_mean([getattr(part, name) for part in self.parts]) for name in ("seconds_deployed", "seconds"))

    @property
    def minutes(self) -> float:
        """Until the move pays off; infinite where it never does."""
        if self.move is None or self.move.steps is None:
            return inf
        return self.move.steps * self.seconds[1] / 60

    def replica_gain(self) -> float | None:
        """The gain of the plan over its own system without replicas, as a share."""
        if self.without_replicas is None:
            return None
        return (1 + self.gain) / (1 + self.without_replicas) - 1

    def tokens_needed(self, least_gain: float, confidence: float) -> float:
        """Tokens to be held out until an interval as wide as twice the gain, or as `least_gain` where that is more, would no
        longer reach from nought to it: the width falls with the root of their number."""
        low, high = self.interval(confidence)
        return sum(part.tokens for part in self.parts) * ((high - low) / 2 / max(abs(self.gain), least_gain, 1e-9)) ** 2


def gather(candidates: Candidates, judge: Judge, stop: Stop, report: Report) -> Evidence:
    """Judge a plan on all that it has not seen. Raises InputError where a plan does not fit, StoppedError when stopped."""
    plan, deployed = candidates.plan, candidates.deployed
    same, faults = same_work(plan, deployed), []
    for recording in (*candidates.own, *candidates.others):
        found = check_recording(recording)
        faults += [f"{recording.name}: {finding.message}" for finding in found if finding.severity == "error"]
    planned = [] if same or faults else parts_of(candidates, judge.phase)
    parts = tuple(held_out(planned, candidates, judge, stop, report))
    k, experts = judge.problem.model.experts_per_token, judge.problem.model.experts
    counted = [recording for part in planned for recording in (part.recording, *part.made_from)]
    scarcest = min(counted, key=copies_of, default=None)
    held = judge.problem.held_bytes
    bytes_now, bytes_then = held(deployed.placement), held(plan.placement)
    return Evidence(
        plan=plan.name,
        deployed=deployed.name,
        unit=judge.unit,
        same=same,
        faults=tuple(faults),
        scarcest=scarcest.name if scarcest else "",
        tokens_per_expert=copies_of(scarcest) / experts if scarcest else 0.0,
        tokens_for_each=experts / k,
        parts=parts,
        persistence=persistence_of(parts, candidates, judge, stop),
        linear=_mean([part.linear for part in parts]),
        without_replicas=_mean([part.without_replicas for part in parts]),
        bare_system=candidates.bare and candidates.bare.system.title,
        replica_bytes=replicas_of(plan) * judge.problem.model.bytes_per_expert,
        deployed_bytes=replicas_of(deployed) * judge.problem.model.bytes_per_expert,
        added_bytes=float((bytes_then - bytes_now).max()),
        memory=float(judge.memory_shares(plan).max()),
        balanced=None if faults or judge.serving is None else _balanced(candidates, same, parts, judge, stop),
        move=_move(deployed, plan, parts, judge) if parts else None,
        batches=tuple(batches_of(planned, candidates, judge, stop, report)),
        other_phase=other_phase((part.phase for part in parts), judge.phase),
    )


def _move(deployed: Plan, plan: Plan, parts: Sequence[HeldOut], judge: Judge) -> Move:
    seconds = [_mean([getattr(part, name) for part in parts]) for name in ("seconds_deployed", "seconds")]
    move = migration(deployed.placement, plan.placement, judge.problem, *seconds)
    steps = None if move.steps == inf else float(move.steps)
    return Move(copies=move.copies, bytes=move.bytes, seconds=float(move.seconds), steps=steps)


def _balanced(candidates: Candidates, same: bool, parts: Sequence[HeldOut], judge: Judge, stop: Stop) -> Balanced | None:
    """As long as nothing is held out, today's step is that of all recordings; None where it cannot be timed."""
    deployed, recordings = candidates.deployed, (*candidates.own, *candidates.others)
    try:
        ceiling = judge.seconds(deployed, balanced_load(judge.problem.model), stop)
        now = _mean([part.seconds_deployed for part in parts] or [judge.seconds(deployed, each, stop) for each in recordings])
    except InputError:
        return None
    then = now if same else _mean([part.seconds for part in parts])
    return None if now is None else Balanced.of(ceiling, now, then)


def _mean(values: Sequence[float | None]) -> float | None:
    """None where there are none, or one is unknown."""
    if not values or any(value is None for value in values):
        return None
    return sum(values) / len(values)


class Thresholds(Options):
    """Shares unless another unit is said. They decide on the evidence and enter none of it.

    gain: below about a twentieth a canary cannot tell a plan from the difference between two servers, and whole steps are
        predicted to 5 to 11 % (docs/serving.md)
    try_gain: less does not repay the attention of whoever rolls it out
    worst_gain: a plan should lose on no recording that it is going to serve
    persistence: a plan that keeps less than half of the possible gain would have to be made anew all the time
    replica_gain: over the same system without replicas; less is not worth the keys and values that their memory could hold
    break_even_minutes: a sixth of the hour for which a plan is asked to serve
    memory: the rest is for activations, buffers and the runtime
    tokens_per_expert: counts scatter by 1 / √n: 25 by a fifth; of fewer nobody knows if an expert is popular
    confidence: of the interval of the gain
    """

    gain: float = Field(0.05, ge=0, le=10, description="do it: minimum gain on recordings that the plan was not made from")
    try_gain: float = Field(0.02, ge=0, le=10, description="try it: minimum gain on recordings that the plan was not made from")
    worst_gain: float = Field(0.0, ge=-1, le=10, description="do it: minimum gain on the worst of them")
    persistence: float = Field(
        0.5, ge=0, le=1, description="do it: minimum part of the gain that is kept on held-out recordings"
    )
    replica_gain: float = Field(0.01, ge=0, le=10, description="do it: minimum gain from replicas")
    break_even_minutes: float = Field(10.0, ge=0, le=1e6, description="maximum time until the move pays off, in minutes")
    memory: float = Field(MEMORY_SHARE, gt=0, le=1, description="maximum share of the fullest GPU's memory")
    tokens_per_expert: float = Field(25.0, ge=0, le=1e9, description="minimum token copies per expert, on average")
    confidence: float = Field(CONFIDENCE, ge=0.5, le=0.9999, description="that the gain lies in its interval")


Word = Literal["do-it", "try-it", "not-now", "cannot-say"]

Unit = Literal["share", "minutes", "count"]


class Criterion(Frozen):
    """A figure and its threshold.

    name: of the threshold
    value: None if it is unknown, which does not pass, and if it is infinite: a move that never pays, or no replicas, which
        have nothing to justify
    at_least: True if more is better
    """

    name: str
    title: str
    value: float | None
    threshold: float
    unit: Unit
    at_least: bool
    passed: bool
    infinite: bool = False


@dataclass(frozen=True)
class Decision:
    """rule: the one that decided, a key of `engine.compare.wording.RULES`"""

    word: Word
    rule: str
    criteria: tuple[Criterion, ...]


def decide(evidence: Evidence, thresholds: Thresholds) -> Decision:
    """The first rule that holds. A wider interval of the gain never brings a plan nearer to "do it"."""
    criteria = _criteria(evidence, thresholds)
    missed = {criterion.name for criterion in criteria if not criterion.passed}
    low, high = evidence.interval(thresholds.confidence) or (0.0, 0.0)
    rules: tuple[tuple[object, Word, str], ...] = (
        (evidence.same, "not-now", "same"),
        ("memory" in missed, "not-now", "memory"),
        (evidence.faults, "cannot-say", "faults"),
        (not evidence.parts, "cannot-say", "nothing held out"),
        ("tokens_per_expert" in missed, "cannot-say", "few tokens"),
        (high < thresholds.try_gain, "not-now", "too little"),
        (low <= 0, "cannot-say", "noise"),
        ("try_gain" in missed, "not-now", "too little"),
        ("break_even_minutes" in missed, "not-now", "move"),
        (missed, "try-it", "some"),
        (True, "do-it", "all"),
    )
    word, rule = next((word, rule) for holds, word, rule in rules if holds)
    return Decision(word, rule, criteria)


def _criteria(evidence: Evidence, thresholds: Thresholds) -> tuple[Criterion, ...]:
    def criterion(name: str, title: str, value: float | None, unit: Unit = "share", at_least: bool = True) -> Criterion:
        limit = getattr(thresholds, name)
        passed = value is not None and (value >= limit if at_least else value <= limit)
        return Criterion(
            name=name,
            title=title,
            value=None if value in (None, inf) else value,
            threshold=limit,
            unit=unit,
            at_least=at_least,
            passed=passed,
            infinite=value == inf,
        )

    # A plan without replicas has nothing to justify.
    replicas = evidence.replica_gain() if evidence.replica_bytes else inf
    worst = evidence.worst and evidence.worst.gain
    minutes = evidence.minutes if evidence.parts else None
    return (
        criterion("gain", "gain held out", evidence.gain),
        criterion("try_gain", "gain held out, to try it", evidence.gain),
        criterion("worst_gain", "gain on the worst part", worst),
        criterion("persistence", "persistence", evidence.persistence),
        criterion("replica_gain", "gain from replicas", replicas),
        criterion("break_even_minutes", "until the move pays off", minutes, "minutes", at_least=False),
        criterion("memory", "memory of the fullest GPU", evidence.memory, at_least=False),
        criterion("tokens_per_expert", "tokens per expert", evidence.tokens_per_expert, "count"),
    )

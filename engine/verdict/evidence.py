"""All figures that a verdict is decided from. None of them depends on a threshold."""

from collections.abc import Sequence
from math import inf, sqrt

from engine.formats import check_recording
from engine.plan import Plan
from engine.result import Stop
from engine.schema import Frozen
from engine.simulate.migration import migration
from engine.studies.judge import Judge, interval, same_work
from engine.systems.base import Report
from engine.verdict.held_out import Candidates, HeldOut, copies_of, held_out, parts_of, persistence_of, replicas_of
from engine.workload import Workload


class Move(Frozen):
    """From the deployed placement to the plan's. copies: (layer, expert, GPU) that are new; bytes: of their weights; seconds:
    of the busiest port; steps: until that time is won back, None where it never is."""

    copies: int
    bytes: float
    seconds: float
    steps: float | None = None


class Evidence(Frozen):
    """Figures of a plan beside the deployed one. Gains are shares; None: unknown.

    plan, deployed: names; unit: of the time that counts, a whole serving step or a pass through the MoE layers
    same: the plan does the same as the deployed one; faults: errors of the recordings, a sentence each
    scarcest: the recording with the fewest tokens; tokens_per_expert: its mean count of an expert; tokens_for_each: tokens that
        give every expert one in the mean
    parts: the held-out recordings and halves; gain: mean over these; error: its standard error; worst: the one with the least
    persistence: see `persistence_of`; linear, without_replicas: mean gains of these over the deployed plan
    bare_system: the system that planned without replicas, None where the plan has none
    replica_bytes, deployed_bytes: of slots beyond one for every expert, on all GPUs, of the plan and of the deployed one
    added_bytes: most that a GPU holds more than under the deployed plan; memory: share of its memory that the fullest has taken
    move: None where nothing is held out; minutes: its steps until it pays off, at the plan's pace
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
    move: Move | None = None

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
        """What the plan gains over its own system without replicas, as a share."""
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
    same, faults = same_work(plan, deployed), tuple(_faults((*candidates.own, *candidates.others)))
    planned = [] if same or faults else parts_of(candidates)
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
        faults=faults,
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
        move=_move(deployed, plan, parts, judge) if parts else None,
    )


def _move(deployed: Plan, plan: Plan, parts: Sequence[HeldOut], judge: Judge) -> Move:
    seconds = [_mean([getattr(part, name) for part in parts]) for name in ("seconds_deployed", "seconds")]
    move = migration(deployed.placement, plan.placement, judge.problem, *seconds)
    steps = None if move.steps == inf else float(move.steps)
    return Move(copies=move.copies, bytes=move.bytes, seconds=float(move.seconds), steps=steps)


def _faults(recordings: Sequence[Workload]) -> list[str]:
    return [
        f"{recording.name}: {finding.message}"
        for recording in recordings
        for finding in check_recording(recording)
        if finding.severity == "error"
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    """None where there are none, or one is unknown."""
    if not values or any(value is None for value in values):
        return None
    return sum(values) / len(values)

"""What a plan is worth when the traffic it was made from was not quite what comes (Aurora Q4, §8.2, Figure 14).

Every system plans on traffic of which a share is noise (see `engine.studies.noise`) and is timed on the traffic as
recorded. The paper does it the other way round, planning on one layer and timing on the mixture; here what is timed stays
the same at every level, so that a longer time is the plan's fault alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from engine.errors import InputError
from engine.goal import Goal
from engine.parallel import in_order
from engine.problem import Problem
from engine.result import Status, Stop, never
from engine.simulate import simulate
from engine.studies.noise import Noise, noisy
from engine.systems import SYSTEMS, run
from engine.systems.base import Report, silent
from engine.systems.options import Value

PAPER_LEVELS = (0.0, 0.25, 0.5, 0.75)
LEVELS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75)
MOST_LEVELS, MOST_SEEDS = 16, 20
BASELINES = {Goal.INFERENCE: ("rga", "rcs", "sjf"), Goal.TWO_MODELS: ("rec",)}
"""What Aurora is compared with (§8.1)."""
PAPER_LOSS = 0.158
"""The most that the paper's plans lost at 75 % imprecision."""


@dataclass(frozen=True)
class ImprecisionPoint:
    """Seconds on the recorded traffic of a system's plan from traffic of which `level` was noise drawn by `seed`."""

    system: str
    level: float
    seed: int
    total: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The point that `to_dict` described."""
        return cls(**data)


def systems_of(problem: Problem) -> tuple[str, ...]:
    """Aurora, then its baselines for as many models as are open. Raises InputError for a training step."""
    if problem.goal is Goal.TRAINING:
        raise InputError("imprecise traffic is studied for inference; what is open is a training step")
    return ("aurora", *BASELINES[problem.goal])


def check_levels(levels: Sequence[float], seeds: int) -> list[float]:
    """The levels ascending, each once. Raises InputError for none, too many, and such as are no shares."""
    ascending = sorted(set(levels))
    if not 1 <= len(ascending) <= MOST_LEVELS:
        raise InputError(f"imprecision: give 1 to {MOST_LEVELS} levels, not {len(ascending)}")
    if bad := [level for level in ascending if not 0 <= level <= 1]:
        raise InputError(f"imprecision: {bad[0]:g} is not between 0 and 1")
    if not 1 <= seeds <= MOST_SEEDS:
        raise InputError(f"imprecision: {seeds} draws are not between 1 and {MOST_SEEDS}")
    return ascending


def imprecision(
    problem: Problem,
    levels: Sequence[float] = LEVELS,
    seeds: int = 3,
    noise: Noise = "layers",
    options: Mapping[str, Mapping[str, Value]] | None = None,
    stop: Stop = never,
    report: Report = silent,
) -> Iterator[ImprecisionPoint]:
    """One point for every level, seed and system, level by level; at level 0 there is nothing to draw, so one seed does.
    options: of the systems, by name. Raises InputError for what cannot be studied."""
    wanted, systems = check_levels(levels, seeds), systems_of(problem)
    trials = [(level, seed, name) for level in wanted for seed in range(seeds if level else 1) for name in systems]
    settings = {name: dict((options or {}).get(name, {})) for name in systems}

    def begun(finished: int, index: int) -> None:
        level, _, name = trials[index]
        report(finished / len(trials), f"{SYSTEMS[name].title} on traffic that is {level:.0%} imprecise")

    for _, point in in_order(_point_of_trial, (problem, noise, trials, settings), len(trials), stop, begun):
        if point is not None:
            yield point


def _point_of_trial(common: tuple, index: int, stop: Stop, report: Report) -> ImprecisionPoint | None:
    """None when stopped."""
    problem, noise, trials, settings = common
    level, seed, name = trials[index]
    outcome = run(SYSTEMS[name], noisy(problem, level, seed, noise), settings[name], stop)
    if outcome.result.status is Status.CANCELLED:
        return None
    return ImprecisionPoint(name, level, seed, simulate(outcome.result.solution, problem).total)

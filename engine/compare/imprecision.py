"""Traffic that is not as it was recorded.

Aurora's Q4 (§8.2) takes the first layer's traffic and adds that of three other layers of the same recording, so that up to
75 % of the traffic is another layer's. Here every layer gets its own three others, drawn at random, and any share.

As in the paper (Figure 14) every system plans once, on the traffic as recorded, and is timed on a mixture of that and noise:
its plan is deployed, and then other requests come. A longer time at a higher level may be the mixture's as well as the plan's,
so the figure that counts is Aurora's gain over its baselines at the same level."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from engine.errors import InputError, StoppedError
from engine.goal import Goal
from engine.parallel import reported
from engine.plan import Plan
from engine.problem import Problem, WholeStep
from engine.result import Status, Stop, never
from engine.simulate import simulate
from engine.systems import SYSTEMS, run
from engine.systems.base import Report, silent
from engine.systems.options import Value
from engine.units import share
from engine.workload import ExpertLoad, MixedTraffic, RoutingTrace, TrafficMatrix, without_seldom

Noise = Literal["layers", "experts"]

NOISES: dict[Noise, str] = {"layers": "other layers' traffic (Aurora Q4)", "experts": "the same traffic, experts shuffled"}
OTHER_LAYERS = 3


def noisy(problem: Problem, level: float, seed: int = 0, noise: Noise | None = None) -> Problem:
    """The problem with `level` (0 … 1) of every layer's tokens going elsewhere; every rank sends as many as before.

    noise: "layers": where up to three other layers, drawn by `seed`, send theirs; "experts": where the layer's own would go
    if its experts changed their places at random; None: layers where there are several. A routing log becomes a `MixedTraffic`,
    so that rows are counted as in the log itself; loads and traffic stay what they are. Level 0 is the problem itself. Raises
    InputError for a level or noise that cannot be.
    """
    if not 0 <= level <= 1:
        raise InputError(f"imprecision: {level:g} is not between 0 and 1")
    kind = noise or ("layers" if problem.workload.layers > 1 else "experts")
    if kind == "layers" and problem.workload.layers < 2:
        raise InputError(f"{problem.workload.name} has one layer, so that no other one can be its noise; shuffle experts")
    if level == 0:
        return problem
    first = _noisy_model(problem, level, np.random.default_rng(seed), kind)
    if problem.goal is not Goal.TWO_MODELS:
        return first
    return replace(first, second=_noisy_model(problem.second, level, np.random.default_rng([seed, 1]), kind))


def _noisy_model(problem: Problem, level: float, rng: np.random.Generator, kind: Noise) -> Problem:
    demand, recording = problem.demand, problem.workload
    layers, _, experts = demand.shape
    # Of every layer the layers whose tokens are its noise, and of their experts those that its own stand for.
    own, name_of = np.arange(layers)[:, None], np.tile(np.arange(experts), (layers, 1))
    if kind == "layers":
        taken = np.array([rng.permutation(np.delete(own, layer))[:OTHER_LAYERS] for layer in range(layers)])
    else:
        taken, name_of = own, np.array([rng.permutation(experts) for _ in range(layers)])
    noise = np.take_along_axis(demand[taken].mean(axis=1), name_of[:, None, :], axis=2)
    sent, elsewhere = demand.sum(axis=2), noise.sum(axis=2)
    # A rank that sends nothing in the other layers goes on sending as recorded.
    weight = np.where(elsewhere > 0, level * sent / np.where(elsewhere > 0, elsewhere, 1.0), 0.0)
    kept = np.where(elsewhere > 0, 1 - level, 1.0)
    mixed = without_seldom(kept[:, :, None] * demand + weight[:, :, None] * noise, demand)
    name, size = f"{recording.name}, {share(level)} imprecise", problem.model.bytes_per_token
    if isinstance(recording, ExpertLoad):
        apart = recording.by_source is not None and len(recording.by_source) == demand.shape[1]
        parts = {"by_source": mixed.transpose(1, 0, 2) if apart else None, "by_step": None}
        return replace(problem, workload=replace(recording, name=name, load=mixed.sum(axis=1), **parts))
    if not isinstance(recording, RoutingTrace):
        return replace(problem, workload=TrafficMatrix(name, mixed * size, size))
    called = np.pad(np.argsort(name_of, axis=1), ((0, 0), (0, 1)), constant_values=-1).astype(recording.experts.dtype)
    parts = [(recording, kept)]
    for layer_of in taken.T:
        chosen = called[np.arange(layers)[:, None], recording.experts[:, layer_of]]
        parts.append((replace(recording, experts=chosen), weight / taken.shape[1]))
    return replace(problem, workload=MixedTraffic(name, mixed * size, size, parts=tuple(parts)))


LEVELS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75)
MOST_LEVELS, MOST_SEEDS = 16, 20
PAPER_LOSS = 0.158
"""The most of its gain over RGA that the paper's Aurora lost at 75 % imprecision."""


class Contender(NamedTuple):
    """A system with the options of the paper's comparison."""

    title: str
    system: str
    options: Mapping[str, Value]


BASELINES: dict[Goal, dict[str, Contender]] = {
    Goal.INFERENCE: {name: Contender(SYSTEMS[name].title, name, {}) for name in ("rga", "rcs", "sjf")},
    Goal.TWO_MODELS: {
        "rga+rec": Contender("Random GPUs and colocation (RGA + REC)", "rec", {"gpus": "random"}),
        "rec": Contender(SYSTEMS["rec"].title, "rec", {}),
    },
}
"""The contenders of Aurora (§8.1), the one of Figure 14 first."""


@dataclass(frozen=True)
class ImprecisionPoint:
    """Seconds of a contender's plan on traffic of which `level` is noise drawn by `seed`."""

    system: str
    level: float
    seed: int
    total: float


def contenders_of(problem: Problem) -> dict[str, Contender]:
    """Aurora, then its baselines for as many models as are open. Raises InputError for a training step."""
    if problem.goal is Goal.TRAINING:
        raise InputError("traffic noise is studied for inference; what is open is a training step")
    return {"aurora": Contender(SYSTEMS["aurora"].title, "aurora", {}), **BASELINES[problem.goal]}


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
    serving: WholeStep | None = None,
) -> Iterator[ImprecisionPoint]:
    """One point for every level, seed and contender, level by level; at level 0 there is nothing to draw, so one seed does.
    Raises InputError for levels and seeds that cannot be.

    options: of the contenders, by name
    serving: the step that is timed as a whole; None: a pass
    """
    wanted, contenders = check_levels(levels, seeds), contenders_of(problem)
    chosen = [(contender, {**contender.options, **(options or {}).get(name, {})}) for name, contender in contenders.items()]
    planning = [f"{contender.title} plans on the traffic as recorded" for contender, _ in chosen]
    plans_made = reported(_plan_of, (problem, chosen), planning, stop, lambda done, title: report(0.5 * done, title))
    made = [plan for _, plan in plans_made]
    if len(made) < len(chosen):
        return
    plans = dict(zip(contenders, made, strict=True))
    trials = [(level, seed, name) for level in wanted for seed in range(seeds if level else 1) for name in plans]
    titles = [f"{contenders[name].title} on traffic that is {share(level)} imprecise" for level, _, name in trials]
    common = (problem, noise, trials, plans, serving)
    for _, point in reported(_point_of_trial, common, titles, stop, lambda done, title: report(0.5 + 0.5 * done, title)):
        yield point


def _plan_of(common: tuple, index: int, stop: Stop, report: Report) -> Plan | None:
    """None when stopped."""
    problem, chosen = common
    contender, options = chosen[index]
    result = run(SYSTEMS[contender.system], problem, options, stop, report).result
    return None if result.status is Status.CANCELLED else result.solution


def _point_of_trial(common: tuple, index: int, stop: Stop, report: Report) -> ImprecisionPoint | None:
    """None when stopped."""
    problem, noise, trials, plans, serving = common
    level, seed, name = trials[index]
    if stop():
        return None
    there = noisy(problem, level, seed, noise)
    if serving is None:
        return ImprecisionPoint(name, level, seed, simulate(plans[name], there).total)
    try:
        total = serving.seconds(plans[name], there, stop)
    except StoppedError:
        return None
    return None if stop() else ImprecisionPoint(name, level, seed, total)  # one simulated in a hurry is no point


def gains(points: Sequence[ImprecisionPoint]) -> tuple[str, float, float] | None:
    """The figures of the paper's Figure 14: the baseline, and Aurora's speed over it at the lowest and at the highest level,
    median of the draws. None if either is missing."""
    baseline = next((point.system for point in points if point.system != "aurora"), None)
    totals = {(point.system, point.level, point.seed): point.total for point in points}
    by_level: dict[float, list[float]] = {}
    for (system, level, seed), total in totals.items():
        if system == baseline and totals.get(("aurora", level, seed)):
            by_level.setdefault(level, []).append(total / totals["aurora", level, seed])
    if len(by_level) < 2:
        return None
    return baseline, float(np.median(by_level[min(by_level)])), float(np.median(by_level[max(by_level)]))

"""The standing of a plan against its baseline: the figures of its verdict line, the same for every goal."""

from dataclasses import dataclass
from typing import Literal

from engine.compare.figures import Metrics, Migration, gap_over_placements, speedup
from engine.goal import Goal
from engine.plan import Plan
from engine.problem import Problem
from engine.result import relative_gap
from engine.serving.figures import ServingFigures
from engine.units import ratio, seconds, share

Span = Literal["pass", "step", "token", "prompt"]
"""The span of the seconds: a pass through all MoE layers, a training step, a step of decode, one of prefill."""

ALIKE = 0.005
"""Relative difference of two simulated times that nobody would decide by."""


@dataclass(frozen=True)
class Risk:
    """A plan on a recording that it was not made from: simulated seconds of it and of the baseline there."""

    recording: str
    seconds: float
    baseline: float

    @property
    def gain(self) -> float:
        """Baseline over plan: below 1 the plan is the slower one."""
        return speedup(self.baseline, self.seconds)


@dataclass(frozen=True)
class Standing:
    """The figures of a plan against its baseline.

    plan, deployed: names; is_deployed: True if they are one
    seconds, deployed_seconds: simulated
    tokens_per_second: of one GPU
    bound: seconds that no order of the plan's sends can beat; bound_covers: sentences on that
    move: from the baseline; None: not counted
    risks: on other recordings, worst first; None: there are some, but none was scored
    placement_gap: see `gap_over_placements`
    """

    plan: str
    deployed: str
    is_deployed: bool
    span: Span
    seconds: float
    deployed_seconds: float
    tokens_per_second: float
    bound: float
    bound_covers: str
    move: Migration | None
    risks: tuple[Risk, ...] | None = ()
    placement_gap: float | None = None

    @property
    def gain(self) -> float:
        """Speed over the baseline: 2 is twice as fast."""
        return speedup(self.deployed_seconds, self.seconds)

    @property
    def against(self) -> str:
        """`1.38× as fast as Linear placement`, or that it is not faster."""
        return gain_in_words(self.gain, self.deployed)

    @property
    def gap(self) -> float:
        """The gap of the plan above its bound, as a share of the bound."""
        return relative_gap(self.seconds, self.bound)

    @property
    def above_bounds(self) -> tuple[str, str]:
        """The title of the plan's gaps, and the gaps: above the bound of its own placement, and above that of any if its
        optimiser claims one: an order can be the best of a placement that is far from it."""
        kind = "schedule" if self.span == "step" else "order"
        if self.placement_gap is None:
            return f"Above the {kind} bound", share(self.gap)
        return f"Above {kind} · placement bound", f"{share(self.gap)} · {share(self.placement_gap)}"


def standing_of(
    plan: Plan,
    own: Metrics | ServingFigures,
    baseline: Plan,
    base: Metrics | ServingFigures,
    problem: Problem,
    move: Migration | None,
    risks: tuple[Risk, ...] | None = (),
) -> Standing:
    """Return how a plan stands against its baseline, the same for every page, command and goal.

    own, base: figures of the plan and of the baseline; those of a serving step say nothing of placements in general
    move: from the baseline to the plan; None: not counted
    risks: on other recordings, worst first; None: not scored yet
    """
    if isinstance(own, ServingFigures):
        span, total, base_total = ("token" if own.step.phase == "decode" else "prompt"), own.seconds, base.seconds
        rate, bound, gap = own.tokens_per_second, own.bound, None
        covers = f"No order of sends brings this placement below {seconds(bound)}."
    else:
        span, total, base_total = ("step" if problem.goal is Goal.TRAINING else "pass"), own.total, base.total
        rate, bound, gap = tokens_per_second(problem, total), own.order_bound, gap_over_placements(plan, own)
        covers = bound_sentence(plan, own)
    return Standing(
        plan=plan.name,
        deployed=baseline.name,
        is_deployed=plan.id == baseline.id,
        span=span,
        seconds=total,
        deployed_seconds=base_total,
        tokens_per_second=rate,
        bound=bound,
        bound_covers=covers,
        move=move,
        risks=risks,
        placement_gap=gap,
    )


def is_loss(gain: float) -> bool:
    """True if a plan is slower than its baseline, by more than `ALIKE`."""
    return gain <= 1 - ALIKE


def gain_in_words(gain: float, baseline: str) -> str:
    """The comparison, in words, of a plan with another one that takes `gain` times as long; within half a percent they are
    alike."""
    if gain >= 1 + ALIKE:
        return f"{ratio(gain)} as fast as {baseline}"
    if is_loss(gain):
        return f"slower than {baseline}: {ratio(1 / gain)} its time"
    return f"as fast as {baseline}"


def tokens_per_second(problem: Problem, total: float) -> float:
    """Tokens that a GPU gets through in a second, on average over the GPUs, where a pass or step of the problem takes `total`
    seconds; of two models those of both. Of a pass through MoE layers alone, which is all that inference simulates."""
    gpus = len(problem.cluster.gpus)
    if problem.step is not None:
        tokens = float(problem.step.batch * problem.step.sequence_length * gpus)
    else:
        tokens = sum(float(part.tokens_of_rank.sum(axis=1).mean()) for part in (problem, problem.second) if part)
    return tokens / gpus / total if total else 0.0


def bound_sentence(plan: Plan, figures: Metrics) -> str:
    """The bound on any order of the plan's sends, or any schedule of a training step, which is computed here for every plan;
    and the bound over placements too, if its optimiser claims one for these inputs."""
    what = "schedule" if figures.decomposition is not None else "order of sends"
    own = f"No {what} brings this placement below {seconds(figures.order_bound)}."
    if (gap := gap_over_placements(plan, figures)) is None:
        return own
    return (
        f"{own} Over all placements without replicas and with as many slots per GPU its optimiser claims a bound of "
        f"{seconds(figures.bound)}, not rechecked here: the plan is {share(gap)} above that."
    )

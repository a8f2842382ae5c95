"""The headline of a plan: how it stands against its baseline. Every page, file and command takes its figures from here, for
every goal; the gain is held out wherever something is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, isinf
from typing import Any, Literal

from engine.compare.figures import Metrics, Migration, gap_over_placements, speedup
from engine.goal import Goal
from engine.placement.migration import break_even
from engine.plan import Plan
from engine.problem import Problem
from engine.result import NOT_BOUNDED, Unbounded, not_bounded, relative_gap
from engine.serving.figures import ServingFigures
from engine.units import digits, seconds, share, signed, size

Span = Literal["pass", "step", "token", "prompt"]
"""The span of the seconds: a pass through all MoE layers, a training step, a step of decode, one of prefill."""

COVERS: dict[Span, str] = {"pass": "MoE layers", "step": "training step", "token": "decode step", "prompt": "prefill step"}
"""The part of a model's work that the times and rates of a span are of."""

ALIKE = 0.005
"""Relative difference of two simulated times that nobody would decide by."""


@dataclass(frozen=True)
class Risk:
    """A plan on a recording, or a later half, that it was not made from: simulated seconds of it and of the baseline there."""

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
    seconds, deployed_seconds: simulated on the recording that is looked at
    tokens_per_second: of one GPU
    bound: seconds that no order of the plan's sends can beat, None: there are none; bound_covers: sentences on that
    move: from the baseline, with the steps until it has paid; None: not counted
    risks: held out, worst first; None: there is something, but it was not scored
    placement_gap: see `gap_over_placements`
    gpus: of the cluster
    recorded: False if routing is assumed, so that there is nothing to hold out
    other_phase: of the recordings that it is judged on, where that is not the step's
    """

    plan: str
    deployed: str
    is_deployed: bool
    span: Span
    seconds: float
    deployed_seconds: float
    tokens_per_second: float
    bound: float | None
    bound_covers: str
    move: Migration | None
    risks: tuple[Risk, ...] | None = ()
    placement_gap: float | None = None
    gpus: int = 1
    recorded: bool = True
    other_phase: str = ""

    @property
    def gain(self) -> float:
        """Speed over the baseline, 2 is twice as fast: the mean of all that is held out, else in sample."""
        return gain_held_out(self.risks) if self.is_held_out else speedup(self.deployed_seconds, self.seconds)

    @property
    def is_held_out(self) -> bool:
        """True if the gain is that on recordings that the plan was not made from."""
        return bool(self.risks) and not self.is_deployed

    @property
    def scope(self) -> str:
        """`held out`, `in sample`, or nothing where routing is assumed."""
        return "held out" if self.is_held_out else "in sample" if self.recorded else ""

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest gain of all that is held out; None of fewer than two."""
        gains = [risk.gain for risk in self.risks or ()]
        return (min(gains), max(gains)) if self.is_held_out and len(gains) > 1 else None

    @property
    def gain_words(self) -> str:
        """`+10.9 % held out (+7.5 % to +13.3 % on 3 recordings)`"""
        words = f"{signed(self.gain - 1)} {self.scope}".rstrip()
        if self.spread is not None:
            low, high = (signed(gain - 1) for gain in self.spread)
            span = f"{low} to {high} on" if low != high else f"{low} on each of"
            return f"{words} ({span} {len(self.risks)} recordings{self.of_phase})"
        return f"{words} (on {self.risks[0].recording}{self.of_phase})" if self.is_held_out else words

    @property
    def of_phase(self) -> str:
        """` of prefill`, where the step is another."""
        return f" of {self.other_phase}" if self.other_phase else ""

    @property
    def rate_name(self) -> str:
        """The name of `tokens_per_second`, with its scope where that is not a whole step."""
        return f"Tokens/s per GPU, {COVERS['pass']}" if self.span == "pass" else "Tokens/s per GPU"

    @property
    def tokens_in_all(self) -> float:
        """Tokens a second of the cluster."""
        return self.tokens_per_second * self.gpus

    @property
    def tokens_per_user(self) -> float | None:
        """Tokens a second of a sequence in decode; None of anything else."""
        return 1 / self.seconds if self.span == "token" and self.seconds else None

    @property
    def payback(self) -> str:
        """`after 144 steps, 4.88 s`: the one count of it."""
        return paid_back(self.move, "step" if self.span in ("token", "prompt", "step") else "pass", pace(self)[1])

    @property
    def against(self) -> str:
        """`+38.0 % over Linear placement, held out`, or that it is not faster."""
        return ", ".join(filter(None, (gain_in_words(self.gain, self.deployed), self.scope)))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON. gain, lowest, highest: as shares; payback_steps: None where it never pays."""
        low, high = self.spread or (None, None)
        steps = None if self.move is None or isinf(self.move.steps) else self.move.steps
        return {
            "plan": self.plan,
            "deployed": self.deployed,
            "span": self.span,
            "seconds": self.seconds,
            "deployed_seconds": self.deployed_seconds,
            "gain": self.gain - 1,
            "scope": self.scope,
            "lowest": low and low - 1,
            "highest": high and high - 1,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "tokens_per_second": self.tokens_in_all,
            "tokens_per_second_per_user": self.tokens_per_user,
            "move_bytes": self.move and self.move.bytes,
            "move_seconds": self.move and self.move.seconds,
            "payback_steps": steps,
        }

    @property
    def in_words(self) -> list[str]:
        """Time, rates and gain, and the cost of moving: a line each."""
        rates = [f"{digits(self.tokens_per_second)} tokens/s per GPU", f"{digits(self.tokens_in_all)} in all"]
        rates += [f"{digits(self.tokens_per_user)} per user"] if self.tokens_per_user else []
        scope = f", {COVERS['pass']}" if self.span == "pass" else ""
        lines = [f"{seconds(self.seconds)} per {self.span}{scope}: {', '.join(rates)}"]
        lines.append(f"{self.gain_words} over {self.deployed}")
        if self.move is not None and self.move.copies:
            lines.append(f"moves {size(self.move.bytes)} in {seconds(self.move.seconds)}, pays back {self.payback}")
        return lines

    @property
    def gap(self) -> float | None:
        """The gap of the plan above its bound, as a share of the bound; None where it has none."""
        return None if self.bound is None else relative_gap(self.seconds, self.bound)

    @property
    def above_bounds(self) -> tuple[str, str]:
        """The title of the plan's gaps, and the gaps, the most that is left to gain: above the bound of its own placement, and
        above that of any if its optimiser claims one: an order can be the best of a placement that is far from it."""
        kind = "schedule" if self.span == "step" else "order"
        gap = NOT_BOUNDED if self.gap is None else share(self.gap)
        if self.placement_gap is None:
            return f"Left to gain by {kind}", gap
        return f"Left to gain by {kind} · placement", f"{gap} · {share(self.placement_gap)}"


def standing_of(
    plan: Plan,
    own: Metrics | ServingFigures,
    baseline: Plan,
    base: Metrics | ServingFigures,
    problem: Problem,
    move: Migration | None,
    risks: Iterable[Risk] | None = (),
    other_phase: str = "",
) -> Standing:
    """Return how a plan stands against its baseline, the same for every page, command and goal.

    own, base: figures of the plan and of the baseline; those of a serving step say nothing of placements in general
    move: from the baseline to the plan, its steps are counted here; None: not counted
    risks: all that is held out; None: not scored yet
    other_phase: see `Standing`
    """
    risks = None if risks is None else tuple(sorted(risks, key=lambda risk: risk.gain))
    if isinstance(own, ServingFigures):
        span, total, base_total = ("token" if own.step.phase == "decode" else "prompt"), own.seconds, base.seconds
        rate, bound, gap = own.tokens_per_second, own.bound, None
        covers = order_bound_sentence(own.unbounded, bound)
    else:
        span, total, base_total = ("step" if problem.goal is Goal.TRAINING else "pass"), own.total, base.total
        rate, bound, gap = tokens_per_second(problem, total), own.order_bound, gap_over_placements(plan, own)
        covers = bound_sentence(plan, own)
    standing = Standing(
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
        gpus=len(problem.cluster.gpus),
        recorded=problem.step is None or problem.step.routing == "recorded",
        other_phase=other_phase if risks else "",
    )
    if move is None or not move.copies:
        return standing
    return replace(standing, move=replace(move, steps=break_even(move.seconds, *pace(standing))))


def gain_held_out(risks: Sequence[Risk]) -> float:
    """The mean speed over the baseline on all that is held out: each part counts alike."""
    return sum(risk.gain for risk in risks) / len(risks)


def pace(standing: Standing) -> tuple[float, float]:
    """Mean seconds of the baseline and of the plan, by which a move pays back: held out, else in sample."""
    if not standing.is_held_out:
        return standing.deployed_seconds, standing.seconds
    risks = standing.risks
    return sum(risk.baseline for risk in risks) / len(risks), sum(risk.seconds for risk in risks) / len(risks)


def paid_back(move: Migration | None, span: str, step_seconds: float) -> str:
    """`after 144 steps, 4.88 s`. span: `pass` or `step`; step_seconds: of one"""
    if move is None or isinf(move.steps):
        return "never"
    if move.steps <= 1:
        return f"in the first {span}"
    plural = "passes" if span == "pass" else "steps"
    return f"after {digits(ceil(move.steps))} {plural}, {seconds(move.steps * step_seconds)}"


def is_loss(gain: float) -> bool:
    """True if a plan is slower than its baseline, by more than `ALIKE`."""
    return gain <= 1 - ALIKE


def gain_in_words(gain: float, baseline: str) -> str:
    """The comparison, in words, of a plan with another one that takes `gain` times as long: `+38.0 % over it`; within half a
    percent they are alike."""
    if gain >= 1 + ALIKE:
        return f"{signed(gain - 1)} over {baseline}"
    if is_loss(gain):
        return f"slower than {baseline}: {signed(gain - 1)}"
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


def order_bound_sentence(unbounded: Unbounded | None, bound: float | None, what: str = "order of sends") -> str:
    """The bound on any order of a plan's sends, or any schedule, in seconds; or why there is none."""
    if unbounded:
        return f"{not_bounded(unbounded).capitalize()}."
    return f"No {what} brings this placement below {seconds(bound)}."


def bound_sentence(plan: Plan, figures: Metrics) -> str:
    """The bound on any order of the plan's sends, or any schedule of a training step, which is computed here for every plan;
    and the bound over placements too, if its optimiser claims one for these inputs."""
    what = "schedule" if figures.decomposition is not None else "order of sends"
    own = order_bound_sentence(figures.unbounded, figures.order_bound, what)
    if (gap := gap_over_placements(plan, figures)) is None:
        return own
    return (
        f"{own} Over all placements without replicas and with as many slots per GPU its optimiser claims a bound of "
        f"{seconds(figures.bound)}, not rechecked here: the plan is {share(gap)} above that."
    )

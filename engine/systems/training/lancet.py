"""Lancet (Jiang et al., 2024): in the forward pass cut operators around every all-to-all into a pipeline, in the backward
pass run weight gradients under all-to-alls."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from engine.goal import Goal
from engine.overlap.operator_axes import latest_last
from engine.overlap.partition import partition
from engine.overlap.partition_axes import overlappable
from engine.overlap.stage_pipeline import ChainInstance
from engine.overlap.weight_gradients import WeightGradientInstance, schedule_weight_gradients
from engine.plan import Overlap, PartitionRange, Priority, SendOrder
from engine.problem import Problem
from engine.result import Guard, Limits, Result, Status, Stop
from engine.simulate.training import MAX_PARTS, PricedStep, price_step
from engine.systems.base import Draft, Note, Notes, Report, System, proof_of
from engine.systems.options import Options, Seed
from engine.systems.pieces import linear_placement
from engine.systems.training.baselines import Bucket
from engine.training import served_in_words
from engine.units import at_most, share
from engine.units import seconds as in_seconds


class LancetOptions(Options):
    partition: bool = Field(
        True, title="Partition the forward pass", description="cut operators of the forward pass around the all-to-alls"
    )
    max_parts: int = Field(
        8, ge=2, le=MAX_PARTS, title="Maximum parts per range", description="maximum parts per range (the paper's ρ)"
    )
    max_range: int = Field(
        0,
        ge=0,
        le=100_000,
        title="Most operators of a range",
        description="most operators in a range (the paper's ι); 0: no limit",
    )
    weight_gradients: Literal["best", "greedy", "none"] = Field(
        "best",
        description="which weight gradients run under which all-to-alls: best: searched and bounded; greedy: the paper's "
        "Algorithm 1; none: they stay where they are",
    )
    irregular: bool = Field(
        True,
        title="Irregular all-to-alls",
        description="all-to-alls carry only real tokens, not buffers filled up to the capacity; in the forward pass every part "
        "of one waits for an exchange of sizes (§6)",
    )
    time_limit: float = Field(5.0, ge=0.05, le=3600, description="seconds for the proof of the weight gradients")
    bucket_mb: Bucket = 25.0
    seed: Seed = 0


def lancet(problem: Problem, options: LancetOptions, stop: Stop, report: Report) -> Draft:
    """Both passes on the priced operator graph."""
    placement, irregular = linear_placement(problem), options.irregular
    priced = price_step(problem, placement, irregular)
    notes: Notes = {"operators": Note(f"{len(priced.graph.operators)} in the whole step")}
    ranges: tuple[PartitionRange, ...] = ()
    under: dict[str, str] = {}
    guard = options.guard(stop)
    if options.partition:
        report(0.1, "cutting the forward pass")
        ranges = _ranges(problem, priced, options, stop, notes)
    if options.weight_gradients != "none":
        report(0.5, "moving weight gradients")
        under = _under(priced, options, guard, notes)
    parts = {"overlap": Overlap(ranges=ranges, under=under, irregular=irregular)}
    parts["priority"] = Priority(policy="fair", bucket=options.bucket_mb * 1e6)
    return Draft(placement, SendOrder(mode="concurrent"), None, notes, stop(), guard.cut, **parts)


def _ranges(
    problem: Problem, priced: PricedStep, options: LancetOptions, stop: Stop, notes: Notes
) -> tuple[PartitionRange, ...]:
    """The cut stretches of the forward pass."""
    forward = priced.graph.of_phase("forward")
    if not forward:
        notes["forward pass"] = Note("the operators given have none")
        return ()
    instance = forward_chain(problem, priced, options.max_parts)
    result = partition(instance, max_range=options.max_range or None, stop=stop)
    cut = [stretch for stretch in result.solution if stretch.parts > 1]
    alone = float(instance.times[:, 0].sum())
    gate = problem.step.gate
    notes["forward pass"] = Note(
        f"{in_seconds(result.objective)} estimated, {in_seconds(alone)} one after another; "
        + (f"stretches cut: {_in_words([stretch.parts for stretch in cut])}" if cut else "no stretch is worth cutting")
    )
    notes["forward pass, proof"] = Note(f"{proof_of(result)} among stretches and parts; found in {in_seconds(result.runtime)}")
    where = "before and after" if gate != "batch-prioritised" else "only after"
    served = served_in_words(problem.step, problem.workload)
    notes["gate"] = Note(f"{gate}: operators {where} the MoE layer can be cut" + (f"; {served}" if served else ""))
    if priced.sizes:
        parts = np.ones(len(forward), dtype=np.int64)
        for stretch in cut:
            parts[stretch.first : stretch.last + 1] = stretch.parts
        counted = {operator.name: int(count) for operator, count in zip(forward, parts, strict=True)}
        took = sum(counted[name] * sizes.seconds for name, sizes in priced.sizes.items())
        count = sum(counted[name] for name in priced.sizes)
        notes["exchanges of sizes"] = Note(f"{count}, one before each part of an all-to-all: {in_seconds(took)} of the network")
    return tuple(
        PartitionRange(first=forward[stretch.first].name, last=forward[stretch.last].name, parts=stretch.parts)
        for stretch in cut
    )


def forward_chain(problem: Problem, priced: PricedStep, parts: int) -> ChainInstance:
    """The forward pass as the chain that Lancet's dynamic programme divides; every operator at its slowest group."""
    forward = priced.graph.of_phase("forward")
    places = [priced.index[operator.name] for operator in forward]
    # No part has less than a sequence.
    most = min(parts, problem.step.batch)
    return ChainInstance(
        network=np.array([operator.network for operator in forward]),
        times=priced.seconds[places, :most].max(axis=2),
        latest_last=latest_last([operator.kind for operator in forward], problem.step.gate),
    )


@dataclass(frozen=True, eq=False)
class BackwardExchanges:
    """The weight-gradient problem of a step: names of all-to-alls and weight gradients, and the instance over them."""

    exchanges: tuple[str, ...]
    gradients: tuple[str, ...]
    instance: WeightGradientInstance


def weight_gradient_problem(priced: PricedStep) -> BackwardExchanges:
    """Weight gradients that could run under each all-to-all of the backward pass (Lancet §4.1)."""
    graph = priced.graph
    exchanges = tuple(operator.name for operator in graph.of_phase("dx") if operator.network)
    gradients = tuple(operator.name for operator in graph.of_phase("dw"))
    allowed = overlappable(graph.graph(), exchanges, gradients)
    instance = WeightGradientInstance(
        np.array([priced.whole(name) for name in exchanges]), np.array([priced.whole(name) for name in gradients]), allowed
    )
    return BackwardExchanges(exchanges, gradients, instance)


def _under(priced: PricedStep, options: LancetOptions, guard: Guard, notes: Notes) -> dict[str, str]:
    """Weight gradient -> the all-to-all it runs under."""
    both = weight_gradient_problem(priced)
    whole = float(both.instance.alltoall.sum())
    if not whole:
        notes["weight gradients"] = Note("no all-to-all of the backward pass takes any time")
        return {}
    greedy = schedule_weight_gradients(both.instance, stop=guard, algorithm="greedy")
    chosen: Result = greedy
    if options.weight_gradients == "best":
        limits = Limits(options.time_limit, wall=math.inf, seed=options.seed)
        chosen = schedule_weight_gradients(both.instance, limits, guard)
    proof = "proven optimal" if chosen.status is Status.OPTIMAL else f"{at_most(chosen.bound / whole)} possible"
    notes["weight gradients"] = Note(
        f"hide {share(chosen.objective / whole)} of the backward all-to-alls ({proof}); the paper's greedy "
        f"{share(greedy.objective / whole)}; found in {in_seconds(chosen.runtime)}"
    )
    return {
        both.gradients[gradient]: both.exchanges[exchange]
        for gradient, exchange in enumerate(chosen.solution.tolist())
        if exchange >= 0
    }


def _in_words(parts: list[int]) -> str:
    values, counts = np.unique(parts, return_counts=True)
    return ", ".join(f"{count} in {value} parts" for value, count in zip(values, counts, strict=True))


SYSTEMS = (
    System(
        name="lancet",
        title="Lancet",
        summary="cuts operators around the all-to-alls of the forward pass, and runs weight gradients under those of the "
        "backward pass",
        paper="Lancet",
        recipe=lancet,
        options=LancetOptions,
        goals=(Goal.TRAINING,),
        preselected=True,
    ),
)

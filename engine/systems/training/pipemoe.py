"""PipeMoE (Shi et al., 2023): every MoE layer in as many parts as suit it."""

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from engine.costs import fit_line
from engine.goal import Goal
from engine.overlap.pipeline_degree import DegreeInstance, best_degree, pipeline_seconds
from engine.overlap.pipemoe_printed import pipemoe_printed
from engine.plan import Pipeline, Priority, SendOrder
from engine.problem import Problem
from engine.result import Provenance, Status, Stop
from engine.simulate.training import MAX_PARTS, PricedStep, price_step, step_seconds
from engine.systems.base import Draft, Note, Report, System, proof_of
from engine.systems.options import Options
from engine.systems.pieces import linear_placement
from engine.systems.training.baselines import Bucket
from engine.systems.training.step_degrees import degrees_of_step
from engine.units import seconds as in_seconds

NetworkOrder = Annotated[
    Literal["dispatch-first", "interleaved"],
    Field(description="of the parts on the network: every dispatch first, or combines in between"),
]


class PipeMoEOptions(Options):
    max_degree: int = Field(8, ge=1, le=MAX_PARTS, title="Most parts of a layer", description="most parts of a layer")
    network_order: NetworkOrder = "dispatch-first"
    algorithm: Literal["exact", "printed", "step"] = Field(
        "exact",
        description="exact: the best whole number of parts of each layer by itself; printed: Algorithm 1 of the paper, which "
        "often misses it; step: the parts of the backward pass by the time of the whole step, in which all-reduces share the "
        "network (the paper's future work, §V-E)",
    )
    evaluations: int = Field(
        400, ge=1, le=100_000, title="Simulated steps", description="steps that algorithm step simulates: the limit of its work"
    )
    bucket_mb: Bucket = 25.0


def pipemoe(problem: Problem, options: PipeMoEOptions, stop: Stop, report: Report) -> Draft:
    """The degree of every layer by itself, forward and backward apart, as the expert computation of the backward pass is
    twice that of the forward pass."""
    placement, order, most = linear_placement(problem), options.network_order, options.max_degree
    priced = price_step(problem, placement)
    tables = {phase: layer_tables(priced, placement.model_layers, phase) for phase in ("forward", "dx")}
    exact = {phase: best_degree(*(stage[:, :most] for stage in table), order=order) for phase, table in tables.items()}
    degrees = {phase: result.solution for phase, result in exact.items()}
    printed = options.algorithm == "printed"
    if printed:
        degrees = {phase: pipemoe_printed(fitted_lines(*table, most)).solution for phase, table in tables.items()}
    seconds = {
        phase: pipeline_seconds(*table, order=order)[np.arange(len(table[0])), degrees[phase] - 1].sum()
        for phase, table in tables.items()
    }
    notes = {
        "degrees, forward": Note(_in_words(degrees["forward"])),
        "degrees, backward": Note(_in_words(degrees["dx"])),
        "MoE layers, dispatch to combine": Note(float(sum(seconds.values())), "s"),
        "the same without a pipeline": Note(float(sum(stage[:, 0].sum() for table in tables.values() for stage in table)), "s"),
    }
    if printed:
        notes["the same with exact degrees"] = Note(sum(result.objective for result in exact.values()), "s")
    pipeline = Pipeline(forward=tuple(degrees["forward"].tolist()), backward=tuple(degrees["dx"].tolist()), order=order)
    priority = Priority(policy="fair", bucket=options.bucket_mb * 1e6)
    draft = Draft(placement, SendOrder(mode="concurrent"), priority=priority, pipeline=pipeline, notes=notes)
    return draft if options.algorithm != "step" else _of_the_step(draft, problem, options, stop, report)


def _of_the_step(draft: Draft, problem: Problem, options: PipeMoEOptions, stop: Stop, report: Report) -> Draft:
    """The draft with the degrees of its backward pass chosen by the time of the step."""
    plan = draft.plan("trial", Provenance(optimiser=""))
    result = degrees_of_step(plan, problem, options.max_degree, options.evaluations, stop, report)
    apart = step_seconds(plan, problem)
    notes = draft.notes | {
        "degrees, backward": Note(_in_words(np.array(result.solution))),
        "the step, degrees of each layer by itself": Note(apart, "s"),
        "the step, degrees chosen with all-reduces": Note(
            f"{in_seconds(result.objective)}, {proof_of(result)} among degrees; found in {in_seconds(result.runtime)}"
        ),
    }
    pipeline = draft.pipeline.model_copy(update={"backward": result.solution})
    return replace(draft, pipeline=pipeline, notes=notes, cancelled=result.status is Status.CANCELLED)


def layer_tables(priced: PricedStep, moe_layers: tuple[int, ...], phase: str) -> tuple[np.ndarray, ...]:
    """float64[layer, parts - 1] three times: seconds of one part of the first all-to-all, of the expert computation and of
    the second all-to-all of every MoE layer, on the slowest group. phase "dx": of the backward pass, dW included."""
    seconds, stages = priced.seconds, []
    phases = ("forward",) if phase == "forward" else ("dx", "dw")
    kinds = ("dispatch", "experts", "combine") if phase == "forward" else ("combine", "experts", "dispatch")
    for kind in kinds:
        rows = []
        for layer in moe_layers:
            parts = [part for part in priced.graph.of_phase(*phases) if (part.layer, part.kind) == (layer, kind)]
            own = [priced.index[part.name] for part in parts]
            rows.append(seconds[own].sum(axis=0).max(axis=1))
        stages.append(np.array(rows))
    return tuple(stages)


def fitted_lines(first: np.ndarray, experts: np.ndarray, second: np.ndarray, most: int) -> DegreeInstance:
    """The α–β lines that the paper's algorithm needs, through the priced parts; size 1 is a whole layer, and both
    all-to-alls are alike."""
    size = 1 / np.arange(1, first.shape[1] + 1)
    numbers = []
    for table in ((first + second) / 2, experts):
        lines = [fit_line(size, np.maximum(row, np.finfo(float).tiny)) for row in table]
        numbers += [np.array([fit.alpha for fit in lines]), np.array([fit.beta for fit in lines]), 1.0]
    return DegreeInstance(*numbers, max_degree=most)


def _in_words(degrees: np.ndarray) -> str:
    """`2 (5 layers), 3 (1 layer)`."""
    values, counts = np.unique(degrees, return_counts=True)
    return ", ".join(f"{value} ({count} layer{'s' if count > 1 else ''})" for value, count in zip(values, counts, strict=True))


SYSTEMS = (
    System(
        name="pipemoe",
        title="PipeMoE",
        summary="every MoE layer in as many pipelined parts as suit it, proven per layer",
        paper="PipeMoE",
        recipe=pipemoe,
        options=PipeMoEOptions,
        goals=(Goal.TRAINING,),
        preselected=True,
    ),
)

"""Lina at inference (Li et al., 2023, §5): experts on as many devices as their popularity asks for, predicted from the
experts that a batch's tokens have just been to, and corrected if the forecast was wrong.

The plan holds the hosting for the recording as a whole, from which the run-time scheduler starts, and the scheduler's
settings; its work batch by batch is simulated by `engine.simulate.two_phase`.
"""

import contextlib
import math
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import Field

from engine.errors import StoppedError
from engine.placement.devices.kernel import DevicesInstance, replicate_devices
from engine.plan import Placement, Reaction, SendOrder
from engine.problem import Problem
from engine.result import GUARD, Guard, Limits, Stop
from engine.simulate.scheduler import PAPER_CHECK, PAPER_SCHEDULE, TwoPhaseOptions, device_slots, options_of
from engine.simulate.two_phase import TwoPhaseResult, two_phase
from engine.systems.base import Draft, Note, Notes, Report, System
from engine.systems.options import Options, Seed
from engine.units import ratio, seconds, share
from engine.workload import RoutingTrace

DEFAULT = TwoPhaseOptions()
STATIC = "Lina's hosting, unscheduled"
"""The plan's name: its time is that of its placement, which the scheduler of its `reaction` only starts from."""
SCHEDULED = "with its scheduler, against contiguous blocks"
AGAINST_STATIC = "with its scheduler, against this hosting left as it is"
"""Subjects of the notes on the plan with its scheduler: ratios of the median batch's times."""
REACTION = "priced at"

SECONDS_A_LAYER = 1.0
"""Seconds of work on a proof that a layer's experts are hosted best."""


class LinaOptions(Options):
    path_length: int = Field(
        DEFAULT.path_length,
        ge=1,
        le=64,
        title="Path length (layers)",
        description="layers of a token's path that predict its next expert",
    )
    top_k: int = Field(
        DEFAULT.top_k, ge=1, le=4096, title="Next experts kept", description="likeliest next experts that an estimate keeps"
    )
    packing: Literal["lina", "best"] = Field(
        "lina", description="lina: equation 1 and first-fit decreasing; best: the largest device load least"
    )
    max_experts: int = Field(
        0,
        ge=0,
        le=4096,
        title="Most experts per GPU",
        description="experts on one device in a layer, at most; 0: the paper's 4, or twice an even share if that is more, as "
        "far as the memory holds them",
    )
    batch_tokens: int = Field(
        1024,
        ge=1,
        le=10**7,
        title="Batch (recorded tokens)",
        description="recorded tokens of one batch in the run-time simulation",
    )
    copies: float = Field(
        64.0,
        ge=1,
        le=10**6,
        title="Tokens per recorded token",
        description="tokens of a batch that each recorded one stands for: services run larger batches",
    )
    scheduler: bool = Field(
        False,
        title="With its scheduler",
        description="rank the plan by its scheduler's time, batch by batch with its reaction; off: by its hosting left alone",
    )
    seed: Seed = 0


def lina(problem: Problem, options: LinaOptions, stop: Stop, report: Report) -> Draft:
    """Hosting by popularity, and the two phases tried on the second half of the recording."""
    gpus = len(problem.cluster.gpus)
    cap = device_slots(problem, options.max_experts)
    rows, worst, bound = [], 0.0, 0.0
    load = sum(
        other.load / np.maximum(other.load.sum(axis=1, keepdims=True), 1) for other in (problem.workload, *problem.others)
    )
    guard = Guard(stop, GUARD * SECONDS_A_LAYER * len(load))
    for layer, popularity in enumerate(load):
        report(0.6 * layer / len(load), f"hosting layer {layer + 1} of {len(load)}", None, None)
        instance = DevicesInstance(popularity, gpus, cap)
        limits = Limits(SECONDS_A_LAYER, wall=math.inf, seed=options.seed, exact=not stop())
        result = replicate_devices(instance, limits, guard, method=options.packing)
        rows.append(result.solution)
        mean = popularity.sum() / gpus or 1.0
        worst, bound = max(worst, result.objective / mean), max(bound, result.bound / mean)
    experts, layers = problem.workload.num_experts, problem.model.moe_layers
    placement = Placement(experts=experts, experts_of_gpu=tuple(rows), model_layers=layers)
    settings = {"path_length": options.path_length, "top_k": options.top_k}
    if options.scheduler:
        settings |= {"batch": options.batch_tokens, "packing": options.packing}
    reaction = Reaction(
        **settings, check_experts=DEFAULT.check_experts * problem.model.experts_per_token, max_experts_per_device=cap
    )
    needed = f"a heuristic, at least {ratio(bound)} is needed (proven)"
    proof = "proven optimal" if worst <= bound * (1 + 1e-9) else needed
    turns = " with copies in turn" if problem.travel and problem.travel.replicas else ""
    notes: Notes = {"largest device load": Note(f"{ratio(worst)} the mean in the worst layer{turns}, {proof}")}
    if isinstance(problem.workload, RoutingTrace) and not stop():
        with contextlib.suppress(StoppedError):
            notes |= run_time_notes(problem, reaction, options, stop, report)
    order, name = SendOrder(mode="concurrent"), None if options.scheduler else STATIC
    return Draft(placement, order, None, notes, cancelled=stop(), limited=guard.cut, reaction=reaction, name=name)


def run_time_notes(problem: Problem, reaction: Reaction, options: LinaOptions, stop: Stop, report: Report) -> Notes:
    """The scheduler's figures on the second half of the recording, learnt from the first."""
    trace = problem.workload
    layers = f"{trace.layers} layers are" if trace.layers > 1 else "a single layer is"
    if trace.layers <= reaction.path_length:
        advice = "choose a shorter path_length" if trace.layers > 1 else "nothing comes before it"
        return {"at run time": Note(f"not simulated: {layers} too few for a path of {reaction.path_length}; {advice}")}
    if trace.tokens < 4:
        return {"at run time": Note(f"not simulated: {trace.tokens} tokens are too few to learn from half of them")}
    profile, served = trace.halves()
    batch = {"batch_tokens": min(options.batch_tokens, served.tokens), "copies": options.copies}
    started = reaction.model_copy(update={"packing": options.packing})
    at_run_time = options_of(started, trace.k, **batch, seed=options.seed)
    served_problem = replace(problem, workload=served, others=(), in_use=None)

    def advance(done: float) -> None:
        report(0.6 + 0.4 * done, "simulating both phases batch by batch", None, None)

    return notes_of(two_phase(served_problem, profile, at_run_time, stop, advance))


def notes_of(result: TwoPhaseResult) -> Notes:
    """Notes for people on a two-phase simulation."""
    titles = {
        "baseline": "no scheduling",
        "static": "hosted once",
        "lina": "both phases",
        "without_estimation": "without estimation",
        "without_fine_tuning": "without fine-tuning",
    }
    figures = {title: result.figures(scheme) for scheme, title in titles.items()}
    scheduled = figures["both phases"].median_inference
    return {
        SCHEDULED: Note(figures["no scheduling"].median_inference / scheduled if scheduled else 1.0, "×"),
        AGAINST_STATIC: Note(figures["hosted once"].median_inference / scheduled if scheduled else 1.0, "×"),
        "estimates right (top 2 as a set, in order)": Note(
            f"{share(result.accuracy('set'))}, {share(result.accuracy('order'))} of {result.batches} batches"
        ),
        "layers tuned again": Note(share(result.fine_tuning_rate)),
        REACTION: Note(
            f"{seconds(result.options.schedule_seconds)} to schedule again and {seconds(result.options.check_seconds)} to "
            f"check on this cluster (the paper's testbed: {PAPER_SCHEDULE * 1e3:g} and {PAPER_CHECK * 1e3:g} ms)"
        ),
        "inference time over ideal, median": Note(
            ", ".join(f"{title} {ratio(figure.median_inference)}" for title, figure in figures.items())
        ),
        "inference time over ideal, 95th percentile": Note(
            ", ".join(f"{title} {ratio(figure.tail_inference)}" for title, figure in figures.items())
        ),
    }


SYSTEMS = (
    System(
        name="lina",
        title="Lina (inference)",
        summary="replicates popular experts, predicted from token paths and corrected after the gate",
        paper="Lina §5",
        recipe=lina,
        options=LinaOptions,
    ),
)

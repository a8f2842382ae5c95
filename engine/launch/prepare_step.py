"""A training step before it is launched: plans on their ranks, a step small enough for the machine, and whether it fits."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from engine.errors import InputError
from engine.launch.devices import Devices
from engine.launch.fold import fold_plan, fold_trace
from engine.launch.prepare import (
    Check,
    Launch,
    backend_check,
    check_passes,
    computed_in,
    gpus_of,
    memory_check,
    rank_check,
    ranks_of,
)
from engine.launch.spec import TOLERANCE, LaunchSpec
from engine.launch.step.problem import check_step_plan, step_problem
from engine.launch.step.sizes import gradient_bytes, reference_bytes, shrunk, step_bytes
from engine.model import MoEModel
from engine.plan import Plan
from engine.training import TrainingStep
from engine.workload import RoutingTrace, Workload

FLOP_BUDGET = 1e11
"""FLOP of one training step of all ranks together that a CPU launch runs: some seconds on two cores."""


def prepare_step(
    plans: Sequence[Plan],
    workload: Workload,
    model: MoEModel,
    step: TrainingStep,
    devices: Devices,
    ranks: int | None = None,
    repeats: int = 3,
    limit: float = 900.0,
    dtype: Literal["fp32", "bf16"] | None = None,
) -> Launch:
    """Fold plans for a training step onto the ranks, and leave out as much of the step as the machine needs: sequences
    first, see `shrunk`. Raises InputError when a launch makes no sense; see `engine.launch.prepare.prepare`.

    workload: replayed where the step is routed as recorded, then it must be a routing log
    """
    gpus = gpus_of(plans)
    for plan in plans:
        if "graph" in plan.provenance.inputs:
            raise InputError(
                f"the plan {plan.name} was made for imported operators, which the ranks cannot compute; plan without a graph"
            )
    ranks = ranks_of(ranks, gpus, devices)
    check_passes(repeats, limit)
    recorded = step.routing == "recorded"
    if recorded and not isinstance(workload, RoutingTrace):
        raise InputError(
            f"the step is routed as recorded, but {workload.name} has no tokens to replay; open a routing log, or assume "
            "balanced routing"
        )
    model.check_recording(workload.layers, workload.num_experts, workload.k, workload.name)
    folded = tuple(fold_plan(plan, ranks) for plan in plans)
    for plan in folded:
        check_step_plan(plan, model, step)
    shared = min(len(devices.gpus), ranks)
    model = computed_in(model, dtype, bool(shared))
    small = step if shared else shrunk(step, model, folded, FLOP_BUDGET / ranks)
    spec = LaunchSpec(
        plans=folded,
        model=model,
        step=small,
        ranks=ranks,
        backend=devices.backend(ranks),
        gpus=shared,
        repeats=repeats,
        limit=limit,
    )
    replayed = fold_trace(workload, gpus, ranks) if recorded else workload
    return Launch(tuple(plans), spec, (replayed,), limit, tuple(_checks(spec, step, devices, gpus)))


def _checks(spec: LaunchSpec, planned: TrainingStep, devices: Devices, gpus: int) -> Iterator[Check]:
    yield rank_check(spec, gpus)
    yield backend_check(spec, devices)
    yield memory_check(spec, devices, *_bytes_of_ranks(spec), "describe a smaller step, or use fewer ranks")
    step = spec.step
    sizes = f"{step.batch:,} × {step.sequence_length:,} tokens on each rank"
    if step != planned:
        sizes += (
            f" instead of {planned.batch:,} × {planned.sequence_length:,}, which would take too long on these devices"
        )
    each = f" of each of {len(spec.plans)} plans in turn" if len(spec.plans) > 1 else ""
    routing = "replayed as recorded" if step.routing == "recorded" else "balanced by assumption"
    yield Check("Step", True, f"{sizes}, {spec.repeats} timed steps{each} after a warm-up; routing {routing}")
    dtype = spec.model.dtype
    yield Check(
        "Numbers",
        True,
        f"{dtype}, random weights and tokens. Gradients, loss and hidden state are compared with those of one process with "
        f"automatic differentiation, to {TOLERANCE[dtype]:.2g} of the largest number of each",
    )


def _bytes_of_ranks(spec: LaunchSpec) -> tuple[float, float]:
    """(bytes of the fullest rank, bytes that rank 0 needs besides for the comparison)."""
    problem = step_problem(spec.model, spec.step, spec.ranks)
    first = step_bytes(problem, spec.plans[0])
    more = [gradient_bytes(problem, plan) for plan in spec.plans[1:]]
    return float(np.sum([first, *more], axis=0).max()), reference_bytes(spec.model, spec.step, spec.ranks)

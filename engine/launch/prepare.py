"""What a launch is before it runs: the plans on its ranks, what they replay, and whether this machine can do it."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.launch.devices import Devices
from engine.launch.fold import fold_plan, fold_trace
from engine.launch.spec import MAX_PLANS, MAX_REPEATS, POOL_STRIDE, WORKER, LaunchSpec
from engine.model import MoEModel
from engine.plan import Plan
from engine.workload import RoutingTrace, Workload

FLOP_BUDGET = 1e12
"""FLOP of one forward pass that a CPU launch replays unless told otherwise: some ten seconds on two cores."""


@dataclass(frozen=True)
class Check:
    """One line of the pre-flight check."""

    name: str
    passed: bool
    text: str


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch that is ready to run: what the ranks get, and what they replay.

    plans: as given, before they were folded onto the ranks; workloads: of the model, and of a second one
    """

    plans: tuple[Plan, ...]
    spec: LaunchSpec
    workloads: tuple[Workload, ...]
    limit: float
    checks: tuple[Check, ...]

    @property
    def ready(self) -> bool:
        return all(check.passed for check in self.checks)

    def command(self, folder: Path) -> list[str]:
        """The exact command, as an argument list."""
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.spec.ranks),
            "--module", WORKER, str(folder),
        ]  # fmt: skip


def prepare(
    plans: Sequence[Plan], workload: Workload, model: MoEModel, devices: Devices, ranks: int | None = None,
    tokens: int | None = None, repeats: int = 3, limit: float = 900.0,
) -> Launch:  # fmt: skip
    """Fold the plans onto the ranks and check that they can run here. Raises InputError when a launch makes no sense.

    plans: run in turn in one job, so that they can be compared
    tokens: how many tokens of the recording to replay, evenly spaced (default: as many as `FLOP_BUDGET` allows).
    """
    if not 1 <= len(plans) <= MAX_PLANS:
        raise InputError(f"{len(plans)} plans: a launch compares 1 to {MAX_PLANS}")
    for plan in plans:
        if what := _not_launchable(plan):
            raise InputError(
                f"the plan {plan.name} has {what}, which can be simulated but not launched yet; launch a plan of one "
                "model with vanilla execution"
            )
    if not isinstance(workload, RoutingTrace):
        raise InputError(
            f"{workload.name} has no tokens to replay; a launch needs a routing log (loads and matrices can be planned "
            "and simulated)"
        )
    gpus = _gpus_of(plans)
    model.check_recording(workload.layers, workload.num_experts, workload.k, workload.name)
    for plan in plans:
        if plan.placement.layers != workload.layers or plan.placement.experts != workload.num_experts:
            raise InputError(
                f"the plan {plan.name} places {plan.placement.experts} experts in {plan.placement.layers} layers, but the "
                f"recording {workload.name} has {workload.num_experts} in {workload.layers}"
            )
    ranks = devices.default_ranks(gpus) if ranks is None else ranks
    if not 1 <= ranks <= gpus:
        raise InputError(f"{ranks} ranks: choose between 1 and {gpus}, the GPUs of the plan")
    backend = devices.backend(ranks)
    dtype = model.dtype if backend == "nccl" and model.dtype != "fp8" else "bf16" if backend == "nccl" else "fp32"
    model = model.model_copy(update={"dtype": dtype})
    per_token = workload.layers * workload.k * model.ffn_flops_per_token
    affordable = workload.tokens if backend == "nccl" else max(ranks, int(FLOP_BUDGET / per_token))
    replayed = min(workload.tokens, affordable if tokens is None else tokens)
    if replayed < 1:
        raise InputError("replay at least one token")
    if not 1 <= repeats <= MAX_REPEATS:
        raise InputError(f"{repeats} timed passes: choose between 1 and {MAX_REPEATS}")
    if not limit > 0:  # a NaN compares false
        raise InputError(f"the time limit must be above 0 s, not {limit:g}")
    spec = LaunchSpec(
        plans=tuple(fold_plan(plan, ranks) for plan in plans),
        model=model,
        ranks=ranks,
        backend=backend,
        repeats=repeats,
    )
    trace = fold_trace(workload, gpus, ranks).spread(replayed)
    return Launch(tuple(plans), spec, (trace,), limit, tuple(_checks(spec, trace, devices, gpus)))


def _gpus_of(plans: Sequence[Plan]) -> int:
    """The GPUs that all plans are for."""
    for plan in plans[1:]:
        if plan.placement.gpus != plans[0].placement.gpus:
            raise InputError(
                f"the plan {plan.name} is for {plan.placement.gpus} GPUs, {plans[0].name} for {plans[0].placement.gpus}; "
                "one launch compares plans for the same cluster"
            )
    return plans[0].placement.gpus


def _not_launchable(plan: Plan) -> str:
    """What of a plan no worker executes yet; empty when one does."""
    if plan.placement_b is not None:
        return "two colocated models"
    if plan.priority is not None:
        return "a training step"
    return "context-coherent execution" if plan.execution != "vanilla" else ""


def _checks(spec: LaunchSpec, trace: RoutingTrace, devices: Devices, gpus: int) -> Iterator[Check]:
    share = f"{gpus} GPUs of the plan" if spec.ranks == gpus else f"{gpus} GPUs of the plan, folded onto"
    yield Check("Ranks", True, f"{share} {spec.ranks} ranks" if spec.ranks != gpus else f"{share}, one rank each")
    where = "one GPU per rank" if spec.backend == "nccl" else f"CPU, {devices.cores} cores for {spec.ranks} ranks"
    yield Check("Backend", True, f"{spec.backend.upper() if spec.backend == 'nccl' else 'Gloo'}: {where}")
    model = spec.model
    held = float(max(plan.placement.slots.max() for plan in spec.plans)) * model.bytes_per_expert
    pool = model.bytes_per_expert + POOL_STRIDE * trace.layers * model.experts * model.bytes_per_number
    activations = 6.0 * trace.tokens * (trace.k + 1) * model.bytes_per_token / spec.ranks
    rank_bytes = held + pool + activations
    need = rank_bytes if spec.backend == "nccl" else rank_bytes * spec.ranks
    room = min(devices.memory) if spec.backend == "nccl" else devices.host_memory
    yield Check(
        "Memory", need < 0.8 * room,
        f"{rank_bytes / 2**30:.2f} GiB per rank, {need / 2**30:.2f} of {room / 2**30:.1f} GiB"
        + ("" if need < 0.8 * room else ": replay fewer tokens or use fewer ranks"),
    )  # fmt: skip
    each = f" of each of {len(spec.plans)} plans in turn" if len(spec.plans) > 1 else ""
    yield Check("Tokens", True, f"{trace.tokens:,} of the recording, {spec.repeats} timed passes{each} after a warm-up")
    yield Check("Numbers", True, f"{model.dtype}, random weights, routing replayed; attention is not run")

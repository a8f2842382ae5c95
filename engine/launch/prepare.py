"""What a launch is before it runs: the plans on its ranks, what they replay, and whether this machine can do it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.errors import InputError
from engine.launch.devices import Devices
from engine.launch.fold import fold_plan, fold_trace
from engine.launch.processes import torchrun
from engine.launch.spec import MAX_PLANS, MAX_REPEATS, POOL_STRIDE, TOLERANCE, WORKER, LaunchSpec
from engine.model import MoEModel
from engine.plan import Plan
from engine.workload import RoutingTrace, Workload

FLOP_BUDGET = 1e12
"""FLOP of one forward pass that a CPU launch replays unless told otherwise: some ten seconds on two cores."""


@dataclass(frozen=True)
class Check:
    """One line of the pre-flight check. warning: whether a person should think before going on, although nothing forbids
    it."""

    name: str
    passed: bool
    text: str
    warning: bool = False


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

    @property
    def tokens(self) -> int:
        """Of the (first) recording that are replayed, or that all ranks feed into a training step."""
        step = self.spec.step
        return self.workloads[0].tokens if step is None else step.tokens * self.spec.ranks

    def command(self, folder: Path) -> list[str]:
        """The exact command, as an argument list."""
        return torchrun(self.spec.ranks, WORKER, folder)


def prepare(
    plans: Sequence[Plan],
    workload: Workload,
    model: MoEModel,
    devices: Devices,
    ranks: int | None = None,
    tokens: int | None = None,
    repeats: int = 3,
    limit: float = 900.0,
    second: tuple[Workload, MoEModel] | None = None,
    dtype: Literal["fp32", "bf16"] | None = None,
) -> Launch:
    """Fold the plans onto the ranks and check that they can run here. Raises InputError when a launch makes no sense.

    plans: run in turn in one job, so that they can be compared
    tokens: how many tokens of the recording to replay, evenly spaced (default: as many as `FLOP_BUDGET` allows); a second
        recording is replayed to the same part.
    second: recording and model that share the ranks, for plans of two models
    dtype: of all numbers (default: on GPUs the model's own, bf16 where it cannot be computed in; on CPUs fp32)
    """
    for plan in plans:
        if plan.priority is not None:
            raise InputError(f"the plan {plan.name} is for a training step; describe the step too (--training)")
    gpus, given = gpus_of(plans), ((workload, model), *([second] if second else []))
    for number, (recording, whose) in enumerate(given):
        _check_recording(recording, whose, plans, number)
    _check_pair(plans, [recording for recording, _ in given])
    ranks = ranks_of(ranks, gpus, devices)
    shared = min(len(devices.gpus), ranks)
    models = [computed_in(whose, dtype, bool(shared)) for _, whose in given]
    work = sum(
        recording.tokens * recording.layers * recording.k * whose.ffn_flops_per_token for recording, whose in given
    )
    affordable = workload.tokens if shared else max(ranks, int(FLOP_BUDGET * workload.tokens / work))
    replayed = min(workload.tokens, affordable if tokens is None else tokens)
    if replayed < 1:
        raise InputError("replay at least one token")
    check_passes(repeats, limit)
    spec = LaunchSpec(
        plans=tuple(fold_plan(plan, ranks) for plan in plans),
        model=models[0],
        model_b=models[1] if second else None,
        ranks=ranks,
        backend=devices.backend(ranks),
        gpus=shared,
        repeats=repeats,
        limit=limit,
    )
    traces = tuple(
        fold_trace(recording, gpus, ranks).spread(max(1, round(recording.tokens * replayed / workload.tokens)))
        for recording, _ in given
    )
    return Launch(tuple(plans), spec, traces, limit, tuple(_checks(spec, traces, devices, gpus)))


def ranks_of(ranks: int | None, gpus: int, devices: Devices) -> int:
    """How many ranks a plan for so many GPUs runs on, by default what suits the devices."""
    ranks = devices.default_ranks(gpus) if ranks is None else ranks
    if not 1 <= ranks <= gpus:
        raise InputError(f"{ranks} ranks: choose between 1 and {gpus}, the GPUs of the plan")
    return ranks


def check_passes(repeats: int, limit: float) -> None:
    """Raise InputError for a number of timed passes or a time limit (seconds) that makes no sense."""
    if not 1 <= repeats <= MAX_REPEATS:
        raise InputError(f"{repeats} timed passes: choose between 1 and {MAX_REPEATS}")
    if not limit > 0:  # a NaN compares false
        raise InputError(f"the time limit must be above 0 s, not {limit:g}")


def computed_in(model: MoEModel, dtype: str | None, on_gpus: bool) -> MoEModel:
    """The model in the numbers that will be used."""
    if dtype not in (None, "fp32", "bf16"):
        raise InputError(f"{dtype}: a launch computes in fp32 or bf16")
    own = "fp32" if not on_gpus else "bf16" if model.dtype == "fp8" else model.dtype
    return model.model_copy(update={"dtype": dtype or own})


def _check_recording(workload: Workload, model: MoEModel, plans: Sequence[Plan], number: int) -> None:
    """Raise InputError unless the recording can be replayed through model `number` of the plans."""
    if not isinstance(workload, RoutingTrace) or not workload.tokens:
        raise InputError(
            f"{workload.name} has no tokens to replay; a launch needs a routing log (loads and matrices can be planned "
            "and simulated)"
        )
    model.check_recording(workload.layers, workload.num_experts, workload.k, workload.name)
    for plan in plans:
        placement = (plan.placement, plan.placement_b)[number]
        if placement is None:
            raise InputError(
                f"the plan {plan.name} is for one model, but two recordings are given; leave out the second"
            )
        if placement.layers != workload.layers or placement.experts != workload.num_experts:
            raise InputError(
                f"the plan {plan.name} places {placement.experts} experts in {placement.layers} layers, but the "
                f"recording {workload.name} has {workload.num_experts} in {workload.layers}"
            )


def _check_pair(plans: Sequence[Plan], recordings: Sequence[Workload]) -> None:
    """Raise InputError for plans of two models that no simulation foretells, and for those whose second model is not
    known."""
    for plan in plans:
        if plan.placement_b is None:
            continue
        if len(recordings) < 2:
            raise InputError(f"the plan {plan.name} is for two models; give the second one's recording and model too")
        if "shared" in (plan.send_order.mode, plan.send_order_b.mode):
            raise InputError(
                f"the plan {plan.name} has a shared order, whose rates need the network for one model alone; launch a plan "
                "with a matched, sequential or concurrent order for two"
            )
    if len({(recording.layers, recording.num_experts) for recording in recordings}) > 1:
        first, other = recordings
        raise InputError(
            f"{first.name} has {first.num_experts} experts in {first.layers} MoE layers, {other.name} has "
            f"{other.num_experts} in {other.layers}: two models run layer beside layer, expert beside expert"
        )


def gpus_of(plans: Sequence[Plan]) -> int:
    """The GPUs that all plans are for."""
    if not 1 <= len(plans) <= MAX_PLANS:
        raise InputError(f"{len(plans)} plans: a launch compares 1 to {MAX_PLANS}")
    for plan in plans[1:]:
        if plan.placement.gpus != plans[0].placement.gpus:
            raise InputError(
                f"the plan {plan.name} is for {plan.placement.gpus} GPUs, {plans[0].name} for {plans[0].placement.gpus}; "
                "one launch compares plans for the same cluster"
            )
    return plans[0].placement.gpus


def rank_check(spec: LaunchSpec, gpus: int) -> Check:
    """How the plan's GPUs map to ranks."""
    share = f"{gpus} GPUs of the plan" if spec.ranks == gpus else f"{gpus} GPUs of the plan, folded onto"
    return Check("Ranks", True, f"{share} {spec.ranks} ranks" if spec.ranks != gpus else f"{share}, one rank each")


def backend_check(spec: LaunchSpec, devices: Devices) -> Check:
    """What carries the bytes, and what computes."""
    if spec.backend == "nccl":
        where = "NCCL: one GPU per rank"
    elif spec.gpus:
        where = (
            f"Gloo, through host memory: {spec.ranks} ranks on {spec.gpus} GPU{'s' if spec.gpus > 1 else ''} in turn"
        )
    else:
        where = f"Gloo: CPU, {devices.cores} cores for {spec.ranks} ranks"
    return Check("Backend", True, where)


def memory_check(spec: LaunchSpec, devices: Devices, rank_bytes: float, more: float, advice: str) -> Check:
    """Whether `rank_bytes` for every rank, and `more` for one of them, find room on every device or in the host's memory."""
    need = rank_bytes * (-(-spec.ranks // spec.gpus) if spec.gpus else spec.ranks) + more
    room = min(devices.memory) if spec.gpus else devices.host_memory
    return Check(
        "Memory",
        need < 0.8 * room,
        f"{rank_bytes / 2**30:.2f} GiB per rank, {need / 2**30:.2f} of {room / 2**30:.1f} GiB"
        + ("" if need < 0.8 * room else f": {advice}"),
    )


def _checks(spec: LaunchSpec, traces: Sequence[RoutingTrace], devices: Devices, gpus: int) -> Iterator[Check]:
    yield rank_check(spec, gpus)
    yield backend_check(spec, devices)
    rank_bytes = max(_bytes_of_rank(plan, spec, traces) for plan in spec.plans)
    yield memory_check(spec, devices, rank_bytes, 0.0, "replay fewer tokens or use fewer ranks")
    each = f" of each of {len(spec.plans)} plans in turn" if len(spec.plans) > 1 else ""
    replayed = " and ".join(f"{trace.tokens:,}" for trace in traces)
    whose = "the recording" if len(traces) == 1 else "the two recordings"
    yield Check("Tokens", True, f"{replayed} of {whose}, {spec.repeats} timed passes{each} after a warm-up")
    dtype = spec.model.dtype
    yield Check(
        "Numbers",
        True,
        f"{dtype}, random weights, routing replayed; attention is not run. What comes out is compared with an unplanned "
        f"computation, to {TOLERANCE[dtype]:.2g} of its largest number",
    )


def _bytes_of_rank(plan: Plan, spec: LaunchSpec, traces: Sequence[RoutingTrace]) -> float:
    """Bytes that the busiest rank needs at once, of all models."""
    models = [spec.model] if spec.model_b is None else [spec.model, spec.model_b]
    total = 0.0
    for model in {one.digest: one for one in models}.values():
        pool = POOL_STRIDE * traces[0].layers * model.experts * model.bytes_per_number
        total += model.bytes_per_expert + pool
    for model, trace, placement in zip(models, traces, (plan.placement, plan.placement_b), strict=False):
        demand = trace.demand(spec.ranks)
        received = float((demand.sum(axis=1)[:, None, :] @ placement.share).max())
        sent = float(demand.sum(axis=2).max()) if plan.execution == "vanilla" else received
        total += float(placement.slots.max()) * model.bytes_per_expert
        total += 6.0 * (sent + received) * model.bytes_per_token
        total += received * model.ffn_matrices * model.d_ff * model.bytes_per_number
        # All tokens, as they are made, and after the all-gather of a context-coherent pass.
        total += trace.tokens * model.d_model * (4 + model.bytes_per_number * (1 if plan.execution == "vanilla" else 3))
    return total

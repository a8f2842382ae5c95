"""A launch of MoE layers forward before it runs: the plans on its ranks, what they replay, and whether it fits."""

from collections.abc import Iterator, Sequence

from engine.errors import InputError
from engine.goal import Goal
from engine.launch.places.devices import Devices
from engine.launch.places.fold import fold_plan, fold_tiers, fold_trace, nearest_ranks
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepared import Check, PreparedLaunch
from engine.launch.preparation.settled import (
    backend_check,
    check_passes,
    computed_in,
    gpus_of,
    memory_check,
    rank_check,
    ranks_of,
    relays_of,
)
from engine.launch.rank.instructions import POOL_STRIDE, TOLERANCE, RankInstructions
from engine.launch.rank.tiers import Tiers
from engine.model import MoEModel
from engine.plan import Plan
from engine.workload import RoutingTrace, Workload

FLOP_BUDGET = 1e12
"""FLOP of one forward pass that a CPU launch replays unless told otherwise: some ten seconds on two cores."""


def prepare_inference(launch: Launch, devices: Devices) -> PreparedLaunch:
    """Fold the plans of a launch onto its ranks and check that they can run on these devices. Raises InputError when the
    launch makes no sense."""
    for plan in launch.plans:
        if plan.goal is Goal.TRAINING:
            raise InputError(f"the plan {plan.name} is for a training step; describe the step too (--training)")
    gpus = gpus_of(launch.plans)
    inputs = ((launch.workload, launch.model), *([launch.second] if launch.second else []))
    for number, (recording, model) in enumerate(inputs):
        _check_recording(recording, model, launch.plans, number)
    _check_pair(launch.plans, [recording for recording, _ in inputs])
    ranks = ranks_of(launch, devices)
    tiers = _tiers(launch, ranks)
    shared = min(len(devices.gpus), ranks)
    models = [computed_in(model, launch.dtype, bool(shared)) for _, model in inputs]
    replayed = _replayed_tokens(launch, inputs, ranks, bool(shared))
    check_passes(launch.repeats, launch.limit)
    instructions = RankInstructions(
        plans=tuple(fold_plan(plan, ranks) for plan in launch.plans),
        model=models[0],
        model_b=models[1] if launch.second else None,
        ranks=ranks,
        backend=devices.backend(ranks),
        gpus=shared,
        repeats=launch.repeats,
        limit=launch.limit,
        tiers=tiers,
    )
    traces = tuple(
        fold_trace(recording, gpus, ranks).spread(max(1, round(recording.tokens * replayed / launch.workload.tokens)))
        for recording, _ in inputs
    )
    checks = tuple(_checks(instructions, traces, devices, gpus))
    return PreparedLaunch(tuple(launch.plans), instructions, traces, launch.limit, checks)


def _tiers(launch: Launch, ranks: int) -> Tiers | None:
    """The ranks' nodes, where a plan lets them relay for each other. Raises InputError when they are not known, or no
    nodes."""
    plan = next((plan for plan in launch.plans if plan.send_order.mode == "two-tier"), None)
    if plan is None:
        return None
    asked = relays_of(plan)
    if launch.cluster is None:
        raise InputError(f"{asked}; say which nodes there are (--cluster)")
    if len(launch.cluster.gpus) != plan.placement.gpus:
        raise InputError(
            f"{asked}: it is for {plan.placement.gpus} GPUs, {launch.cluster.name} has {len(launch.cluster.gpus)}"
        )
    tiers = fold_tiers(launch.cluster, ranks)
    if tiers is None:
        nearest = nearest_ranks(launch.plans, launch.cluster, ranks)
        raise InputError(f"{asked}; on {ranks} ranks one would stand for GPUs of several nodes: choose {nearest}")
    return tiers


def _replayed_tokens(launch: Launch, inputs: Sequence[tuple[Workload, MoEModel]], ranks: int, on_gpus: bool) -> int:
    """How many tokens of the (first) recording are replayed."""
    tokens = launch.workload.tokens
    work = sum(
        recording.tokens * recording.layers * recording.k * model.ffn_flops_per_token for recording, model in inputs
    )
    affordable = tokens if on_gpus else max(ranks, int(FLOP_BUDGET * tokens / work))
    replayed = min(tokens, affordable if launch.tokens is None else launch.tokens)
    if replayed < 1:
        raise InputError("replay at least one token")
    return replayed


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
    """Raise InputError for plans of two models that no simulation predicts, and for those whose second model is not
    known."""
    for plan in plans:
        if plan.goal is not Goal.TWO_MODELS:
            continue
        if len(recordings) < 2:
            raise InputError(f"the plan {plan.name} is for two models; give the second one's recording and model too")
        for mode in ("shared", "two-tier"):
            if mode in (plan.send_order.mode, plan.send_order_b.mode):
                raise InputError(
                    f"the plan {plan.name} has a {mode} order, whose rates need the network for one model alone; launch a "
                    "plan with a matched, sequential or concurrent order for two"
                )
    if len({(recording.layers, recording.num_experts) for recording in recordings}) > 1:
        first, other = recordings
        raise InputError(
            f"{first.name} has {first.num_experts} experts in {first.layers} MoE layers, {other.name} has "
            f"{other.num_experts} in {other.layers}: two models run layer beside layer, expert beside expert"
        )


def _checks(
    instructions: RankInstructions, traces: Sequence[RoutingTrace], devices: Devices, gpus: int
) -> Iterator[Check]:
    yield rank_check(instructions, gpus)
    yield backend_check(instructions, devices)
    rank_bytes = max(_bytes_of_rank(plan, instructions, traces) for plan in instructions.plans)
    yield memory_check(instructions, devices, rank_bytes, 0.0, "replay fewer tokens or use fewer ranks")
    each = f" of each of {len(instructions.plans)} plans in turn" if len(instructions.plans) > 1 else ""
    replayed = " and ".join(f"{trace.tokens:,}" for trace in traces)
    whose = "the recording" if len(traces) == 1 else "the two recordings"
    yield Check("Tokens", True, f"{replayed} of {whose}, {instructions.repeats} timed passes{each} after a warm-up")
    dtype = instructions.model.dtype
    yield Check(
        "Numbers",
        True,
        f"{dtype}, random weights, routing replayed; attention is not run. What comes out is compared with an unplanned "
        f"computation, to {TOLERANCE[dtype]:.2g} of its largest number",
    )


def _bytes_of_rank(plan: Plan, instructions: RankInstructions, traces: Sequence[RoutingTrace]) -> float:
    """Bytes that the busiest rank needs at once, of all models."""
    models = [instructions.model] if instructions.model_b is None else [instructions.model, instructions.model_b]
    total = 0.0
    for model in {model.digest: model for model in models}.values():
        pool = POOL_STRIDE * traces[0].layers * model.experts * model.bytes_per_number
        total += model.bytes_per_expert + pool
    for model, trace, placement in zip(models, traces, (plan.placement, plan.placement_b), strict=False):
        demand = trace.demand(instructions.ranks)
        received = float((demand.sum(axis=1)[:, None, :] @ placement.share).max())
        sent = float(demand.sum(axis=2).max()) if plan.execution == "vanilla" else received
        total += float(placement.slots.max()) * model.bytes_per_expert
        # What is passed on for others lies in a pool: in each of two hops about as much as a rank sends or receives itself.
        copies = 9.0 if plan.send_order.mode == "two-tier" else 6.0
        total += copies * (sent + received) * model.bytes_per_token
        total += received * model.ffn_matrices * model.d_ff * model.bytes_per_number
        # All tokens, as they are made, and after the all-gather of a context-coherent pass.
        total += trace.tokens * model.d_model * (4 + model.bytes_per_number * (1 if plan.execution == "vanilla" else 3))
    return total

"""A launch of MoE layers forward before it runs: the plans on its ranks, the tokens that they replay, and the checks
that it fits."""

from collections.abc import Iterable, Iterator, Sequence

from engine.errors import InputError
from engine.goal import Goal
from engine.launch.places.devices import Devices
from engine.launch.places.fold import fold_plan, fold_tiers, nearest_ranks
from engine.launch.places.testbed import emulated
from engine.launch.preparation import settled
from engine.launch.preparation.launch import Check, Launch, PreparedLaunch
from engine.launch.preparation.memory import forward_memory, memory_checks
from engine.launch.preparation.replayed import check_plan_for, in_words, routing_checks, supply_of
from engine.launch.preparation.scheduled import Schedulers
from engine.launch.preparation.settled import Attempt
from engine.launch.rank.difference import allowed, coarsest
from engine.launch.rank.difference import in_words as tolerance_in_words
from engine.launch.rank.instructions import RankInstructions, uses_nodes
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Plan
from engine.problem import model_for
from engine.runtime.exchange.links import Links, Tiers
from engine.units import size
from engine.workload import RoutingTrace, Workload

FLOP_BUDGET = 1e12
"""FLOP of one forward pass that a CPU launch replays unless told otherwise: some ten seconds on two cores."""


def prepare_inference(launch: Launch, devices: Devices) -> PreparedLaunch:
    """Fold the plans of a launch onto its ranks and check that they can run on these devices. Raises InputError if the
    launch makes no sense."""
    for plan in launch.plans:
        if plan.goal is Goal.TRAINING:
            raise InputError(f"the plan {plan.name} is for a training step; describe the step too (--training)")
        _check_travel(plan)
    gpus = settled.gpus_of(launch.plans)
    inputs = ((launch.workload, launch.model), *([launch.second] if launch.second else []))
    inputs = [(recording, model_for(recording, model)) for recording, model in inputs]
    for number, (recording, model) in enumerate(inputs):
        _check_recording(recording, model, launch.plans, number)
    _check_pair(launch.plans, [recording for recording, _ in inputs])
    ranks = settled.ranks_of(launch, devices)
    tiers = tiers_of(launch, ranks)
    shared = min(len(devices.gpus), ranks)
    models = [settled.computed_in(model, launch.dtype, bool(shared)) for _, model in inputs]
    recordings = [recording for recording, _ in inputs]
    folded = tuple(fold_plan(plan, ranks, drawn_links(launch, ranks)) for plan in launch.plans)
    schedulers = Schedulers.of(folded, recordings[0])
    if schedulers.batch is not None:
        recordings[0] = schedulers.batch
    if launch.tokens is not None and launch.tokens < 1:
        raise InputError("replay at least one token")
    settled.check_passes(launch.repeats, launch.limit)
    starts = _starts(launch.plans)

    def attempts() -> Iterator[Attempt]:
        for divisor in settled.NARROWER:
            narrow = [settled.narrowed(model, divisor) for model in models]
            supplies = [
                supply_of(recording, model, gpus, ranks, start)
                for recording, model, start in zip(recordings, narrow, starts, strict=False)
            ]
            first, flops = supplies[0], zip(supplies, narrow, strict=True)
            work = sum(supply.copies * model.ffn_flops_per_token for supply, model in flops)
            affordable = first.usual if shared else min(first.usual, max(ranks, int(FLOP_BUDGET * first.tokens / work)))
            replayed = min(first.most, affordable if launch.tokens is None else launch.tokens)
            both = {"model": narrow[0], "model_b": narrow[1] if launch.second else None}
            instructions = settled.instructions_of(launch, devices, ranks, plans=schedulers.plans, **both, tiers=tiers)
            traces = tuple(supply.part(first.part_of(replayed)) for supply in supplies)
            needed = forward_memory(instructions, traces, schedulers.profile)
            yield Attempt(
                instructions, traces, tuple(memory_checks(instructions, devices, needed, _advice(instructions, devices)))
            )

    chosen, memory = settled.first_that_fits(attempts())
    checks = (*_checks(chosen, recordings, memory, devices, gpus), *schedulers.checks(chosen.replayed[0].tokens))
    about = tuple(launch.plans), chosen.instructions, chosen.replayed, launch.limit, checks
    return PreparedLaunch(*about, profile=schedulers.profile)


def drawn_links(launch: Launch, ranks: int) -> Network | None:
    """The network between the ranks if it is emulated as drawn, None if it is that of some machine."""
    if launch.on != "testbed" or launch.cluster is None:
        return None
    testbed = emulated(launch.plans[0], launch.cluster, ranks, launch.scale)
    return Links.between(testbed.bandwidth, testbed.tiers).network


def _starts(plans: Sequence[Plan]) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The start GPUs of the tokens of both models. Raises InputError if plans of a launch do not agree, for all replay
    the same tokens."""
    starts = {(plan.token_gpus, plan.token_gpus_b) for plan in plans}
    if len(starts) > 1:
        alone = next(plan for plan in plans if plan.token_gpus is not None)
        raise InputError(
            f"the plan {alone.name} has each model's tokens on that model's own GPUs, another plan does not; launch them one "
            "by one"
        )
    return starts.pop()


def _check_travel(plan: Plan) -> None:
    """Raise InputError if no rank can carry out how a plan's tokens travel."""
    if plan.travel is None:
        return
    travels = f"in the plan {plan.name} tokens travel {plan.travel.in_words}"
    if plan.execution != "vanilla":
        raise InputError(
            f"{travels}, but a context-coherent launch sends one row per token copy in the model's format; launch a plan with "
            "--travel copies or with vanilla execution"
        )
    modes = [order.mode for order in (plan.send_order, plan.send_order_b) if order is not None]
    ordered = [mode for mode in modes if mode != "concurrent"]
    if plan.travel.unit == "node" and ordered:
        raise InputError(
            f"{travels}, which a launch sends all at once, not in a {ordered[0]} order; plan with a concurrent order, or with "
            "--travel gpu"
        )


def tiers_of(launch: Launch, ranks: int) -> Tiers | None:
    """The ranks' nodes, if a plan uses them. Raises InputError if they are not known, or no nodes."""
    plan, cluster = next(filter(uses_nodes, launch.plans), None), launch.cluster
    if plan is None:  # the all-gathers of context-coherent plans use them if they are known
        carried = any(plan.execution == "context-coherent" for plan in launch.plans)
        known = carried and cluster is not None and len(cluster.gpus) == settled.gpus_of(launch.plans)
        return fold_tiers(cluster, ranks) if known else None
    asked = settled.relays_of(plan)
    if cluster is None:
        raise InputError(f"{asked}; say which nodes there are (--cluster)")
    if len(cluster.gpus) != plan.placement.gpus:
        raise InputError(f"{asked}: it is for {plan.placement.gpus} GPUs, {cluster.name} has {len(cluster.gpus)}")
    tiers = fold_tiers(cluster, ranks)
    if tiers is None:
        nearest = nearest_ranks(launch.plans, cluster, ranks)
        raise InputError(f"{asked}; on {ranks} ranks one would stand for GPUs of several nodes: choose {nearest}")
    return tiers


def _check_recording(workload: Workload, model: MoEModel, plans: Sequence[Plan], number: int) -> None:
    """Raise InputError unless the recording can be replayed through model `number` of the plans."""
    model.check_recording(workload.layers, workload.num_experts, workload.k, workload.name)
    for plan in plans:
        placement = (plan.placement, plan.placement_b)[number]
        if placement is None:
            raise InputError(f"the plan {plan.name} is for one model, but two recordings are given; leave out the second")
        if placement.layers != workload.layers or placement.experts != workload.num_experts:
            raise InputError(
                f"the plan {plan.name} places {placement.experts} experts in {placement.layers} layers, but the "
                f"recording {workload.name} has {workload.num_experts} in {workload.layers}"
            )
        check_plan_for(workload, plan)


def _check_pair(plans: Sequence[Plan], recordings: Sequence[Workload]) -> None:
    """Raise InputError for plans of two models that no simulation predicts, and for those without a second model."""
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


def _advice(instructions: RankInstructions, devices: Devices) -> str:
    """Advice to a person if memory is short."""
    models = [model for model in (instructions.model, instructions.model_b) if model is not None]
    layer = sum(model.bytes_per_expert * model.experts for model in models)
    if layer < (sum(devices.memory[: instructions.gpus]) if instructions.gpus else devices.host_memory):
        return "replay fewer tokens or use fewer ranks"
    return f"the experts of one layer alone take {size(layer)}; launch it on a larger machine, by Slurm or on Kubernetes"


def _checks(
    chosen: Attempt, recordings: Sequence[Workload], memory: Iterable[Check], devices: Devices, gpus: int
) -> Iterator[Check]:
    instructions, traces = chosen.instructions, chosen.replayed
    yield settled.rank_check(instructions, gpus)
    yield settled.backend_check(instructions, devices)
    yield from memory
    each = f" of each of {len(instructions.plans)} plans in turn" if len(instructions.plans) > 1 else ""
    replayed = " and ".join(f"{trace.tokens:,}" for trace in traces)
    replayed += " of the recording" if len(traces) == 1 else " of the two recordings"
    if not all(isinstance(recording, RoutingTrace) for recording in recordings):
        replayed = in_words(recordings, traces)
    if travelling := [plan for plan in instructions.plans if plan.travel is not None]:
        rows = "; ".join(f"of {plan.name} {plan.travel.in_words}" for plan in travelling)
        yield Check("Rows", True, rows if len(instructions.plans) > 1 else travelling[0].travel.in_words)
    yield Check("Tokens", True, f"{replayed}, {instructions.repeats} timed passes{each} after a warm-up")
    yield from routing_checks(recordings, traces, (instructions.model, instructions.model_b))
    dtype = instructions.model.dtype
    rounded = max((coarsest(instructions.model, plan) for plan in instructions.plans), key=allowed)
    yield Check(
        "Numbers",
        True,
        f"{dtype}, random weights, routing replayed; attention is not run. What comes out is compared with "
        f"an unplanned computation{tolerance_in_words(dtype, rounded, 'the largest number')}",
    )

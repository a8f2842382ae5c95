"""The memory that a rank needs, and the checks that the devices and the host of a launch have it.

Tensors are counted. The memory of a process, a CUDA context and NCCL is estimated by public figures: it depends on the
GPU, the driver and the versions of PyTorch and NCCL.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.launch.places.devices import Devices
from engine.launch.preparation.launch import Check
from engine.launch.rank.instructions import POOL_STRIDE, RankInstructions, slots_to_fetch, uses_nodes
from engine.launch.step.sizes import check_step_plan
from engine.model import MoEModel
from engine.plan import Placement, Plan
from engine.units import share
from engine.workload import RoutingTrace

MIB, GIB = 2.0**20, 2.0**30
PROCESS, CODE = 256 * MIB, 192 * MIB
"""Bytes of a process that computes on CPUs, before it has any tensor of a launch: its own, and the code that all share.
Measured with PyTorch 2.13 on x86-64: 209 and 145 MiB in a forward pass, 238 and 189 in a training step."""
PROCESS_WITH_CUDA = 2 * GIB
"""Bytes of a process that computes on a GPU, an estimate: 0.4 to 2 GB (github.com/pytorch/pytorch/issues/113326)."""
CONTEXT = 512 * MIB
"""GPU bytes of each process on it, before it has any tensor, an estimate: 0.29 GB with kernels that are loaded when
they are needed (github.com/pytorch/pytorch/pull/86509), about 0.4 (issues/109888), and the workspaces of cuBLAS."""
ALL_KERNELS = 512 * MIB
"""Additional bytes if all kernels are loaded at once, as over NCCL (see `engine.launch.rank.settings`), an estimate:
0.67 GB in all against 0.29 in that pull request of 2022."""
COLLECTIVES, PEER = 688 * MIB, 448 * MIB
"""GPU bytes of an NCCL communicator with all-reduces, and of every peer that it sends to, an estimate: 688 MB with 4
A100 (github.com/NVIDIA/nccl/issues/964), and 3.28 GB more on each of 8 H100 after an all-to-all (issues/1685)."""
MOST_PEERS = 7
"""Most peers for which a GPU has buffers of their own: those of its node. The others share one buffer."""
USABLE = 0.8
"""Usable share of the free memory: allocators round up and leave holes, and others on the machine go on."""

LARGEST_MEASURED = 2.0
"""Most rows that the machine is measured with at the start, relative to the mean rank's."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes that the fullest rank needs at once in addition to those of its process.

    device: on the device that computes
    compared: there on rank 0 in addition, for the comparison
    host: its arrays, in the host's memory
    through_host: tensors of a rank on a GPU that are made in the host's memory first
    staged: page-locked memory for tensors on their way over Gloo
    """

    device: float
    compared: float
    host: float
    through_host: float
    staged: float


def memory_checks(instructions: RankInstructions, devices: Devices, needed: RankMemory, advice: str) -> Iterator[Check]:
    """Check that every device has room for its ranks, and the host for all of them. advice: for a person if there is none."""
    ranks, gpus, host = instructions.ranks, instructions.gpus, devices.host_memory
    if not gpus:
        rank_bytes = PROCESS + needed.device + needed.host
        yield _check("Memory", "of a host", rank_bytes, CODE + rank_bytes * ranks + needed.compared, host, advice)
        return
    rank_bytes = CONTEXT + needed.device
    host_bytes = PROCESS_WITH_CUDA + needed.host + needed.through_host
    if instructions.backend == "nccl":
        peers = min(ranks - 1, MOST_PEERS)
        rank_bytes += ALL_KERNELS + communicators(instructions) * (COLLECTIVES + PEER * peers)
    else:
        host_bytes += needed.staged
    room = min(devices.memory[:gpus])
    yield _check("Memory", "of a GPU", rank_bytes, rank_bytes * -(-ranks // gpus) + needed.compared, room, advice)
    yield _check("Host memory", "of a host", host_bytes, host_bytes * ranks, host, advice)


def communicators(instructions: RankInstructions) -> int:
    """Number of communicators that hold every rank: one of the launch, and one for each of two models; of a step one
    for all-to-alls, one for gradients, and two for every plan with several copies of its experts (see `Groups`)."""
    if instructions.ranks == 1:
        return 0
    if instructions.step is None:
        return 1 if instructions.model_b is None else 3
    groups = (check_step_plan(plan, instructions.model, instructions.step) for plan in instructions.plans)
    return 3 + 2 * sum(count > 1 for count in groups)


def _check(name: str, where: str, rank_bytes: float, need: float, room: float, advice: str) -> Check:
    most = f"{USABLE * room / GIB:.2f} GiB ({share(USABLE)}) may be used"
    text = f"{rank_bytes / GIB:.2f} GiB per rank, {need / GIB:.2f} of {room / GIB:.2f} GiB {where}, of which {most}"
    fits = need < USABLE * room
    return Check(name, fits, text if fits else f"{text}: {advice}")


class Part(NamedTuple):
    """One model of a plan.

    sent, received: copies of the rank that sends (receives) most in a layer
    """

    plan: Plan
    model: MoEModel
    trace: RoutingTrace
    placement: Placement
    sent: float
    received: float


def forward_memory(
    instructions: RankInstructions, traces: Sequence[RoutingTrace], profile: RoutingTrace | None = None
) -> RankMemory:
    """Memory of the fullest rank, which is taken to be the fullest in everything; of several plans one runs at a time.

    profile: tokens that schedulers of plans have learnt from
    """
    models = [instructions.model] if instructions.model_b is None else [instructions.model, instructions.model_b]
    pools = [_pool(model, traces[0].layers) for model in {model.digest: model for model in models}.values()]
    plans = [
        [
            Part(plan, model, trace, placement, *_copies(plan, trace, placement, instructions.ranks))
            for model, trace, placement in zip(models, traces, (plan.placement, plan.placement_b), strict=False)
        ]
        for plan in instructions.plans
    ]
    at_work = max(sum(map(_at_work, parts)) for parts in plans)
    outputs, compared, routes = 0.0, 0.0, 0.0
    for part in (part for parts in plans for part in parts):  # every plan keeps the output of its last pass, and all routes
        held = part.trace.tokens / (instructions.ranks if part.plan.execution == "vanilla" else 1)
        outputs += held * part.model.bytes_per_token
        compared = max(compared, _compared(part))
        # Token, choice, expert and rank of every copy of all ranks in both exchanges of every layer, as int64, and as much
        # again of one layer while it is laid out.
        routes += 64.0 * part.trace.tokens * part.trace.k * (part.trace.layers + 2)
    # A scheduled plan has all experts in the host's memory, those fetched in slots, and the experts that followed each path.
    scheduled = [plan for plan in instructions.plans if plan.reaction is not None]
    in_host = len(scheduled) * 2.0 * pools[0]
    known = 0.0 if profile is None else profile.experts.nbytes + len(scheduled) * 64.0 * profile.experts.size
    fetched = sum(map(slots_to_fetch, scheduled)) * instructions.model.bytes_per_expert
    on_gpu = instructions.device == "cuda"
    return RankMemory(
        device=sum(pools) + outputs + at_work + fetched + (0.0 if on_gpu else in_host),
        compared=max(0.0, compared - at_work),
        host=routes + known + (in_host if on_gpu else 0.0) + sum(trace.experts.nbytes + 4.0 * trace.tokens for trace in traces),
        # Random numbers are made in 32 bits.
        through_host=4.0 * max(pool / model.bytes_per_number for pool, model in zip(pools, models, strict=False))
        + 4.0 * max(trace.tokens * model.d_model for trace, model in zip(traces, models, strict=True)),
        # In both directions, each rounded up to a power of two.
        staged=max(sum(2.0 * (p.sent + p.received) * p.model.bytes_per_token for p in parts) for parts in plans),
    )


def _copies(plan: Plan, trace: RoutingTrace, placement: Placement, ranks: int) -> tuple[float, float]:
    """(sent, received) of the busiest rank in a layer."""
    demand = trace.demand(ranks)
    # If tokens choose their copies, one may serve all that choose its expert.
    chooses = plan.travel is not None and plan.travel.replicas is not None
    share = placement.share > 0 if chooses else placement.share
    received = float((demand.sum(axis=1)[:, None, :] @ share).max())
    return float(demand.sum(axis=2).max()) if plan.execution == "vanilla" else received, received


def _pool(model: MoEModel, layers: int) -> float:
    """Bytes of the random numbers that all experts are cut from, and of the routers."""
    strides = POOL_STRIDE * (layers * model.experts + 1)
    return model.bytes_per_expert + (strides + layers * model.d_model * model.experts) * model.bytes_per_number


def _at_work(part: Part) -> float:
    """Bytes of a layer's experts and of the rows at hand."""
    model, number = part.model, part.model.bytes_per_number
    computed = max(part.received, LARGEST_MEASURED * part.trace.tokens * model.experts_per_token / part.placement.gpus)
    # Rows passed on for others lie in a pool: in each of two hops about as many as a rank sends or receives itself.
    copies = 9.0 if uses_nodes(part.plan) else 6.0
    held = float(part.placement.slots.max())
    if part.plan.reaction is not None:
        held = max(held, part.plan.reaction.max_experts_per_device)
    total = held * model.bytes_per_expert
    total += copies * (part.sent + part.received) * model.bytes_per_token
    # Inner rows before, in and after the activation.
    total += computed * (model.ffn_matrices + 1) * model.d_ff * number
    # All tokens, as they are made, and after both all-gathers of a context-coherent pass.
    gathered = 1 if part.plan.execution == "vanilla" else 4
    return total + part.trace.tokens * model.d_model * (4 + number * gathered)


def _compared(part: Part) -> float:
    """Bytes on rank 0 of all ranks' tokens and their intermediate results in a layer, expert after expert, in 32 bits;
    a model in shorter numbers is computed in those first."""
    model, wide = part.model, max(part.model.bytes_per_number, 4.0)
    gathered = 5 if part.plan.execution == "vanilla" else 8
    rows = float(part.trace.demand(1).max())
    total = part.trace.tokens * (model.d_model * (8 + gathered * wide) + 2 * 4.0 * model.experts)
    total += rows * (model.d_model * (8 + 3 * wide) + (model.ffn_matrices + 1) * model.d_ff * wide)
    return total + model.bytes_per_expert * (1 + wide / model.bytes_per_number) + 8.0 * part.trace.experts.size

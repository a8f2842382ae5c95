"""What a rank needs in memory, and whether the devices and the host of a launch have it.

What tensors take is counted. What a process, a CUDA context and NCCL take by themselves is estimated by public figures: it
depends on the GPU, the driver and the versions of PyTorch and NCCL.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.launch.places.devices import Devices
from engine.launch.preparation.prepared import Check
from engine.launch.rank.instructions import RankInstructions
from engine.launch.step.problem import check_step_plan

MIB, GIB = 2.0**20, 2.0**30

PROCESS, CODE = 256 * MIB, 192 * MIB
"""Of a process that computes on CPUs, before it has any tensor of a launch: what is its own, and the code that all share.
Measured with PyTorch 2.13 on x86-64: 209 and 145 MiB in a forward pass, 238 and 189 in a training step."""
PROCESS_WITH_CUDA = 2 * GIB
"""The same in one that computes on a GPU, an estimate: 0.4 to 2 GB (github.com/pytorch/pytorch/issues/113326)."""
CONTEXT = 512 * MIB
"""Of a GPU's memory in each process on it, before it has any tensor, an estimate: 0.29 GB with kernels that are loaded when
they are needed (github.com/pytorch/pytorch/pull/86509), about 0.4 (issues/109888), and the workspaces of cuBLAS."""
ALL_KERNELS = 512 * MIB
"""More where all kernels are loaded at once, as over NCCL (see `engine.launch.rank.settings`), an estimate: 0.67 GB in all
against 0.29 in that pull request of 2022."""
COLLECTIVES, PEER = 688 * MIB, 448 * MIB
"""Of a GPU's memory for an NCCL communicator with all-reduces, and more for every peer that it sends to, an estimate: 688 MB
with 4 A100 (github.com/NVIDIA/nccl/issues/964), and 3.28 GB more on each of 8 H100 after an all-to-all (issues/1685)."""
MOST_PEERS = 7
"""To which a GPU has buffers of their own: those of its node. To the others it sends through a buffer that they share."""
USABLE = 0.8
"""Of what is free: allocators round up and leave holes, and others on the machine go on."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes that the fullest rank needs at once beside those of its process.

    device: where it computes; compared: there on rank 0 besides, for the comparison; host: its arrays, in the host's memory;
    through_host: of a rank that computes on a GPU, what is made in the host's memory first; staged: what passes through
    page-locked memory where it talks over Gloo
    """

    device: float
    compared: float
    host: float
    through_host: float
    staged: float


def memory_checks(instructions: RankInstructions, devices: Devices, needed: RankMemory, advice: str) -> Iterator[Check]:
    """Whether every device has room for its ranks, and the host for all of them. advice: what to do where there is none"""
    ranks, gpus, host = instructions.ranks, instructions.gpus, devices.host_memory
    if not gpus:
        rank_bytes = PROCESS + needed.device + needed.host
        yield _check("Memory", rank_bytes, CODE + rank_bytes * ranks + needed.compared, host, advice)
        return
    rank_bytes = CONTEXT + needed.device
    host_bytes = PROCESS_WITH_CUDA + needed.host + needed.through_host
    if instructions.backend == "nccl":
        rank_bytes += ALL_KERNELS + nccl_bytes(instructions)
    else:
        host_bytes += needed.staged
    room = min(devices.memory[:gpus])
    yield _check("Memory", rank_bytes, rank_bytes * -(-ranks // gpus) + needed.compared, room, advice)
    yield _check("Host memory", host_bytes, host_bytes * ranks, host, advice)


def nccl_bytes(instructions: RankInstructions) -> float:
    """Of a GPU's memory for all communicators of a launch."""
    return communicators(instructions) * (COLLECTIVES + PEER * min(instructions.ranks - 1, MOST_PEERS))


def communicators(instructions: RankInstructions) -> int:
    """That hold every rank: of the launch, of two models one each; of a step one for all-to-alls, one for gradients, and two
    for every plan whose experts are there several times (see `Groups`)."""
    if instructions.ranks == 1:
        return 0
    if instructions.step is None:
        return 1 if instructions.model_b is None else 3
    groups = (check_step_plan(plan, instructions.model, instructions.step) for plan in instructions.plans)
    return 3 + 2 * sum(count > 1 for count in groups)


def _check(name: str, rank_bytes: float, need: float, room: float, advice: str) -> Check:
    text = f"{rank_bytes / GIB:.2f} GiB per rank, {need / GIB:.2f} of {room / GIB:.2f} GiB"
    fits = need < USABLE * room
    return Check(name, fits, text if fits else f"{text}: {advice}")

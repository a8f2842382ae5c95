"""The ranks of a model under a plan: their group, the device that they exchange from, and the end of one of them, which the
others learn in a line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engine.errors import InputError, LostRankError
from engine.runtime.exchange.recorder import communication_device

OF_NCCL = re.compile(r"^nccl\w+: .*\n(?:Last error:\s*)?(.+)", re.MULTILINE)
"""The cause in the last line of PyTorch's report on an NCCL error."""
CLOSED = re.compile(r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|remote process")
PLACE = re.compile(r"^(\[[^\]]*\] )+")
"""Source positions that a library puts before its errors."""


def ranks_of(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int, int]:
    """(group, its ranks, the rank of this process): without a group all ranks of the job if there are several processes."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return None, 1, 0
    group = group or dist.group.WORLD
    return group, dist.get_world_size(group), dist.get_rank(group)


def check_device(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise InputError if the backend of a group exchanges no tensors of a device, as NCCL none of the host's memory."""
    backend_of = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    if device.type not in backend_of:
        raise InputError(
            f"the ranks exchange over {', '.join(sorted({*backend_of.values()}))}, which takes no tensors on the device "
            f"{device.type}: put the model on this rank's GPU, with load_planned by loading=Loading(device=…), or join by gloo"
        )


def cause_of(error: Exception) -> str:
    """The cause in PyTorch's report on an exchange that failed."""
    if by_nccl := OF_NCCL.search(str(error)):
        return by_nccl[1]
    return PLACE.sub("", (str(error).splitlines() or [""])[0]).partition(". This is typically")[0]


def is_loss(error: Exception) -> bool:
    """True if an exchange failed because another rank is gone, or has not come in time."""
    if OF_NCCL.search(str(error)):
        return CLOSED.search(cause_of(error)) is not None
    return isinstance(error, dist.DistError) or "gloo/" in str(error)


@contextmanager
def among_ranks() -> Iterator[None]:
    """Inside, ranks exchange. Raises LostRankError where a backend says in its own words that another one is gone; which one
    it knows by its address alone."""
    try:
        yield
    except RuntimeError as error:
        if not is_loss(error):
            raise
        said = f"rank {dist.get_rank()} lost another rank: {cause_of(error)}"
        raise LostRankError(f"{said}; the output of that one or of what started it says why") from None


@contextmanager
def all_or_none(group: dist.ProcessGroup | None, device: torch.device, doing: str) -> Iterator[None]:
    """At the end of the block all ranks know whether it went well on all: a rank that failed raises its own error, and the
    others one that names it, so that none waits for a rank that has gone."""
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    if group is not None:
        own = torch.tensor([failure is None], dtype=torch.int64, device=communication_device(device, group))
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        try:
            dist.all_gather(every, own, group=group)
        except RuntimeError as error:
            raise failure or LostRankError(f"a rank ended before it had {doing}: {cause_of(error)}") from None
        failed = [rank for rank, fine in enumerate(every) if not int(fine)]
        if failure is None and failed:
            raise InputError(f"rank {failed[0]} has not {doing}; its own message says why")
    if failure is not None:
        raise failure

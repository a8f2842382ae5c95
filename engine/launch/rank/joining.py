"""The beginning and end of a rank: it meets the others, ends with the process that started it, and reports the cause
when it fails."""

import contextlib
import faulthandler
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from engine.errors import InputError, LostRankError
from engine.launch.rank.failure import STACK, RankFailure
from engine.runtime.ranks import OF_NCCL, cause_of, is_loss

JOIN_LIMIT = 120.0
"""Seconds for which a rank waits for the others to start: they may have to read PyTorch from a network file system."""

GRACE = 5.0
"""Seconds for which a rank that has run out of patience may be stuck in a connection."""

NO_MEMORY = re.compile(r"(can't|[Cc]annot) allocate memory|out of memory|failed to map segment")
WANTED = re.compile(r"ried to allocate ([\d.]+ \w+)")
SHARED_MEMORY = "shared memory segment"


@contextlib.contextmanager
def reporting_failure() -> Iterator[None]:
    """End this process when the body fails: with a traceback on standard error, and a line for the process that started the
    ranks. At once, because waiting for ranks that are gone may never end. Inside, `STACK` prints this process's stack."""
    faulthandler.register(STACK, all_threads=False)
    try:
        yield
    except Exception as error:
        _end(error)


@contextlib.contextmanager
def joined(backend: str, limit: float, device: torch.device) -> Iterator[None]:
    """Join this rank with all others for the body. Raises InputError that names those that have not come after `JOIN_LIMIT`.

    NCCL learns the device and connects all ranks at once: one that cannot is known before anything is measured, later
        groups are split off (in which all ranks have to take part), a barrier does not have to guess its GPU, and a
        send outside a batch uses the existing communicator instead of making one for each pair.

    limit: seconds for which a rank may wait for another one
    device: the device that the rank computes on
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _meet(rank, ranks, min(JOIN_LIMIT, limit))
    bound = device if backend == "nccl" and device.type == "cuda" else None
    wait = timedelta(seconds=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=wait, device_id=bound)
    yield
    dist.destroy_process_group()


def _meet(rank: int, ranks: int, patience: float) -> dist.Store:
    """The store through which all ranks have found each other. Raises InputError that names those that have not come."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
    keeper = "torchrun" if served else "rank 0"
    absent = InputError(f"{keeper} did not answer at {host} port {port} within {patience:g} s")
    wait = timedelta(seconds=patience)
    # A host that accepts connections and then says nothing would be waited for without end.
    alarm = threading.Timer(patience + GRACE, _end, [absent])
    alarm.daemon = True
    alarm.start()
    try:
        try:
            store = dist.TCPStore(host, port, ranks, rank == 0 and not served, wait, wait_for_workers=False)
        except dist.DistError as error:
            if "EADDRINUSE" in str(error):
                raise InputError(f"port {port} of {host}, where the ranks meet, is in use by another program") from None
            raise absent from None
        _gather(store, rank, ranks, patience)
    finally:
        alarm.cancel()
    return store


def _gather(store: dist.Store, rank: int, ranks: int, patience: float) -> None:
    """Wait for all ranks. Raises InputError that names those that have not come."""
    keys = [f"joined/{other}" for other in range(ranks)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, timedelta(seconds=patience))
    except dist.DistStoreError:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
        raise InputError(f"{who} did not join within {patience:g} s") from None


def _end(error: Exception) -> NoReturn:
    with contextlib.suppress(Exception):  # a full disk, or no memory for a traceback
        if not isinstance(error, InputError):
            traceback.print_exception(error)
    code = 1
    try:
        sys.stdout.write(failure_of(error, int(os.environ["RANK"])).line)
        sys.stdout.flush()
    except OSError:
        code = os.EX_IOERR
    os._exit(code)


def failure_of(error: Exception, rank: int) -> RankFailure:
    """The report of a rank on the exception that ends it."""
    if isinstance(error, InputError):
        return RankFailure(rank, str(error), isinstance(error, LostRankError))
    by_nccl, text = OF_NCCL.search(str(error)), cause_of(error)
    if by_nccl and SHARED_MEMORY in text:
        room = "make room there (containers have 64 MB unless told otherwise: --shm-size)"
        return RankFailure(rank, f"rank {rank}: {text}; {room}", False)
    if by_nccl and "Duplicate GPU" in text:
        return RankFailure(rank, f"rank {rank} shares its GPU with another rank, which NCCL cannot: {text}", False)
    if isinstance(error, MemoryError) or NO_MEMORY.search(text):
        size = WANTED.search(text)
        wanted = f" (it wanted {size[1]} more)" if size else ""
        return RankFailure(rank, f"rank {rank} is out of memory{wanted}; use fewer ranks or replay fewer tokens", False)
    if by_nccl and not is_loss(error):
        return RankFailure(rank, f"rank {rank} failed in NCCL: {text}", False)
    if is_loss(error):
        return RankFailure(rank, f"rank {rank} lost another rank: {text}", True)
    if isinstance(error, OSError) and error.filename:
        return RankFailure(rank, f"rank {rank}: {error.filename}: {error.strerror}", False)
    return RankFailure(rank, f"rank {rank} failed: {type(error).__name__}: {text}", False)

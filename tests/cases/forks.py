"""Ranks that are forks of one process, which has imported all that takes seconds; on a testbed each in its own namespace."""

import ctypes
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from engine.launch.places.testbed import LINK

NETWORK = 0x40000000
"""CLONE_NEWNET."""


def forked(run: Callable[[int], object], ranks: int, folder: Path, namespaces: Sequence[str] = ()) -> list:
    """The answers of `run(rank)` on Gloo ranks, as JSON keeps them. Raises AssertionError if a rank fails.

    folder: an empty one
    namespaces: of a testbed's ranks, see `Testbed.namespace`
    """
    torch.set_num_threads(1)

    def be(rank: int) -> None:
        if namespaces:
            with Path("/run/netns", namespaces[rank]).open() as network:
                assert ctypes.CDLL(None).setns(network.fileno(), NETWORK) == 0
            os.environ |= {"GLOO_SOCKET_IFNAME": LINK, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        (folder / f"of-{rank}.json").write_text(json.dumps(run(rank)))
        sys.stdout.flush()
        os._exit(0)  # the last thing that ranks do may have been to break the group

    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=be, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * ranks
    return [json.loads((folder / f"of-{rank}.json").read_text()) for rank in range(ranks)]

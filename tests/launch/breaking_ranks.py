"""One of two ranks that break NCCL's rules in every way: `python -m tests.launch.breaking_ranks RANK 2 FOLDER`.

It writes the refusals as `outcome-RANK.json`.
"""

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.launch import nccl_rules


def refusal(act: Callable[[], object]) -> str:
    """The refusal; empty if there is none."""
    try:
        act()
    except nccl_rules.NcclError as error:
        return str(error)
    return ""


def main(rank: int, ranks: int, folder: Path) -> None:
    nccl_rules.patch()
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    groups, other = [dist.new_group(), dist.new_group()], 1 - rank
    outcome = {}

    arriving = torch.zeros(4)
    receive = dist.P2POp(dist.irecv, arriving, other, groups[0])
    sends = [dist.P2POp(dist.isend, torch.ones(4), other, group) for group in groups]
    outcome["mixed"] = refusal(lambda: dist.batch_isend_irecv([receive, sends[1]]))
    outcome["alone"] = refusal(lambda: dist.isend(torch.ones(4), other, groups[0]))

    nccl_rules.DELAY = 1.0  # or on a busy machine something may have arrived before it is looked at
    for work in dist.batch_isend_irecv([receive, sends[0]]):
        work.wait()
    outcome["by the host"] = arriving.numpy().tolist()
    nccl_rules.DELAY = 0.0
    with nccl_rules.stream:
        outcome["by a kernel"] = (arriving + 0).tolist()

        def crossed() -> None:
            works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups[:: 1 - 2 * rank]]
            for work in works:
                work.wait()
            torch.ones(1).add(1)

        dist.barrier()
        outcome["crossed"] = refusal(crossed)
    (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))
    os._exit(0)  # a thread that waits for the other rank waits for ever


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

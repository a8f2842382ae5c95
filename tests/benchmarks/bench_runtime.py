"""A planned MoE layer and the PyTorch calls that it needs, written by hand, in turn on the same ranks:
`python -m tests.benchmarks.bench_runtime [REPEATS [TOKENS …]]` (default 15 runs of 512 and of 8,192 tokens a rank).

By hand is what a person writes for one fixed layout, experts in blocks of ranks: an all-to-all of counts and one of rows each
way, the rows sorted by expert, a product for every expert, the outputs added up. Printed for 2 and 4 ranks over Gloo, forward
alone and with backward: the median milliseconds of both, and the median of the ratios of runs that followed each other
directly, by the clock and by the processor time of all ranks. Other work on the machine disturbs the clock.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.plan import Placement, Plan, SendOrder
from engine.result import Provenance
from engine.runtime.layer import PlannedExperts
from engine.runtime.layer_plan import layer_plans
from tests.benchmarks.shared import columns
from tests.cases.live_layers import stack_of

EXPERTS, K, WIDTH, D_FF = 16, 2, 256, 512
TOKENS = (512, 8192)


def plan_of(ranks: int) -> Plan:
    """Experts in blocks, everything sent at once."""
    slots = tuple(tuple(block.tolist()) for block in np.split(np.arange(EXPERTS), ranks))
    placement = Placement(experts=EXPERTS, experts_of_gpu=(slots,), model_layers=(0,))
    about = {"name": "blocks", "send_order": SendOrder(mode="concurrent"), "provenance": Provenance(optimiser="linear")}
    return Plan(placement=placement, **about)


def by_hand(x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor, inward: torch.Tensor, outward: torch.Tensor):
    """The same layer in plain calls."""
    ranks, own = dist.get_world_size(), len(inward)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=EXPERTS)
    came = torch.empty_like(counts)
    dist.all_to_all_single(came, counts)
    by_source = came.view(ranks, own)
    sent, received = counts.view(ranks, own).sum(1).tolist(), by_source.sum(1).tolist()
    token = order // K
    rows = AllToAll.apply(x.index_select(0, token), received, sent)
    expert = torch.arange(own).repeat(ranks).repeat_interleave(came)
    by_expert = expert.argsort(stable=True)
    rows = rows.index_select(0, by_expert)
    outputs = []
    for mine, into, out in zip(rows.split(by_source.sum(0).tolist()), inward.unbind(), outward.unbind(), strict=True):
        gates, values = (mine @ into).chunk(2, dim=1)
        outputs.append((torch.nn.functional.silu(gates) * values) @ out)
    outputs = torch.cat(outputs).index_select(0, by_expert.argsort())
    back = AllToAll.apply(outputs, sent, received)
    return torch.zeros_like(x).index_add(0, token, back * weight.flatten()[order, None])


class AllToAll(torch.autograd.Function):
    """An all-to-all with gradients."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        into = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(into, rows, received, sent)
        return into

    @staticmethod
    def backward(ctx, rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return AllToAll.forward(ctx, rows.contiguous(), *ctx.sizes), None, None


def measured(rank: int, ranks: int, tokens: int, backward: bool, repeats: int) -> dict:
    """Seconds of every run of both, in turn."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn((tokens, WIDTH), generator=generator).requires_grad_(backward)
    chosen = torch.rand((tokens, EXPERTS), generator=generator).argsort(dim=1)[:, :K]
    weight = torch.rand((tokens, K), generator=generator)
    (way,) = layer_plans(plan_of(ranks), ranks, rank)
    every = torch.Generator().manual_seed(100)
    inward = torch.randn((EXPERTS, WIDTH, 2 * D_FF), generator=every)[list(way.held)] / WIDTH**0.5
    outward = torch.randn((EXPERTS, D_FF, WIDTH), generator=every)[list(way.held)] / D_FF**0.5
    layer = PlannedExperts(stack_of(inward, outward), way)
    matrices = [parameter.detach().clone().requires_grad_(backward) for parameter in layer.parameters()]
    ways = {"planned": lambda: layer(x, chosen, weight), "by hand": lambda: by_hand(x, chosen, weight, *matrices)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with torch.set_grad_enabled(backward):
        for number in range(repeats + 2):
            outputs = {}
            for name in list(ways)[:: 1 if number % 2 else -1]:
                for leaf in (x, *layer.parameters(), *matrices):
                    leaf.grad = None
                dist.barrier()
                begin, worked = time.perf_counter(), time.process_time()
                outputs[name] = ways[name]()
                if backward:
                    outputs[name].sum().backward()
                dist.barrier()
                if number >= 2:
                    taken[name].append((time.perf_counter() - begin, time.process_time() - worked))
            assert torch.allclose(*outputs.values(), atol=1e-4)
    return taken


def child(rank: int, ranks: int, folder: Path, repeats: int, *tokens: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    cases = [(count, backward) for count in tokens for backward in (False, True)]
    outcome = [measured(rank, ranks, *case, repeats) for case in cases]
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


def main(repeats: int = 15, *tokens: int) -> None:
    tokens = tokens or TOKENS
    row = columns(
        {
            "ranks": "d",
            "tokens": ",d",
            "run": ">13s",
            "planned, ms": ".1f",
            "by hand, ms": ".1f",
            "ratio": ".3f",
            "of CPU": ".3f",
        }
    )
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "tests.benchmarks.bench_runtime", "--child"]
            settings = os.environ | {"OMP_NUM_THREADS": "1"}
            words = [[*command, str(rank), str(ranks), folder, *map(str, (repeats, *tokens))] for rank in range(ranks)]
            for process in [subprocess.Popen(words_of, env=settings) for words_of in words]:
                if process.wait():
                    raise SystemExit("a rank failed")
            outcomes = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
        cases = [(count, run) for count in tokens for run in ("forward", "and backward")]
        for place, (count, run) in enumerate(cases):
            # float64[way, repeat, 2]: the clock of the slowest rank, the processor time of all
            both = [np.array([outcome[place][name] for outcome in outcomes]) for name in ("planned", "by hand")]
            (planned, hand), (worked, by_hand_worked) = zip(*((of.max(0)[:, 0], of.sum(0)[:, 1]) for of in both), strict=True)
            ratios = np.median(planned / hand), np.median(worked / by_hand_worked)
            row(ranks, count, run, np.median(planned) * 1e3, np.median(hand) * 1e3, *ratios)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), *map(int, sys.argv[5:]))
    else:
        main(*map(int, sys.argv[1:]))

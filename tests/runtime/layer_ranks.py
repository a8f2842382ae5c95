"""One of the ranks of `test_layer`: `python -m tests.runtime.layer_ranks RANK RANKS FOLDER`, with the plans in the file that
`PLANS` names. It runs a layer of each forward and backward, and writes outputs, gradients and bytes as `outcome-RANK.json`.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from engine.plan import Plan
from engine.runtime.exchange.links import Tiers
from engine.runtime.gradients import reduce_gradients
from engine.runtime.layer import PlannedExperts
from engine.runtime.layer_plan import layer_plans
from engine.runtime.live import LiveExchange
from tests.cases.live_layers import WIDTH, matrices_of, stack_of, tokens_of


class Model(nn.Module):
    """A layer under a plan, after a dense one that every rank has: a factor of each number."""

    def __init__(self, layer: PlannedExperts) -> None:
        super().__init__()
        self.layer, self.factor = layer, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.factor, chosen, weight)


class Counted:
    """Bytes that leave this rank for others with the rows of tokens, as PyTorch is given them. to: those to each rank"""

    def __init__(self, rank: int) -> None:
        self.rank, self.to, self._of_tokens = rank, Counter(), False
        begin, to_all, send, operation = LiveExchange.begin, dist.all_to_all_single, dist.isend, dist.P2POp

        def counted_begin(*arguments):
            self._of_tokens = True
            arrived = begin(*arguments)
            self._of_tokens = False
            return arrived

        def counted_to_all(into, out, into_splits, out_splits, **more):
            if self._of_tokens:
                self.to.update({dst: rows * out[:1].nbytes for dst, rows in enumerate(out_splits) if dst != rank})
            return to_all(into, out, into_splits, out_splits, **more)

        def counted_send(tensor, dst, *more):
            self.to[dst] += tensor.nbytes if tensor.dim() == 2 else 0  # one byte alone is the reply to an arrival
            return send(tensor, dst, *more)

        def counted_operation(how, tensor, peer, *more):
            self.to[peer] += tensor.nbytes if how is counted_send else 0
            return operation(send if how is counted_send else how, tensor, peer, *more)

        self.patches = [
            mock.patch.object(LiveExchange, "begin", counted_begin),
            mock.patch.object(dist, "all_to_all_single", counted_to_all),
            mock.patch.object(dist, "isend", counted_send),
            mock.patch.object(dist, "P2POp", counted_operation),
        ]

    def __enter__(self) -> "Counted":
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error) -> None:
        for patch in self.patches:
            patch.stop()


def outcome_of(case: dict, rank: int, ranks: int, group: dist.ProcessGroup | None = None) -> dict:
    """Outputs, gradients and bytes of one layer under a plan, among the ranks of a group."""
    plan = Plan.model_validate_json(case["plan"])
    tiers = None if case["tiers"] is None else Tiers(**case["tiers"])
    way = layer_plans(plan, ranks, rank, tiers)[-1]
    inward, outward = (matrices[list(way.held)] for matrices in matrices_of(way.experts))
    model = Model(PlannedExperts(stack_of(inward, outward), way, group))
    tokens = tokens_of(ranks, way.experts).of(rank)
    x, weight = tokens.x.requires_grad_(), tokens.weight.requires_grad_()
    with Counted(rank) as there:
        y = model(x, tokens.chosen, weight)
    with Counted(rank) as back:
        (y * tokens.target).sum().backward()
    reduce_gradients(model, group)
    with torch.inference_mode():
        again = model(x, tokens.chosen, weight)
    experts = model.layer.experts
    gradients = {
        name: torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
        for name, matrix in (("inward", experts.inward), ("outward", experts.outward), ("factor", model.factor))
    }
    tensors = {"y": y, "again": again, "x": x.grad, "weight": weight.grad} | gradients
    sent = [[counted.to[dst] for dst in range(ranks)] for counted in (there, back)]
    return {"held": way.held, "bytes": sent, **{name: tensor.tolist() for name, tensor in tensors.items()}}


def main(rank: int, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    cases = json.loads(Path(os.environ["PLANS"]).read_text())
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])] if ranks == 4 else []
    outcome = {}
    for name, case in cases.items():
        alone = "in a group" in name  # of ranks 1 and 3, or of the other two
        ends = (rank // 2, 2, groups[rank % 2]) if alone else (rank, ranks)
        outcome[name] = outcome_of(case, *ends)
    dist.barrier()
    (folder / f"outcome-{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

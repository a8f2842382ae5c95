"""A person's own model on a rank: loaded once, with the experts of all plans that are compared, and run under one after
another. Plans differ in who computes; weights that a rank holds under two plans are there once.

Each rank has texts of its own, as one batch. All ranks call the model equally often, one with shorter texts or without any too,
and go on to the last token whatever ends a sequence.
"""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from engine.files import open_atomically
from engine.launch.own.check import Outputs, Unplanned
from engine.launch.own.watch import Some, Watch, WatchedExperts
from engine.launch.rank.context import RankContext
from engine.launch.rank.difference import Difference
from engine.launch.rank.instructions import BEGINS, COMPARED_PASSES, ROUTING_OF_RANK, Tokens, writing
from engine.launch.rank.measure_machine import SHORT_REPEATS, measure_machine, seconds_of
from engine.plan import Plan, SendOrder, together
from engine.runtime.describe import describe_here
from engine.runtime.generation import passes
from engine.runtime.layer import PlannedExperts
from engine.runtime.layer_plan import layer_plans
from engine.runtime.live import LiveExchange
from engine.runtime.weights import Loading, load_planned
from engine.timeline import PREFILL_LABEL, TOKEN_LABEL

REPORTS = 20
"""Reports of a pass on how far it is: few, as it is timed meanwhile; and of the loading."""


def measure_machine_for_own(context: RankContext) -> dict[str, list]:
    """As `measure_machine`, around the tokens of the prefill; "decode": the same around those of each further token, since
    lines that are fitted around thousands of rows say little of a few; "sizes": [0, seconds] of a live exchange of sizes."""
    instructions, ranks = context.instructions, context.ranks
    own, model, device = instructions.own, instructions.model, context.device

    def around(tokens: int) -> dict[str, list]:
        shape = (tokens, len(model.moe_layers), model.experts_per_token)
        stand_in = Tokens(np.broadcast_to(np.int16(0), shape), np.zeros(tokens, np.int32))
        return measure_machine(RankContext(instructions, (stand_in,), context.rank, device, context.recorder))

    measured = around(own.computed(ranks))
    if own.new_tokens > 1:
        measured["decode"] = around(sum(len(own.batch(rank, ranks)) for rank in range(ranks)))
    if ranks > 1:
        way = layer_plans(instructions.plans[0], ranks, context.rank, instructions.tiers)[0]
        exchange, slots = LiveExchange(way, None), way.slots_of_rank
        counts = torch.zeros((sum(slots), 1), dtype=torch.int64, device=device)
        measured["sizes"] = [[0, seconds_of(lambda: exchange.sizes(counts, slots), context, SHORT_REPEATS)]]
    return measured


class OwnRank:
    """The model on this rank, and the outputs of each plan's last pass. Making it loads the weights, on all ranks."""

    def __init__(self, context: RankContext) -> None:
        instructions, own = context.instructions, context.instructions.own
        self.context, self.watch = context, Watch(context.recorder)
        self.texts = own.batch(context.rank, context.ranks)
        self.unplanned = Unplanned(context) if own.compared else None
        self.routing: list[np.ndarray] = []
        """int16[token, layer, k] of every pass of the model in the warm-up, which is the same under all plans."""
        plans = [_ascending(plan) for plan in instructions.plans]
        self._union = together([plan.placement for plan in plans])
        union = plans[0].model_copy(
            update={
                "placement": self._union,
                "send_order": SendOrder(mode="concurrent"),
                **dict.fromkeys(("travel", "pipeline", "claim", "reaction", "offload")),
            }
        )
        loading = Loading(context.dtype, context.device, instructions.seed, report=self._loaded)
        self._told = 0.0
        self._described = describe_here(Path(own.folder), instructions.model.dtype)  # with the libraries, which are no weights
        before = self._held()
        self.model = load_planned(Path(own.folder), union, loading=loading)
        self.memory = self._held() - before
        self._blocks = [block for block in self.model.modules() if isinstance(getattr(block, "experts", None), PlannedExperts)]
        self._blocks.sort(key=lambda block: block.experts.way.layer)
        self._of_plan = [self._layers(plan) for plan in plans]
        for layer, block in enumerate(self._blocks):
            router = getattr(block, "gate", None) or block.router
            router.register_forward_pre_hook(partial(self._before_router, layer))

    def _layers(self, plan: Plan) -> list[WatchedExperts]:
        """The layers of a plan, with the experts of this rank among those that it holds for all plans."""
        context, layers = self.context, []
        ways = layer_plans(plan, context.ranks, context.rank, context.instructions.tiers)
        for block, way in zip(self._blocks, ways, strict=True):
            held = block.experts.way.held
            places = [held.index(expert) for expert in way.held]
            some = Some(block.experts.experts, places, len(held))
            layers.append(WatchedExperts(some, way, None, self.watch).eval())
        return layers

    def _before_router(self, layer: int, *_: object) -> None:
        self.watch.computed("attention", layer)

    def _loaded(self, share: float, line: str) -> None:
        if share >= self._told:  # a model may have tens of thousands of tensors
            self._told = share + 1 / REPORTS
            self.context.report(BEGINS * (0.2 + 0.8 * share), line)

    def _held(self) -> int:
        """Bytes of tensors on the device, or of this process that are no file's."""
        if self.context.device.type == "cuda":
            return torch.cuda.memory_allocated(self.context.device)
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared

    def run(self, plan: int, report: Callable[[float, str], None]) -> Outputs:
        """One pass under a plan: the texts, then token by token."""
        for block, layer in zip(self._blocks, self._of_plan[plan], strict=True):
            block.experts = layer
        count = self.context.instructions.own.new_tokens
        kept = set(np.linspace(0, count - 1, min(count, COMPARED_PASSES)).round().astype(int).tolist())
        every, chosen, logits = max(1, count // REPORTS), [], []
        steps = passes(self.model, self.texts, count)
        self.watch.routing = None if self.routing else (routed := [])
        dist.barrier()
        for step in range(count):
            if step % every == 0:
                report(step / count, f"token {step + 1} of {count}")
            self.watch.begin(PREFILL_LABEL if step == 0 else f"{TOKEN_LABEL}{step + 1}")
            of_step, best = next(steps)
            chosen.append(best)
            if step in kept and self.unplanned is not None:
                logits.append(of_step.clone())
            self.watch.computed("attention", -1)
        if self.watch.routing is not None:
            layers = len(self._blocks)
            whole = [torch.stack(routed[at : at + layers], dim=1) for at in range(0, len(routed), layers)]
            self.routing = [part.numpy().astype(np.int16) for part in whole]
        return Outputs(torch.stack(chosen, dim=1), sorted(kept), logits)

    def release(self) -> None:
        """Let go of the model, to make room for the unplanned one."""
        if self.model is not None:
            self.model, self._blocks, self._of_plan = None, [], []
            gc.collect()
            if self.context.device.type == "cuda":
                torch.cuda.empty_cache()

    def save(self, folder: Path) -> None:
        """Write the routing of this rank, an array a pass of the model."""
        with writing(folder), open_atomically(folder / ROUTING_OF_RANK.format(self.context.rank)) as file:
            np.savez_compressed(file, *self.routing)

    def facts(self) -> dict[str, Any]:
        """The facts on the model for the report; called on all ranks, complete on rank 0."""
        memory: list[int] = [0] * self.context.ranks
        dist.all_gather_object(memory, self.memory)
        facts = {"memory": memory, "same_tokens": None if self.unplanned is None else self.unplanned.same}
        if self.context.rank:
            return facts
        predicted = self._described.weights.memory(self._union).of_rank.tolist()
        return facts | {"random": self._described.random, "predicted_memory": predicted}


def _ascending(plan: Plan) -> Plan:
    """The plan with the slots of every rank in the order of their experts, which changes nothing for a live model."""
    return plan.model_copy(update={"placement": together([plan.placement]), "claim": None})


class OwnExecutor:
    """Executor of a plan. own: shared by all of a rank; number: of the plan"""

    def __init__(self, own: OwnRank, number: int) -> None:
        self.own, self.number = own, number

    def run(self, report: Callable[[float, str], None]) -> None:
        self.outputs = self.own.run(self.number, report)

    def difference(self) -> Difference | None:
        """Difference of the logits from those of the unplanned model that goes on with the same tokens; None where there is
        none, and on all ranks but 0."""
        self.own.release()
        return None if self.own.unplanned is None else self.own.unplanned.difference(self.outputs, self.number)


def executors_of(context: RankContext) -> tuple[OwnRank, list[OwnExecutor]]:
    """The model on a rank, and the executors of all plans."""
    own = OwnRank(context)
    return own, [OwnExecutor(own, number) for number in range(len(context.instructions.plans))]

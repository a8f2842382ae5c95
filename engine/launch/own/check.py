"""The tokens and logits of a person's own model under a plan, compared with those of the model without one on one process.

The unplanned model takes the texts of every rank in turn, and goes on with the tokens that were generated under the plan, so
that the logits of all passes can be compared, whatever token came before. Its own tokens are those with the largest logits.
Where numbers or rows have fewer than 32 bits it runs twice, with their rounding and without, see
`engine.launch.rank.difference`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from engine.launch.rank.context import RankContext
from engine.launch.rank.difference import Difference, allowed, coarsest, relative, worst
from engine.plan import Travel
from engine.runtime.adapters import adapter_of
from engine.runtime.exchange.wire import Wire
from engine.runtime.generation import passes
from engine.runtime.weights import Loading, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Outputs(NamedTuple):
    """The outputs of a pass on a rank.

    tokens: int64[sequence, new token]
    steps: the passes of the model of which there are logits
    logits: [sequence, vocabulary] of each of those; none if nothing is compared
    """

    tokens: torch.Tensor
    steps: list[int]
    logits: list[torch.Tensor]


class Wanted(NamedTuple):
    """The unplanned outputs for the texts of a rank.

    after: the tokens that they go on with, int64[sequence, new token]
    tokens: those with the largest logits
    logits: [sequence, vocabulary] of each compared pass, in 32 bits at least
    off: relative error of each in the formats of the launch and of the rows
    """

    after: torch.Tensor
    tokens: torch.Tensor
    logits: list[torch.Tensor]
    off: list[float]


class Unplanned:
    """The unplanned model, loaded on rank 0 when it is first needed. same: for every plan compared so far, True if its tokens
    are those that the unplanned model chooses"""

    def __init__(self, context: RankContext) -> None:
        self.context, self.same = context, []
        self._wanted: list[Wanted | None] = [None] * context.ranks
        self._formats: list[torch.dtype] = []

    def difference(self, outputs: Outputs, number: int) -> Difference | None:
        """The worst difference of any rank's logits, on rank 0; None on the others. number: of the plan"""
        context = self.context
        of_ranks = list(self._gathered(outputs))
        if context.rank:
            return None
        self._run(of_ranks, number)
        number_format = coarsest(context.instructions.model, context.instructions.plans[number])
        pairs = list(zip(of_ranks, self._wanted, strict=True))
        self.same.append(all(torch.equal(ours.tokens, theirs.tokens) for ours, theirs in pairs))
        # One bound for all: whether rounding makes a router choose another expert is chance, in few logits more than in many.
        limit = allowed(number_format, max(off for _, theirs in pairs for off in theirs.off))
        return worst(
            Difference(relative(own.to(wanted.device), wanted), limit)
            for ours, theirs in pairs
            for own, wanted in zip(ours.logits, theirs.logits, strict=True)
        )

    def _gathered(self, outputs: Outputs) -> Iterator[Outputs]:
        """The outputs of every rank that has texts, on rank 0; nothing on the others. Ranks without texts send theirs too."""
        context, device = self.context, self.context.communication_device
        if context.rank:
            for tensor in (outputs.tokens, *outputs.logits):
                dist.send(tensor.to(device).contiguous(), 0)
            return
        yield outputs
        own, words = context.instructions.own, outputs.logits[0].shape[1]
        for rank in range(1, context.ranks):
            texts = len(own.batch(rank, context.ranks))
            tokens = torch.empty((texts, own.new_tokens), dtype=torch.int64, device=device)
            logits = [torch.empty((texts, words), dtype=outputs.logits[0].dtype, device=device) for _ in outputs.logits]
            for tensor in (tokens, *logits):
                dist.recv(tensor, rank)
            yield Outputs(tokens.to(context.device), outputs.steps, logits)

    def _run(self, of_ranks: list[Outputs], number: int) -> None:
        """Bring `_wanted` to the tokens of these outputs and the formats of the plan's rows; most plans have the same."""
        context, instructions = self.context, self.context.instructions
        travel, width = instructions.plans[number].travel or Travel(), instructions.model.d_model
        wires = [Wire(form or context.dtype, width) for form in (travel.dispatch, travel.combine)]
        known, self._formats = self._formats, [wire.dtype for wire in wires]
        pairs = zip(of_ranks, self._wanted, strict=True)
        if known == self._formats and all(wanted and torch.equal(ours.tokens, wanted.after) for ours, wanted in pairs):
            return
        context.use_all_cores()
        model = load_model(Path(instructions.own.folder), Loading(context.dtype, context.device, instructions.seed))
        rounds = any(wire.dtype != context.dtype for wire in wires)
        with rounded_rows(model, *wires) if rounds else nullcontext():
            self._wanted = [self._one(model, rank, ours) for rank, ours in enumerate(of_ranks)]
        if context.dtype == torch.float32 and not rounds:
            return
        model.float()
        for rank, (ours, short) in enumerate(zip(of_ranks, self._wanted, strict=True)):
            exact = self._one(model, rank, ours)
            off = [relative(low, high) for low, high in zip(short.logits, exact.logits, strict=True)]
            self._wanted[rank] = Wanted(ours.tokens, (exact if rounds else short).tokens, exact.logits, off)

    def _one(self, model: "PreTrainedModel", rank: int, ours: Outputs) -> Wanted:
        own = self.context.instructions.own
        tokens, logits = [], []
        for step, (of_step, best) in enumerate(passes(model, own.batch(rank, self.context.ranks), own.new_tokens, ours.tokens)):
            tokens.append(best)
            if step in ours.steps:
                logits.append(of_step.float())
        return Wanted(ours.tokens, torch.stack(tokens, dim=1), logits, [0.0] * len(logits))


@contextmanager
def rounded_rows(model: "PreTrainedModel", there: Wire, back: Wire) -> Iterator[None]:
    """Inside, the experts of a model without a plan take and return vectors rounded to the formats of a plan's rows."""
    handles = []
    for block in adapter_of(model).blocks(model):
        experts = block.module.experts
        handles.append(experts.register_forward_pre_hook(lambda _, taken: (there.rounded(taken[0]), *taken[1:])))
        handles.append(experts.register_forward_hook(lambda _, taken, output: back.rounded(output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

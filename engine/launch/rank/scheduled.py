"""A plan whose scheduler hosts experts anew for every batch (Lina sections 5.2 and 6.2), at work on a rank.

While a layer is at work after its gate, phase one prepares the next one in a thread of its own. The rank counts where the
paths of its tokens lead, all ranks gather these counts and make the same hosting of them, and each copies the weights that it
lacks out of its host's memory. Phase two, after the gate, counts the real choices. Where the most popular experts are others
than estimated, it makes and fetches a hosting for these, while all wait. Phase one is measured as steps of the layer before, in
which it runs.

The rules are those of `engine.simulate.scheduler`. Indexes of rows are made with the clocks stopped, as in every launch.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from engine.launch.rank.context import RankContext
from engine.launch.rank.forward import Forward
from engine.launch.rank.instructions import slots_to_fetch
from engine.launch.rank.layer import Weights
from engine.placement.devices.search import Hosting
from engine.plan import Placement, Plan
from engine.simulate.scheduler import Decision, Scheduler, options_of
from engine.workload import RoutingTrace

Answer = TypeVar("Answer")


class FetchedWeights:
    """The experts of a rank that always has some of every layer, and takes others out of its host's memory into slots.

    kept: the experts that it always has
    slots: number of slots
    """

    def __init__(self, weights: Weights, kept: Sequence[int], slots: int) -> None:
        self.weights, self.kept = weights, frozenset(kept)
        inward, outward = weights.experts(0, [0] * slots)
        self.slots = list(zip(inward, outward, strict=True))
        self.slot_of: dict[tuple[int, int], int] = {}
        self.host = [pool.pin_memory() if inward.is_cuda else pool for pool in weights.scaled_pools("cpu")]

    def clear(self) -> None:
        """Forget all fetched experts."""
        self.slot_of.clear()

    def missing(self, layer: int, experts: Sequence[int]) -> list[int]:
        """The experts of a layer that are not here."""
        return [expert for expert in experts if expert not in self.kept and (layer, expert) not in self.slot_of]

    def fetch(self, layer: int, experts: Sequence[int]) -> float:
        """Copy experts from the host's memory into free slots, on the current stream. Returns their bytes."""
        copied = 0
        for expert in experts:
            self.slot_of[layer, expert] = slot = len(self.slot_of)
            for pool, span, into in zip(self.host, self.weights.windows(layer, expert), self.slots[slot], strict=True):
                into.copy_(pool[span].view_as(into), non_blocking=True)
                copied += into.nbytes
        return float(copied)

    def experts(self, layer: int, experts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Weights.experts`, from the experts that are here alone."""
        inward, outward = (matrix.new_empty((len(experts), *matrix.shape)) for matrix in self.slots[0])
        for into, out, expert in zip(inward, outward, experts, strict=True):
            here = expert in self.kept
            own = self.weights.expert(layer, expert) if here else self.slots[self.slot_of[layer, expert]]
            into.copy_(own[0])
            out.copy_(own[1])
        return inward, outward


class Scheduled(Forward):
    """Executor of such a plan for one model with vanilla execution.

    decisions: on the layers of the last pass
    """

    def __init__(self, context: RankContext, plan: Plan) -> None:
        super().__init__(context, plan)
        model, tokens, reaction = self.model.model, context.tokens[0], plan.reaction
        self.options = options_of(reaction, tokens.experts.shape[2], len(tokens.experts))
        profile = RoutingTrace("profile", tokens.profile, model.experts)
        self.scheduler = Scheduler(self.options, profile, context.ranks)
        self.start = plan.placement
        kept, slots = self.scheduler.kept[context.rank], slots_to_fetch(plan)
        self.model.at_hand = self.weights = FetchedWeights(self.model.weights, kept, slots)
        # Counts are in the host's memory, and travel while a layer's rows do.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=context.instructions.limit))
        (self.stream,) = context.streams(1)
        self.decisions: list[Decision] = []
        self.first_choices: list[np.ndarray] = []
        self.ahead: Future[tuple[np.ndarray, Hosting]] | None = None

    def begin(self) -> None:
        super().begin()
        self.decisions, self.first_choices = [], []

    def prepare(self, layer: int) -> None:
        if layer < self.options.path_length:
            self.weights.clear()
            hosting = self.start.experts_of_gpu[layer]
            self.weights.fetch(layer, self.weights.missing(layer, hosting[self.context.rank]))
            self.decisions.append(Decision(None, hosting, False))
            super().prepare(layer)
        else:
            self.model.ready_for_gate(layer)

    def after_gate(self, layer: int) -> None:
        if layer >= self.options.path_length:
            self._check(layer)
            self.communicator.meet()
        self.first_choices.append(self.model.chosen[:, 0].cpu().numpy())
        if self.options.path_length <= layer + 1 < self.model.layers:
            self.ahead = in_thread(lambda: self._phase_one(layer + 1))

    def after_layer(self, layer: int) -> None:
        if self.options.path_length <= layer + 1 < self.model.layers:
            self.ahead.result()

    def _phase_one(self, layer: int) -> tuple[np.ndarray, Hosting]:
        """The estimate for a layer, and its hosting, with all weights that this rank lacks."""
        recorder, at = self.context.recorder, layer - 1
        with torch.cuda.stream(self.stream):
            with recorder.computing("estimate", at):
                paths = np.stack(self.first_choices, axis=1)
                mine = np.append(self.scheduler.expected(paths, layer), len(paths))
                parts = [torch.empty(len(mine), dtype=torch.float64) for _ in range(self.context.ranks)]
                dist.all_gather(parts, torch.from_numpy(mine), group=self.group)
                counts = torch.stack(parts).numpy()
                estimate = self.scheduler.estimate(counts[:, :-1], counts[:, -1].sum())
            with recorder.computing("schedule", at):
                hosting = self.scheduler.hosting(estimate, layer)
            self.weights.clear()
            self._fetch(layer, hosting, at)
            recorder.wait_for_stream()
        return estimate, hosting

    def _check(self, layer: int) -> None:
        """Phase two: host a layer again if its real choices are off the estimate, while all ranks wait."""
        recorder, chosen, (estimate, predicted) = self.context.recorder, self.model.chosen, self.ahead.result()
        with recorder.computing("check", layer):
            load = torch.bincount(chosen[chosen >= 0], minlength=self.scheduler.experts).cpu()
            dist.all_reduce(load, group=self.group)
            off = self.scheduler.off(estimate, load.numpy())
        hosting = predicted
        if off:
            with recorder.computing("schedule", layer):
                hosting = self.scheduler.hosting(load.numpy(), layer)
            self._fetch(layer, hosting, layer)
        self.decisions.append(Decision(predicted, hosting, off))
        with recorder.paused():
            self.model.settle(layer, self._placement())

    def _fetch(self, layer: int, hosting: Hosting, at: int) -> None:
        """Copy the weights of a layer's experts that this rank lacks, as a step of layer `at`."""
        missing, recorder = self.weights.missing(layer, hosting[self.context.rank]), self.context.recorder
        if missing:
            begin = recorder.mark()
            size = self.weights.fetch(layer, missing)
            recorder.log("host_copy", at, begin, recorder.mark(), bytes=size)

    def _placement(self) -> Placement:
        """The plan's placement with the decisions so far."""
        decided = tuple(decision.hosting for decision in self.decisions)
        rows = (*decided, *self.start.experts_of_gpu[len(decided) :])
        return Placement(experts=self.start.experts, experts_of_gpu=rows, model_layers=self.start.model_layers)


def in_thread(work: Callable[[], Answer]) -> Future[Answer]:
    """Start work in a thread, in the inference mode of this one. A daemon, so that a rank that has failed can end although a
    peer keeps its thread waiting."""
    answer: Future[Answer] = Future()
    inference = torch.is_inference_mode_enabled()

    def run() -> None:
        try:
            with torch.inference_mode(inference):
                answer.set_result(work())
        except BaseException as error:  # raised where it is waited for
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer

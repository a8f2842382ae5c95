"""Two models on the same ranks: while one computes, the other sends (Aurora section 6.1, figure 7 and table 2).

Every rank computes one thing at a time, in the order of `engine.simulate.colocated`: the gates of a and b, then the experts
of a as soon as its dispatch has ended, those of b, and likewise the aggregations. An all-to-all starts when all ranks have
finished what feeds it, and runs beside the computation of the other model.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch

from engine.launch.rank.communicator import Communicator
from engine.launch.rank.context import RankContext
from engine.launch.rank.forward import kind_of_layers
from engine.plan import Plan


class Lane:
    """Where the exchanges of one model run, one after another, beside the computation of this rank.

    On a GPU they have a stream of their own. Gloo keeps its caller waiting, so its exchanges also have a thread of their
    own. NCCL's are handed over by the thread that computes: so all ranks start those of two models in one order, without
    which they could wait for each other for ever.
    """

    def __init__(self, context: RankContext, communicator: Communicator) -> None:
        self.communicator, self.device = communicator, context.device
        self._stream = torch.cuda.Stream(context.device) if context.device.type == "cuda" else None
        self._exchanges: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threaded = context.instructions.backend == "gloo"
        if self._threaded:
            # A daemon, so that a rank whose computation has failed can end although a peer keeps its exchange waiting.
            threading.Thread(target=self._work, args=(torch.is_inference_mode_enabled(),), daemon=True).start()

    def start(self, exchange: Callable[[], None]) -> Callable[[], None]:
        """Run an exchange between two meetings of all ranks, after what the current stream was given so far. The function
        returned waits for it: the host where a thread runs it, else the current stream."""
        ready, ended, over = self._event(), self._event(), Future()
        if ready is not None:
            ready.record()

        def run() -> None:
            with self._on_stream():
                if ready is not None:
                    self._stream.wait_event(ready)
                self.communicator.meet()
                exchange()
                self.communicator.meet()
                if ended is not None:
                    ended.record()

        def run_and_tell() -> None:
            try:
                over.set_result(run())
            except BaseException as error:  # raised where it is waited for
                over.set_exception(error)

        def wait() -> None:
            over.result()
            if ended is not None:
                torch.cuda.current_stream(self.device).wait_event(ended)

        if self._threaded:
            self._exchanges.put(run_and_tell)
        else:
            run_and_tell()
        return wait

    def _work(self, inference: bool) -> None:
        with torch.inference_mode(inference):  # a thread begins without it
            while True:
                self._exchanges.get()()

    def _event(self) -> torch.cuda.Event | None:
        return None if self._stream is None else torch.cuda.Event()

    def _on_stream(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class Colocated:
    """Executor of a plan for two models."""

    def __init__(self, context: RankContext, plan: Plan) -> None:
        self.context, self.communicator = context, Communicator(context)
        communicators = [Communicator(context, group) for group in context.groups(2)]
        self.models = [
            kind_of_layers(plan)(context, plan, communicator, number)
            for number, communicator in enumerate(communicators)
        ]
        self.lanes = [Lane(context, communicator) for communicator in communicators]

    def run(self, report: Callable[[float, str], None]) -> None:
        for model in self.models:
            model.begin()
        layers = self.models[0].layers
        for layer in range(layers):
            report(layer / layers, f"layer {layer + 1} of {layers}")
            # Nothing is on its way now: the aggregation of b, the last of a layer, needs all of its exchanges.
            with self.context.recorder.paused():
                for model in self.models:
                    model.ready(layer)
            self.communicator.meet()
            self.layer(layer)
        for model in self.models:
            model.forget()

    def layer(self, layer: int) -> None:
        """One layer of both models, see the top of this file."""
        both = list(zip(self.models, self.lanes, strict=True))
        arrivals = []
        for model, lane in both:
            model.gate(layer)
            arrivals.append(lane.start(partial(model.exchange, "dispatch", layer)))
        for place, (model, lane) in enumerate(both):
            arrivals[place]()
            model.ffn(layer)
            arrivals[place] = lane.start(partial(model.exchange, "combine", layer))
        for place, (model, _) in enumerate(both):
            arrivals[place]()
            model.aggregate(layer)

    def difference(self) -> float | None:
        differences = [model.difference() for model in self.models]
        return None if None in differences else max(differences)

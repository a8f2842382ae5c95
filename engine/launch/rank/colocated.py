"""Two models on the same ranks: while one computes, the other sends (Aurora section 6.1, figure 7 and table 2).

Every rank computes one thing at a time, in the order of `engine.simulate.colocated`: the gates of a and b, then the
experts of a as soon as its dispatch has ended, those of b, and likewise the aggregations. An all-to-all starts when all
ranks have finished the step that feeds it, and runs during the computation of the other model.
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
from engine.launch.rank.difference import Difference, worst
from engine.launch.rank.forward import kind_of_layers
from engine.launch.rank.instructions import left_open
from engine.plan import Plan


class Lane:
    """A lane for the exchanges of one model, one after another, during the computation of this rank.

    On a GPU they have a stream of their own. Gloo blocks its caller, so its exchanges also have a thread of their own.
    NCCL's are handed over by the thread that computes: so all ranks start those of two models in one order, without
    which they could wait for each other for ever.

    stream: its own, None without a GPU
    left_open: true if `start` leaves the meeting that ends an exchange to `close`, see `engine.runtime.exchange.all_to_all`
    """

    def __init__(
        self, context: RankContext, communicator: Communicator, stream: torch.cuda.Stream | None, left_open: bool
    ) -> None:
        self.communicator, self.device, self._stream = communicator, context.device, stream
        self.left_open, self._ended = left_open, None
        self._exchanges: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._threaded = context.instructions.backend == "gloo"
        if self._threaded:
            # A daemon, so that a rank whose computation has failed can end although a peer keeps its exchange waiting.
            threading.Thread(target=self._work, args=(torch.is_inference_mode_enabled(),), daemon=True).start()

    def start(self, exchange: Callable[[], None]) -> Callable[[], None]:
        """Run an exchange between two meetings of all ranks, after the work given so far to the current stream. The
        function returned waits for both: the host if a thread runs them, else the current stream."""
        ready, ended, over = self._event(), self._event(), Future()
        self._ended = ended
        if ready is not None:
            ready.record()

        def run() -> None:
            with self._on_stream():
                if ready is not None:
                    self._stream.wait_event(ready)
                self.communicator.meet()
                exchange()
                if not self.left_open:
                    self._end(ended)

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

    def close(self) -> None:
        """Run the meeting that ends the last exchange, if it was left out. To be called before that exchange is waited for."""
        if self.left_open:
            with self._on_stream():
                self._end(self._ended)

    def _end(self, ended: torch.cuda.Event | None) -> None:
        self.communicator.meet()
        if ended is not None:
            ended.record()

    def _work(self, inference: bool) -> None:
        if self._stream is not None:
            # A thread begins on the first GPU, on which every rank would otherwise make a context.
            torch.cuda.set_device(self.device)
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
            kind_of_layers(plan)(context, plan, communicator, number) for number, communicator in enumerate(communicators)
        ]
        own = zip(communicators, context.streams(2), strict=True)
        self.lanes = [Lane(context, *lane, left_open(context.instructions, plan)) for lane in own]

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
        """One layer of both models, in the order that the module's docstring gives."""
        both = list(zip(self.models, self.lanes, strict=True))
        arrivals = []
        for model, lane in both:
            model.gate(layer)
            arrivals.append(lane.start(partial(model.exchange, "dispatch", layer)))
        self._close()
        for place, (model, lane) in enumerate(both):
            arrivals[place]()
            model.ffn(layer)
            arrivals[place] = lane.start(partial(model.exchange, "combine", layer))
        self._close()
        for place, (model, _) in enumerate(both):
            arrivals[place]()
            model.aggregate(layer)

    def _close(self) -> None:
        for lane in self.lanes:
            lane.close()

    def difference(self) -> Difference | None:
        differences = [model.difference() for model in self.models]
        return None if None in differences else worst(differences)

"""The collectives of a step, in parallel with its computation: the start of each, and the proof that no two ranks wait
for each other.

All-to-alls and all-reduces have a lane each, with a stream of its own on a GPU, and process groups of their own; under
"fifo" one lane has both. A lane has its collectives in a fixed order and one in flight at a time. The next one starts
as soon as the tasks before it in the program are over and the policy lets it, started by the thread that ends the last
of them: the main thread, which computes, or the thread of a lane, which only waits for the collective in flight.

Why no deadlock: the order of a lane is the same on all ranks, as it comes from the program alone. All-to-alls are
    chained in the program. All-reduces, and under "fifo" all collectives, are ordered by the last computation that they
    wait for, which is the order in which they become ready, because every rank computes in program order. A computation
    waits only for collectives that wait for earlier computations (the update, which is last, for all), and so do
    collectives for collectives; and an all-to-all never waits for an all-reduce unless they share a lane. So take, of
    computations and collectives in this order, the first that is not over on all ranks: everything that it waits for is
    over, and every rank comes to it. All-to-alls hold all-reduces back, and so do announcements of them, but these end
    by the same argument whatever the all-reduces do, and then every rank starts its next one.

This is also why, unlike in the simulation, an all-to-all does not wait for a micro-op that happens to be in flight: one
rank may have started that micro-op while another, on which the all-to-all is in flight already, holds it back. If the
first now waited for the micro-op's end, both would wait forever. The two share the network for the rest of one
micro-op, which is why micro-ops are small.

Over NCCL a fixed order of every lane is not enough: kernels of different communicators may have to wait for a place on
    the device, and two ranks that start an all-to-all and an all-reduce in different orders then wait for each other.
    There all collectives start in one order on all ranks, that in which the simulation starts them, which stands in for
    the policy: a rank that is late with one holds back all later ones. NCCL is told to keep the device to the order of
    the host (see `settings`), as a collective is handed over before the tasks that it waits for are over on the device.
    No deadlock: take the first in that order that is not over on all ranks. The tasks that it waits for ended in the
    simulation before it started, so they come earlier. Sizes that are exchanged have to reach the host; only the thread
    of their lane waits there, and the next collective of that lane is the one that needs them.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from engine.simulate.streams import ALL_TO_ALL, COMPUTE, Tasks, run_streams

POLL = 5e-5
"""Seconds between two looks at a GPU, which does not report by itself that it is done."""


@dataclass(eq=False)
class Lane:
    """Collectives in their order.

    started: number started
    flying: waits for the one in flight, if there is one
    """

    tasks: Sequence[int]
    stream: torch.cuda.Stream | None
    started: int = 0
    flying: Callable[[], None] | None = None

    def current(self) -> AbstractContextManager:
        """Inside, PyTorch gives work to this lane's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Network:
    """The collectives of a program.

    launch: starts a collective and returns a function that waits until it is over, on a GPU until the current stream
        has been told to wait for it
    streams: of two lanes, on a GPU
    one_order: true if all start in one order (see the top of this file)
    """

    def __init__(
        self,
        tasks: Tasks,
        policy: str,
        launch: Callable[[int], Callable[[], None]],
        device: torch.device,
        streams: Sequence[torch.cuda.Stream | None],
        one_order: bool = False,
    ) -> None:
        self.policy, self.launch, self.device, self.streams = policy, launch, device, streams
        self.stream, self.pair = tasks.stream.tolist(), tasks.pair.tolist()
        self.before: list[list[int]] = [[] for _ in self.stream]
        for before, after in tasks.edges.tolist():
            self.before[after].append(before)
        self.launches = simulated_order(tasks, policy) if one_order else None
        self.order = orders_of(tasks, policy, self.launches)
        self.exchanges = [task for task, stream in enumerate(self.stream) if stream == ALL_TO_ALL]
        self.holds = set(np.flatnonzero(tasks.holds).tolist())
        self.on_gpu = device.type == "cuda"

    def start(self) -> None:
        """Begin a run."""
        self._state = threading.Condition()
        self._begun: dict[int, torch.cuda.Event | None] = {}
        self._done: dict[int, torch.cuda.Event | None] = {}
        self._landed = 0
        self._failure: BaseException | None = None
        self._lanes = [Lane(tasks, stream) for tasks, stream in zip(self.order, self.streams, strict=False)]
        self._threads = [threading.Thread(target=self._attend, args=(lane,), daemon=True) for lane in self._lanes]
        for thread in self._threads:
            thread.start()

    def begin(self, task: int) -> None:
        """Wait for the collectives that a computation needs, before it starts."""
        needed = [before for before in self.before[task] if self.stream[before] != COMPUTE]
        with self._state:
            self._wait_until(lambda: all(before in self._done for before in needed))
            self._let_stream_wait_for(needed)
            if task in self.holds:
                self._begun[task] = self._event()

    def finish(self, task: int) -> None:
        """Note that a computation is over, on a GPU: given to the current stream."""
        with self._state:
            self._done[task] = self._event()
            self._advance()

    def end(self) -> None:
        """Wait for all collectives."""
        rest = [task for tasks in self.order for task in tasks]
        with self._state:
            self._wait_until(lambda: all(task in self._done for task in rest))
            self._let_stream_wait_for(rest)
        for thread in self._threads:
            thread.join()

    def fail(self, failure: BaseException) -> None:
        """Release all that wait."""
        with self._state:
            self._failure = self._failure or failure
            self._state.notify_all()

    def _attend(self, lane: Lane) -> None:
        """Wait for the collectives of a lane, in a thread of its own."""
        try:
            if self.on_gpu:
                torch.cuda.set_device(self.device)
            with torch.inference_mode(), lane.current():  # both are a thread's own
                for task in lane.tasks:
                    with self._state:
                        self._wait_until(lambda: lane.flying is not None)
                    lane.flying()
                    with self._state:
                        self._done[task] = self._event()
                        lane.flying = None
                        self._advance()
        except StepError:
            pass  # the failed thread has reported it
        except BaseException as failure:
            self.fail(failure)

    def _advance(self) -> None:
        """Start all collectives that may start, all-to-alls first. With the state locked, as in all methods below."""
        started = True
        while started:
            started = False
            for lane in self._lanes:
                if lane.flying is None and lane.started < len(lane.tasks) and self._may_start(lane.tasks[lane.started]):
                    task = lane.tasks[lane.started]
                    with lane.current():
                        self._let_stream_wait_for(self.before[task])
                        lane.flying = self.launch(task)
                    lane.started += 1
                    started = self.launches is not None  # it may have been another lane's turn that came
        self._state.notify_all()

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while True:
            if self._failure is not None:
                raise StepError("a part of the training step failed on this rank") from self._failure
            if condition():
                return
            self._state.wait(POLL if self.on_gpu else None)
            if self.on_gpu:
                self._advance()

    def _may_start(self, task: int) -> bool:
        if not all(before in self._done for before in self.before[task]):
            return False
        if self.launches is not None:
            return task == self.launches[sum(lane.started for lane in self._lanes)]
        if self.stream[task] == ALL_TO_ALL or self.policy in ("fair", "fifo"):
            return True
        # On a GPU the thread that hands out work is far ahead; the progress of the GPU counts.
        if not all(self._over(before) for before in self.before[task]):
            return False
        while self._landed < len(self.exchanges) and self._over(self.exchanges[self._landed]):
            self._landed += 1
        if self._landed == len(self.exchanges):
            return True
        current = self.exchanges[self._landed]
        if all(self._over(before) for before in self.before[current]):
            return False
        if self.policy == "priority":
            reached = [hold for hold, event in self._begun.items() if not self.on_gpu or event.query()]
            return all(self._over(hold) for hold in reached)
        # A pair is open from the start of its first all-to-all to the end of its last one.
        return self._landed == 0 or self.pair[self.exchanges[self._landed - 1]] != self.pair[current]

    def _over(self, task: int) -> bool:
        return task in self._done and (not self.on_gpu or self._done[task].query())

    def _event(self) -> torch.cuda.Event | None:
        return torch.cuda.current_stream().record_event() if self.on_gpu else None

    def _let_stream_wait_for(self, tasks: Sequence[int]) -> None:
        if self.on_gpu:
            for task in tasks:
                torch.cuda.current_stream().wait_event(self._done[task])


class StepError(RuntimeError):
    """The step stopped because a part of it failed in another thread; that failure is the cause."""


def last_computations(tasks: Tasks) -> dict[int, int]:
    """Collective -> the last computation that it waits for, by itself or through other collectives; -1: none."""
    before: dict[int, list[int]] = {task: [] for task in np.flatnonzero(tasks.stream != COMPUTE).tolist()}
    for needed_task, task in tasks.edges.tolist():
        if task in before:
            before[task].append(needed_task)
    last: dict[int, int] = {}
    for task, needed in before.items():
        last[task] = max((last.get(needed_task, needed_task) for needed_task in needed), default=-1)
    return last


def orders_of(tasks: Tasks, policy: str, launches: Sequence[int] | None = None) -> list[list[int]]:
    """The collectives of every lane in their order (see the top of this file). launches: the one order of all, if any."""
    ordered = launches
    if ordered is None:
        last = last_computations(tasks)
        ordered = sorted(last, key=lambda task: (last[task], task))
    if policy == "fifo":
        return [list(ordered)]
    exchanges = [task for task in ordered if tasks.stream[task] == ALL_TO_ALL]
    return [exchanges, [task for task in ordered if tasks.stream[task] != ALL_TO_ALL]]


def simulated_order(tasks: Tasks, policy: str) -> list[int]:
    """The collectives in the order in which the simulation starts them: the same on all ranks, as it comes from the program
    alone."""
    start, end = run_streams(tasks, policy)
    return sorted(np.flatnonzero(tasks.stream != COMPUTE).tolist(), key=lambda task: (start[task].max(), end[task].max(), task))

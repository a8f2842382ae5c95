"""The points of a study in parallel, and their answers in the order of the points.

Short work stays in this process. Long work goes to processes of this machine, one a processor, or to a Dask cluster if
`SWITCHYARD_DASK` has the address of its scheduler: the same work, the same answers.
"""

import contextlib
import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from engine.errors import InputError
from engine.parallel.crew import GRACE, LOST_IN_A_ROW, Batch, Crew, Report, Work, silent
from engine.parallel.processes import Processes, give_up_preparing, prepare, processors
from engine.parallel.remote import Remote
from engine.result import Stop, never

ADDRESS = "SWITCHYARD_DASK"
"""Environment variable: address of a Dask scheduler, `tcp://…`."""

PATIENCE = 2.0
"""Seconds of work in this process before others are prepared. That takes about as long, so that no work takes more than
twice as long as with its length known from the start, and short work no longer than ever."""
POLL = 0.05

Begun = Callable[[int, int], None]
"""Called with the number of finished points and the point that is waited for."""


def in_order(
    work: Work,
    common: Any,
    count: int,
    stop: Stop = never,
    begun: Begun = silent,
    report_of: Callable[[int], Report] = lambda index: silent,
) -> Iterator[tuple[int, Any]]:
    """(index, answer) of the points 0 … count - 1, as soon as all before it are there; an error of a point is raised in
    its place. Asked to stop, points at work hand back their best and no others begin: then some may be missing. Raises
    InputError if the workers are gone for good, after all answers that had come.

    report_of: the `Report` of a point that is done in this process
    """
    if address := os.environ.get(ADDRESS) if count > 1 else None:
        batch = Batch(work, common)
        yield from _Elsewhere(lambda points: Remote(address, batch), count, 0, stop, begun).of(range(count))
        return
    helpers = _Helpers(work, common, count)
    finished = 0
    try:
        while (index := helpers.next_here()) is not None:
            begun(finished, index)
            if stop():
                return
            yield index, work(common, index, stop, report_of(index))
            finished += 1
        if helpers.futures:
            elsewhere = _Elsewhere(helpers.crew_for, count, finished, stop, begun)
            yield from elsewhere.collect(helpers.crew, helpers.futures)
    finally:
        helpers.close()


def reported(work: Work, common: Any, titles: Sequence[str], stop: Stop, report: Report) -> Iterator[tuple[int, Any]]:
    """`in_order` with a point for every title. `report` is told the share of finished points, and the title of the one that
    is waited for, with how far it is if that is done in this process. Points whose work answers None, as it was stopped midway,
    are left out."""

    def begun(finished: int, index: int) -> None:
        report(finished / len(titles), titles[index])

    def report_of(index: int) -> Report:  # what else is reported is of the point alone
        return lambda done, message, *more: report((index + done) / len(titles), f"{titles[index]}: {message}")

    points = in_order(work, common, len(titles), stop, begun, report_of)
    return ((index, answer) for index, answer in points if answer is not None)


class _Helpers:
    """Processes that take over the points not begun in this one, once the work has proved long.

    crew: the processes, once they are there
    futures: of the points that they took, in order
    """

    def __init__(self, work: Work, common: Any, count: int) -> None:
        self.futures: dict[int, Future] = {}
        self._free, self._lock, self._closed = deque(range(count)), threading.Lock(), threading.Event()
        self.crew: Crew | None = None
        self._preparing = False
        if count > 1 and processors() > 1:
            self._module = work.__module__
            # Now: later this process would change the common data while the thread hands it out.
            self._batch = Batch(work, copy.deepcopy(common))
            threading.Thread(target=self._take_over, daemon=True).start()

    def next_here(self) -> int | None:
        """The next point to do in this process; None when none is left."""
        with self._lock:
            return self._free.popleft() if self._free else None

    def crew_for(self, points: int) -> Crew:
        """Processes for so many points."""
        prepare(self._module)
        return Processes(self._batch, points)

    def close(self) -> None:
        """End the processes, and those being prepared."""
        with self._lock:
            self._closed.set()
            if self._preparing:
                give_up_preparing()
            if self.crew is not None:
                self.crew.close()

    def _take_over(self) -> None:
        if self._closed.wait(PATIENCE):
            return
        with contextlib.suppress(OSError, EOFError):  # no more processes or memory, or given up: all is done here
            self._preparing = True
            prepare(self._module)
            self._preparing = False
            with self._lock:
                if not self._closed.is_set() and self._free:
                    self.crew, self.futures = self._started(list(self._free))
                    self._free.clear()

    def _started(self, points: list[int]) -> tuple[Crew, dict[int, Future]]:
        crew = Processes(self._batch, len(points))
        try:
            return crew, {index: crew.submit(index) for index in points}
        except OSError:
            crew.close()
            raise


class _Elsewhere:
    """Points that a crew does, and another crew if that one is lost."""

    def __init__(self, crew_for: Callable[[int], Crew], count: int, finished: int, stop: Stop, begun: Begun) -> None:
        self._crew_for, self._count, self._finished = crew_for, count, finished
        self._stop, self._begun = stop, begun

    def of(self, points: range) -> Iterator[tuple[int, Any]]:
        """The answers of these points by a new crew."""
        self._begun(self._finished, points[0])
        if self._stop():
            return
        crew = self._crew_for(len(points))
        yield from self.collect(crew, {index: crew.submit(index) for index in points})

    def collect(self, crew: Crew, futures: dict[int, Future]) -> Iterator[tuple[int, Any]]:
        """The answers of points that a crew has been given, in order."""
        lost_in_a_row, already = 0, self._finished
        try:
            while futures:
                done = {index: future for index, future in futures.items() if future.done()}
                gone = [
                    index for index, future in done.items() if future.cancelled() or isinstance(future.exception(), crew.lost)
                ]
                if len(done) - len(gone) + already > self._finished:
                    self._finished, lost_in_a_row = len(done) - len(gone) + already, 0
                if gone:
                    lost_in_a_row += 1
                    crew.close()
                    if lost_in_a_row == LOST_IN_A_ROW:
                        raise InputError(f"{crew.advice} ({self._finished} of {self._count} points are done)")
                    crew = self._crew_again(len(futures) - len(done) + len(gone))
                    futures |= {index: crew.submit(index) for index in futures if index in gone or index not in done}
                    continue
                while futures and (first := next(iter(futures))) in done:
                    already += 1
                    yield first, futures.pop(first).result()
                if futures:
                    self._begun(self._finished, next(iter(futures)))
                    if self._wait(crew, [future for index, future in futures.items() if index not in done]):
                        break
            if futures:  # at work when asked to stop
                crew.ask_to_stop()
                wait(futures.values(), GRACE)
            yield from _answers(futures)
        except InputError:
            yield from _answers(futures)
            raise
        finally:
            crew.close()

    def _crew_again(self, points: int) -> Crew:
        try:
            return self._crew_for(points)
        except InputError as error:
            raise InputError(f"{error}; {self._finished} of {self._count} points are done") from None

    def _wait(self, crew: Crew, ahead: list[Future]) -> bool:
        """Wait until one of these, which were not finished at the last look, is; return True if asked to stop before.
        Some may be finished by now, for the reader of the answers may take long."""
        while not wait(ahead, POLL, FIRST_COMPLETED).done:
            if self._stop():
                return True
            crew.check()
        return self._stop()


def _answers(futures: dict[int, Future]) -> Iterator[tuple[int, Any]]:
    """All available answers, in order."""
    for index, future in futures.items():
        if future.done() and not future.cancelled() and future.exception() is None:
            yield index, future.result()

"""Processes that answer single questions for a process that lives long and serves many, such as a studio. While such a
process computes for one person all others wait, because Python runs one thread at a time."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from engine.errors import InputError
from engine.parallel.crew import LOST_IN_A_ROW
from engine.parallel.processes import Workers, prepare, processors

KEPT = 8
"""Large arguments that a worker keeps: those of its last questions."""
POLL = 0.05
"""Seconds between two checks that the answers are still wanted."""


@dataclass(frozen=True)
class Question:
    """Work (a function of a module) and its arguments.

    large: the first arguments, each under the digest of its content, so that a worker that has it need not be sent it
        again
    small: the other arguments
    """

    work: Callable[..., Any]
    large: Mapping[str, Any] = field(default_factory=dict)
    small: tuple = ()


class Pool:
    """One process a processor, shared by all threads of this one. They start at `start`, and end at `close` or with
    this process. A worker that dies costs its question a second attempt.

    module: imported once for all of them
    begin: called in each before its first question
    """

    def __init__(self, module: str, begin: Callable[[], None]) -> None:
        self._module, self._begin = module, begin
        self._lock, self._started, self._ready = threading.Lock(), False, threading.Event()
        self._workers: Workers | None = None

    @property
    def ready(self) -> bool:
        """True if a question is answered without waiting for processes to start."""
        return self._ready.is_set()

    def start(self) -> None:
        """Start the processes in the background, which takes some seconds; harmless to repeat."""
        with self._lock:
            if self._started:
                return
            self._started = True
        threading.Thread(target=self._prepare, daemon=True).start()

    def _prepare(self) -> None:
        with contextlib.suppress(OSError, EOFError, BrokenProcessPool):  # no more processes or memory: never ready
            prepare(self._module)
            workers = Workers(processors(), self._begin)
            wait([workers.executor.submit(_nothing) for _ in range(processors())])
            with self._lock:
                if not self._started:  # closed meanwhile
                    workers.close()
                    return
                self._workers = workers
                self._ready.set()

    def answers(self, questions: Sequence[Question], still_wanted: Callable[[], None] = lambda: None) -> list[Any]:
        """The answers of a ready pool, in order; an error of a question is raised here. Raises InputError if workers
        are lost again and again.

        still_wanted: called every `POLL` seconds; if it raises, questions that have not begun are dropped
        """
        answers, lost = [None] * len(questions), [0] * len(questions)
        awaited = {index: self._ask(question) for index, question in enumerate(questions)}
        try:
            while awaited:
                done = wait(awaited.values(), POLL, FIRST_COMPLETED).done
                if not done and (workers := self._workers):
                    workers.check()
                still_wanted()
                for index in [index for index, future in awaited.items() if future in done]:
                    try:
                        answers[index] = awaited.pop(index).result()
                    except _LackingError:
                        awaited[index] = self._ask(questions[index], whole=True)
                    except BrokenProcessPool:
                        lost[index] += 1
                        if lost[index] == LOST_IN_A_ROW:
                            raise InputError(
                                "the processes that simulate were killed again and again, perhaps for want of memory; "
                                "choose a smaller cluster"
                            ) from None
                        awaited[index] = self._ask(questions[index])
        finally:
            for future in awaited.values():
                future.cancel()
        return answers

    def _ask(self, question: Question, whole: bool = False) -> Future:
        """Hand a question to a worker, with its large arguments or without."""
        large = dict(question.large) if whole else dict.fromkeys(question.large)
        with self._lock:
            try:
                return self._workers.executor.submit(_answer, question.work, large, question.small)
            except BrokenProcessPool:
                self._workers.close()
                self._workers = Workers(processors(), self._begin)
                return self._workers.executor.submit(_answer, question.work, large, question.small)

    def close(self) -> None:
        """End the processes, at work or not; `start` begins anew."""
        with self._lock:
            self._started = False
            self._ready.clear()
            if self._workers is not None:
                self._workers.close()
                self._workers = None


class _LackingError(Exception):
    """A worker was not sent a large argument and has not kept it."""


_kept: OrderedDict[str, Any] = OrderedDict()


def _answer(work: Callable[..., Any], large: Mapping[str, Any], small: tuple) -> Any:
    """Answer a question in a worker. large: arguments by digest, None for those that it should have kept."""
    for digest, value in large.items():
        if value is not None:
            _kept[digest] = value
        elif digest not in _kept:
            raise _LackingError
        _kept.move_to_end(digest)
    arguments = [_kept[digest] for digest in large]
    while len(_kept) > KEPT:
        _kept.popitem(last=False)
    return work(*arguments, *small)


def _nothing() -> None:
    """A first question, which starts a process."""

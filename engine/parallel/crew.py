"""The workers of a study's points outside this process, and the work of one of them."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from engine.result import Stop

Report = Callable[..., None]
"""Called with the progress of the work within a point: share done, message, best objective so far, bound so far."""

Work = Callable[[Any, int, Stop, Report], Any]
"""A point of a study: takes the data that all points have in common, the point's index, a `Stop` and a `Report`, and
returns its answer. A function of a module, so that another process finds it; it does not change the common data."""

GRACE = 0.7
"""Seconds that points at work are given to hand back their best; a job is killed a second after it was asked to stop."""
LOST_IN_A_ROW = 3
"""Times that workers may be lost without a point finished, or an answer come, in between."""


class NotBegunError(Exception):
    """A worker was asked to stop before it came to a point that it had been handed."""


class Crew(Protocol):
    """Workers that do points of one study, by a `concurrent.futures.Executor`.

    lost: exceptions of a future without its worker, so that its point is to be done again
    advice: for a person if workers go again and again
    """

    lost: tuple[type[BaseException], ...]
    advice: str

    def submit(self, index: int) -> Future:
        """Have a point done; points begin in the order in which they are submitted."""

    def check(self) -> None:
        """Raise InputError if nobody is left to do the points; asked several times per second."""

    def ask_to_stop(self) -> None:
        """Make the `Stop` of all points at work true, and let no others begin. Harmless to repeat."""

    def close(self) -> None:
        """End the workers that were started for the study, at work or not. Harmless to repeat."""


@dataclass(frozen=True)
class Batch:
    """The input of every worker, sent once: the work and the data that its points have in common."""

    work: Work
    common: Any

    def do(self, index: int, stop: Stop) -> Any:
        """Do a point, in a worker. Raises `NotBegunError` if nobody waits for it any more."""
        if stop():
            raise NotBegunError
        return self.work(self.common, index, stop, silent)


def silent(*progress: object) -> None:
    """The `Report` of work that nobody watches, such as a point in another process: progress moves by the point there."""

"""Who does the points of a study beside this process, and what a worker does with one of them."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, Protocol

from engine.result import Stop

Report = Callable[..., None]
"""Told how far the work within a point is: share done, message, best objective so far, bound so far."""

Work = Callable[[Any, int, Stop, Report], Any]
"""A point of a study: of what all points have in common, the point's index, a `Stop` and a `Report` its answer. A function of a
module, so that another process finds it; it changes nothing of what is common."""

GRACE = 0.7
"""Seconds that points at work are given to hand back their best; a job is killed a second after it was asked to stop."""


class NotBegunError(Exception):
    """A worker was asked to stop before it came to a point that it had been handed."""


class Crew(Protocol):
    """Workers that do points of one study, by a `concurrent.futures.Executor`.

    lost: exceptions of a future whose worker is gone, so that its point is to be done again
    advice: what to do where workers go again and again
    """

    lost: tuple[type[BaseException], ...]
    advice: str

    def submit(self, index: int) -> Future:
        """Have a point done; points begin in the order in which they are submitted."""

    def check(self) -> None:
        """Raise InputError when nobody is left to do the points; asked several times a second."""

    def ask_to_stop(self) -> None:
        """Make the `Stop` of all points at work true, and let no others begin. Harmless to repeat."""

    def close(self) -> None:
        """End the workers that were started for the study, at work or not. Harmless to repeat."""


def parcel(work: Work, common: Any) -> bytes:
    """What every worker gets once: the work and what its points have in common."""
    return pickle.dumps((work, common), pickle.HIGHEST_PROTOCOL)


def do_point(parcel: bytes, index: int, stop: Stop) -> Any:
    """One point of a parcel, in whatever process this is. Raises `NotBegunError` where nobody waits for it any more."""
    if stop():
        raise NotBegunError
    work, common = _opened(parcel)
    return work(common, index, stop, _nobody)


@lru_cache(maxsize=1)
def _opened(parcel: bytes) -> tuple[Work, Any]:
    # Kept from point to point: what was computed of the problem for one serves the next.
    return pickle.loads(parcel)


def _nobody(*told: object) -> None:
    """The `Report` of a point in another process: progress moves by the point there."""

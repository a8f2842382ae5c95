"""A crew of the workers of a Dask cluster (`distributed`, see requirements-dask.txt).

Common data goes to every worker once. A worker that dies costs its points a second attempt, which the scheduler sees to.
"""

import logging
import platform
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from typing import Any

from engine.errors import InputError
from engine.parallel.crew import Batch
from engine.result import library_versions

CONNECTING = 10.0
"""Seconds in which a scheduler has to answer."""
WITHOUT_WORKERS = 30.0
"""Seconds in which a scheduler that lost all its workers may find others."""
POLL = 0.25
"""Seconds between two questions of a worker about whether its points are still wanted."""


class Remote:
    """A crew on a Dask cluster, see `Crew`. Raises InputError if the cluster cannot be used."""

    advice = "the Dask cluster lost the same points again and again; look at the logs of its workers"

    def __init__(self, address: str, batch: Batch) -> None:
        try:
            import distributed
        except ImportError:
            raise InputError(
                f"points cannot go to {address}: distributed is not installed; pip install -r requirements-dask.txt"
            ) from None
        logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are put into one line below
        self.lost = (CancelledError, distributed.KilledWorker)
        self._address, self._had_workers, self._checked = address, time.monotonic(), 0.0
        try:
            self._client = distributed.Client(address, timeout=CONNECTING, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"no Dask scheduler answers at {address} ({error or type(error).__name__})") from None
        with ExitStack() as if_refused:
            if_refused.callback(_briefly, self._client.close)
            try:
                self._client.wait_for_workers(1, timeout=CONNECTING)
                self._check_versions()
                self._stop = distributed.Event(f"switchyard-stop-{secrets.token_hex(8)}", client=self._client)
                self._batch = self._client.scatter(batch, broadcast=True, hash=False)
            except TimeoutError:
                raise InputError(f"the Dask scheduler at {address} has no workers; start some: dask worker {address}") from None
            except (OSError, CancelledError) as error:
                raise InputError(f"the Dask scheduler at {address} went away ({type(error).__name__})") from None
            if_refused.pop_all()
        self._executor = self._client.get_executor(pure=False)

    def _check_versions(self) -> None:
        """Raise InputError unless all have the same libraries, which the same answers need."""
        mine = _versions()
        try:
            of_workers = _within(CONNECTING, lambda: self._client.run(_versions, on_error="return"))
        except TimeoutError:
            raise InputError(
                f"the Dask cluster at {self._address} hangs: not all its workers answered within {CONNECTING:g} s"
            ) from None
        for worker, theirs in of_workers.items():
            if isinstance(theirs, Exception):
                raise InputError(
                    f"the Dask worker {worker} cannot import the engine ({theirs}); start it in the project's folder"
                )
            for name, version in mine.items():
                if theirs[name] != version:
                    raise InputError(
                        f"the Dask worker {worker} has {name} {theirs[name]}, this machine has {version}; the same answers "
                        "need the same versions"
                    )

    def submit(self, index: int) -> Future:
        return self._executor.submit(_do, self._batch, index, self._stop.name, priority=-index)

    def check(self) -> None:
        now = time.monotonic()
        if now - self._checked < 1.0:
            return
        self._checked = now
        if _briefly(self._client.nthreads):
            self._had_workers = now
        elif now - self._had_workers > WITHOUT_WORKERS:
            raise InputError(f"the Dask scheduler at {self._address} has lost all its workers, or hangs")

    def ask_to_stop(self) -> None:
        _briefly(self._stop.set)

    def close(self) -> None:
        _briefly(lambda: self._executor.shutdown(wait=False))
        _briefly(self._client.close)


def _briefly(call: Callable[[], Any]) -> Any:
    """The scheduler's answer to a question; None if it fails or takes long, for a scheduler may hang."""
    with suppress(Exception):  # a scheduler that is gone cancels the futures, which is how that is noticed
        return _within(0.3, call)
    return None


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return or raise the result of a call. Raises TimeoutError if it takes longer."""
    answer: Future = Future()

    def ask() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(seconds)


def _versions() -> dict[str, str]:
    return {"Python": platform.python_version(), **library_versions()}


def _do(batch: Batch, index: int, stop: str) -> Any:
    return batch.do(index, _RemoteStop(stop))


class _RemoteStop:
    """The `Stop` of a point on a worker: an event of the cluster, looked at now and then."""

    def __init__(self, name: str) -> None:
        from distributed import Event

        self._event, self._set, self._looked = Event(name), False, float("-inf")

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._set and now - self._looked > POLL:
            self._looked = now
            try:
                self._set = self._event.is_set()
            except Exception:  # whatever it is, nobody waits for the answer any more
                self._set = True
        return self._set

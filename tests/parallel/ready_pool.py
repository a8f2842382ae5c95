"""A pool of processes that has started, for tests and for the scripts that they run."""

import time

from engine.parallel.pool import Pool


def nothing() -> None:
    """The first work of these workers."""


def ready(pool: Pool) -> Pool:
    pool.start()
    deadline = time.monotonic() + 60
    while not pool.ready:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pool

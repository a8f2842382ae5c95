"""A pool of processes that has started, for tests and for the scripts that they run."""

from engine.parallel.pool import Pool
from tests.cases.jobs import until


def nothing() -> None:
    """The first work of these workers."""


def ready(pool: Pool) -> Pool:
    pool.start()
    until(lambda: pool.ready)
    return pool

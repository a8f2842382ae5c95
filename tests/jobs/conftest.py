"""The fixture that starts jobs of `tests/jobs/handlers.py`."""

import pytest

from engine.jobs import runner
from engine.jobs.runner import Job
from tests.cases.jobs import WORKER


@pytest.fixture
def start(tmp_path):
    """Starts jobs of `tests/jobs/handlers.py`; whatever still runs at the end of the test is killed."""
    started = []

    def begin(kind: str, arguments: dict | None = None, queued: bool = True) -> Job:
        started.append(runner.start(kind, arguments or {}, tmp_path, module=WORKER, queued=queued))
        return started[-1]

    yield begin
    for job in started:
        if job.folder.exists():
            runner.cancel(job, grace=0)
            assert runner.wait(job, 5).finished

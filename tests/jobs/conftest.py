"""The fixture that starts jobs of `tests/jobs/handlers.py`."""

from pathlib import Path
from typing import Any

import pytest

from engine.jobs import runner
from engine.jobs.runner import Job
from tests.cases.jobs import WORKER


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(kind: str, arguments: dict | None = None, root: Path = tmp_path, module: str = WORKER, **more: Any) -> Job:
        started.append(runner.start(kind, arguments or {}, root, module=module, **more))
        return started[-1]

    yield begin
    for job in started:
        if job.folder.exists():
            runner.cancel(job, grace=0)
            assert runner.wait(job, 5).finished

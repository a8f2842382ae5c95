"""Jobs of `tests/jobs/handlers.py`: their kinds and arguments, a job folder made by hand, and waiting."""

import subprocess
import sys
import time
from pathlib import Path

from engine.jobs import protocol, workers
from engine.jobs.protocol import Request
from engine.jobs.runner import Job

WORKER = "tests.jobs.handlers"
ID = "20250102T030405000006-0123abcd"
LONG = {"steps": 1000, "pause": 0.05}


def until(condition, timeout=60.0):
    """Wait until a condition is true and return its value."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return answer


def by_hand(root: Path) -> Job:
    """Make the folder of a job that no process works on."""
    job = Job(ID, root / "jobs" / ID)
    job.folder.mkdir(parents=True)
    request = Request(kind="count", arguments={}, created=time.time())
    (job.folder / protocol.REQUEST).write_text(request.to_json())
    return job


def in_another_process(code: str, *arguments: object) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=workers.PROJECT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()

"""Jobs from a process that has the engine imported already: as real as any other, and on their feet at once.

`tests/jobs` and `tests/browser` start jobs the way the studio does.
"""

import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from engine.jobs.protocol import LOG

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload([__name__, "engine.jobs.tasks", "engine.jobs.studies", "engine.jobs.scores"])


def spawn(module: str, folder: Path) -> SimpleNamespace:
    """In place of `engine.jobs.runner._spawn`: what the runner needs of a process."""
    process = FORK_SERVER.Process(target=_work, args=(module, folder, dict(os.environ)))
    process.start()

    def wait() -> int:
        process.join()
        return process.exitcode

    return SimpleNamespace(pid=process.pid, wait=wait, kill=process.kill)


def _work(module: str, folder: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with (folder / LOG).open("ab") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    sys.exit(importlib.import_module(module).main(folder))

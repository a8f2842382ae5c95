"""Jobs and studios from a process that has everything imported already: as real as any other, and on their feet at once.

`tests/jobs` starts jobs the way the studio does, and so do the studios of `tests/browser`; `tests/browser/test_main_job.py`
starts a studio the way a person does.
"""

import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from engine.jobs.protocol import LOG

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload([
    __name__, "engine.jobs.tasks", "engine.jobs.studies", "engine.jobs.scores", "streamlit.web.cli", "app.cached",
    "app.launch_form", "app.launch_report", "app.review_list", "app.what_if_live", "app.what_if_studies", "app.affinity_study",
])  # fmt: skip
ROOT = Path(__file__).parents[2]


def spawn(module: str, folder: Path) -> SimpleNamespace:
    """In place of `engine.jobs.runner._spawn`: what the runner needs of a process."""
    process = FORK_SERVER.Process(target=_work, args=(module, folder, dict(os.environ)))
    process.start()

    def wait() -> int:
        process.join()
        return process.exitcode

    return SimpleNamespace(pid=process.pid, wait=wait, kill=process.kill)


def serve(arguments: list[str], environment: dict[str, str], log: Path) -> multiprocessing.Process:
    """`python -m streamlit` with these arguments."""
    process = FORK_SERVER.Process(target=_serve, args=(arguments, environment, log))
    process.start()
    return process


def _serve(arguments: list[str], environment: dict[str, str], log: Path) -> None:
    _become(environment, log)
    os.chdir(ROOT)
    sys.argv = ["streamlit", *arguments]
    importlib.import_module("streamlit.web.cli").main()


def _work(module: str, folder: Path, environment: dict[str, str]) -> None:
    _become(environment, folder / LOG)
    sys.exit(importlib.import_module(module).main(folder))


def _become(environment: dict[str, str], log: Path) -> None:
    """Let this process have a session, an environment and a log of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())

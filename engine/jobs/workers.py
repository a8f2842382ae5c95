"""Starts the process of a job: a new one, or a standby that has imported all that plans need and waits for its folder.

A new worker imports for longer than it then needs for the first plans of a small problem. Whoever serves people for long,
such as a studio, therefore keeps one standby. It is a worker like any other: a process of its own session, started by the same
command without a folder. It reads that from its standard input once there is a job, as JSON with the environment of then.
Until then it knows nothing and shares nothing, and it ends when whoever keeps it ends, however that happens, since nobody could
write to it any more.
"""

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from engine.files import open_to_append
from engine.jobs.protocol import LOG

MARK = "SWITCHYARD_JOB"
"""Environment variable every process of a job inherits: finds those that outlived the parent that linked them to it. A standby
sets it for those that it starts; it itself is found by the id that is noted as soon as it has the job."""
PROJECT = Path(__file__).resolve().parents[2]
WORKER = "engine.jobs.worker"
NEEDED = (
    *("engine.jobs.tasks", "engine.systems.aurora_exclusive", "engine.systems.best", "engine.placement.grouped_assignment"),
    *("engine.solver", "ortools.linear_solver.python.model_builder"),
)
"""Modules that plans by the usual systems need."""
KERNELS = ("engine.simulate.compile_ahead", "engine.placement.best")
"""Modules of which `compile_ahead` loads compiled code."""

_lock, _kept = threading.Lock(), False
_standby: subprocess.Popen[bytes] | None = None


def keep_standby() -> None:
    """Have a standby for the next job from now on; harmless to repeat. It takes the memory of a worker."""
    global _kept
    with _lock:
        if not _kept:
            _kept = True
            _start_standby()


def replace_standby() -> None:
    """Start another standby for one that was used, where one is kept: once its job has ended, for which it would take time."""
    with _lock:
        if _kept and (_standby is None or _standby.poll() is not None):
            _start_standby()


def _start_standby() -> None:
    global _standby
    with contextlib.suppress(OSError):  # no more processes or memory: jobs start as they would without
        _standby = _process([WORKER], subprocess.PIPE, subprocess.DEVNULL, _environment())


def start(module: str, folder: Path, handed: bytes | None = None) -> subprocess.Popen[bytes]:
    """Start the worker of the job in `folder`; `module` is the code to run. Raises OSError if it cannot.

    handed: what a new worker alone can read, see `Context.handed`
    """
    global _standby
    environment = _environment() | {MARK: str(folder)}
    if handed is not None:
        # Without a name from the start: the system forgets it with the worker, however that ends.
        with open_to_append(folder / LOG) as log, tempfile.TemporaryFile() as file:
            file.write(handed)
            file.seek(0)
            return _process([module, str(folder)], file, log, environment)
    with _lock:
        standby, _standby = (_standby, None) if module == WORKER else (None, _standby)
    if standby is not None and standby.poll() is None:
        with contextlib.suppress(OSError), standby.stdin as told:  # it may die just now
            told.write(json.dumps([str(folder), environment]).encode())
            told.close()
            return standby
    with open_to_append(folder / LOG) as log:
        return _process([module, str(folder)], subprocess.DEVNULL, log, environment)


def _environment() -> dict[str, str]:
    paths = [str(PROJECT), os.environ.get("PYTHONPATH", "")]
    # Unbuffered: the log is read while it is written, and must be whole when the worker is killed.
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def _process(
    words: list[str], stdin: int | IO[bytes], output: int | IO[bytes], environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=PROJECT,
        env=environment,
        stdin=stdin,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def awaited_folder() -> Path:
    """The folder of the job that this standby is told, once it is; meanwhile it imports. It ends if it cannot be told one."""
    told: list[bytes] = []

    def listen() -> None:
        if not (text := sys.stdin.buffer.read()):
            os._exit(0)  # also in the middle of an import
        told.append(text)

    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    load(lambda: not told)  # a job need not wait for what it may not need
    listening.join()
    name, environment = json.loads(told[0])
    os.environ.clear()
    os.environ.update(environment)
    folder = Path(name)
    with open_to_append(folder / LOG) as log, Path(os.devnull).open("rb") as nothing:
        for target, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), target)
    return folder


def load(goes_on: Callable[[], bool]) -> None:
    """Import what plans need and load its compiled code, module by module, while there is time for more."""
    gc.disable()  # or it walks through all that is imported, again and again
    for name in (*NEEDED, *KERNELS):
        if not goes_on():
            break
        module = importlib.import_module(name)
        if name in KERNELS:
            module.compile_ahead()
    gc.freeze()
    gc.enable()

"""The process of one job: `python -m engine.jobs.worker FOLDER`. Started by `engine.jobs.runner`.

It exits with 0 when the work returned, 2 on bad input and 1 on any other exception.
"""

import contextlib
import errno
import faulthandler
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from engine.errors import InputError
from engine.files import PRIVATE_FILE, mark, write_atomically
from engine.jobs import queue
from engine.jobs.protocol import ALIVE, CANCELLED, ERROR, REQUEST, RESERVE, Context, Failure, Request, write_pid

RESERVED = 2**14
"""Bytes of disk that a job holds while it works, so that it can say why it failed when there are no others left."""

Handler = Callable[[dict[str, Any], Context], dict[str, Any]]

# The only work a job can do, by kind. Named rather than imported: a job loads what it needs and no more.
HANDLERS = {
    "optimise": "engine.jobs.tasks:optimise",
    "launch": "engine.jobs.launches:launch",
    "calibrate": "engine.jobs.launches:calibrate_devices",
    "affinity": "engine.jobs.studies:affinity_study",
    "sweep": "engine.jobs.studies:sweep_study",
    "sensitivity": "engine.jobs.studies:sensitivity_study",
    "curve": "engine.jobs.studies:curve_study",
    "contention": "engine.jobs.studies:contention_study",
    "imprecision": "engine.jobs.studies:imprecision_study",
    "capacity": "engine.jobs.studies:capacity_study",
    "replan": "engine.jobs.studies:replan",
    "front": "engine.jobs.scores:find_front",
    "matrix": "engine.jobs.scores:score_matrix",
    "verdict": "engine.jobs.judgements:verdict",
    "redundancy": "engine.jobs.judgements:redundancy_study",
    "lina": "engine.jobs.scores:lina_study",
}


def main(folder: Path) -> int:
    """Do the job in `folder`; returns the exit code."""
    return run(folder, HANDLERS)


def run(folder: Path, handlers: Mapping[str, str]) -> int:
    """Do the job in `folder` by the handler of its kind, given as `module:function`; returns the exit code."""
    os.umask(0o077)  # whatever the work and its ranks leave is as private as the folder
    context = Context(folder)
    signal.signal(signal.SIGTERM, lambda number, frame: context.ask_to_stop())
    faulthandler.enable()
    write_pid(folder, os.getpid())
    alive = FileLock(folder / ALIVE, mode=PRIVATE_FILE)  # to the end of the process
    with contextlib.suppress(OSError):
        alive.acquire()
        write_atomically(folder / RESERVE, os.urandom(RESERVED))
    threading.Thread(target=_heed_marker, args=(folder, context), daemon=True).start()
    try:
        request = Request.from_json((folder / REQUEST).read_bytes(), REQUEST)
        with queue.turn(folder, context.stop) as my_turn:
            if not my_turn:
                mark(folder / CANCELLED)
                return 0
            handler = _load(request.kind, handlers)
            if (folder / CANCELLED).exists():
                return 0
            context.finish(handler(request.arguments, context))
    except InputError as error:
        if context.stop():  # work without a partial result answers a signal from outside like this
            with contextlib.suppress(OSError):
                mark(folder / CANCELLED)
        _leave_error(folder, str(error))
        with contextlib.suppress(OSError):
            print(error, file=sys.stderr)
        return 2
    except Exception as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        _leave_error(folder, f"{folder}: {error.strerror}" if full else f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return 1
    finally:
        with contextlib.suppress(OSError):
            (folder / RESERVE).unlink(missing_ok=True)
    return 0


def _heed_marker(folder: Path, context: Context) -> None:
    """Stop for whoever asks from another machine, from which no signal comes."""
    while not (folder / CANCELLED).exists():
        time.sleep(0.5)
    context.ask_to_stop()


def _load(kind: str, handlers: Mapping[str, str]) -> Handler:
    if kind not in handlers:
        raise InputError(f"{REQUEST}: no job is of the kind '{kind}'; the kinds are {', '.join(sorted(handlers))}")
    module, function = handlers[kind].split(":")
    return getattr(importlib.import_module(module), function)


def _leave_error(folder: Path, message: str) -> None:
    # On a full disk, without the reserve, the exit code and what the log still takes have to do.
    with contextlib.suppress(OSError):
        (folder / RESERVE).unlink(missing_ok=True)
        write_atomically(folder / ERROR, Failure(message=" ".join(message.split())).to_json())


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    gc.freeze()  # or the interpreter looks for half a second through what ends with it anyway
    sys.exit(code)

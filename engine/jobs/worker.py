"""The process of one job: `python -m engine.jobs.worker FOLDER`, started by `engine.jobs.workers`, or a standby without one.

It exits with 0 when the work returned, 2 on bad input and 1 on any other exception.
"""

import contextlib
import errno
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from engine.errors import InputError
from engine.files import PRIVATE_FILE, mark, write_atomically
from engine.jobs import queue, workers
from engine.jobs.kinds import HANDLERS, answered, handler_of
from engine.jobs.protocol import ALIVE, CANCELLED, ERROR, REQUEST, RESERVE, Context, Failure, Request, write_pid

RESERVED = 2**14
"""Bytes of disk that a job holds while it works, so that it can say why it failed when there are no others left."""


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
            handler = handler_of(request.kind, handlers)
            if (folder / CANCELLED).exists():
                return 0
            context.finish(answered(handler, request.arguments, context))
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


def _leave_error(folder: Path, message: str) -> None:
    # On a full disk, without the reserve, the exit code and the rest of the log have to do.
    with contextlib.suppress(OSError):
        (folder / RESERVE).unlink(missing_ok=True)
        write_atomically(folder / ERROR, Failure(message=" ".join(message.split())).to_json())


if __name__ == "__main__":
    code = main(Path(sys.argv[1]) if sys.argv[1:] else workers.awaited_folder())
    gc.freeze()  # or the interpreter looks for half a second through objects that end with it anyway
    sys.exit(code)

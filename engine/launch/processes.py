"""The processes of a launch: run to their end, watched, and nothing of them left behind."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from engine.errors import InputError
from engine.launch.spec import PROGRESS, WORKER
from engine.result import Stop


def run_processes(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    ranks: int,
    limit: float,
    folder: Path,
    stop: Stop,
    report,
) -> None:
    """Run the ranks of a launch, or what starts them, until all have ended well. Raises InputError as soon as one fails,
    when the launch is stopped, and when it takes too long. Nothing is left running, also when this process dies.

    commands: the argument list of every process, and what it needs in its environment beside what all need; ranks: how
    many share the processors of this machine; limit: seconds.
    """
    shared = os.environ | {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(folder),  # torchrun leaves a folder for its logs behind
    }
    root = Path(__file__).parent.parent.parent
    deadline = time.monotonic() + limit
    errors: list[str] = []
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for command, own in commands:
            process = subprocess.Popen(
                command, cwd=root, env=shared | own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace", preexec_fn=_die_with_parent,
            )  # fmt: skip
            processes.append(process)
            readers.append(threading.Thread(target=_relay, args=(process.stdout, report, errors), daemon=True))
            readers[-1].start()
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if stop():
                raise InputError("the launch was ended: stopped")
            if time.monotonic() > deadline:
                raise InputError(f"the launch was ended: not finished after {limit:g} s")
            time.sleep(0.05)
    finally:
        _end(processes, folder)
        for reader in readers:
            reader.join(5.0)
    if failed := [code for code in codes if code]:
        raise InputError(f"the ranks ended with exit code {failed[0]}; {errors[0] if errors else 'see the log'}")


def _end(processes: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    """Leave nothing of a launch running: torchrun gives its ranks sessions of their own, and a rank that is still
    starting does not notice that torchrun was killed."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    patience = time.monotonic() + 1.0
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, patience - time.monotonic()))
        process.kill()
        process.wait()
    for rank in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if {WORKER, str(folder)} <= set(rank.cmdline()):
                rank.kill()


def _relay(stream, report, errors: list[str]) -> None:
    """Pass the ranks' progress lines on, print everything else, and collect the lines that name an error."""
    for line in stream:
        told = _progress(line)
        if told is not None:
            report(told["done"], told["message"], None, None)
        else:
            print(line, end="", flush=True)
            if "Error" in line:
                errors.append(line.strip())


def _progress(line: str) -> dict[str, Any] | None:
    """What a progress line says; None for any other, also for one that another rank's output has run into."""
    if not line.startswith(PROGRESS):
        return None
    with contextlib.suppress(ValueError):
        return json.loads(line.removeprefix(PROGRESS))
    return None


def _die_with_parent() -> None:
    """Ask Linux to end this process when the job that started it dies, so that no ranks are left behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG

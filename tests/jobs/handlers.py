"""A worker with jobs to try the runner on: `python -m tests.jobs.handlers FOLDER`, or a standby without one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import ConfigDict

from engine.errors import InputError
from engine.jobs import workers
from engine.jobs.kinds import Answer, Ask
from engine.jobs.protocol import Context
from engine.jobs.worker import run
from engine.result import Stop

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL, {options})
print(child.pid, flush=True)
{then}
"""


class Loose(Ask):
    """Whatever is asked."""


class Count(Ask):
    """The number to count to, and the seconds of each step."""

    steps: int
    pause: float = 0.0


class LooseAnswer(Answer):
    """Whatever is answered."""

    model_config = ConfigDict(extra="allow")


def count(ask: Count, context: Context) -> LooseAnswer:
    reached = 0
    while reached < ask.steps and not context.stop():
        reached += 1
        context.keep(LooseAnswer(reached=reached))
        context.report(reached / ask.steps, f"step {reached}", incumbent=reached, bound=float("inf"))
        time.sleep(ask.pause)
    return LooseAnswer(reached=reached, returned=True)


def study(ask: Count, context: Context) -> LooseAnswer:
    """Does `steps` points that take `pause` seconds each, soon in processes of its own, until asked to stop."""
    from engine.parallel import in_order  # which the other kinds, started cold by the dozen, need not load

    done = []
    for point, _ in in_order(rest, ask.pause, ask.steps, context.stop):
        done.append(point)
        context.keep(LooseAnswer(done=done))
        context.report(len(done) / ask.steps, f"point {point}", incumbent=1.0)
    return LooseAnswer(done=done)


def rest(pause: float, point: int, stop: Stop, report: Callable[..., None]) -> int:
    time.sleep(pause)
    return point


def refuse(ask: Loose, context: Context) -> LooseAnswer:
    raise InputError("load.csv, line 3:\nexpert 9 of 8")


def crash(ask: Loose, context: Context) -> LooseAnswer:
    print("before the bug")
    return LooseAnswer(answer={}["missing"])


def leave(ask: Loose, context: Context) -> LooseAnswer:
    os._exit(3)


def cling(ask: Loose, context: Context) -> LooseAnswer:
    """Ignores SIGTERM, and has descendants in other sessions: one without environment, one without parent."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    scripts = PARENT.format(options="env={}", then="child.wait()"), PARENT.format(options="", then="")
    parents = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for script in scripts]
    pids = [int(parent.stdout.readline()) for parent in parents]
    parents[1].wait()
    context.keep(LooseAnswer(reached=1))
    context.report(None, " ".join(map(str, pids)))
    time.sleep(60)
    return LooseAnswer()


def take(ask: Count, context: Context) -> LooseAnswer:
    """Says how much it was handed."""
    return LooseAnswer(handed=len(context.handed()), reached=ask.steps)


def fill(ask: Loose, context: Context) -> LooseAnswer:
    context.keep(LooseAnswer(reached=1))
    with (context.folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    context.report(0.5, "x" * 10_000)
    return LooseAnswer(reached=2)


if __name__ == "__main__":
    names = ("count", "study", "refuse", "crash", "leave", "cling", "fill", "take")
    given = Path(sys.argv[1]) if sys.argv[1:] else workers.awaited_folder()
    sys.exit(run(given, {name: f"tests.jobs.handlers:{name}" for name in names}))

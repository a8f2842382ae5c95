"""The processes of a launch: run to their end, watched, and none of them left behind."""

import contextlib
import ctypes
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from engine.errors import InputError, StoppedError
from engine.launch.places.testbed import Testbed
from engine.launch.rank.failure import STACK, TORCHRUN_LOGS, Failures, RankLogs, RankProgress
from engine.launch.rank.instructions import PROGRESS
from engine.launch.rank.settings import threads
from engine.result import Stop

WORKER, SWEEP_RANK = "engine.launch.worker", "engine.launch.calibration.sweep_rank"
"""The only modules that ranks run: that of a launch, and that of a calibration."""

ROOT = Path(__file__).parents[3]
"""The project's folder, in which ranks are started."""

FOR_EVERY_RANK = {"PYTHONUNBUFFERED": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank}] "}
"""Environment variables of all ranks everywhere, and of the torchrun that starts them."""

MOST_PRINTED = 2**28
"""Bytes that the ranks of a launch may print in all."""

OF_RANK = re.compile(r"\[rank (\d+)\] (.*)", re.DOTALL)
"""A rank's line as torchrun passes it on."""

PATIENCE = 2.0
"""Seconds that torchrun has to end by itself once a rank has reported a failure, before all is ended."""
TO_END = 0.3
"""Seconds that it has after it is told to end: it takes one to put itself away, half of the time promised to a person;
killed, it takes its ranks along."""

Command = tuple[Sequence[str], Mapping[str, str]]
"""The argument list of a process, and its environment variables in addition to the common ones: RANK if it is one rank."""


def run_processes(commands: Sequence[Command], ranks: int, limit: float, folder: Path, stop: Stop, report) -> None:
    """Run the ranks of a launch, or the process that starts them, until all have ended well. Raises InputError as soon as one
    fails, if the launch is stopped, and if it takes too long. Nothing is left running, also if this process dies.

    A rank's output goes to its file in the folder, see `rank.failure`, and except progress to standard output. Only
    rank 0's progress is reported.

    ranks: number that share the processors of this machine
    limit: seconds
    """
    deadline = time.monotonic() + limit
    output = _Output(RankLogs(folder, ranks), report)
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for command in commands:
            processes.append(_start(command, ranks, folder))
            readers.append(output.reader(processes[-1], _rank_of(command)))
        codes = _wait(processes, output, folder, stop, deadline, limit)
    except InputError:
        output.ended = True
        raise
    finally:
        _end(processes, folder)
        for reader in readers:
            reader.join(5.0)
        shutil.rmtree(folder / TORCHRUN_LOGS, ignore_errors=True)
        output.logs.save()
    if any(codes) or output.failures.reported:
        if stop():  # the signal that asked for it may have ended them too
            raise StoppedError("the launch was ended: stopped")
        # A rank that was killed before one that failed because of it.
        for code, place in sorted((code, place) for place, code in enumerate(codes) if code)[:1]:
            output.failures.ended(_rank_of(commands[place]), code)
        output.logs.failed = output.failures.culprit
        output.logs.save()
        raise InputError(f"the launch failed: {output.failures.reason}")


def _rank_of(command: Command) -> int | None:
    """The rank that a command starts; None: all of them, by torchrun."""
    _, environment = command
    return int(environment["RANK"]) if "RANK" in environment else None


def _start(command: Command, ranks: int, folder: Path) -> subprocess.Popen[str]:
    arguments, environment = command
    shared = FOR_EVERY_RANK | {
        "OMP_NUM_THREADS": str(threads(ranks)),
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(folder),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1",  # a suspended rank does not end when it is asked to
    }
    # Sent by Linux when the job that started the process dies, so that no ranks are left behind (1 = PR_SET_PDEATHSIG).
    # torchrun has ranks to end; a rank may be suspended, and then only SIGKILL ends it.
    last = signal.SIGTERM if _rank_of(command) is None else signal.SIGKILL
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=os.environ | shared | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        preexec_fn=partial(ctypes.CDLL(None).prctl, 1, last),
        start_new_session=True,  # a Ctrl-C is for Switchyard, which then ends its processes
    )


def _wait(
    processes: Sequence[subprocess.Popen[str]], output: "_Output", folder: Path, stop: Stop, deadline: float, limit: float
) -> list[int | None]:
    """Watch the processes until all have ended, one has ended badly or a rank has reported a failure; returns their
    exit codes, None for those that still run. Raises InputError if they are to be ended before that."""
    saved, patience = 0.0, math.inf
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        if stop():
            raise StoppedError("the launch was ended: stopped")
        if (now := time.monotonic()) > deadline:
            raise InputError(f"the launch was ended: not finished after {limit:g} s{_hung(folder)}")
        if output.failures.reported:
            patience = min(patience, now + PATIENCE)
            if now > patience:
                break
        if now > saved + 0.5:
            saved = now
            output.logs.save()
            printed = output.printed
            for path in (folder / TORCHRUN_LOGS).glob("*/*/*/*.log"):  # torchrun's own files
                with contextlib.suppress(OSError):
                    printed += path.stat().st_size
            if printed > MOST_PRINTED:
                raise InputError(f"the launch was ended: its ranks printed more than {MOST_PRINTED >> 20} MiB")
        time.sleep(0.05)
    return codes


def commands_of(module: str, ranks: int, folder: Path, testbed: Testbed | None) -> list[Command]:
    """The commands that run a module on `ranks` ranks of this machine, with the folder as its only argument: torchrun,
    or on emulated links every rank by itself in its network namespace, because torchrun starts all its ranks in one."""
    if testbed is None:
        return [(torchrun(ranks, module, folder), {"GLOO_SOCKET_IFNAME": "lo"})]
    rank_alone = [sys.executable, "-m", module, str(folder)]
    return [(testbed.inside(rank, rank_alone), testbed.environment(rank)) for rank in range(testbed.ranks)]


def torchrun(ranks: int, module: str, folder: Path) -> list[str]:
    """The command that runs a module on `ranks` ranks of this machine, as an argument list."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*start, "--tee", "3", "--log-dir", str(folder / TORCHRUN_LOGS), "--module", module, str(folder)]


class _Output:
    """The output of a launch's processes: passed on, and searched for the cause of their end."""

    def __init__(self, logs: RankLogs, report) -> None:
        self.logs, self.report, self.printed = logs, report, 0
        self.ended = False
        """True once the launch is ended from here: torchrun then prints a traceback of the signal, which tells nothing."""
        self.failures = Failures()

    def reader(self, process: subprocess.Popen[str], rank: int | None) -> threading.Thread:
        """A thread that relays the output of a process, already running."""
        thread = threading.Thread(target=self.relay, args=(process.stdout, rank), daemon=True)
        thread.start()
        return thread

    def relay(self, stream, rank: int | None) -> None:
        """Read the output of a process to its end. rank: that of the process; None: torchrun, which names the rank of a
        line."""
        for line in stream:
            self.printed += len(line)
            mine = OF_RANK.fullmatch(line) if rank is None else None
            with contextlib.suppress(OSError):  # a log on a full disk: without a reader the ranks would stop
                self._take(*((int(mine[1]), mine[2]) if mine else (rank, line)))

    def _take(self, rank: int | None, line: str) -> None:
        progress = RankProgress.read(line.removeprefix(PROGRESS)) if line.startswith(PROGRESS) else None
        if progress is not None and rank is not None:
            self.logs.progress(rank, progress)
            if rank == 0:
                self.report(progress.done, progress.message, None, None)
            return
        line = self.failures.take(rank, line)
        if rank is not None:
            self.logs.print(rank, line)
        elif self.ended:
            return
        print(line if rank is None else f"[rank {rank}] {line}", end="", flush=True)


def _end(processes: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    """Leave nothing of a launch running: torchrun gives its ranks sessions of their own, and a rank that is still
    starting does not notice that torchrun was killed."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    patience = time.monotonic() + TO_END
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, patience - time.monotonic()))
        process.kill()
        process.wait()
    for process in _processes_of(folder):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _processes_of(folder: Path) -> Iterator[psutil.Process]:
    """The living ranks in this run folder, and torchrun."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = set(process.cmdline())
            if str(folder) in words and {WORKER, SWEEP_RANK} & words:
                yield process


def _hung(folder: Path) -> str:
    """A note on ranks that do not end. They are asked to print their stacks, which goes to the log."""
    suspended = []
    for process in _processes_of(folder):
        with contextlib.suppress(psutil.Error, KeyError):
            rank = process.environ()["RANK"]
            if process.status() == psutil.STATUS_STOPPED:
                suspended.append(rank)
            process.send_signal(STACK)
    time.sleep(0.5)
    return "".join(f"; rank {rank} is suspended" for rank in sorted(suspended, key=int))

"""Processes from one that has everything imported already: as real as any other, and on their feet at once.

Studios, jobs, commands, torchrun and its ranks are started with `sys.executable`. Where it is not the point how they start,
it is `warm_python`, which asks the process here for a fork. A test that suspends, kills or looks for processes starts its own
cold, as a person does, since `warm_python` stands for its fork and would be found instead; so does the main job in the browser
in `make everything`.
"""

import contextlib
import ctypes
import fcntl
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests import spent

ROOT = Path(__file__).parent.parent
PYTHON = Path(__file__).parent / "warm_python"
INTERPRETER = sys.executable
MOST_FILES = 64
"""Open files that a process may lend."""
ADDRESS = "SWITCHYARD_TESTS_WARM"
"""The variable that tells `warm_python` the address of the process."""
IMPORTED = (
    "engine.jobs.tasks",
    "engine.jobs.studies",
    "engine.jobs.scores",
    "engine.placement.grouped_assignment",
    "engine.placement.replication.exact",
    "engine.solver",
    "engine.launch.worker",
    "engine.launch.calibration.sweep_rank",
    "engine.launch.step.run",
    "engine.launch.step.measure_machine",
    "engine.launch.own.run",
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "streamlit.web.cli",
    "networkx",
    "ortools.linear_solver.python.model_builder",
    "scipy.optimize",
    "scipy.sparse.csgraph",
)
OF_MODELS = "transformers.models.auto.modeling_auto", "transformers.models.deepseek_v3.modeling_deepseek_v3"
"""Imported where transformers is installed, for ranks that load a model."""


@contextlib.contextmanager
def serving(address: Path) -> Iterator[None]:
    """Inside, `warm_python` works in whoever has `ADDRESS` in the environment.

    Its Python is this one, as in an activated environment: else a script of a version manager's would look for one each time.
    """
    os.environ["PATH"] = os.pathsep.join([str(Path(INTERPRETER).parent), os.environ["PATH"]])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        command = [sys.executable, "-m", __name__, str(listener.fileno())]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]):
            yield


def serve(listener: socket.socket) -> None:
    """Fork a process for everyone who asks, until whoever started this one has ended.

    Everyone is told the exit code of theirs, which ends when they are gone.
    """
    processes: dict[socket.socket, Process] = {}
    while True:
        ended = {process.ended: asking for asking, process in processes.items()}
        ready, _, _ = select.select([listener, sys.stdin, *processes, *ended], [], [])
        if sys.stdin in ready:
            return
        if listener in ready:
            asking, _ = listener.accept()
            _load()  # not before somebody asks: most runs of a few tests start nothing
            if process := _begin(asking, [listener, *processes]):
                processes[asking] = process
        for asking in processes.keys() & {*ready}:
            processes[asking].obey(asking.recv(1))
        for pidfd in ended.keys() & {*ready}:
            asking = ended[pidfd]
            with asking, contextlib.suppress(OSError):
                asking.sendall(processes.pop(asking).code())


@dataclass
class Process:
    """A process that was forked. ended: a pidfd; record: the file to which its processor seconds are added, if any"""

    pid: int
    ended: int
    record: str | None

    def obey(self, number: bytes) -> None:
        """Pass a signal on; nothing at all is read from somebody who is gone."""
        if number:
            os.kill(self.pid, number[0])
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # and whoever it forked
        os.kill(self.pid, signal.SIGKILL)

    def code(self) -> bytes:
        """The exit code, as `warm_python` wants it, once the process has ended."""
        os.close(self.ended)
        _, status, usage = os.wait4(self.pid, 0)
        if self.record:
            with Path(self.record).open("a") as seconds:
                seconds.write(f"{usage.ru_utime + usage.ru_stime}\n")
        return os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True)


def _begin(asking: socket.socket, others: list[socket.socket]) -> Process | None:
    """Fork what is asked for; None if whoever asked is gone already. others: sockets that are none of the fork's business."""
    size, lent, _, _ = socket.recv_fds(asking, 4, MOST_FILES)
    told = asking.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL) if size else b""
    request = json.loads(told) if told else {}
    child = os.fork() if request else None
    if child == 0:
        os.setsid()
        for each in (asking, *others):
            each.close()
        os._exit(_run(lent, **request))
    for descriptor in lent:
        os.close(descriptor)
    if child is None:
        asking.close()
        return None
    return Process(child, os.pidfd_open(child), request["environment"].get(spent.ENDED))


@functools.cache
def _load() -> None:
    """Load the modules that a fork would import, the compiled simulation, and what a studio loads with its first page."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from app import warm_up
    from engine import cli
    from engine.placement import best, group_loads
    from engine.placement.affinity import kernel as affinity
    from engine.placement.coactivation import kernel as coactivation
    from engine.placement.replication import by_rank

    # torchrun looks through all modules, here many, to name each step in which its ranks meet, in an event that goes nowhere.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    groups = (group.name for group in pkgutil.iter_modules(cli.__path__, "engine.cli."))
    for module in (*IMPORTED, *groups, *(OF_MODELS if importlib.util.find_spec("transformers") else ())):
        importlib.import_module(module)

    warm_up.begin().join()
    warm_up.begin_simulation().join()
    best.compile_ahead(by_rank=True)
    for kernel in (group_loads, affinity, coactivation, by_rank):
        kernel.compile_ahead()
    warm_up.spare()


def _run(lent: list[int], words: list[str], environment: dict[str, str], folder: str, inherited: list[int]) -> int:
    """Be `python -u -m` with these words, or `python -c`; returns the exit code.

    lent: the network's namespace, the standard streams, and what else `inherited` has the numbers of
    """
    import torch

    network, *files = lent
    elsewhere = os.fstat(network).st_ino != Path("/proc/self/ns/net").stat().st_ino
    if elsewhere and ctypes.CDLL(None).setns(network, 0x40000000):  # CLONE_NEWNET
        return 1
    os.close(network)
    kept = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3 + max(inherited, default=0)) for file in files]
    for target, file in zip((0, 1, 2, *inherited), kept, strict=True):
        os.dup2(file, target)
    for file in {*files, *kept} - {0, 1, 2, *inherited}:
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(target, mode, buffering=1) for target, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if "OMP_NUM_THREADS" in environment:  # read when PyTorch is loaded
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = words
    if words[0] != "pytest":  # each test decides how its own processes start
        sys.executable = str(PYTHON)
        multiprocessing.set_executable(str(PYTHON))
    if not hasattr(sys.modules.get(words[0]), "__path__"):
        sys.modules.pop(words[0], None)  # else runpy warns that it was imported before
    try:
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

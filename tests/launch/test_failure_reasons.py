"""The cause of a failed launch in one line, from exceptions of ranks and the output of nodes; logs and progress of ranks."""

import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.errors import StoppedError
from engine.launch.rank import failure as rank_logs
from engine.launch.rank.joining import failure_of, joined
from engine.launch.running import processes
from engine.launch.running.clusters import cause, node_lines
from engine.launch.running.processes import run_processes
from engine.launch.worker import gpu_of
from engine.result import never
from engine.systems.base import silent
from tests.cases.cluster_launches import destination
from tests.cases.refusals import refusal

LOST = rank_logs.RankFailure(0, "rank 0 lost another rank: closed", True).line
CAUSE = rank_logs.RankFailure(1, "rank 1 is out of memory", False).line


@pytest.mark.parametrize(
    ("error", "message", "lost"),
    [
        (lambda: torch.empty(2**58), f"rank 3 is out of memory (it wanted {2**60} bytes more); use fewer", False),
        (lambda: bytearray(2**60), "rank 3 is out of memory; use fewer ranks", False),
        (lambda: Path("/no such/file").read_text(), "rank 3: /no such/file: No such file or directory", False),
        (lambda: [][1], "rank 3 failed: IndexError: list index out of range", False),
        (lambda: lost_by_gloo(), "rank 3 lost another rank: Connection closed by peer [127.0.0.1]:48541", True),
    ],
)
def test_what_a_rank_says_of_its_exception(error, message, lost):
    with pytest.raises(Exception) as caught:
        error()
    failure = failure_of(caught.value, 3)
    assert failure.message.startswith(message) and (failure.rank, failure.lost) == (3, lost)
    assert rank_logs.read_failure(failure.line) == failure and "\n" not in failure.message


def of_nccl(kind: str, explanation: str, last: str) -> dist.DistBackendError:
    """An error of NCCL as PyTorch reports it (ProcessGroupNCCL.cpp, getNcclErrorDetailStr)."""
    return dist.DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
        f"{kind} (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n{kind}: {explanation}\nLast error:\n{last}"
    )


CUDA = ("ncclUnhandledCudaError", "Call to CUDA function failed.")
SYSTEM = ("ncclSystemError", "System call (e.g. socket, malloc) or external library call failed or device error.")
REMOTE = ("ncclRemoteError", "A call failed possibly due to a network error or a remote process exiting prematurely.")
USAGE = ("ncclInvalidUsage", "This usually reflects invalid usage of NCCL library.")
SHM = "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)"
TWICE = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
CLOSED = "socketProgress: Connection closed by remote peer node-1<51159>"


@pytest.mark.parametrize(
    ("kind", "last", "message", "lost"),
    [
        (CUDA, "Cuda failure 2 'out of memory'", "rank 3 is out of memory; use fewer ranks", False),
        (CUDA, "Cuda failure 999 'unknown error'", "rank 3 failed in NCCL: Cuda failure 999 'unknown error'", False),
        (SYSTEM, SHM, f"rank 3: {SHM}; make room there", False),
        (USAGE, TWICE, f"rank 3 shares its GPU with another rank, which NCCL cannot: {TWICE}", False),
        (REMOTE, CLOSED, f"rank 3 lost another rank: {CLOSED}", True),
    ],
)
def test_what_a_rank_says_of_nccl_s_errors(kind, last, message, lost):
    failure = failure_of(of_nccl(*kind, last), 3)
    assert failure.message.startswith(message) and failure.lost == lost and "\n" not in failure.message


@pytest.fixture
def meeting(monkeypatch) -> Iterator[socket.socket]:
    """The port at which rank 0 of two is to meet rank 1, which does not exist: nobody listens there."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        named = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.getsockname()[1]}
        for name, value in named.items():
            monkeypatch.setenv(name, str(value))
        yield place


def test_a_rank_that_never_joins_is_named(meeting):
    meeting.close()
    assert refusal(joined("gloo", 0.3, torch.device("cpu")).__enter__) == "rank 1 did not join within 0.3 s"


def test_a_port_in_use_is_named(meeting):
    meeting.listen()
    place = f"port {meeting.getsockname()[1]} of 127.0.0.1"
    message = refusal(joined("gloo", 0.3, torch.device("cpu")).__enter__)
    assert message == f"{place}, where the ranks meet, is in use by another program"
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(2)
            assert not thread.is_alive(), "its alarm would end this process later"


def lost_by_gloo() -> None:
    raise RuntimeError(
        "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:48541. "
        "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error."
    )


@pytest.mark.parametrize("line", ["failure", 'failure {"rank": 1', 'failure {"rank": 1}', "failure []", f"x {CAUSE}"])
def test_lines_that_another_one_has_run_into_are_not_read(line):
    assert rank_logs.read_failure(f"{line}\n") is None


def test_a_rank_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert re.fullmatch("rank 3 sees no GPU on .*: .*; ask for nodes that have some, or for none", refusal(gpu_of, 3))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert gpu_of(7) == torch.device("cuda", 1)


FIRST = "E1121 18:09:42.869000 17128 multiprocessing/api.py:1002] failed (exitcode: {}) local_rank: {} (pid: 171) of binary: x"
TABLE = """Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 17134) 
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : {} (pid: 17133) 
"""  # noqa: W291
FULL = "rank 1 could not write what it printed; the disk of the run folder may be full"
BUG = "[rank1]: engine.errors.SomeError: a bug\n"
KILLED = "rank 1 was killed by signal 9 (SIGKILL, which the system sends when memory runs out)"
ENDED, LONELY = "rank 1 was killed by signal 15 (SIGTERM)", "rank 0 lost another rank: closed"
WITH_CODE = "rank 1 ended with exit code"


@pytest.mark.parametrize(
    ("lines", "reason", "culprit"),
    [
        ([(0, LOST), (1, CAUSE), (None, FIRST.format(1, 0))], "rank 1 is out of memory", (1, 1)),
        ([(1, CAUSE), (None, FIRST.format(-9, 0))], "rank 1 is out of memory", (1, 1)),
        ([(0, LOST), (None, FIRST.format(-9, 1)), (None, TABLE.format(-9, -15))], KILLED, (1, -9)),
        # Both had ended when torchrun looked, and the one that noticed is said to be the first.
        ([(0, LOST), (None, FIRST.format(1, 0)), (None, TABLE.format(-9, 1))], KILLED, (1, -9)),
        ([(None, FIRST.format(-15, 1)), (None, TABLE.format(-15, -15))], ENDED, (1, -15)),
        ([(None, FIRST.format(-11, 0))], "rank 0 was killed by signal 11 (SIGSEGV)", (0, -11)),
        ([(0, LOST), (None, FIRST.format(1, 0)), (None, TABLE.format(-15, 1))], LONELY, (0, 1)),
        ([(1, "Traceback\n"), (1, BUG), (None, FIRST.format(1, 1))], f"rank 1 failed: {BUG[9:-1]}", (1, 1)),
        ([(None, "OSError: [Errno 28] No space\n"), (None, TABLE.format(1, 1))], "OSError: [Errno 28] No space", None),
        ([(0, "progress " + FIRST.format(74, 1))], FULL, (1, 74)),
        ([(None, FIRST.format(3, 1)), (None, TABLE.format(3, -15))], f"{WITH_CODE} 3; see its log", (1, 3)),
        ([(0, "frame #0: c10::Error::Error(c10::SourceLocation)\n")], "see the log", None),
    ],
)
def test_the_cause_is_told_and_not_its_consequences(lines, reason, culprit):
    failures = rank_logs.Failures()
    for number, text in lines:
        for line in text.splitlines(keepends=True):
            failures.take(number, line)
    assert (failures.reason, failures.culprit) == (reason, culprit)
    failures = rank_logs.Failures()
    failures.ended(None, -9)
    assert failures.reason.startswith("torchrun was killed by signal 9") and failures.culprit is None


# Logs of nodes and ranks.
HANDLE = "slurm://switchyard/7"
MEMORY = rank_logs.RankFailure(5, "rank 5 is out of memory", False).line
SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 23729 got signal: 15\n"
STEP = "srun: error: 127.0.0.3: task 0: {}\n"
SAID, NOTHING = "Slurm says '127.0.0.3: task 0: Killed'", "what its nodes printed is in {folder}"
GONE = "execve(): /gone/python: No such file"
UNSEEN = "they have not run, or they do not see it as /scratch/run (--seen-as"
ALONE = f"[rank 0] {LOST}"
CANCELLED = "slurmstepd-127.0.0.2: error: *** STEP 2.0 ON 127.0.0.2 CANCELLED AT 2026-11-23T15:40:54 ***\n"


def first_of_node(code: int, rank: int) -> str:
    return f"E1123 15:48 17128 api.py:1002] failed (exitcode: {code}) local_rank: {rank} (pid: 171) of binary: python\n"


@pytest.mark.parametrize(
    ("first", "second", "batch", "wanted"),
    [
        # torchrun counts the ranks of its node; the nodes are numbered by their names, not in the order they were asked for.
        (f"[rank 4] x\n{first_of_node(-9, 1)}", ALONE, "", "rank 5 was killed by signal 9 (SIGKILL, which"),
        (ALONE + first_of_node(1, 0), f"[rank 6] x\n{first_of_node(-11, 2)}", "", "rank 6 was killed by signal 11"),
        (ALONE, f"[rank 5] {MEMORY}", "", "rank 5 is out of memory"),
        (ALONE, f"[rank 4] x\n{first_of_node(-15, 0)}", STEP.format("Killed"), f"{SAID}; rank 0 lost another rank"),
        # A step that the scheduler ends is no cause, nor is its message about that.
        (f"[rank 0] x\n{first_of_node(-15, 0)}", SIGNALLED, CANCELLED + STEP.format("Terminated"), NOTHING),
        ("[rank 0] x\n", "", STEP.format("Exited with exit code 1") + STEP.format("Killed"), SAID),
        ("", "", f"slurmstepd-127.0.0.2: error: {GONE} or directory\n", f"Slurm says '{GONE}"),
        ("", "", "+ srun --output=x\n", NOTHING),
        (None, None, None, "its nodes have left no log in {folder}: " + UNSEEN),
    ],
)
def test_the_cause_is_told_as_far_as_the_nodes_tell_it(tmp_path, first, second, batch, wanted):
    where = destination("slurm", tmp_path, gpus=0, ranks_per_node=4, seen_as="/scratch")
    (folder := tmp_path / "run").mkdir()
    for part, text in (("-switchyard-0", first), ("-switchyard-1", second), ("", batch)):
        if text is not None:
            (folder / f"slurm-7{part}.out").write_text(text)
    said = cause(folder, HANDLE, where)
    assert said.startswith(wanted.format(folder=folder))
    assert said.endswith(f"what its nodes printed is in {folder}") == (first is not None)
    assert list(node_lines(folder, HANDLE, where, 1)) == (second or "").splitlines(keepends=True)


# Each rank's own log.
TALKS = """
import json, os, sys, time
rank = os.environ.get("RANK") or sys.argv[1]
print(f"hello from {rank}", flush=True)
print("progress " + json.dumps({"done": 0.25, "message": f"layer {rank}"}), flush=True)
print("progress nonsense", "progress 5", 'progress {"done": "x", "message": 1}', sep="\\n", flush=True)
print(f"bye from {rank}", file=sys.stderr, flush=True)
"""


def ranks(count: int, script: str = TALKS) -> list[tuple[list[str], dict[str, str]]]:
    return [([sys.executable, "-c", script], {"RANK": str(rank)}) for rank in range(count)]


def words(folder: Path, rank: int) -> list[str]:
    """A rank's log without the seconds, which begin every line."""
    lines = rank_logs.log_tail(folder, rank, 10**6).splitlines()
    assert all(float(line.split(" s  ")[0]) >= 0 for line in lines)
    return [line.split(" s  ", 1)[1].strip() for line in lines]


def test_every_rank_has_a_log_of_its_own_and_only_the_first_ones_progress_is_the_launchs(tmp_path, capfd):
    reports = []
    run_processes(ranks(3), 3, 30.0, tmp_path, never, lambda *report: reports.append(report))
    for rank in range(3):
        said = words(tmp_path, rank)
        assert said[:2] == [f"hello from {rank}", f"25%  layer {rank}"] and said[-1] == f"bye from {rank}"
        assert "progress nonsense" in said
    assert reports == [(0.25, "layer 0", None, None)]
    now = rank_logs.standing(tmp_path)
    assert [step.message for step in now.steps] == ["layer 0", "layer 1", "layer 2"] and now.failed is None
    log = capfd.readouterr().out
    assert "[rank 2] hello from 2" in log and "layer" not in log


def test_torchrun_says_whose_a_line_is(tmp_path):
    talk, reports = TALKS.replace('(f"hello from {rank}"', '(f"[rank {rank}] hello"'), []
    talk = talk.replace('"progress " + json', 'f"[rank {rank}] progress " + json')
    command = [sys.executable, "-c", talk, "1"]
    run_processes([(command, {})], 2, 30.0, tmp_path, never, lambda *report: reports.append(report))
    assert words(tmp_path, 1) == ["hello", "25%  layer 1"] and words(tmp_path, 0) == [] and not reports
    assert [step and step.done for step in rank_logs.standing(tmp_path).steps] == [None, 0.25]


def test_the_rank_that_ended_a_launch_is_noted(tmp_path):
    script = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    assert "rank 1 ended with exit code 3" in refusal(run_processes, ranks(2, script), 2, 30.0, tmp_path, never, silent)
    assert (rank_logs.standing(tmp_path).failed, rank_logs.standing(tmp_path).code) == (1, 3)


def test_a_launch_that_prints_without_end_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "MOST_PRINTED", 2**22)
    script = "while True: print('x' * 1000)"
    assert "printed more than 4 MiB" in refusal(run_processes, ranks(1, script), 1, 30.0, tmp_path, never, silent)
    assert rank_logs.log_of(tmp_path, 0).stat().st_size <= rank_logs.LIMIT


def test_a_long_log_keeps_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_logs, "LIMIT", 4000)
    logs = rank_logs.RankLogs(tmp_path, 1)
    for number in range(500):
        logs.print(0, f"line {number}\n")
        assert rank_logs.log_of(tmp_path, 0).stat().st_size <= 4000
    first, *kept = rank_logs.log_tail(tmp_path, 0, 1000).splitlines()
    numbers = [int(line.split()[-1]) for line in kept]
    assert "dropped" in first and len(numbers) > 50
    assert numbers == list(range(500 - len(numbers), 500))
    logs.print(0, "y" * 10_000)
    assert rank_logs.log_of(tmp_path, 0).stat().st_size <= 4000 and rank_logs.log_tail(tmp_path, 0, 1).endswith("y")


def test_a_rank_that_has_said_nothing_and_a_launch_that_has_not_begun_or_whose_folder_is_gone(tmp_path):
    assert rank_logs.log_tail(tmp_path, 0) == "" and rank_logs.standing(tmp_path) is None
    logs = rank_logs.RankLogs(tmp_path, 2)
    logs.save()
    assert rank_logs.standing(tmp_path) == rank_logs.Standing(steps=(None, None))
    logs.progress(1, rank_logs.RankProgress.read('{"done": 7.0, "message": "m"}'))
    logs.save()
    first, second = rank_logs.standing(tmp_path).steps
    assert first is None and second.done == 1.0
    logs.failed = 1, -9
    logs.save()
    assert rank_logs.standing(tmp_path).code == -9
    # A run folder that is gone stops nobody.
    logs = rank_logs.RankLogs(tmp_path / "run", 1)
    logs.print(0, "lost\n")
    logs.progress(0, rank_logs.RankProgress(done=0.5, message="lost", time=0.0))
    logs.save()
    assert not (tmp_path / "run").exists()


def test_torchrun_says_nothing_of_having_been_ended(tmp_path, capsys):
    begun = tmp_path / "begun"
    program = (
        "import pathlib, signal, sys, time\n"
        "def ended(*_):\n    print('Traceback: got signal 15', flush=True)\n    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, ended)\n"
        f"pathlib.Path({str(begun)!r}).touch()\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program]
    with pytest.raises(StoppedError, match=r"^the launch was ended: stopped$"):  # 130 on the command line
        run_processes([(command, {})], 1, 60.0, tmp_path, begun.exists, silent)
    assert "Traceback" not in capsys.readouterr().out

"""Why a launch failed, in one line: what ranks say of their exceptions, and what is made of all that is printed."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.errors import InputError
from engine.launch.rank.failure import Failures, RankFailure, read_failure
from engine.launch.rank.joining import failure_of, joined
from engine.launch.worker import gpu_of

LOST = RankFailure(0, "rank 0 lost another rank: closed", True).line
CAUSE = RankFailure(1, "rank 1 is out of memory", False).line


@pytest.mark.parametrize(
    ("error", "message", "lost"),
    [
        (
            lambda: torch.empty(2**58),
            "rank 3 is out of memory (it wanted 1152921504606846976 bytes more); use fewer",
            False,
        ),
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
    assert read_failure(failure.line) == failure and "\n" not in failure.message


def of_nccl(kind: str, explanation: str, last: str) -> dist.DistBackendError:
    """As PyTorch reports what NCCL returns (ProcessGroupNCCL.cpp, getNcclErrorDetailStr)."""
    return dist.DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
        f"{kind} (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n{kind}: {explanation}\nLast error:\n{last}"
    )


CUDA = ("ncclUnhandledCudaError", "Call to CUDA function failed.")
SYSTEM = ("ncclSystemError", "System call (e.g. socket, malloc) or external library call failed or device error.")
REMOTE = ("ncclRemoteError", "A call failed possibly due to a network error or a remote process exiting prematurely.")
USAGE = ("ncclInvalidUsage", "This usually reflects invalid usage of NCCL library.")
SHM = "Error while creating shared memory segment /dev/shm/nccl-WU88OE (size 9637888), error: No space left on device (28)"


@pytest.mark.parametrize(
    ("kind", "last", "message", "lost"),
    [
        (CUDA, "Cuda failure 2 'out of memory'", "rank 3 is out of memory; use fewer ranks", False),
        (CUDA, "Cuda failure 999 'unknown error'", "rank 3 failed in NCCL: Cuda failure 999 'unknown error'", False),
        (SYSTEM, SHM, f"rank 3: {SHM}; make room there", False),
        (
            USAGE,
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
            "rank 3 shares its GPU with another rank, which NCCL cannot: Duplicate GPU detected : rank 1 and rank 0",
            False,
        ),
        (
            REMOTE,
            "socketProgress: Connection closed by remote peer node-1<51159>",
            "rank 3 lost another rank: socketProgress: Connection closed by remote peer node-1<51159>",
            True,
        ),
    ],
)
def test_what_a_rank_says_of_nccl_s_errors(kind, last, message, lost):
    failure = failure_of(of_nccl(*kind, last), 3)
    assert failure.message.startswith(message) and failure.lost == lost and "\n" not in failure.message


@pytest.fixture
def meeting(monkeypatch) -> Iterator[socket.socket]:
    """Where rank 0 of two is to meet rank 1, which does not exist: a port that nobody listens at."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        named = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": place.getsockname()[1]}
        for name, value in named.items():
            monkeypatch.setenv(name, str(value))
        yield place


def test_a_rank_that_never_joins_is_named(meeting):
    meeting.close()
    with (
        pytest.raises(InputError, match=r"^rank 1 did not join within 0.3 s$"),
        joined("gloo", 0.3, torch.device("cpu")),
    ):
        pass


def test_a_port_in_use_is_named(meeting):
    meeting.listen()
    port = meeting.getsockname()[1]
    wanted = f"^port {port} of 127.0.0.1, where the ranks meet, is in use by another program$"
    with pytest.raises(InputError, match=wanted), joined("gloo", 0.3, torch.device("cpu")):
        pass
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
    assert read_failure(f"{line}\n") is None


def test_a_rank_without_a_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InputError, match=r"^rank 3 sees no GPU on .*: .*; ask for nodes that have some, or for none$"):
        gpu_of(3)
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


@pytest.mark.parametrize(
    ("lines", "reason", "culprit"),
    [
        ([(0, LOST), (1, CAUSE), (None, FIRST.format(1, 0))], "rank 1 is out of memory", (1, 1)),
        ([(1, CAUSE), (None, FIRST.format(-9, 0))], "rank 1 is out of memory", (1, 1)),
        ([(0, LOST), (None, FIRST.format(-9, 1)), (None, TABLE.format(-9, -15))], KILLED, (1, -9)),
        # Both had ended when torchrun looked, and the one that noticed is said to be the first.
        ([(0, LOST), (None, FIRST.format(1, 0)), (None, TABLE.format(-9, 1))], KILLED, (1, -9)),
        (
            [(None, FIRST.format(-15, 1)), (None, TABLE.format(-15, -15))],
            "rank 1 was killed by signal 15 (SIGTERM)",
            (1, -15),
        ),
        ([(None, FIRST.format(-11, 0))], "rank 0 was killed by signal 11 (SIGSEGV)", (0, -11)),
        (
            [(0, LOST), (None, FIRST.format(1, 0)), (None, TABLE.format(-15, 1))],
            "rank 0 lost another rank: closed",
            (0, 1),
        ),
        (
            [(1, "Traceback\n"), (1, BUG), (None, FIRST.format(1, 1))],
            "rank 1 failed: engine.errors.SomeError: a bug",
            (1, 1),
        ),
        ([(None, "OSError: [Errno 28] No space\n"), (None, TABLE.format(1, 1))], "OSError: [Errno 28] No space", None),
        ([(0, "progress " + FIRST.format(74, 1))], FULL, (1, 74)),
        (
            [(None, FIRST.format(3, 1)), (None, TABLE.format(3, -15))],
            "rank 1 ended with exit code 3; see its log",
            (1, 3),
        ),
        ([(0, "frame #0: c10::Error::Error(c10::SourceLocation)\n")], "see the log", None),
    ],
)
def test_the_cause_is_told_and_not_its_consequences(lines, reason, culprit):
    failures = Failures()
    for number, text in lines:
        for line in text.splitlines(keepends=True):
            failures.take(number, line)
    assert (failures.reason, failures.culprit) == (reason, culprit)


def test_torchrun_killed_is_told():
    failures = Failures()
    failures.ended(None, -9)
    assert failures.reason.startswith("torchrun was killed by signal 9") and failures.culprit is None

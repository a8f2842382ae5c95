"""The cause of a failed launch in one line, and the files of its ranks in the run folder. A rank prints a line on its
failure before it ends; the process that started the ranks finds the cause in these lines, torchrun's reports and exit
codes. It keeps a log of every rank, and all ranks' progress in one file."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from engine.errors import InputError
from engine.files import open_to_append, tail, write_atomically
from engine.schema import Frozen

FAILURE = "failure "
"""Beginning of the line in which a rank reports its failure; JSON follows."""

STACK = signal.SIGUSR1
"""The signal that makes a rank print its stack."""

FIRST = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) ")
ROW = re.compile(r"\s*(rank|exitcode)\s+: (-?\d+) ")
"""The two reports of exit codes by torchrun: of the rank that it saw ending first, then a table of all."""

ERROR = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception): .+)")
"""The last line of a traceback."""

ENDED_BY_OTHERS = -signal.SIGTERM
"""Exit code of ranks that torchrun ends after it has lost one."""

STANDING = "ranks.json"
TORCHRUN_LOGS = "torchrun"
"""Folder in the run folder in which torchrun keeps its ranks' output, while they run."""

LIMIT = 2**20
"""Most bytes of a rank's file. The older half of a longer log is dropped."""

DROPPED = b"(what was printed before was dropped)\n"


class RankFailure(NamedTuple):
    """A rank's report of its failure, in a sentence. lost: true if it only noticed that another rank was gone."""

    rank: int
    message: str
    lost: bool

    @property
    def line(self) -> str:
        return f"{FAILURE}{json.dumps(self._asdict())}\n"


def read_failure(line: str) -> RankFailure | None:
    """Read a rank's failure line; None for any other, also for one that another process's output has run into."""
    if not line.startswith(FAILURE):
        return None
    try:
        fields = json.loads(line.removeprefix(FAILURE))
        return RankFailure(int(fields["rank"]), str(fields["message"]), bool(fields["lost"]))
    except (ValueError, TypeError, KeyError):
        return None


class Failures:
    """The known causes of a failed launch, from the output and exit codes of its processes."""

    def __init__(self) -> None:
        self.reported: list[RankFailure] = []
        self._first: tuple[int, int] | None = None
        self._killed: dict[int | None, int] = {}
        self._row = -1
        self._errors: list[tuple[int | None, str]] = []

    def take(self, rank: int | None, line: str) -> str:
        """Note a failure that a line reports, and return the line's text for a log. rank: the rank that printed it,
        None for torchrun."""
        if failure := read_failure(line):
            self.reported.append(failure)
            return f"{failure.message}\n"
        if first := FIRST.search(line):  # of any process: on a full disk a rank's torn line may run into it
            self.ended(int(first[2]), int(first[1]))
        elif rank is None and (row := ROW.match(line)):
            if row[1] == "rank":
                self._row = int(row[2])
            elif (code := int(row[2])) < 0 and code != ENDED_BY_OTHERS:
                self._killed.setdefault(self._row, -code)
        elif (error := ERROR.match(line)) and "ChildFailedError" not in line:
            self._errors.append((rank, error[1].strip()))
        return line

    def ended(self, rank: int | None, code: int) -> None:
        """Note the end of the process that was the first to end badly.

        rank: that process; None for torchrun
        code: exit code, negative for the signal that killed it
        """
        if rank is not None:
            self._first = rank, code
        if code < 0:
            self._killed[rank] = -code

    @property
    def told(self) -> bool:
        """True if anything is known at all."""
        return bool(self.reported or self._killed or self._first or self._errors)

    @property
    def certain(self) -> bool:
        """True if the cause is known, and not only its consequences."""
        return bool(self._causes or self._killed)

    @property
    def culprit(self) -> tuple[int, int] | None:
        """The rank with the most telling log, and its exit code; None if no rank is known to have failed."""
        for failure in self._causes:
            return failure.rank, 1
        for rank, number in self._killed.items():
            return self._first if rank is None else (rank, -number)
        return self._first

    @property
    def reason(self) -> str:
        """The cause of the failure in a sentence. A rank that only lost another one is believed last."""
        for failure in self._causes:
            return failure.message
        for rank, number in self._killed.items():
            name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
            name += ", which the system sends when memory runs out" if number == signal.SIGKILL else ""
            return f"{'torchrun' if rank is None else f'rank {rank}'} was killed by signal {number} ({name})"
        if self._first and self._first[1] == os.EX_IOERR:
            return f"rank {self._first[0]} could not write what it printed; the disk of the run folder may be full"
        for failure in self.reported:
            return failure.message
        for rank, error in self._errors:
            return error if rank is None else f"rank {rank} failed: {error}"
        return "rank {} ended with exit code {}; see its log".format(*self._first) if self._first else "see the log"

    @property
    def _causes(self) -> list[RankFailure]:
        return [failure for failure in self.reported if not failure.lost]


class RankProgress(Frozen):
    """The last progress report of a rank.

    done: share done, 0 to 1
    message: its work at that moment
    time: seconds since the epoch
    """

    done: float = Field(ge=0, le=1)
    message: str
    time: float

    @classmethod
    def read(cls, text: str) -> "RankProgress | None":
        """Read the JSON of a progress line; None if it is torn, or another process's output has run into it."""
        try:
            fields = json.loads(text)
            done = min(max(float(fields["done"]), 0.0), 1.0)
            return cls(done=done, message=str(fields["message"]), time=time.time())
        except (ValueError, TypeError, KeyError):
            return None


class Standing(Frozen):
    """Progress of all ranks, and the rank that ended the launch with its exit code, negative for the signal that killed it."""

    steps: tuple[RankProgress | None, ...]
    failed: int | None = None
    code: int | None = None


def log_of(folder: Path, rank: int) -> Path:
    """The file with a rank's output."""
    return folder / f"rank-{rank}.log"


def log_tail(folder: Path, rank: int, lines: int = 20) -> str:
    """The last lines of a rank's output."""
    return "\n".join(tail(log_of(folder, rank)).decode(errors="replace").splitlines()[-lines:])


def standing(folder: Path) -> Standing | None:
    """Progress of the ranks of the launch in this folder; None if none has started, or the file is damaged."""
    with contextlib.suppress(OSError, InputError):
        return Standing.from_json((folder / STANDING).read_bytes(), STANDING)
    return None


class RankLogs:
    """Writes the files. Lines of one rank must come from one thread at a time; on a full disk they are lost."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.began = folder, time.monotonic()
        self.failed: tuple[int, int] | None = None
        self._steps: list[RankProgress | None] = [None] * ranks
        self._written: Standing | None = None
        for rank in range(ranks):
            log_of(folder, rank).unlink(missing_ok=True)

    def print(self, rank: int, line: str) -> None:
        """Add a line to a rank's file, with the seconds since the start."""
        path, text = log_of(self.folder, rank), f"{time.monotonic() - self.began:8.2f} s  {line.rstrip()}".encode()
        with contextlib.suppress(OSError):
            with open_to_append(path) as file:
                file.write(text[: LIMIT // 4] + b"\n")
                length = file.tell()
            if length > LIMIT:
                kept = path.read_bytes()[-LIMIT // 2 :]
                write_atomically(path, DROPPED + kept[kept.index(b"\n") + 1 :])

    def progress(self, rank: int, progress: RankProgress) -> None:
        """Note a rank's progress."""
        self._steps[rank] = progress
        self.print(rank, f"{progress.done:4.0%}  {progress.message}")

    def save(self) -> None:
        """Write the ranks' progress, if it has changed."""
        failed, code = self.failed or (None, None)
        now = Standing(steps=tuple(self._steps), failed=failed, code=code)
        if now != self._written:
            with contextlib.suppress(OSError):
                write_atomically(self.folder / STANDING, now.to_json())
                self._written = now

"""What the ranks of a launch print, each in a file of its own in the run folder, and how far each of them is."""

import contextlib
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from engine.errors import InputError
from engine.files import open_to_append, tail, write_atomically
from engine.schema import Frozen

STANDING = "ranks.json"
TORCHRUN_LOGS = "torchrun"
"""Folder in the run folder in which torchrun keeps what its ranks print, while they run."""

LIMIT = 2**20
"""Bytes that a rank's file may have. Of a longer log the older half goes."""

DROPPED = b"(what was printed before was dropped)\n"


class RankProgress(Frozen):
    """Where a rank was when it last said so: the share done, what it was doing, and when (seconds since the epoch)."""

    done: float = Field(ge=0, le=1)
    message: str
    time: float


class Standing(Frozen):
    """How far the ranks are, and which one ended the launch: its exit code, negative for the signal that killed it."""

    steps: tuple[RankProgress | None, ...]
    failed: int | None = None
    code: int | None = None


def log_of(folder: Path, rank: int) -> Path:
    """The file with what a rank printed."""
    return folder / f"rank-{rank}.log"


def log_tail(folder: Path, rank: int, lines: int = 20) -> str:
    """The last lines that a rank printed."""
    return "\n".join(tail(log_of(folder, rank)).decode(errors="replace").splitlines()[-lines:])


def standing(folder: Path) -> Standing | None:
    """How far the ranks of the launch in this folder are or were; None where none has started, or the file is damaged."""
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

    def progress(self, rank: int, progress: dict[str, Any]) -> None:
        """Note how far a rank is."""
        done = min(max(float(progress["done"]), 0.0), 1.0)
        self._steps[rank] = RankProgress(done=done, message=progress["message"], time=time.time())
        self.print(rank, f"{done:4.0%}  {progress['message']}")

    def save(self) -> None:
        """Write how far the ranks are, if that has changed."""
        failed, code = self.failed or (None, None)
        now = Standing(steps=tuple(self._steps), failed=failed, code=code)
        if now != self._written:
            with contextlib.suppress(OSError):
                write_atomically(self.folder / STANDING, now.to_json())
                self._written = now

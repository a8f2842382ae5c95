"""A disk that fails at a chosen moment, as in SQLite's tests: each request of `engine.files` to the disk is a point, and a test
lets the first point fail, then the second, until there are no more.

At its point the disk refuses (full, broken, not allowed), or the process ends: a kill keeps all earlier requests, a power cut
only synced ones. A file system may lose the names or the contents that were not synced, so there are two power cuts.
"""

import errno
import io
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from engine import files

How = Literal["ENOSPC", "EIO", "EACCES", "kill", "power cut, names lost", "power cut, contents lost"]
REFUSALS: tuple[How, ...] = ("ENOSPC", "EIO", "EACCES")
ENDS: tuple[How, ...] = ("kill", "power cut, names lost", "power cut, contents lost")


class Ended(BaseException):
    """The process is no more: nothing catches it, and nothing it does on its way out reaches the disk."""


class Disk:
    """Stands between `engine.files` and the system, for all below a folder. points: how many there have been."""

    def __init__(self, root: Path, how: How = "kill", at: int = 0, end: Callable[[], None] | None = None) -> None:
        self.root, self.how, self.at, self.points, self.ended = root.resolve(), how, at, 0, False
        self._end = end
        self._paths: dict[int, Path] = {}
        self._synced: dict[Path, bytes] = {}  # of files with more in them than would be left
        self._undo: list[tuple[Path, Callable[[], None]]] = []  # of names that may be lost, by their folder

    @property
    def failed(self) -> bool:
        """True if its moment has come."""
        return 0 < self.at <= self.points

    def _point(self, frees_room: bool = False) -> None:
        if self.ended:
            raise Ended
        self.points += 1
        if not self.failed:
            return
        if self.how in ENDS:
            self.ended = True
            if self.how != "kill":
                self._cut()
            if self._end is not None:
                self._end()
            raise Ended
        # A full disk stays full and a forbidden one forbidden; a broken one fails once.
        lasts = self.how != "EIO" and not (self.how == "ENOSPC" and frees_room)
        if self.points == self.at or lasts:
            number = getattr(errno, self.how)
            raise OSError(number, os.strerror(number))

    def _cut(self) -> None:
        if self.how == "power cut, names lost":
            for _, undo in reversed(self._undo):
                undo()
        for path, content in self._synced.items():
            if path.exists():
                path.write_bytes(content)

    def _watches(self, path: Any) -> bool:
        return isinstance(path, (str, Path)) and Path(path).resolve().is_relative_to(self.root)

    def open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._point()
        path, is_new = Path(path), not Path(path).exists()
        file = os.open(path, flags, mode)
        self._paths[file] = path
        if is_new:
            self._undo.append((path.parent, lambda: _remove(path)))
        return file

    def fdopen(self, file: int, mode: str) -> io.BufferedWriter:
        return io.BufferedWriter(_File(self, file, mode))

    def about_to_write(self, file: int) -> None:
        self._point()
        path = self._paths[file]
        self._synced.setdefault(path, path.read_bytes())

    def write(self, file: int, data: bytes) -> int:
        self.about_to_write(file)
        return os.write(file, data)

    def fsync(self, file: int) -> None:
        self._point()
        path = self._paths[file]
        self._synced.pop(path, None)
        if path.is_dir():
            self._undo = [(folder, undo) for folder, undo in self._undo if folder != path]

    def replace(self, source: Path, target: Path) -> None:
        self._point()
        source, target = Path(source), Path(target)
        before = target.read_bytes() if target.exists() else None
        OS["replace"](source, target)
        self._synced.pop(target, None)
        if source in self._synced:
            self._synced[target] = self._synced.pop(source)
        put_back = (lambda: _remove(target)) if before is None else (lambda: target.write_bytes(before))
        self._undo.append((target.parent, put_back))

    def unlink(self, path: Path, **more: Any) -> None:
        self._point(frees_room=True)
        path = Path(path)
        content = path.read_bytes()
        OS["unlink"](path)
        self._undo.append((path.parent, lambda: path.write_bytes(content)))

    def mkdir(self, path: Path, *mode: int) -> None:
        if not Path(path).exists():  # else nothing is written
            self._point()
        OS["mkdir"](path, *mode)
        self._undo.append((Path(path).parent, lambda: shutil.rmtree(path, ignore_errors=True)))

    def __getattr__(self, name: str) -> Any:
        """All else is the system's."""
        return getattr(os, name)


OS = {name: getattr(os, name) for name in ("mkdir", "replace", "unlink")}
"""The calls of `os` that paths make by themselves."""


def _remove(path: Path) -> None:
    with suppress(FileNotFoundError):
        OS["unlink"](path)


class _File(io.FileIO):
    def __init__(self, disk: Disk, file: int, mode: str) -> None:
        super().__init__(file, mode)
        self._disk = disk

    def write(self, data: Any) -> int | None:
        try:
            self._disk.about_to_write(self.fileno())
        except OSError:
            super().write(bytes(data)[: len(data) // 2])  # as much as there was room for
            raise
        return super().write(data)


@contextmanager
def failing(root: Path, how: How = "kill", at: int = 0, end: Callable[[], None] | None = None) -> Iterator[Disk]:
    """A disk that fails at its point `at`, counted from 1 (0: never), for everything below `root` that is written inside. Where
    everything ends there, the `with` block is left. end: called instead of going on as an exception."""
    disk = Disk(root, how, at, end)

    def of_disk(name: str) -> Callable[..., Any]:
        return lambda path, *rest, **more: (getattr(disk, name) if disk._watches(path) else OS[name])(path, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", disk)
        for name in OS:
            patch.setattr(os, name, of_disk(name))
        try:
            yield disk
        except Ended:
            if end is not None:
                raise


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Inside, this process cannot write files of more than so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

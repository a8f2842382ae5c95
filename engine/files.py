"""Whatever lasts is written here, once and for all: others read it while it is written, disks are full, and power is cut.

What was written is on the disk when a function returns, as a whole, and a reader at any moment, also after a kill or a power
cut, sees the old content or the new. A file is no more readable than its owner's folder that it is in.

The folder that everything is kept in. It stands apart from what reads the files there, which a rank has no use for.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from engine.errors import InputError

TAIL = 65536  # bytes

PRIVATE, PRIVATE_FILE = 0o700, 0o600
"""The mode of a folder that nobody but its owner may enter, and of a file that nobody else may read."""


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter, and those above it that are missing; one that is there stays as it is."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent)
    try:
        folder.mkdir(PRIVATE)
    except FileExistsError:  # of somebody else at the same moment, or a file
        if not folder.is_dir():
            raise
    else:
        _sync_folder(folder.parent)


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """A draft beside the file, to be written in the `with` block and put in the file's place at its end."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        os.close(_open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        yield draft
        # A rename can reach the disk before what it renames, and then a power cut leaves an empty file under the name.
        _sync(draft)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # on a disk that became read-only, why the file cannot be written counts
            draft.unlink()
        raise
    _sync_folder(path.parent)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """The same draft, opened for binary data."""
    with replace_atomically(path) as draft, os.fdopen(_open(draft, os.O_WRONLY), "wb") as file:
        yield file


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file by `content` (text as UTF-8), see `replace_atomically`."""
    data = content.encode() if isinstance(content, str) else content
    with open_atomically(path) as file:
        file.write(data)


def mark(path: Path) -> None:
    """Put an empty file there, unless one is: that it is there says all."""
    os.close(_open(path, os.O_WRONLY | os.O_CREAT))
    _sync_folder(path.parent)


def append(path: Path, line: bytes) -> None:
    """Add a line to what only informs: in a single write, so that those of several threads or processes never mix, and without
    waiting for the disk. A full disk or a power cut may tear it."""
    file = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def open_to_append(path: Path) -> BinaryIO:
    """A file for what a process prints, or to be locked."""
    return os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def tail(path: Path) -> bytes:
    """The end of a file, as much as anybody wants to see; empty when there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            return file.read()
    except FileNotFoundError:
        return b""


def _open(path: Path, flags: int) -> int:
    folder = path.parent.stat()
    # In somebody else's folder, such as that of whoever asked for a launch, they have to be able to read it.
    mine = folder.st_uid == os.geteuid()
    return os.open(path, flags | os.O_CLOEXEC, 0o666 & folder.st_mode if mine else 0o666)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _sync_folder(folder: Path) -> None:
    """Without it a power cut may leave a file under no name, or its old content under the name."""
    try:
        _sync(folder)
    except OSError as error:
        # File systems that know no such thing, and folders that may be written but not read.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def data_folder() -> Path:
    """The folder from SWITCHYARD_DATA, or `.switchyard` in the project's root; made if missing, and its owner's alone, as
    whoever can read the name of a session can open it."""
    folder = Path(os.environ.get("SWITCHYARD_DATA") or Path(__file__).parents[1] / ".switchyard").resolve()
    try:
        make_folder(folder)
        about = folder.stat()
    except OSError as error:
        raise InputError(f"the data folder {folder} cannot be made ({error.strerror}); set SWITCHYARD_DATA") from None
    open_to_others = stat.S_IMODE(about.st_mode) & ~PRIVATE
    if open_to_others and about.st_uid == os.geteuid() and not about.st_mode & stat.S_ISVTX:  # as /tmp has
        with suppress(OSError):  # of a volume that is mounted to be read
            folder.chmod(PRIVATE)
    return folder

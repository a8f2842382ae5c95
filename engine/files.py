"""Durable writing of files, and the data folder.

When a function returns, the content is on the disk as a whole. A reader sees the old content or the new at any moment, also
after a kill or a power cut. A file is no more readable than the folder of its owner. The readers of these files are in
`engine.store`, which a rank does not need.
"""

import contextlib
import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from engine.errors import InputError
from engine.program import usual_data_folder

TAIL = 65536
"""Bytes."""
PRIVATE, PRIVATE_FILE = 0o700, 0o600
"""The mode of a folder that only its owner may enter, and of a file that only its owner may read."""


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner may enter, and missing ones above it; an existing one stays as it is."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent)
    try:
        folder.mkdir(PRIVATE)
    except FileExistsError:  # another process made it at the same moment, or it is a file
        if not folder.is_dir():
            raise
    else:
        _sync_folder(folder.parent)


def is_device(path: Path) -> bool:
    """True for what is there and neither a file nor a folder: a device such as /dev/null, a pipe."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """A draft in the file's folder, to be written in the `with` block and put in the file's place at its end. A device stays in
    its place: the draft is written to it."""
    if is_device(path):
        with tempfile.TemporaryDirectory() as folder:
            (draft := Path(folder) / path.name).touch(PRIVATE_FILE)
            yield draft
            path.write_bytes(draft.read_bytes())
        return
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        os.close(_open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        yield draft
        # A rename can reach the disk before the content, and then a power cut leaves an empty file under the name.
        _sync(draft)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # on a disk that became read-only the first error is the one to report
            draft.unlink()
        raise
    _sync_folder(path.parent)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """As `replace_atomically`, with the draft opened for binary data."""
    with replace_atomically(path) as draft, os.fdopen(_open(draft, os.O_WRONLY), "wb") as file:
        yield file


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file by `content` (text as UTF-8), see `replace_atomically`."""
    data = content.encode() if isinstance(content, str) else content
    with open_atomically(path) as file:
        file.write(data)


def mark(path: Path) -> None:
    """Make an empty file, unless it exists: its existence is the message."""
    os.close(_open(path, os.O_WRONLY | os.O_CREAT))
    _sync_folder(path.parent)


def append(path: Path, line: bytes) -> None:
    """Add a line to a file that only informs.

    It is a single write, so that lines of several threads or processes never mix, and does not wait for the disk. A full disk
    or a power cut may tear the line.
    """
    file = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def open_to_append(path: Path) -> BinaryIO:
    """A file for a process's output, or to be locked."""
    return os.fdopen(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def tail(path: Path) -> bytes:
    """The last `TAIL` bytes of a file; empty when there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            return file.read()
    except FileNotFoundError:
        return b""


def _open(path: Path, flags: int) -> int:
    folder = path.parent.stat()
    # In the folder of another user, such as the one who asked for a launch, that user has to be able to read it.
    mine = folder.st_uid == os.geteuid()
    return os.open(path, flags | os.O_CLOEXEC, 0o666 & folder.st_mode if mine else 0o666)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk; without it a power cut may lose a file's name, or bring back its old content."""
    try:
        _sync(folder)
    except OSError as error:
        # File systems without this operation, and folders that may be written but not read.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def data_folder() -> Path:
    """The folder from SWITCHYARD_DATA, or the usual one; made if missing.

    Only its owner may read it, as the name of a session is enough to open it.
    """
    folder = Path(os.environ.get("SWITCHYARD_DATA") or usual_data_folder()).resolve()
    try:
        make_folder(folder)
        about = folder.stat()
    except OSError as error:
        raise InputError(f"the data folder {folder} cannot be made ({error.strerror}); set SWITCHYARD_DATA") from None
    open_to_others = stat.S_IMODE(about.st_mode) & ~PRIVATE
    if open_to_others and about.st_uid == os.geteuid() and not about.st_mode & stat.S_ISVTX:  # as /tmp has
        with suppress(OSError):  # a volume that is mounted read-only
            folder.chmod(PRIVATE)
    return folder

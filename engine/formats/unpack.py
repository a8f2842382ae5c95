"""Folders and archives as the files in them."""

import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from engine.formats.glance import Glance
from engine.formats.source import MAX_FILE_BYTES, MAX_UNPACKED_BYTES, check_size, fault, one_clear_line

MOST_FILES = 4096
"""In a folder or archive: as many as there are ranks, with some requests of each."""


def files_inside(path: Path, scratch: Path | None) -> list[Path] | None:
    """The files in a folder, or in an archive (zip, tar, tar.gz), which is unpacked into `scratch`, a folder of the caller's;
    by name, hidden ones left out. None for any other file, and for archives without `scratch`. Raises InputError for too many
    or too large ones."""
    with one_clear_line(path):
        if path.is_dir():
            return _in_folder(path)
        if scratch is not None and path.is_file() and path.stat().st_size and is_archive(path):
            return _in_archive(path, scratch)
        return None


def is_archive(path: Path) -> bool:
    """Whether a file holds files of other formats: a zip of anything but NumPy arrays or tensors, or a tar."""
    glance = Glance(path)
    if glance.magic == ".npz":
        return not glance.is_torch and not all(name.endswith(".npy") for name in glance.archived)
    return (glance.magic == ".gz" or b"ustar" in glance.head[:512]) and tarfile.is_tarfile(path)


def _in_folder(folder: Path) -> list[Path]:
    files: list[Path] = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            files.append(path)
            if len(files) > MOST_FILES:
                raise fault(folder, f"holds more than {MOST_FILES:,} files; give those of one recording")
    if not files:
        raise fault(folder, "is an empty folder")
    return files


def _in_archive(path: Path, scratch: Path) -> list[Path]:
    check_size(path)
    into = scratch / f"{len(list(scratch.iterdir()))}-{path.stem}"
    into.mkdir()
    files, unpacked = [], 0
    with zipfile.ZipFile(path) if Glance(path).magic == ".npz" else tarfile.open(path) as archive:
        for name, size, open_member in _members(archive):
            inside = PurePosixPath(name.replace("\\", "/"))
            if any(part.startswith(".") for part in inside.parts) or "__MACOSX" in inside.parts:
                continue  # hidden files, and names that climb out of the folder
            unpacked += size
            if unpacked > MAX_UNPACKED_BYTES or size > MAX_FILE_BYTES or len(files) >= MOST_FILES:
                raise fault(
                    path,
                    f"holds more than {MOST_FILES:,} files, {MAX_FILE_BYTES // 1024**2} MB in one or "
                    f"{MAX_UNPACKED_BYTES // 1024**3} GB in all; give those of one recording",
                )
            target = into.joinpath(*(part for part in inside.parts if part != "/"))
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_member() as member, target.open("wb") as file:
                shutil.copyfileobj(member, file)
            files.append(target)
    if not files:
        raise fault(path, "is an archive without files")
    return sorted(files)


def _members(archive: zipfile.ZipFile | tarfile.TarFile) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """(name, bytes, how to open it) of every regular file."""
    if isinstance(archive, zipfile.ZipFile):
        for entry in archive.infolist():
            if entry.filename and not entry.is_dir():  # zipfile asks for the last letter of a name
                yield entry.filename, entry.file_size, lambda entry=entry: archive.open(entry)
        return
    for entry in archive:
        if entry.isfile():
            yield entry.name, entry.size, lambda entry=entry: archive.extractfile(entry)

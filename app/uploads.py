"""Files that a person drops on a page: kept for a moment in the data folder, read by the engine, then removed."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine import store
from engine.errors import InputError

MOST_NAME_BYTES = 100


@contextmanager
def as_files(uploads: Sequence[tuple[str, bytes]]) -> Iterator[list[Path]]:
    """Uploaded files (name, content) on the disk for as long as they are being read, in one folder unless two have one name.
    Raises InputError when the disk does not take them."""
    with store.scratch() as folder:
        paths: list[Path] = []
        for name, content in uploads:
            path = folder / "0" / name_on_disk(name)
            while path in paths:
                path = folder / str(int(path.parent.name) + 1) / path.name
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
            except OSError as error:
                raise InputError(f"{path.name}: the data folder cannot be written ({error.strerror})") from None
            paths.append(path)
        yield paths


@contextmanager
def as_file(name: str, content: bytes) -> Iterator[Path]:
    """One uploaded file, see `as_files`."""
    with as_files([(name, content)]) as (path,):
        yield path


def name_on_disk(name: str) -> str:
    """The name is the browser's word: only its last part, only harmless characters, and only as many as any disk takes."""
    last = re.sub(r"[^\w.\- ()]", "_", name.replace("\\", "/").rsplit("/", 1)[-1])
    short = last.encode()[-MOST_NAME_BYTES:].decode(errors="ignore")
    return short if short.strip(". ") else "file"

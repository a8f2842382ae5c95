"""Files that a person drops on a page: kept for a moment in the data folder, read by the engine, then removed."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from app import state
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
    """One uploaded file on the disk, see `as_files`."""
    with as_files([(name, content)]) as (path,):
        yield path


def name_on_disk(name: str) -> str:
    """A safe file name: only the last part of the browser's name, harmless characters, no more than any disk takes."""
    last = re.sub(r"[^\w.\- ()]", "_", name.replace("\\", "/").rsplit("/", 1)[-1])
    short = last.encode()[-MOST_NAME_BYTES:].decode(errors="ignore")
    return short if short.strip(". ") else "file"


def first_time(file_id: str) -> bool:
    """True once per uploaded file: an upload stays in its widget, but is read only once."""
    seen = state.visit.uploads
    if file_id in seen:
        return False
    seen[file_id] = None
    return True


def newly_in(zone: str, file_ids: list[str]) -> list[str]:
    """Return the ids of files that were not in a drop zone before. When a file has left, the complaints about those that stay
    are forgotten: it may have been the cause."""
    zones, seen = state.visit.zones, state.visit.uploads
    if set(zones.get(zone, ())) - set(file_ids):
        refused = {id for id in file_ids if seen.get(id) and seen[id][1]}
        for key in [key for key in seen if key.partition(" ")[0] in refused]:
            del seen[key]
    came, zones[zone] = [id for id in file_ids if id not in zones.get(zone, ())], file_ids
    return came


def show_answers(zone: str, file_ids: list[str], alone: bool) -> None:
    """Show the answers to these files in a drop zone. alone: True hides the answers to earlier uploads."""
    told = state.visit.told
    told[zone] = list(dict.fromkeys([*([] if alone else told.get(zone, [])), *file_ids]))


def shown_in(zone: str, file_ids: list[str]) -> list[str]:
    """Return the files of a drop zone with answers that are shown. file_ids: all files in the zone."""
    return [id for id in state.visit.told.get(zone, []) if id in file_ids]


def answer(file_id: str, text: str, refused: bool) -> None:
    """Remember how an uploaded file was opened, or why it was refused, for as long as it is in its widget."""
    state.visit.uploads[file_id] = (text, refused)


def complaints(file_ids: Sequence[str]) -> list[str]:
    """Reasons of refusals; the one that files of one recording share once."""
    return list(dict.fromkeys(text for text, refused in _answered(file_ids) if refused))


def answers(file_ids: Sequence[str]) -> list[str]:
    """Sentences on opened files; the one that files of one recording share once."""
    return list(dict.fromkeys(text for text, refused in _answered(file_ids) if not refused))


def _answered(file_ids: Sequence[str]) -> list[tuple[str, bool]]:
    seen = state.visit.uploads
    return [seen[id] for id in file_ids if seen.get(id)]

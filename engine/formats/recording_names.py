"""Which files of a folder belong together, by their names: those of one run differ in numbers and ids alone."""

import re
from collections.abc import Sequence
from pathlib import Path

from engine.formats.source import Source

_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_WORD = r"(?<![0-9A-Za-z])(?=[A-Za-z]*\d[A-Za-z]*\d)[0-9A-Za-z]{12,}(?![0-9A-Za-z])"
_ID = re.compile(rf"{_UUID}|{_WORD}|\d+")


def without_ids(path: Path) -> str:
    """The file's name with `#` for every UUID, long word with several digits (a request's id) and number in it:
    `routes-layer12.jsonl` and `routes-layer3.jsonl` are both `routes-layer#.jsonl`."""
    return _ID.sub("#", path.name)


def in_order(sources: Sequence[Source]) -> list[Source]:
    """The files by the numbers in their names, which are those of time more often than the order of letters: 2 before 10."""
    return sorted(sources, key=lambda source: [part.zfill(20) for part in re.split(r"(\d+)", source.path.name)])

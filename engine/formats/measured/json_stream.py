"""JSON objects too large to hold: their members one after another, and the elements of one long list in them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from engine.formats.source import fault, quoted

PIECE = 1024**2
"""Characters that are read at a time."""
MAX_VALUE = 16 * 1024**2
"""Characters of one element, or of one member that is no such list."""

_NUMBER = re.compile(r"[-+.\deE]*")
_BLANKS = re.compile(r"[ \t\r\n]*")
_scan = json.JSONDecoder(strict=False).scan_once


def read_members(file: TextIO, path: Path, key: str, most: int) -> Iterator[tuple[str, object]]:
    """(key, value) of every member of the object in `file`; of the member `key`, a list, (key, element) of each element. Raises
    InputError, which names `path`, for other text and for more than `most` characters."""
    text = _Text(file, path, most)
    if text.next() != "{":
        raise fault(path, "a JSON object {…} is needed")
    for _ in _separated(text, "}"):
        name = text.value()
        if not isinstance(name, str):
            raise fault(path, "not valid JSON (a key must be a text)")
        text.expect(":")
        if name != key:
            yield name, text.value()
        elif text.next() != "[":
            raise fault(path, f"{quoted(key)} is not a list")
        else:
            for _ in _separated(text, "]"):
                yield name, text.value()
    if text.next():
        raise fault(path, "not valid JSON (more after its end)")


class _Text:
    """A window into a text. `start` is where what was not yet taken begins."""

    def __init__(self, file: TextIO, path: Path, most: int) -> None:
        self.file, self.path, self.left = file, path, most
        self.window, self.start, self.ended = "", 0, False

    def next(self) -> str:
        """The next character that is no blank, which stays; "" at the end."""
        while True:
            self.start = _BLANKS.match(self.window, self.start).end()
            if self.start < len(self.window):
                return self.window[self.start]
            if self.ended:
                return ""
            self._read_on()

    def expect(self, characters: str) -> str:
        """Take the next character, which must be one of these."""
        if (character := self.next()) not in characters or not character:
            where = (
                f"{quoted(character)} instead of {' or '.join(characters)}" if character else "it ends in the middle"
            )
            raise fault(self.path, f"not valid JSON ({where})")
        self.start += 1
        return character

    def value(self) -> object:
        """Take the next value."""
        self.next()
        while True:
            try:
                value, end = _scan(self.window, self.start)
            except (StopIteration, json.JSONDecodeError) as error:
                if self.ended or len(self.window) - self.start > MAX_VALUE:
                    why = error.msg if isinstance(error, json.JSONDecodeError) else "a value is missing"
                    raise fault(self.path, f"not valid JSON, or cut off ({why})") from None
            else:
                # A number may go on in what was not read yet.
                cut = _NUMBER.match(self.window, end).end() == len(self.window)
                if not cut or self.ended or len(self.window) - self.start > MAX_VALUE:
                    self.start = end
                    return value
            self._read_on()

    def _read_on(self) -> None:
        """Twice as much, so that a long value is not begun over and over."""
        piece = self.file.read(max(PIECE, len(self.window) - self.start))
        self.left -= len(piece)
        if self.left < 0:
            raise fault(self.path, "unpacks to more than is read; profile fewer steps")
        self.window, self.start, self.ended = self.window[self.start :] + piece, 0, not piece


def _separated(text: _Text, end: str) -> Iterator[None]:
    """Once for each part between an opening bracket, which is next, commas and `end`; the caller takes the part."""
    text.start += 1
    if text.next() == end:
        text.start += 1
        return
    while True:
        yield
        if text.expect("," + end) == end:
            return

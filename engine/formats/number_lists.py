"""Nested lists of JSON as arrays: out of parsed lists, and, if they are most of a text, straight out of the text."""

import json
import re
from collections.abc import Iterator
from itertools import chain

import numpy as np

INTEGERS: frozenset[type] = frozenset({int})
NUMBERS: frozenset[type] = frozenset({int, float})
BULK = (
    *("routed_experts", "prompt_routed_experts", "topk_experts", "origin_rows", "top_indices"),
    *("expert_load", "p2l_map", "logical_count"),
)
"""Keys that hold nearly all of a recording's text: ids and counts."""
UNREAD = ("topk_weights",)
"""Keys that hold three times as much text again, the gate's scores, which would take longer than all else to read."""
# Its quotation mark is no part of a text: there it has a backslash before.
_PLACE = re.compile(rb'"(?<!\\")(?P<key>%b)"\s*:\s*(?=(?P<beginning>\[[\[\s]*))' % "|".join((*BULK, *UNREAD)).encode())
SHORTEST = 1024
"""Bytes of a text from which this is quicker than Python's parser."""
_MOST_ARRAYS = 100_000
"""Arrays taken out of a text; those of a few numbers are no gain."""
_MOST_AXES = 3
_STANDS_FOR_LIST = "-Infinity"
"""A constant that Python's parser hands over; it stands in no recording."""


def array_of_lists(rows: object, depth: int, kinds: frozenset[type] = INTEGERS) -> np.ndarray | None:
    """The lists as int64[...] of `depth` axes, float64 if `kinds` holds float; None unless all lists of a level are of one
    length and hold numbers of these kinds alone.

    Three times as quick as `np.array`, which also makes of one long text among the numbers an array that no memory holds.

    rows: lists, or the int32[...] that `loads` made of them, which stays as it is for integers
    """
    if isinstance(rows, np.ndarray):
        return None if rows.ndim != depth else rows.astype(np.float64) if float in kinds else rows
    shape, level = [], [rows]
    for axis in range(depth):
        if set(map(type, level)) != {list} or len(lengths := set(map(len, level))) != 1:
            return None
        shape.append(lengths.pop())
        if axis < depth - 1:
            level = list(chain.from_iterable(level))
    if not set(map(type, chain.from_iterable(level))) <= kinds:
        return None
    dtype = np.float64 if float in kinds else np.int64
    try:
        return np.fromiter(chain.from_iterable(level), dtype, len(level) * shape[-1]).reshape(shape)
    except OverflowError:
        return None


def array_of_text(text: bytes, depth: int) -> np.ndarray | None:
    """A text that is one list as int32[...] of `depth` axes, None unless `scan_lists` takes it."""
    from engine.formats.scan_lists import scan_lists  # numba, which takes a moment to load

    lengths, numbers = np.empty(depth, np.int64), np.empty(len(text) // 2, np.int32)
    end, count = scan_lists(np.frombuffer(text, np.uint8), 0, lengths, numbers)
    return numbers[:count].reshape(lengths) if end == len(text) else None


def loads(text: bytes, most_lists: int) -> object | None:
    """The JSON in a text, with int32[...] in place of lists under the keys `BULK` that `scan_lists` takes, and None in place of
    lists of numbers under the keys `UNREAD`. None if there are no such lists, more than `most_lists` others, or anything that
    only Python's parser may judge, such as a short text."""
    parts, arrays, begin = [], [], 0
    for start, end, array in _lists(text) if len(text) >= SHORTEST else ():
        parts += (text[begin:start], _STANDS_FOR_LIST.encode())
        arrays.append(array)
        begin = end
    outline = b"".join((*parts, text[begin:])) if arrays else b""
    if not arrays or outline.count(b"[") + outline.count(b"{") > most_lists:
        return None
    if outline.count(_STANDS_FOR_LIST.encode()) != len(arrays):
        return None
    left = iter(arrays)
    try:
        value = json.loads(outline, parse_constant=lambda name: next(left) if name == _STANDS_FOR_LIST else float(name))
    except (ValueError, RecursionError):
        return None
    return None if any(True for _ in left) else value  # one that is left stood in a text


def _lists(text: bytes) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """(first byte, byte after the last, numbers) of the lists under one of the keys, the first `_MOST_ARRAYS` of them."""
    place = _PLACE.search(text)
    if place is None:
        return
    from engine.formats.scan_lists import scan_lists, skip_lists

    data, numbers = np.frombuffer(text, np.uint8), np.empty(len(text) // 2, np.int32)
    for _ in range(_MOST_ARRAYS):
        start, array = place.end(), None
        if place["key"].decode() in UNREAD:
            end = skip_lists(data, start)
        else:
            lengths = np.empty(min(place["beginning"].count(b"["), _MOST_AXES), np.int64)
            end, count = scan_lists(data, start, lengths, numbers)
            array = numbers[:count].reshape(lengths).copy() if end > 0 else None
        if end > 0:
            yield start, end, array
        if (place := _PLACE.search(text, max(start, end))) is None:
            return

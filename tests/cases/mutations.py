"""Strategies that change a good file in a few places, in its structure, its text or its bytes, for fuzz targets."""

import io
import json
import re
import warnings
import zipfile
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**53, 2**63, 2**70, -(2**63), 10**30, 4095, 4096, 32768, 2_000_000]),
    st.floats(),
    st.text(max_size=6),
)


def values_with(*texts: str) -> st.SearchStrategy:
    """Any JSON, in which these texts are more likely."""
    return st.recursive(
        st.one_of(SCALARS, st.sampled_from(texts)) if texts else SCALARS,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
        max_leaves=12,
    )


VALUES = values_with()


def places_in(value: object, path: tuple = ()) -> list[tuple]:
    """Paths to every value in dicts and lists, the whole first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places_in(item, (*path, key)))]


def with_change(value: dict | list, path: tuple, kind: str, new: object) -> dict | list:
    """A copy with the value at a path replaced by `new`, left out, emptied, repeated, put into a list, or under another key."""
    key, *rest = path
    copy = dict(value) if isinstance(value, dict) else list(value)
    if rest:
        copy[key] = with_change(value[key], tuple(rest), kind, new)
        return copy
    old = copy[key]
    match kind:
        case "replace":
            copy[key] = new
        case "drop":
            del copy[key]
        case "empty":
            copy[key] = type(old)() if isinstance(old, dict | list | str) else None
        case "repeat" if isinstance(copy, list):
            copy[key:key] = [old] * 3
        case "repeat":
            copy[f"{key}2"] = old
        case "wrap":
            copy[key] = [old]
    return copy


@st.composite
def mutated(draw: st.DrawFn, structure: object, values: st.SearchStrategy = VALUES, most: int = 3) -> object:
    """The structure with up to `most` values changed."""
    for _ in range(draw(st.integers(0, most))):
        if places := places_in(structure)[1:]:
            kind = draw(st.sampled_from(("replace", "replace", "replace", "drop", "empty", "repeat", "wrap")))
            new = draw(values) if kind == "replace" else None
            structure = with_change(structure, draw(st.sampled_from(places)), kind, new)
    return structure


_NUMBER, _KEY = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?"), re.compile(r'("[^"\\]*"): ')
_ODD_NUMBERS = ("9" * 5000, "1e999", "-0", "1E-400", "NaN", "0" * 9, "[" * 5000, '{"a":' * 5000, '"\\ud800"', '"\\u0000"')


@st.composite
def json_texts(draw: st.DrawFn, structure: object) -> bytes:
    """The structure as JSON, now and then with a key twice, or with a number as no writer has it."""
    text = json.dumps(structure)
    kind = draw(st.sampled_from(("plain", "plain", "plain", "plain", "key", "number")))
    pattern = _KEY if kind == "key" else _NUMBER
    if kind != "plain" and (matches := list(pattern.finditer(text))):
        place = draw(st.sampled_from(matches))
        new = f"{place[1]}: null, {place[0]}" if kind == "key" else draw(st.sampled_from(_ODD_NUMBERS))
        text = text[: place.start()] + new + text[place.end() :]
    return text.encode()


PIECES = (
    *("", "0", "1", "-1", "3", "1024", "2000000", "9" * 30, "0.001", "1e400", "nan", "inf", "null", "true", '"x"', "x"),
    *("[", "]", "{", "}", ",", ":", ";", "\n", "\r", "\t", "\x00", '"', "\ufeff", "…", "\u2028", "[" * 300, "," * 300),
)


@st.composite
def changed_text(draw: st.DrawFn, text: str, pieces: Sequence[str] = PIECES) -> str:
    """The text with up to five changes: a line moved, cut or with its beginning two thousand times, a word or a few characters
    exchanged for one of the pieces."""
    for _ in range(draw(st.integers(0, 5))):
        lines = text.split("\n")
        at = draw(st.integers(0, len(lines) - 1))
        match draw(st.sampled_from(("move", "drop", "cut", "long", "word", "word", "piece"))):
            case "move":
                lines.insert(draw(st.integers(0, len(lines))), lines[at])
            case "drop" if len(lines) > 1:
                del lines[at]
            case "cut":
                lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
            case "long":
                lines[at] = " ".join(lines[at].split(" ")[:3] * 2000)
            case "word":
                words = re.split(r"([ ,\t]+)", lines[at])
                words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(pieces))
                lines[at] = "".join(words)
            case "piece":
                begin = draw(st.integers(0, len(text)))
                end = begin + draw(st.sampled_from((0, 1, 2, 10, 50)))
                lines = [text[:begin] + draw(st.sampled_from(pieces)) + text[end:]]
        text = "\n".join(lines)
    return text


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes, one time in three with two of them changed, one in six each cut short or with a few exchanged for others."""
    data, kind = bytearray(data), draw(st.integers(0, 5))
    if data and kind in (1, 2):
        for at in draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=2)):
            data[at] = draw(st.integers(0, 255))
    if kind == 4:
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.sampled_from((0, 1, 8)))] = draw(st.binary(max_size=3))
    return bytes(data[: draw(st.integers(0, len(data)))] if kind == 3 else data)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


_DTYPES = ("u1", "i2", ">i4", "i8", "u8", "f2", "f4", ">f8", "?", "c8", "S3", "U2", "O", "M8[s]", "i4,f8")
_FILLS = (-1, 0, 1, 4095, 4096, 32768, 2_000_000, 2**31, 2**53, 2**62, np.nan, np.inf, -np.inf, 1e308, 0.5)
_SHAPES = ((), (0,), (-1,), (-1, 1), (1, -1), (1, 1, -1), (2, -1), (-1, 2), (2, 2, -1), (1, 2, 3, -1))


@st.composite
def changed_arrays(draw: st.DrawFn, array: np.ndarray) -> np.ndarray:
    """The array, perhaps of another dtype or shape, with one number or many exchanged."""
    match draw(st.sampled_from(("same", "dtype", "shape", "cut", "number", "all", "many"))):
        case "dtype":
            with np.errstate(all="ignore"):
                return array.astype(draw(st.sampled_from(_DTYPES)))
        case "shape":
            shape = draw(st.sampled_from(_SHAPES))
            free = max(array.size // max(int(np.prod([size for size in shape if size > 0])), 1), 1)
            return np.resize(array, [free if size < 0 else size for size in shape])
        case "cut" if array.ndim:
            return np.take(array, range(draw(st.integers(0, len(array)))), axis=0)
        case "number" | "all" as which:
            fill = draw(st.sampled_from(_FILLS))
            array = array.astype(type(fill) if isinstance(fill, float) else np.int64)
            places = draw(st.integers(0, max(array.size - 1, 0))) if which == "number" else slice(None)
            array.reshape(-1)[places] = fill
        case "many":
            return np.resize(array, (draw(st.sampled_from((1, 70, 1001, 40_000))), *array.shape[1:]))
    return array


_HEADERS = {
    "shape": ("(True,)", "(True, 3, 2)", "(4, 3, True)", "(-4, -3, 2)", "(4294967296, 4294967296)", "(10**9,)", "()", "(4.0,)"),
    "descr": ("'|O'", "'<V8'", "'<i3'", "[('a', '<i4')]", "('<i4', (2,))", "8", "'<M8'", "'|S0'", "None"),
    "fortran_order": ("True", "1", "None"),
    "text": ("{", "[]", "None", "{**{}}", "{'shape': (2,)}", "[" * 100, "(" * 100, "-" * 3000, "1e999", "'\\x00'", "{[]: 0}"),
}  # fmt: skip


@st.composite
def npy_files(draw: st.DrawFn, array: np.ndarray) -> bytes:
    """The array changed, as `.npy`, sometimes under another header."""
    array = draw(changed_arrays(array))
    if draw(st.integers(0, 3)):
        return npy(array)
    said = {"descr": repr(array.dtype.str), "fortran_order": "False", "shape": repr(array.shape)}
    part = draw(st.sampled_from(tuple(_HEADERS)))
    new = draw(st.sampled_from(_HEADERS[part]))
    header = new if part == "text" else ", ".join(f"'{name}': {text}" for name, text in (said | {part: new}).items())
    header = (header if part == "text" else f"{{{header}}}").encode() + b"\n"
    version = draw(st.sampled_from((1, 1, 2, 3, 9)))
    size = len(header) + draw(st.sampled_from((0, 0, 0, 1, -1, 30_000)))
    data = array.tobytes() if array.dtype != object else b""
    return b"\x93NUMPY" + bytes((version, 0)) + max(size, 0).to_bytes(2 if version == 1 else 4, "little") + header + data


_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


@st.composite
def zips(draw: st.DrawFn, members: dict[str, bytes]) -> bytes:
    """An archive of these members in any compression, sometimes with one of them twice; perhaps damaged."""
    file, compression = io.BytesIO(), draw(st.sampled_from(_COMPRESSIONS))
    listed = [*members.items()]
    if draw(st.integers(0, 9)) == 9:
        listed.append(draw(st.sampled_from(listed)))
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as archive:
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, data in listed:
            archive.writestr(name, data)
    return draw(damaged(file.getvalue()))

"""The format of a file, by its content, and the files that together are one recording; folders and archives count as the
files in them.

`STRANGERS` are well-known files that are no recordings, each with a word on the file to bring in its place. They are tried
only after every format has declined, so that this list cannot hide a format.
"""

import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from engine.errors import InputError, one_line
from engine.formats.format import BELONGS, Format, Glance
from engine.formats.known import FORMATS
from engine.formats.source import (
    MAGIC,
    MAX_FILE_BYTES,
    MAX_UNPACKED_BYTES,
    check_beginning,
    check_size,
    check_there,
    fault,
    one_clear_line,
    quoted,
    read_json,
)

_SQLITE = b"SQLite format 3\0"
_RECORD = "record routing from the server (How to record, docs/recording.md)"
_CONFIG = "open the config.json beside it for the model"
MOST_FILES = 4096
"""Files in a folder or archive: one for each of many ranks, with some requests of each."""


@dataclass(frozen=True)
class Stranger:
    """A well-known kind of file that nothing here reads.

    is_: in a sentence, after "FILE: is"
    instead: the advice
    tells: True if a file is one of these
    """

    is_: str
    instead: str
    tells: Callable[[Glance], bool]


def _is_list_of_events(glance: Glance) -> bool:
    """True for a Chrome trace that is a bare list of events."""
    events = glance.json
    return isinstance(events, list) and bool(events) and isinstance(events[0], dict) and {"ph", "pid"} <= set(events[0])


def _is_nsight(glance: Glance) -> bool:
    """True for a report, by its name, as its content is NVIDIA's own, and for an export to SQLite, by its tables."""
    if glance.head.startswith(_SQLITE):
        return b"CUPTI_ACTIVITY" in glance.head
    return glance.path.suffix.lower() in (".nsys-rep", ".qdrep") and not glance.is_text


def _has_one(glance: Glance, *words: bytes) -> bool:
    return glance.is_text and any(word in glance.head for word in words)


STRANGERS = (
    Stranger(
        "a tokenizer of Hugging Face, which says nothing of routing",
        f"{_CONFIG}, and {_RECORD}",
        lambda glance: {"added_tokens", "model"} <= glance.keys or "tokenizer_class" in glance.keys,
    ),
    Stranger("the index of a checkpoint's safetensors files", _CONFIG, lambda glance: "weight_map" in glance.keys),
    Stranger(
        "a generation_config.json, which has no sizes of the model",
        _CONFIG,
        lambda glance: "transformers_version" in glance.keys and "model_type" not in glance.keys,
    ),
    Stranger(
        "a safetensors file without token counts or routing: weights of a model, by all appearance",
        _CONFIG,
        lambda glance: bool(glance.tensors),
    ),
    Stranger(
        "a model in GGUF", "open the config.json of the model that it was made from", lambda glance: glance.head[:4] == b"GGUF"
    ),
    Stranger(
        "a report of Nsight Systems",
        "its times are not read; profile with the PyTorch profiler and export a Chrome trace (.json), or run python -m engine "
        "calibrate on the machine",
        _is_nsight,
    ),
    Stranger("a database of SQLite", "save its table as CSV or Parquet", lambda glance: glance.head.startswith(_SQLITE)),
    Stranger(
        "a Chrome trace that is a bare list of events",
        'times are read from traces of the PyTorch profiler: export_chrome_trace writes {"traceEvents": [...]}',
        _is_list_of_events,
    ),
    Stranger(
        "a log of vLLM without routing",
        _RECORD,
        lambda glance: _has_one(glance, b"Avg prompt throughput", b"Initializing a V1 LLM engine", b"vLLM API server version"),
    ),
    Stranger(
        "a log of SGLang without routing",
        _RECORD,
        lambda glance: _has_one(glance, b"server_args=ServerArgs(", b"Prefill batch. #new-seq", b"Decode batch. #running-req"),
    ),
)


def files_inside(path: Path, scratch: Path | None) -> list[Path] | None:
    """The files in a folder or in an archive (zip, tar, tar.gz) by name, hidden ones left out. None for any other file, and
    for archives without `scratch`. Raises InputError for too many or too large ones.

    scratch: a folder of the caller's into which archives are unpacked
    """
    with one_clear_line(path):
        if path.is_dir():
            inside = sorted(path.rglob("*"))
            hidden = [any(part.startswith(".") for part in file.relative_to(path).parts) for file in inside]
            files = [file for file, out in zip(inside, hidden, strict=True) if not out and file.is_file()]
            if len(files) > MOST_FILES:
                raise fault(path, f"holds more than {MOST_FILES:,} files; give those of one recording")
            if not files:
                raise fault(path, "is an empty folder")
            return files
        if scratch is not None and path.is_file() and path.stat().st_size and is_archive(path):
            return _in_archive(path, scratch)
        return None


def is_archive(path: Path) -> bool:
    """True if a file holds files of other formats: a zip of anything but NumPy arrays or tensors, or a tar."""
    glance = Glance(path)
    if glance.magic == ".npz":
        return not glance.is_torch and not all(name.endswith(".npy") for name in glance.archived)
    return (glance.magic == ".gz" or b"ustar" in glance.head[:512]) and tarfile.is_tarfile(path)


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
    """(name, bytes, function that opens it) of every regular file."""
    if isinstance(archive, zipfile.ZipFile):
        for entry in archive.infolist():
            if entry.filename and not entry.is_dir():  # zipfile asks for the last letter of a name
                yield entry.filename, entry.file_size, lambda entry=entry: archive.open(entry)
        return
    for entry in archive:
        if entry.isfile():
            yield entry.name, entry.size, lambda entry=entry: archive.extractfile(entry)


@dataclass(frozen=True)
class Part:
    """One recording, or one file of another kind. paths: its files, several if ranks, requests or layers have their own"""

    format: Format
    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The file's stem, or the beginning that the names of its files share."""
        if len(self.paths) == 1:
            return self.paths[0].stem
        stems = [path.stem for path in self.paths]
        common = stems[0]
        while not all(stem.startswith(common) for stem in stems):
            common = common[:-1]
        return common.rstrip("_-. ") or self.paths[0].parent.name or "recording"


def identify(path: Path) -> Format:
    """The format of a file; raises InputError, which says as closely as it can what the file is, if nothing here reads it."""
    with one_clear_line(path):
        check_there(path)
        check_size(path)
        glance = Glance(path)
        for format in FORMATS:
            if format.tells(glance):
                return format
        raise _unknown(glance)


def parts(paths: Iterable[Path], scratch: Path | None = None) -> list[Part]:
    """The recordings and other files in these files, folders and archives, in their order: files of one recording together.

    scratch: a folder of the caller's to unpack archives into; without one they are not unpacked

    Files that nothing reads are left out of folders and archives that hold something else; else raises InputError.
    """
    return joined(part for path in paths for part in single_files(path, scratch))


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts with the files of one recording, or of another set, in one part."""
    together: dict[tuple[Format, Path, str], list[Path]] = {}
    for part in parts:
        for file in part.paths:
            key = file.name if part.format.recording_of is None else part.format.recording_of(file)
            files = together.setdefault((part.format, file.parent, key), [])
            if file not in files:  # a file may be named twice
                files.append(file)
    return _with_sets([Part(format, tuple(sorted(files))) for (format, _, _), files in together.items()])


def _with_sets(parts: list[Part]) -> list[Part]:
    """The parts with those that are a set in one part, in the place of the first of them."""
    for format in dict.fromkeys(part.format for part in parts if part.format.together):
        chosen = set(format.together.choose([path for part in parts if part.format == format for path in part.paths]))
        if chosen:
            place = next(place for place, part in enumerate(parts) if chosen & set(part.paths))
            parts = [part for part in parts if not chosen & set(part.paths)]
            parts.insert(place, Part(format.together.format, tuple(sorted(chosen))))
    return parts


def single_files(path: Path, scratch: Path | None = None) -> list[Part]:
    """A file, or those in a folder or archive, each as a part of its own. See `parts`."""
    inside = files_inside(path, scratch)
    if inside is None:
        return [Part(identify(path), (path,))]
    known, fault_of_last = [], None
    for file in inside:
        try:
            known.append(Part(identify(file), (file,)))
        except InputError as error:
            fault_of_last = error
    if not known:
        raise fault(path, f"holds nothing that is read here ({fault_of_last})")
    return known


def the_recording(paths: Iterable[Path], scratch: Path | None = None) -> Part:
    """The one recording in these files, folders and archives; raises InputError if they hold several, or only other things.

    scratch: as for `parts`
    """
    recognised = parts(paths, scratch)
    recordings = [part for part in recognised if part.format.is_recording]
    if not recordings:
        other = recognised[0]
        raise fault(other.paths[0], f"is {other.format.title}, not a recording; {BELONGS[other.format.kind]}")
    if len(recordings) > 1:
        names = one_line(" and ".join(part.name for part in recordings[:3]))
        raise InputError(f"{len(recordings)} recordings ({names}{' …' if len(recordings) > 3 else ''}); give the files of one")
    return recordings[0]


def _unknown(glance: Glance) -> InputError:
    """The error for a file that no format takes, which says as closely as it can what the file is."""
    path = glance.path
    if known := next((known for known in STRANGERS if known.tells(glance)), None):
        return fault(path, f"is {known.is_}; {known.instead}")
    if glance.head[:1] == b"\x80" and glance.head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return fault(
            path,
            "is a Python pickle, which is never loaded, as it could run any program; load it where it was made and save the "
            "numbers: numpy.savez(name, experts=array)",
        )
    if path.suffix.lower() in MAGIC:
        check_beginning(path, path.suffix.lower())
    if glance.magic == ".npz":
        zipfile.ZipFile(path).close()  # raises if it is damaged
    if glance.magic is not None:
        return fault(path, f"is {MAGIC[glance.magic][1].replace('NumPy .npz', 'zip')} that holds nothing that is read here")
    if glance.is_json:
        content = read_json(path) if glance.json is None else glance.json  # raises if it is none
        keys = ", ".join(quoted(key) for key in list(content)[:6]) if isinstance(content, dict) else "a list"
        return fault(
            path,
            f"is JSON that Switchyard does not recognise ({keys or 'an empty object'}); docs/formats.md lists what is read",
        )
    if glance.head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return fault(path, "is text in UTF-16; save it as UTF-8")
    kind = "text" if glance.is_text else "binary"
    return fault(path, f"is a {kind} file that Switchyard cannot read; docs/formats.md lists what is read")

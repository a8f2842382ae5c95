"""What a file is, by its content, and which files together are one recording."""

import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError, one_line
from engine.formats.format import BELONGS, Format
from engine.formats.glance import Glance
from engine.formats.known import FORMATS
from engine.formats.source import (
    MAGIC,
    check_beginning,
    check_size,
    check_there,
    fault,
    one_clear_line,
    quoted,
    read_json,
)
from engine.formats.strangers import stranger
from engine.formats.unpack import files_inside


@dataclass(frozen=True)
class Part:
    """One recording, or one file of another kind. paths: its files, several where ranks, requests or layers have their own."""

    format: Format
    paths: tuple[Path, ...]

    @property
    def name(self) -> str:
        """The file's stem, or what the names of its files begin with."""
        if len(self.paths) == 1:
            return self.paths[0].stem
        stems = [path.stem for path in self.paths]
        common = stems[0]
        while not all(stem.startswith(common) for stem in stems):
            common = common[:-1]
        return common.rstrip("_-. ") or self.paths[0].parent.name or "recording"


def identify(path: Path) -> Format:
    """What a file is; raises InputError with what it looks like where it is nothing that is read here."""
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

    scratch: a folder of the caller's to unpack archives into; without one they are not unpacked. What nothing reads is left
    out of folders and archives that hold something else; else InputError.
    """
    return joined(part for path in paths for part in single_files(path, scratch))


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same with the files of one recording, or of another set, in one part."""
    together: dict[tuple[Format, Path, str], list[Path]] = {}
    for part in parts:
        for file in part.paths:
            key = file.name if part.format.recording_of is None else part.format.recording_of(file)
            files = together.setdefault((part.format, file.parent, key), [])
            if file not in files:  # a file may be named twice
                files.append(file)
    return _with_sets([Part(format, tuple(sorted(files))) for (format, _, _), files in together.items()])


def _with_sets(parts: list[Part]) -> list[Part]:
    """The same with those that are a set in one part, in the place of the first of them."""
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
    """The one recording in these files, folders and archives; raises InputError where they hold several, or only other things.
    scratch: as of `parts`"""
    recognised = parts(paths, scratch)
    recordings = [part for part in recognised if part.format.is_recording]
    if not recordings:
        other = recognised[0]
        raise fault(other.paths[0], f"is {other.format.title}, not a recording; {BELONGS[other.format.kind]}")
    if len(recordings) > 1:
        names = one_line(" and ".join(part.name for part in recordings[:3]))
        raise InputError(
            f"{len(recordings)} recordings ({names}{' …' if len(recordings) > 3 else ''}); give the files of one"
        )
    return recordings[0]


def _unknown(glance: Glance) -> InputError:
    """Why nothing recognised the file, as closely as can be said."""
    path = glance.path
    if (known := stranger(glance)) is not None:
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
        zipfile.ZipFile(path).close()  # raises where it is damaged
    if glance.magic is not None:
        return fault(
            path, f"is {MAGIC[glance.magic][1].replace('NumPy .npz', 'zip')} that holds nothing that is read here"
        )
    if glance.is_json:
        content = read_json(path) if glance.json is None else glance.json  # raises where it is none
        keys = ", ".join(quoted(key) for key in list(content)[:6]) if isinstance(content, dict) else "a list"
        return fault(
            path,
            f"is JSON that Switchyard does not recognise ({keys or 'an empty object'}); docs/formats.md lists what is read",
        )
    if glance.head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return fault(path, "is text in UTF-16; save it as UTF-8")
    what = "text" if glance.is_text else "binary"
    return fault(path, f"is a {what} file that Switchyard cannot read; docs/formats.md lists what is read")

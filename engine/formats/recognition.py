"""The format of a file, by its content, and the files that together are one recording; folders and archives count as the
files in them.

`STRANGERS` are well-known files that are no recordings, each with a word on the file to bring in its place. They are tried
only after every format has declined, so that this list cannot hide a format.
"""

import gzip
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from engine.errors import InputError, one_line
from engine.formats import rank_files
from engine.formats.format import Format, Glance
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
    without_ids,
)
from engine.model import MoEModel
from engine.program import command

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
        "a file of torch.save without routing, token counts or a plan: weights, by all appearance",
        f"{_CONFIG}, or the router_trace_rank….jsonl beside it if Megatron-Core's tracer wrote it",
        lambda glance: glance.is_torch,
    ),
    Stranger(
        "a model in GGUF", "open the config.json of the model that it was made from", lambda glance: glance.head[:4] == b"GGUF"
    ),
    Stranger(
        "a report of Nsight Systems",
        "its times are not read; profile with the PyTorch profiler and export a Chrome trace (.json), or run "
        f"{command()} calibrate on the machine",
        _is_nsight,
    ),
    Stranger("a database of SQLite", "save its table as CSV or Parquet", lambda glance: glance.head.startswith(_SQLITE)),
    Stranger(
        "a Chrome trace that is a bare list of events",
        'times are read from traces of the PyTorch profiler: export_chrome_trace writes {"traceEvents": [...]}',
        _is_list_of_events,
    ),
    Stranger(
        "a table of addresses of Ascend NPUs",
        "it has neither links nor rates: save what 'npu-smi info -t topo' prints on one machine",
        lambda glance: (
            {"server_list", "server_count"} <= glance.keys
            or (glance.is_text and re.search(rb"^(?:address_\d+=|ipaddr:)", glance.head, re.MULTILINE) is not None)
        ),
    ),
    Stranger(
        "the overview of nvidia-smi, which does not show links",
        "save these instead: nvidia-smi -L > topo.txt; nvidia-smi topo -m >> topo.txt",
        lambda glance: _has_one(glance, b"| NVIDIA-SMI "),
    ),
    Stranger(
        "the overview of npu-smi, which does not show links",
        "save what 'npu-smi info -t topo' prints",
        lambda glance: _has_one(glance, b"| npu-smi "),
    ),
    Stranger(
        "of AMD's tools, but not the links of GPUs",
        "save what 'rocm-smi --showtopo' or 'amd-smi topology' prints",
        lambda glance: _has_one(glance, b"ROCm System Management Interface", b"| AMD-SMI "),
    ),
    Stranger(
        "the output of HCCL's tests, which names neither the collective nor the NPUs",
        "save its times as CSV: operation,ranks,bytes,seconds in the first line and all_to_all,8,1048576,0.00012 in the next",
        lambda glance: _has_one(glance, b"data_size(Bytes):") and b"alg_bandwidth" in glance.head,
    ),
    Stranger(
        "the state or a test of a single network card",
        "type its rate as the bandwidth of the GPU's port on the Cluster page",
        lambda glance: _has_one(glance, b"BW average[", b"RDMA_Write BW Test", b"CA type: ", b"hca_id:"),
    ),
    Stranger(
        "a log in JSON, as Docker keeps it",
        "give the text alone: docker logs CONTAINER > run.log, or jq -j .log FILE > run.log",
        lambda glance: {"log", "stream"} <= set(glance.record),
    ),
    Stranger(
        "a log of SGLang with its balancedness, but without routing",
        _RECORD,
        lambda glance: _has_one(glance, b"[Expert Balancedness]"),
    ),
    Stranger(
        "a log of vLLM with EPLB's balancedness, but neither routing nor the experts of its ranks",
        f"the start of the log has '[EP Rank 0/8] … index map:' of each rank, which is a plan; {_RECORD}",
        lambda glance: _has_one(glance, b"balancedness="),
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


_LINK = r"(?:NV\d+|PIX|PXB|PHB|SYS|XGMI)"
LIKE = {
    "the output of nccl-tests": (
        "keep all that the test prints",
        {
            "lines of ranks": r"^#? *Rank +\d+ ",
            "the head of its table": "algbw +busbw",
            "rows of sizes": r"^ *\d+ +\d+ +float ",
        },
    ),
    "the links of one machine's GPUs": (
        "save what 'nvidia-smi topo -m' or 'rocm-smi --showtopo' prints",
        {"a head with every GPU": r"\bGPU0[ \t]+GPU1\b", "rows of links": rf"\b{_LINK}[ \t]+(?:{_LINK}|X\b)"},
    ),
    "a log of a serving engine": (
        _RECORD,
        {"the engine": r"\b(?:vllm|sglang|tensorrt.llm|EngineCore)\b", "experts of each rank": "->", "routing": "topk_ids"},
    ),
    "a table of routing, loads or traffic": (
        "save it as CSV, such as token,layer,expert in the first line and 0,3,17 in the next",
        {
            "the names of columns": r"\b(?:tokens?|layers?|experts?|src|dst)\b",
            "numbers": r"^[ \t]*-?\d[\d.]*(?:[ \t:;|,]+-?\d[\d.]*)+\s*$|\bexpert\W{1,3}\d",
            "commas": r"\d *, *\d",
        },
    ),
}
"""Kinds of text that one which nothing names may be a part of, with the advice and the marks of a whole one by name."""


def _nearest(glance: Glance) -> str:
    """The kind of text that has most in common with this one, with the parts that it lacks; "" if none has a thing."""
    text = glance.head.decode(errors="replace")
    has = {
        kind: [name for name, mark in marks.items() if re.search(mark, text, re.M | re.I)] for kind, (_, marks) in LIKE.items()
    }
    kind = max(has, key=lambda kind: len(has[kind]))
    instead, marks = LIKE[kind]
    lacking = " and ".join(name for name in marks if name not in has[kind]) or "its usual form"
    return f"; it is nearest to {kind}: it has {' and '.join(has[kind])}, but not {lacking}; {instead}" if has[kind] else ""


def files_inside(path: Path, scratch: Path | None) -> list[Path] | None:
    """The files in a folder or in an archive (zip, tar, tar.gz, a file in gzip) by name, hidden ones left out. None for any
    other file, for one in gzip that is read as it is, and for archives without `scratch`. Raises InputError for too many or
    too large ones.

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
        if scratch is not None and path.is_file() and path.stat().st_size:
            if is_archive(path):
                return _in_archive(path, scratch)
            if (opened := _unzipped(path, scratch)) != path:
                return [opened]
        return None


def _unzipped(path: Path, scratch: Path | None) -> Path:
    """The file that one in gzip holds, in a folder for those of its folder; itself if it is none, or is read as it is. Raises
    InputError."""
    glance = Glance(path)
    if scratch is None or glance.magic != ".gz" or is_archive(path) or any(format.tells(glance) for format in FORMATS):
        return path
    check_size(path)
    target = scratch / f"unzipped-{path.parent.name}" / (path.stem if path.suffix.lower() == ".gz" else path.name)
    target.parent.mkdir(exist_ok=True)
    with gzip.open(path) as packed, target.open("wb") as file:
        while block := packed.read(1024**2):
            file.write(block)
            if file.tell() > MAX_FILE_BYTES:
                raise fault(path, f"unpacks to more than {MAX_FILE_BYTES // 1024**2} MB; cut the recording")
    return target


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """The file, or the one that it holds in gzip. Raises InputError for a fault in it, in one line."""
    with one_clear_line(path), TemporaryDirectory() as scratch:
        check_there(path)
        yield _unzipped(path, Path(scratch))


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


def parts(paths: Iterable[Path], scratch: Path | None = None, model: MoEModel | None = None) -> list[Part]:
    """The recordings and other files in these files, folders and archives, in their order: files of one recording together.

    scratch: a folder of the caller's to unpack archives into; without one they are not unpacked
    model: the open model, which tells files of ranks that have the loads of their own experts alone

    Files that nothing reads are left out of folders and archives that hold something else; else raises InputError.
    """
    return joined((part for path in paths for part in single_files(path, scratch)), model)


def joined(parts: Iterable[Part], model: MoEModel | None = None) -> list[Part]:
    """The parts with the files of one recording, or of another set, in one part. model: as for `parts`"""
    together: dict[tuple[Format, Path, str], list[Path]] = {}
    for part in parts:
        for file in part.paths:
            key = file.name if part.format.recording_of is None else part.format.recording_of(file)
            files = together.setdefault((part.format, file.parent, key), [])
            if file not in files:  # a file may be named twice
                files.append(file)
    return _with_ranks(_with_sets([Part(format, tuple(sorted(files))) for (format, _, _), files in together.items()]), model)


def _in_a_folder(path: Path) -> tuple:
    return path.parent, without_ids(path.with_suffix(""))


def _a_folder_each(path: Path) -> tuple:
    return path.parent.parent, without_ids(path.parent), path.name


def _with_ranks(parts: list[Part], model: MoEModel | None) -> list[Part]:
    """The parts with files of ranks that have the loads of their own experts in one part, in the place of the first of them."""
    for key in (_in_a_folder, _a_folder_each) if model else ():
        alike: dict[tuple, list[Part]] = {}
        for part in parts:
            if len(part.paths) == 1 and part.format.name in rank_files.KINDS:
                alike.setdefault(key(part.paths[0]), []).append(part)
        for own in alike.values():
            if of_ranks := rank_files.of_ranks([(part.format, part.paths[0]) for part in own], model):
                place = parts.index(own[0])
                parts = [part for part in parts if part not in own]
                parts.insert(place, Part(of_ranks, tuple(part.paths[0] for part in own)))
    return parts


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
            with one_clear_line(file):
                file = _unzipped(file, scratch) if file.stat().st_size else file
            known.append(Part(identify(file), (file,)))
        except InputError as error:
            fault_of_last = error
    if not known:
        raise fault(path, f"holds nothing that is read here ({fault_of_last})")
    return known


def the_recording(paths: Iterable[Path], scratch: Path | None = None, model: MoEModel | None = None) -> Part:
    """The one recording in these files, folders and archives; raises InputError if they hold several, or only other things.

    scratch, model: as for `parts`
    """
    recognised = parts(paths, scratch, model)
    recordings = [part for part in recognised if part.format.is_recording]
    if not recordings:
        other = recognised[0]
        raise fault(other.paths[0], f"is {other.format.title}, not a recording; {other.format.belongs}")
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
    if glance.magic == ".gz":
        return fault(path, "is a gzip file; unpack it and give the file that is in it")
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
    nearest = _nearest(glance) if glance.is_text else ""
    return fault(path, f"is a {kind} file that Switchyard cannot read{nearest}; docs/formats.md lists what is read")

"""A folder with a model: its `config.json`, and the tensors of its safetensors files, of which only the headers are read until
a slice is asked for. Nothing is unpickled, and no code of the folder runs."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine.errors import InputError
from engine.formats.source import fault, one_clear_line, quoted, read_json_object

if TYPE_CHECKING:
    from torch import Tensor

SWITCH = "SWITCHYARD_MODELS"
"""Environment variable: the folders of models that the studio and its commands may open, or that such folders lie in, with the
system's separator of paths between them."""
INDEX = "model.safetensors.index.json"
MAPPED = 64 * 2**20
"""Bytes read after which the files are opened anew: pages that were read of an open file count as memory of this process."""
DEEPEST, MOST_FOLDERS = 3, 200
"""Levels below a listed folder at which models are looked for, as many as a download cache of Hugging Face has, and the most
that are offered."""
_DTYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of a number of the formats that weights are computed in."""


def listed(folder: Path) -> Path:
    """The folder of a model, made absolute. Raises InputError unless the operator has listed it, or one above it."""
    allowed = _allowed()
    real = folder.resolve()
    if not any(real.is_relative_to(one) for one in allowed):
        names = ", ".join(map(str, allowed)) or "none is"
        raise InputError(
            f"{folder}: models are opened from the folders that {SWITCH} lists ({names}); add this one or one above it"
        )
    return real


def folders() -> list[Path]:
    """The folders with a `config.json` that the operator has listed, or that lie in listed ones; each listed one's by name."""
    found: dict[Path, None] = {}
    for top in _allowed():
        for where, inside, files in os.walk(top):
            folder = Path(where)
            if "config.json" in files:
                found[folder] = None
            if "config.json" in files or len(folder.relative_to(top).parts) == DEEPEST:
                inside.clear()
            inside.sort()
            if len(found) == MOST_FOLDERS:
                return list(found)
    return list(found)


def _allowed() -> list[Path]:
    return [Path(part).resolve() for part in os.environ.get(SWITCH, "").split(os.pathsep) if part]


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model's folder. Raises InputError if there is none, or if its weights are quantised."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder of a model")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: a model's folder has a config.json, and safetensors files with its weights")
    config = _json(folder / "config.json")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        by = f": {quoted(method)}" if method else ""
        raise fault(
            folder / "config.json",
            f"the weights are quantised (quantization_config{by}), and a plan runs in fp32, bf16 or fp16: write them in bf16 "
            "first, by transformers' from_pretrained(…, quantization_config=…(dequantize=True)), to(torch.bfloat16) and "
            "save_pretrained(…, save_original_format=False)",
        )
    return config


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. file: its name; bytes: of one of its numbers"""

    file: str
    shape: tuple[int, ...]
    bytes: int


class Checkpoint:
    """The tensors of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Read the headers. Raises InputError for a folder without a config, with weights that are not safetensors, with files
        that are damaged or missing, and with a tensor twice."""
        self.folder = folder
        self.config = read_config(folder)
        self.entries: dict[str, Entry] = {}
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if not files and (others := sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])):
            raise fault(others[0], "weights are read from safetensors alone, never from pickles; convert them first")
        if (folder / INDEX).is_file():
            named = _json(folder / INDEX).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
                raise fault(folder / INDEX, "has no weight_map from names to files")
            files = sorted(set(named.values()))
        for file in files:
            with self._open(file) as reader:
                for name in reader.keys():  # noqa: SIM118, a reader is no mapping
                    part = reader.get_slice(name)
                    if name in self.entries:
                        raise fault(folder / file, f"tensor {quoted(name)} is in {self.entries[name].file} too")
                    self.entries[name] = Entry(file, tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), 0))

    @property
    def empty(self) -> bool:
        """True if the folder has a config alone."""
        return not self.entries

    @contextmanager
    def reading(self) -> Iterator["Reader"]:
        """A reader of slices, which keeps files open for some of them."""
        with ExitStack() as stack:
            yield Reader(self, stack)

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        path = self.folder / file
        if Path(file).name != file or not path.is_file():
            raise fault(self.folder / INDEX, f"names the file {quoted(file)}, which is not there")
        try:
            with safe_open(path, framework="pt") as reader:
                yield reader
        except (SafetensorError, OSError) as error:
            raise fault(path, f"cannot be read as safetensors: {error}") from None


class Reader:
    """Tensors and slices of a checkpoint, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self._checkpoint, self._stack, self._open, self._mapped = checkpoint, stack, {}, 0

    def copy(self, name: str, place: "Tensor", row: int | None = None) -> None:
        """Copy a tensor, or row `row` of it along its first axis, into a tensor of its shape, in that one's number format
        and on its device."""
        entry = self._checkpoint.entries[name]
        if self._mapped > MAPPED:
            self._stack.close()
            self._open, self._mapped = {}, 0
        self._mapped += place.numel() * entry.bytes
        if entry.file not in self._open:
            self._open[entry.file] = self._stack.enter_context(self._checkpoint._open(entry.file))
        part = self._open[entry.file].get_slice(name)
        place.detach().copy_(part[:] if row is None else part[row])  # which no gradient is to know of


def _json(path: Path) -> dict[str, Any]:
    with one_clear_line(path):
        return read_json_object(path)

"""Recordings out, in every form that can carry them: one file an outside format."""

from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.files import replace_atomically
from engine.formats.source import one_clear_line
from engine.formats.writers import moe_balance, npy, npz, sglang_statistics, tables
from engine.formats.writers.writer import KINDS, Writer
from engine.model import MoEModel
from engine.workload import Workload

__all__ = ["WRITERS", "Converted", "Writer", "write_recording", "writer_for"]

WRITERS: dict[str, Writer] = {
    writer.name: writer for module in (npz, npy, tables, moe_balance, sglang_statistics) for writer in module.WRITERS
}
"""By the names of the formats that they write. Of several with a suffix the first is meant by it."""


@dataclass(frozen=True)
class Converted:
    """A recording that was written. lost: what the file does not say of it, a phrase each; size: bytes"""

    path: Path
    format: str
    lost: tuple[str, ...]
    size: int


def writer_for(path: Path, to: str | None = None) -> Writer:
    """The writer of this name, or the one that the file's suffix means; raises InputError."""
    if to is not None:
        if to not in WRITERS:
            raise InputError(f"there is no format {to!r} to write; there are {', '.join(WRITERS)}")
        return WRITERS[to]
    for writer in WRITERS.values():
        if path.suffix.lower() == writer.suffix:
            return writer
    suffixes = ", ".join(dict.fromkeys(writer.suffix for writer in WRITERS.values()))
    raise InputError(f"{path.name}: which format? End the name in {suffixes}, or name the format (--to)")


def write_recording(workload: Workload, path: Path, to: str | None = None, model: MoEModel | None = None) -> Converted:
    """Write a recording, whole or not at all; raises InputError where the format cannot carry one of its kind.

    to: one of `WRITERS`; without it the suffix decides; model: what was recorded, where the format numbers the model's layers
    """
    writer = writer_for(path, to)
    if not isinstance(workload, writer.carries):
        able = [other.name for other in WRITERS.values() if isinstance(workload, other.carries)]
        raise InputError(
            f"{workload.name}: is {KINDS[type(workload)]}, which {writer.title} cannot carry; {', '.join(able)} can"
        )
    with one_clear_line(path), replace_atomically(path) as draft:
        lost = writer.write(workload, draft, model)
        size = draft.stat().st_size
    return Converted(path, writer.name, lost, size)

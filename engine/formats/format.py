"""What an outside format is to us: a name, how its files are told by what is in them, and who reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.formats.glance import Glance
from engine.formats.source import Source
from engine.workload import Workload

Kind = Literal[
    "routing",
    "loads",
    "traffic",
    "plan",
    "cluster",
    "model",
    "step",
    "measurements",
    "profile",
    "topology",
    "pairs",
    "graph",
]

BELONGS = {
    "routing": "open it on the Workload page",
    "loads": "open it on the Workload page",
    "traffic": "open it on the Workload page",
    "plan": "open it on the Optimise page as what is deployed now",
    "cluster": "open it on the Cluster page",
    "model": "open it on the Workload page",
    "step": "open it on the Optimise page",
    "measurements": "use it as costs on the Cluster page",
    "profile": "use it as costs on the Cluster page",
    "topology": "open it on the Cluster page",
    "pairs": "open all of it at once on the Cluster page, or give it to detect --pairs",
    "graph": "give it to plan --graph",
}
"""Where in the studio each kind of file is used."""


@dataclass(frozen=True)
class FileSet:
    """What some files of one format are together and none of them is alone. format: of the set; choose: those of these files
    that belong to it, () where they make no set."""

    format: "Format"
    choose: Callable[[Sequence[Path]], tuple[Path, ...]]


@dataclass(frozen=True)
class Format:
    """title: in a sentence, after "it is"; tells: whether a file is one of these, by its content; read: the recording in one
    file, or in all files of one recording, None for what is not a recording; recording_of: what files of one recording in one
    folder have in common, such as their name without the rank, None where every file is a recording of its own; members: names
    of the workloads inside a file, () where it holds a single one, None where files of this format always do; together: what
    its files may be together, whatever their folders."""

    name: str
    title: str
    kind: Kind
    tells: Callable[[Glance], bool]
    read: Callable[[Sequence[Source]], Workload] | None = None
    recording_of: Callable[[Path], str] | None = None
    members: Callable[[Path], tuple[str, ...]] | None = None
    together: FileSet | None = None

    @property
    def is_recording(self) -> bool:
        return self.read is not None


def of_one_file(read: Callable[[Source], Workload]) -> Callable[[Sequence[Source]], Workload]:
    """A reader of single files as `Format.read` is called."""

    def read_only(sources: Sequence[Source]) -> Workload:
        (source,) = sources
        return read(source)

    return read_only

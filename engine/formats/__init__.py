"""Files of the outside world in, engine objects out: a module for each outside format, and here the choice between them.

Every fault of a file is an InputError of one line: its name, the place in it and the rule that it breaks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from engine.catalogue import cluster_of_gpus, cluster_presets, model_presets
from engine.cluster import Cluster
from engine.errors import InputError
from engine.formats import huggingface, packaged
from engine.formats.arrays import of_computing_experts
from engine.formats.checks import check_recording
from engine.formats.cost_files import OF_ONE_PAIR, findings_of_times, is_of_one_pair, read_collectives, read_costs
from engine.formats.format import BELONGS, Format, Kind
from engine.formats.measured.nccl_pairs import findings_of_pairs
from engine.formats.recognition import Part, identify, joined, parts, single_files, the_recording
from engine.formats.source import MAX_FILE_BYTES, Source, check_file, fault, one_clear_line, read_json_object
from engine.model import MoEModel
from engine.plan import Plan
from engine.schema import Frozen
from engine.serving.sizes import TransformerSizes
from engine.workload import Finding, Origin, Workload

Document = TypeVar("Document", bound=Frozen)
Preset = TypeVar("Preset")


def read_workload(
    files: Path | Sequence[Path],
    name: str | None = None,
    member: str | None = None,
    num_experts: int | None = None,
    bytes_per_token: float = 1.0,
    model: MoEModel | None = None,
    scratch: Path | None = None,
    stages: int | None = None,
    deployed: Path | None = None,
) -> Workload:
    """The recording in a file, a folder or an archive, or in the files of one recording (of ranks, requests or layers); raises
    InputError.

    name: the workload's; the file's stem by default, with `::member` if a member is asked for
    member: one of the workloads of a file that holds several
    num_experts: logical experts per layer of the open model; ids are held against it. Without it, and if the file does not
        say, there are as many as the largest id + 1
    bytes_per_token: bytes of one token copy, kept with a traffic matrix and unused otherwise
    model: the open model, for formats that lack the layers and experts per token
    scratch: a folder of the caller's to unpack archives into; without one they are not unpacked
    stages: pipeline stages of the run that was recorded, for recordings and models that do not tell
    deployed: the plan that ran while it was recorded, for counts of its slots
    """
    paths = [files] if isinstance(files, Path) else list(files)
    recording = the_recording(paths, scratch, model)
    with one_clear_line(recording.paths[0]):
        if member is not None and recording.format.members is None:
            raise fault(paths[0], f"holds one workload only; leave out '::{member}'")
        default = recording.name if member is None else f"{recording.name}::{member}"
        workload = recording.format.read(
            [
                Source(path, name or default, member, num_experts, bytes_per_token, model, stages, deployed)
                for path in recording.paths
            ]
        )
        workload = workload if workload.origin else replace(workload, origin=Origin(format=recording.format.name))
        return of_computing_experts(workload, model)


def members(path: Path) -> tuple[str, ...]:
    """Names of the workloads inside a file; () for one that holds a single unnamed recording. Raises InputError."""
    with one_clear_line(path):
        inside = identify(path).members
        return inside(path) if inside else ()


def split_member(text: str) -> tuple[Path, str | None]:
    """`FILE::intent` as (FILE, `intent`), and a plain `FILE` as (FILE, None)."""
    file, mark, member = text.rpartition("::")
    if not mark:
        return Path(text), None
    if not file or not member:
        raise InputError(f"{' '.join(text.split())}: write FILE::NAME, with the name of a workload inside the file")
    return Path(file), member


def read_document(kind: type[Document], path: Path) -> Document:
    """A document that is saved as JSON: a plan, a training step, an operator graph …; a path that begins with a brace is the
    JSON itself, as a command line may have it. Raises InputError."""
    if str(path).startswith("{"):
        return kind.from_json(str(path), "the JSON given")
    with one_clear_line(path):
        check_file(path, (".json",))
        return kind.from_dict(read_json_object(path), path.name)


def read_cluster(path: Path) -> Cluster:
    """A cluster as saved by the studio (JSON); if there is no such file, the catalogue's of this name, or nodes of its GPUs
    (`4xH100`). Raises InputError."""
    if not path.exists():
        if (counted := cluster_of_gpus(str(path))) is not None:
            return counted
        return _of_catalogue(path, cluster_presets(), "cluster").cluster
    return read_document(Cluster, path)


def read_model(path: Path) -> MoEModel:
    """A model as saved by the studio, or a Hugging Face `config.json`; if there is no such file, the catalogue's of this name,
    or a packaged one by its name on the Hugging Face Hub. Raises InputError."""
    with one_clear_line(path):
        if not path.exists():
            if packaged.is_packaged(str(path)):
                return packaged.packaged_model(str(path))
            return _of_catalogue(path, model_presets(), "model").model
        check_file(path, (".json",))
        data = read_json_object(path)
        if huggingface.TELLING_KEYS & set(data):
            return huggingface.model_of_config(data, path)
        return MoEModel.from_dict(data, path.name)


def _of_catalogue(path: Path, presets: Mapping[str, Preset], kind: str) -> Preset:
    """The preset with the path's text as its name."""
    try:
        return presets[str(path)]
    except KeyError:
        raise fault(path, f"there is no such file, and no {kind} of this name in the catalogue") from None


def is_huggingface(path: Path) -> bool:
    """True if a model's file is a Hugging Face `config.json`, not one that the studio saved; raises InputError."""
    with one_clear_line(path):
        check_file(path, (".json",))
        return bool(huggingface.TELLING_KEYS & set(read_json_object(path)))


def read_sizes(path: Path) -> TransformerSizes:
    """The attention, dense layers and vocabulary of a Hugging Face `config.json`; raises InputError."""
    with one_clear_line(path):
        check_file(path, (".json",))
        return huggingface.sizes_of_config(read_json_object(path), path)


def read_plan(path: Path) -> Plan:
    """A plan as saved by the studio (JSON); raises InputError."""
    return read_document(Plan, path)

"""Files of the outside world in, engine objects out. One module an outside format; here is the choice between them.

Every fault of a file is an InputError of one line: its name, the place in it and the rule that it breaks.
"""

from pathlib import Path
from typing import TypeVar

from engine.cluster import Cluster
from engine.costs import CostProfile, MeasuredTimes
from engine.costs.device_profile import DeviceProfile
from engine.errors import InputError
from engine.formats import huggingface, kineto, measurements, nccl_tests, numpy_files, sglang, tables
from engine.formats.checks import Finding, check_recording
from engine.formats.source import MAX_FILE_BYTES, Source, check_file, fault, one_clear_line, read_json_object
from engine.model import MoEModel
from engine.plan import Plan
from engine.schema import Frozen
from engine.workload import Workload

Document = TypeVar("Document", bound=Frozen)

__all__ = [
    "MAX_FILE_BYTES",
    "WORKLOAD_EXTENSIONS",
    "Finding",
    "check_recording",
    "members",
    "read_cluster",
    "read_costs",
    "read_document",
    "read_model",
    "read_plan",
    "read_workload",
    "split_member",
]

_READERS = {
    ".npz": numpy_files.read_npz,
    ".npy": numpy_files.read_npy,
    ".csv": tables.read_csv,
    ".parquet": tables.read_parquet,
    ".json": sglang.read_statistics,
}
WORKLOAD_EXTENSIONS = tuple(_READERS)


def read_workload(
    path: Path,
    name: str | None = None,
    member: str | None = None,
    num_experts: int | None = None,
    bytes_per_token: float = 1.0,
) -> Workload:
    """The recording in a file; raises InputError.

    name: what to call it; the file's stem by default, with `::member` when a member is asked for
    member: which workload of an `.npz` that holds several
    num_experts: logical experts per layer of the open model; ids are held against it. Without it, and when the file
        does not say, there are as many as the largest id + 1
    bytes_per_token: bytes of one token copy, kept with a traffic matrix and unused otherwise
    """
    with one_clear_line(path):
        extension = check_file(path, _READERS)
        if member is not None and extension != ".npz":
            raise fault(path, f"holds one workload only; leave out '::{member}' (only an .npz can hold several)")
        default = path.stem if member is None else f"{path.stem}::{member}"
        return _READERS[extension](Source(path, name or default, member, num_experts, bytes_per_token))


def members(path: Path) -> tuple[str, ...]:
    """Names of the workloads inside an `.npz`; () for one that holds a single unnamed recording and for other files.
    Raises InputError."""
    with one_clear_line(path):
        return numpy_files.members(path) if check_file(path, _READERS) == ".npz" else ()


def split_member(text: str) -> tuple[Path, str | None]:
    """`FILE::intent` as (FILE, `intent`), and a plain `FILE` as (FILE, None)."""
    file, mark, member = text.rpartition("::")
    if not mark:
        return Path(text), None
    if not file or not member:
        raise InputError(f"{' '.join(text.split())}: write FILE::NAME, with the name of a workload inside the file")
    return Path(file), member


def read_document(kind: type[Document], path: Path) -> Document:
    """Anything that is saved as JSON: a plan, a training step, an operator graph …; raises InputError."""
    with one_clear_line(path):
        check_file(path, (".json",))
        return kind.from_dict(read_json_object(path), path.name)


def read_cluster(path: Path) -> Cluster:
    """A cluster as saved by the studio (JSON); raises InputError."""
    return read_document(Cluster, path)


def read_model(path: Path) -> MoEModel:
    """A model as saved by the studio, or a Hugging Face `config.json`; raises InputError."""
    with one_clear_line(path):
        check_file(path, (".json",))
        data = read_json_object(path)
        if huggingface.TELLING_KEYS & set(data):
            return huggingface.model_of_config(data, path)
        return MoEModel.from_dict(data, path.name)


def read_costs(path: Path) -> CostProfile | MeasuredTimes:
    """Fitted lines or measured times: either of them as saved (JSON), what `calibrate` writes (JSON), measured times as a
    table (CSV), the text that nccl-tests prints (.txt, .log, .out), or a trace of the PyTorch profiler (.json, .json.gz);
    raises InputError."""
    with one_clear_line(path):
        extension = check_file(path, (".json", ".gz", ".csv", *nccl_tests.EXTENSIONS))
        if extension == ".csv":
            return measurements.read_measurements(path)
        if extension in nccl_tests.EXTENSIONS:
            return nccl_tests.read_nccl_tests(path)
        data = kineto.read_gzip(path) if extension == ".gz" else read_json_object(path)
        if kineto.is_trace(data):
            return kineto.read_kineto(data, path)
        if data.get("kind") == "calibration":
            return DeviceProfile.from_dict(data, path.name).measured
        return (MeasuredTimes if "kind" in data else CostProfile).from_dict(data, path.name)


def read_plan(path: Path) -> Plan:
    """A plan as saved by the studio (JSON); raises InputError."""
    return read_document(Plan, path)

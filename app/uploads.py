"""Files that a person drops on a page: kept for a moment in the data folder, read by the engine, then removed."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app import cached, state
from engine import formats, store
from engine.catalogue.nvidia import Drawn
from engine.cluster import Cluster
from engine.errors import InputError
from engine.formats.nvidia_topo import read_topology
from engine.workload import RoutingTrace, TrafficMatrix, Workload

MOST_NAME_BYTES = 100
MOST_WORKLOADS = 64
"""In one file: every one of them is read, kept and listed."""
TYPES = [extension.removeprefix(".") for extension in formats.WORKLOAD_EXTENSIONS]


def receive(name: str, content: bytes) -> str:
    """Open an uploaded file as what it is (a recording, a model or a cluster) and say what was opened.

    Raises InputError with one line; what the session had open stays open.
    """
    with as_file(name, content) as path:
        return _open(path)


def topology(name: str, content: bytes, type: str | None) -> Drawn:
    """The machine in what `nvidia-smi topo -m` printed; `type` names its GPUs where the text does not. Raises InputError."""
    with as_file(name, content) as path:
        return read_topology(path, type)


@contextmanager
def as_file(name: str, content: bytes) -> Iterator[Path]:
    """An uploaded file on the disk for as long as it is being read. Raises InputError when the disk does not take it."""
    folder = Path(tempfile.mkdtemp(prefix="upload-", dir=store.data_folder()))
    try:
        path = folder / name_on_disk(name)
        try:
            path.write_bytes(content)
        except OSError as error:
            raise InputError(f"{path.name}: the data folder cannot be written ({error.strerror})") from None
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def name_on_disk(name: str) -> str:
    """The name is the browser's word: only its last part, only harmless characters, and only as many as any disk takes."""
    last = re.sub(r"[^\w.\- ()]", "_", name.replace("\\", "/").rsplit("/", 1)[-1])
    short = last.encode()[-MOST_NAME_BYTES:].decode(errors="ignore")
    return short if short.strip(". ") else "file"


def _open(path: Path) -> str:
    kind = _kind_of_json(path) if path.suffix.lower() == ".json" else "recording"
    if kind == "cluster":
        cluster = formats.read_cluster(path)
        state.open_cluster(cluster)
        return f"opened the cluster {cluster.name}"
    if kind == "model":
        model = formats.read_model(path)
        workload = cached.workload()
        if workload is not None and not isinstance(workload, TrafficMatrix):
            try:
                model.check_recording(workload.layers, workload.num_experts, workload.k, workload.name)
            except InputError as error:
                raise InputError(
                    f"{path.name}: {error}; the open model stays (open the model's recording first)"
                ) from None
        state.open_model(model)
        return f"opened the model {model.name}"
    parts = formats.members(path) or (None,)
    if len(parts) > MOST_WORKLOADS:
        raise InputError(
            f"{path.name}: holds {len(parts)} workloads, at most {MOST_WORKLOADS} are opened at once; save fewer"
        )
    opened = [_read(path, part) for part in parts]
    for workload in opened:
        state.open_workload(workload)
    names = " and ".join(workload.name for workload in opened)
    return f"opened {names}"


def _read(path: Path, member: str | None) -> Workload:
    """The recording. One with the layers and k of the open model is held against that model's number of experts; one of
    another model is no fault, so its own sizes count then."""
    model = state.model()
    if model is None:
        return formats.read_workload(path, member=member)
    workload = formats.read_workload(path, member=member, bytes_per_token=model.bytes_per_token)
    same = isinstance(workload, RoutingTrace) and (workload.layers, workload.k) == (
        len(model.moe_layers),
        model.experts_per_token,
    )
    if not same or workload.num_experts == model.experts:
        return workload
    return formats.read_workload(path, member=member, num_experts=model.experts)


def _kind_of_json(path: Path) -> str:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return "recording"  # whose reader says what is wrong with it
    keys = set(content) if isinstance(content, dict) else set()
    if "nodes" in keys:
        return "cluster"
    return "recording" if "logical_count" in keys or not keys else "model"


def as_json(document: Cluster) -> str:
    """A cluster as a file that `receive` opens again."""
    return document.model_dump_json(indent=1, exclude_none=True)

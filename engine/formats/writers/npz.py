"""NumPy archives, `.npz`: everything that a recording holds, but for its name, which is the file's."""

import zipfile
from pathlib import Path

import numpy as np

from engine.formats.numpy_files import FINDINGS
from engine.formats.writers.writer import Writer
from engine.model import MoEModel
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload


def write_npz(workload: Workload, path: Path, _model: MoEModel | None = None) -> tuple[str, ...]:
    """Compressed arrays, see `engine.formats.numpy_files`. The format that the recording was read from is not kept; what its
    reader found, and what remedies did, is. Layers of loads without any tokens are left out when it is read."""
    # NumPy compresses as hard as it can, which takes several times as long for a few per cent.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in _arrays(workload).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return ()


def _arrays(workload: Workload) -> dict[str, np.ndarray]:
    match workload:
        case RoutingTrace():
            parts = {"experts": workload.experts, "num_experts": np.int64(workload.num_experts)}
            optional = ("sequence", "source_rank", "phase", "model_layers")
        case ExpertLoad():
            parts = {"expert_load": workload.load}
            optional = ("model_layers", "by_source", "by_step")
        case TrafficMatrix():
            parts = {"traffic_bytes": workload.bytes, "bytes_per_token": np.float64(workload.bytes_per_token)}
            optional = ()
    parts |= {name: np.asarray(part) for name in optional if (part := getattr(workload, name)) is not None}
    if workload.origin and workload.origin.findings:
        parts["findings"] = np.frombuffer(FINDINGS.dump_json(workload.origin.findings), np.uint8)
    return parts


WRITERS = (Writer("npz", ".npz", "a NumPy archive", (RoutingTrace, ExpertLoad, TrafficMatrix), write_npz),)

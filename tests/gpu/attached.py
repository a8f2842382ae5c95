"""NVML, PyTorch, the catalogue and nvidia-smi have to see the same GPUs."""

import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.catalogue import gpu_types
from engine.launch.places.devices import Devices, attached, cluster_of, counted, driver_version
from tests.gpu.table import Finding, SkipError, needs

DEV = Path("/dev")


def seen_without_torch(devices: Devices) -> str | None:
    """The source that names a GPU that PyTorch cannot use; None if there is none."""
    if devices.gpus:
        return None
    if devices.machine:
        return f"NVML shows {counted(gpu.name for gpu in devices.machine)}"
    if nodes := sorted(DEV.glob("nvidia[0-9]*")):
        return f"there is {nodes[0]}"
    program = shutil.which("nvidia-smi")
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60).stdout if program else ""
    return f"nvidia-smi shows {listed.splitlines()[0]}" if listed.startswith("GPU ") else None


def why_unusable(devices: Devices) -> str:
    """Why PyTorch can use none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}"
    return f"PyTorch {torch.__version__}, " + ("; ".join(devices.notes) or "no reason is known")


def discovery() -> list[Finding]:
    """NVML and PyTorch see the same GPUs, and a cluster can be drawn of them."""
    devices = attached()
    hidden = len(devices.machine) != len(devices.gpus) and "CUDA_VISIBLE_DEVICES" not in os.environ
    needs(not hidden, devices.summary)
    needs(driver_version() is not None, "NVML does not tell the driver's version")
    drawn = cluster_of(devices.machine, stand_in(devices))
    needs(len(drawn.cluster.gpus) == len(devices.machine), f"drawn were {len(drawn.cluster.gpus)}")
    memory = f"{min(devices.memory) / 2**30:.0f} GiB"
    return [Finding(f"{counted(devices.gpus)}, {memory}, driver {driver_version()}, CUDA {torch.version.cuda}")]


def topology() -> list[Finding]:
    """The output of nvidia-smi is read as the cluster that NVML shows."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise SkipError("there is no nvidia-smi here")
    if lacking := [name for name in ("pyarrow", "safetensors", "yaml") if find_spec(name) is None]:
        raise SkipError(f"this Python lacks {', '.join(lacking)}, which the readers of files import")
    from engine.formats.nvidia_topo import read_topology

    commands = [program, "-L"], [program, "topo", "-m"]
    printed = [subprocess.run(each, capture_output=True, text=True, check=True, timeout=60).stdout for each in commands]
    devices = attached()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "topology.txt"
        path.write_text("".join(printed), encoding="utf-8")
        drawn = read_topology(path, stand_in(devices))
    seen = cluster_of(devices.machine, stand_in(devices)).cluster
    read, shown = ([gpu.type for gpu in cluster.gpus] for cluster in (drawn.cluster, seen))
    needs(read == shown, f"read were {counted(read)}, NVML shows {counted(shown)}")
    return [Finding(counted(read))]


def stand_in(devices: Devices) -> str | None:
    """A type of the catalogue for GPUs that it does not know: their rates are not checked."""
    return None if all(gpu.type for gpu in devices.machine) else next(iter(gpu_types()))

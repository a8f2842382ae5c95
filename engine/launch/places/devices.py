"""The devices of this machine that can run a job, and the machine as a cluster."""

import functools
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType

import numpy as np
import psutil

from engine import catalogue
from engine.catalogue.links import PCIE_LANE, Drawn, draw, type_of
from engine.errors import InputError, one_line
from engine.parallel.processes import ask, leave_with_parent

MOST_RANKS = 8
"""Most ranks of a machine with fewer GPUs unless a person wants more: each is a process."""


@dataclass(frozen=True)
class Accelerator:
    """A GPU of this machine as its driver describes it.

    name: the driver's name
    memory: bytes
    pcie: bytes/s of its PCIe port in one direction, None if not known
    nvlinks: NVLinks to every GPU of the machine (0: none, and to itself), None if not known
    free: bytes that no process has now, None if not known
    uuid: the id under which the driver and PyTorch know it, None if not known
    """

    name: str
    memory: float
    pcie: float | None = None
    nvlinks: tuple[int, ...] | None = None
    free: float | None = None
    uuid: str | None = None

    @property
    def type(self) -> str | None:
        """The catalogue's type, None if the catalogue does not know the name."""
        return type_of(self.name)


@dataclass(frozen=True)
class Devices:
    """Attached accelerators and the host.

    gpus: those that PyTorch can run on
    memory: free bytes of each of them, or all bytes if only those are known (of a cluster, and if NVML does not tell)
    host_memory: bytes free on the host
    machine: every GPU that the driver shows, also those that PyTorch cannot use
    notes: devices that were not found, and the reasons
    """

    gpus: tuple[str, ...]
    memory: tuple[float, ...]
    cores: int
    host_memory: float
    machine: tuple[Accelerator, ...] = ()
    notes: tuple[str, ...] = ()

    def backend(self, ranks: int) -> str:
        """NCCL when every rank gets a GPU of its own, Gloo on the CPU otherwise."""
        return "nccl" if len(self.gpus) >= ranks else "gloo"

    def default_ranks(self, gpus: int) -> int:
        """Ranks for a plan of `gpus` GPUs: one per attached GPU if there are several, else at most four on the CPU."""
        return min(gpus, len(self.gpus) if len(self.gpus) > 1 else 4)

    @property
    def summary(self) -> str:
        if len(self.machine) > len(self.gpus):
            can = f"{len(self.gpus)} of them" if self.gpus else "none of them"
            return f"{counted(gpu.name for gpu in self.machine)} (PyTorch can use {can}), {self.cores} CPU cores"
        if self.gpus:
            return f"{counted(self.gpus)}, {self.cores} CPU cores"
        return f"no GPU attached; {self.cores} CPU cores, {self.host_memory / 2**30:.3g} GiB free"


def counted(names: Iterable[str]) -> str:
    """`4 × A, 2 × B`."""
    every = list(names)
    return ", ".join(f"{every.count(name)} × {name}" for name in dict.fromkeys(every))


def attached() -> Devices:
    """The devices of this machine: NVML's view of its GPUs, or PyTorch's if NVML has none. Anything missing (the
    module, the driver, permission) is a note, never an error."""
    machine, notes = _seen_by_nvml()
    gpus, why_none = _seen_by_torch() if "torch" in sys.modules else seen_by_another_process()
    if not gpus:
        notes += (why_none,)
    elif len(gpus) < len(machine):
        notes += ("PyTorch may use fewer GPUs than the machine has (CUDA_VISIBLE_DEVICES)",)
    machine = machine or gpus
    free = {gpu.uuid: gpu.free for gpu in machine if gpu.free is not None}
    return Devices(
        gpus=tuple(gpu.name for gpu in gpus),
        memory=tuple(free.get(gpu.uuid, gpu.memory) for gpu in gpus),
        cores=len(os.sched_getaffinity(0)),
        host_memory=float(psutil.virtual_memory().available),
        machine=machine,
        notes=notes,
    )


def cluster_of(machine: Sequence[Accelerator], type: str | None = None) -> Drawn:
    """This machine's GPUs as a cluster of one node, with notes on the assumptions made.

    Raises InputError if there is no GPU, or one with a name unknown to the catalogue while no type is given.

    type: the catalogue's type to take for GPUs that it does not know by name; they keep their own memory
    """
    if not machine:
        raise InputError(
            "there is no GPU on this machine to draw a cluster from; start from a preset, or detect on a machine with GPUs"
        )
    known = ", ".join(catalogue.gpu_types())
    gpus, stood_in = [], {}
    for gpu in machine:
        if gpu.type is None and type is None:
            raise InputError(
                f"'{gpu.name}' with {gpu.memory / 2**30:.3g} GiB is not in the catalogue, so its rates are unknown; "
                f"choose the nearest type ({known})"
            )
        catalogued = catalogue.gpu(gpu.type or type)
        if gpu.type is None:
            stood_in[gpu.name] = catalogued.type
            catalogued = catalogued.model_copy(update={"memory": gpu.memory})
        gpus.append(catalogued)
    count = len(machine)
    linked = all(gpu.nvlinks is not None for gpu in machine)
    nvlinks = np.array([gpu.nvlinks for gpu in machine]) if linked else np.zeros((count, count), dtype=np.int64)
    drawn = draw(socket.gethostname() or "this machine", gpus, nvlinks, [gpu.pcie for gpu in machine])
    notes = [f"'{name}' has the rates of {kind}, which was chosen for it" for name, kind in stood_in.items()]
    if not linked and count > 1:
        notes.append("whether NVLinks join the GPUs could not be read, so PCIe is taken; 'nvidia-smi topo -m' would tell")
    return Drawn(drawn.cluster, (*notes, *drawn.notes))


def _seen_by_torch() -> tuple[tuple[Accelerator, ...], str]:
    """The GPUs that PyTorch can use, and the reason if it can use none."""
    import torch

    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    why = "this PyTorch is built without CUDA" if torch.version.cuda is None else "PyTorch finds no usable GPU"
    properties = [torch.cuda.get_device_properties(index) for index in indices]
    # Free bytes it could tell only from a context of its own on every GPU, which takes some hundred megabytes of each.
    return tuple(Accelerator(gpu.name, float(gpu.total_memory), uuid=str(gpu.uuid)) for gpu in properties), why


@functools.cache
def seen_by_another_process() -> tuple[tuple[Accelerator, ...], str]:
    """`_seen_by_torch` of a process that ends: PyTorch takes 200 MB, which a studio would keep."""
    asked = ask(__name__)
    if asked.returncode:
        return (), f"PyTorch could not be asked: {one_line(asked.stderr[-200:])}"
    rows, why = json.loads(asked.stdout.splitlines()[-1])
    return tuple(Accelerator(**row) for row in rows), why


def _seen_by_nvml() -> tuple[tuple[Accelerator, ...], tuple[str, ...]]:
    """Every GPU of the machine in the driver's order, and the reason if there is none or something could not be read."""
    try:
        import pynvml
    except ImportError:
        return (), ("NVML was not asked: the package nvidia-ml-py is not installed",)
    try:
        with _session(pynvml):
            handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
            links = _nvlinks(pynvml, handles)
            memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
            return tuple(
                Accelerator(
                    name=pynvml.nvmlDeviceGetName(handle),
                    memory=float(memory[at].total),
                    pcie=_pcie(pynvml, handle),
                    nvlinks=None if links is None else tuple(links[at].tolist()),
                    free=float(memory[at].free),
                    uuid=pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-"),
                )
                for at, handle in enumerate(handles)
            ), ()
    except pynvml.NVMLError as error:
        return (), (f"NVML shows no GPU: {error}",)


def driver_version() -> str | None:
    """Version of NVIDIA's driver; None if it does not tell."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        with _session(pynvml):
            return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None


@contextmanager
def _session(nvml: ModuleType) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _pcie(nvml: ModuleType, handle: object) -> float | None:
    """Bytes/s of the port at the most that GPU and slot can do together: an idle port is switched to a lower rate."""
    try:
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        width = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except nvml.NVMLError:
        return None
    return PCIE_LANE[generation] * width if generation in PCIE_LANE and width > 0 else None


def _nvlinks(nvml: ModuleType, handles: list[object]) -> np.ndarray | None:
    """int64[gpu, gpu]: NVLinks between each pair; a link into a switch reaches every other GPU with links into one.
    None if the driver does not answer."""
    count = len(handles)
    direct, switched = np.zeros((count, count), dtype=np.int64), np.zeros(count, dtype=np.int64)
    try:
        place = {_bus(nvml.nvmlDeviceGetPciInfo(handle)): at for at, handle in enumerate(handles)}
        for at, handle in enumerate(handles):
            for link in range(nvml.NVML_NVLINK_MAX_LINKS):
                try:
                    if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                        continue
                except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                    continue  # no NVLink at all, or no link of this number
                if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                    switched[at] += 1
                else:
                    peer = place.get(_bus(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
                    if peer is not None:  # a container may hold only some of the machine's GPUs
                        direct[at, peer] += 1
    except nvml.NVMLError:
        return None
    through = np.minimum(switched[:, None], switched[None, :])
    np.fill_diagonal(through, 0)
    # The two ends of a link can be read at different moments, and a pair is as good as its worse end.
    return np.minimum(direct, direct.T) + through


def _bus(info: object) -> tuple[int, int, int]:
    return info.domain, info.bus, info.device


if __name__ == "__main__":
    leave_with_parent()
    seen, reason = _seen_by_torch()
    print(json.dumps([[asdict(gpu) for gpu in seen], reason]))

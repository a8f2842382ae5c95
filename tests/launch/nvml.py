"""A small stand-in for the module pynvml: GPUs, their ports and their NVLinks."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

GIB = 2.0**30
SWITCH = "switch"


class NVMLError(Exception):
    pass


NAMES = ("NotSupportedError", "InvalidArgumentError", "NoPermissionError")
NotSupportedError, InvalidArgumentError, NoPermissionError = (type(name, (NVMLError,), {}) for name in NAMES)


@dataclass
class Gpu:
    """links: per NVLink the bus of the GPU at its other end, SWITCH, or None for a link that is down; taken: bytes that
    processes have."""

    name: str
    memory: float
    bus: int
    generation: int = 4
    width: int = 16
    links: list[int | str | None] = field(default_factory=list)
    taken: float = 0.0


def switched(name: str, count: int, links: int, memory: float = 80 * GIB, generation: int = 4) -> list[Gpu]:
    """GPUs of which all links go into switches; one link more is down."""
    return [Gpu(name, memory, at, generation, links=[SWITCH] * links + [None]) for at in range(count)]


def linked(
    name: str, count: int, pairs: list[tuple[int, int, int]], memory: float = 32 * GIB, generation: int = 3
) -> list[Gpu]:
    """GPUs joined by (GPU, peer, number of links)."""
    gpus = [Gpu(name, memory, at, generation) for at in range(count)]
    for gpu, peer, links in pairs:
        gpus[gpu].links += [peer] * links
        gpus[peer].links += [gpu] * links
    return gpus


def plug_in(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu], forbidden: tuple[str, ...] = ()) -> ModuleType:
    """Put a module in pynvml's place that shows these GPUs and denies the `forbidden` calls. Its `sessions` counts how
    many were begun and how many are still open."""
    module = ModuleType("pynvml")
    module.sessions = [0, 0]
    module.NVMLError, module.NVML_NVLINK_MAX_LINKS, module.NVML_NVLINK_DEVICE_TYPE_SWITCH = NVMLError, 36, 2
    module.NVMLError_NotSupported, module.NVMLError_InvalidArgument = NotSupportedError, InvalidArgumentError

    def bus(number: int) -> SimpleNamespace:
        return SimpleNamespace(domain=0, bus=number, device=0)

    def link(gpu: Gpu, number: int) -> int | str | None:
        if not gpu.links:
            raise NotSupportedError("Not Supported")
        if number >= len(gpu.links):
            raise InvalidArgumentError("Invalid Argument")
        return gpu.links[number]

    def init() -> None:
        module.sessions[0] += 1
        module.sessions[1] += 1

    def shutdown() -> None:
        module.sessions[1] -= 1

    calls = {
        "nvmlInit": init,
        "nvmlShutdown": shutdown,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda at: gpus[at],
        "nvmlDeviceGetName": lambda gpu: gpu.name,
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=int(gpu.memory), free=int(gpu.memory - gpu.taken)),
        "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu.bus}",
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: gpu.generation,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: gpu.width,
        "nvmlDeviceGetPciInfo": lambda gpu: bus(gpu.bus),
        "nvmlDeviceGetNvLinkState": lambda gpu, at: int(link(gpu, at) is not None),
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda gpu, at: 2 if link(gpu, at) == SWITCH else 0,
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda gpu, at: bus(link(gpu, at)),
    }

    def denied(*arguments: object) -> None:
        raise NoPermissionError("Insufficient Permissions")

    for name, call in calls.items():
        setattr(module, name, denied if name in forbidden else call)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module

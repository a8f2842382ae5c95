"""What this machine can run a job on."""

import os
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Devices:
    """Attached accelerators and the host. memory: bytes of every GPU; host_memory: bytes free on the host."""

    gpus: tuple[str, ...]
    memory: tuple[float, ...]
    cores: int
    host_memory: float

    def backend(self, ranks: int) -> str:
        """NCCL when every rank gets a GPU of its own, Gloo on the CPU otherwise."""
        return "nccl" if len(self.gpus) >= ranks else "gloo"

    def default_ranks(self, gpus: int) -> int:
        """Ranks for a plan of `gpus` GPUs: one per attached GPU where there are several, else at most four on the CPU."""
        return min(gpus, len(self.gpus) if len(self.gpus) > 1 else 4)

    @property
    def summary(self) -> str:
        if self.gpus:
            return f"{len(self.gpus)} × {self.gpus[0]}, {self.cores} CPU cores"
        return f"no GPU attached; {self.cores} CPU cores, {self.host_memory / 2**30:.3g} GiB free"


def attached() -> Devices:
    """The devices of this machine. Importing torch takes a second, so it is imported here."""
    import torch

    found = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return Devices(
        gpus=tuple(torch.cuda.get_device_name(index) for index in found),
        memory=tuple(float(torch.cuda.get_device_properties(index).total_memory) for index in found),
        cores=len(os.sched_getaffinity(0)),
        host_memory=float(psutil.virtual_memory().available),
    )

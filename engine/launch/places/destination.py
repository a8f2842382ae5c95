"""The destination of a cluster's job: a Slurm partition or a Kubernetes queue, its share of the cluster, and the folder
that its nodes share."""

import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch.places.devices import Devices
from engine.schema import Frozen

OR = " or "
"""Between the types of GPUs that a node may have."""

FIRST_PORT, PORTS = 20000, 10000
"""Ports at which nodes may meet. Jobs on one machine get different ones, below those that Linux hands out by itself."""

CPUS_PER_RANK, MEMORY_PER_RANK = 4, 8 * 2.0**30
"""CPUs and bytes of memory of a rank unless a person says otherwise."""

SLURM_JOB_ID = "${app_id}"
"""Replaced by the job's number everywhere in Slurm's script by TorchX, also in a folder's name."""


def _called(pattern: str, noun: str, rule: str) -> AfterValidator:
    """A check of a name, with a message for a person on a wrong one: these names end up in scripts and requests."""

    def check(name: str) -> str:
        if not re.fullmatch(pattern, name):
            raise ValueError(f"{name[:60]!a} is no {noun}; {rule}")
        return name

    return AfterValidator(check)


def _folder(path: str) -> str:
    """An absolute path that can stand on one line."""
    if not path.isprintable():
        raise ValueError(f"{path[:60]!a} has characters that cannot be printed; choose another folder")
    if not path.startswith("/") or ".." in PurePosixPath(path).parts:
        raise ValueError(f"'{path}' is no absolute path; begin it with / and leave out ..")
    return str(PurePosixPath(path))


_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""A name as Kubernetes takes it (RFC 1123)."""

Folder = Annotated[str, Field(max_length=1000), AfterValidator(_folder)]
_ACCOUNT, _CHARACTERS = "[A-Za-z0-9][A-Za-z0-9_.-]*", "use letters, digits, '_', '.' and '-'"
Partition = Annotated[str, _called(f"({_ACCOUNT}(,{_ACCOUNT})*)?", "partition", f"{_CHARACTERS}, with ',' between several")]
Account = Annotated[str, _called(f"({_ACCOUNT})?", "account", _CHARACTERS)]
_SMALL = "use at most 63 small letters, digits and '-', with a letter or digit at both ends"
Label = Annotated[str, _called(_LABEL, "name for Kubernetes", _SMALL)]
_DOTTED = rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*"
Names = Annotated[str, _called(_DOTTED, "name for Kubernetes", "use small letters, digits, '-' and '.'")]
_IMAGE, _PUSHED = (r"((?!sha256:)[A-Za-z0-9/][A-Za-z0-9._/:@#+-]{0,500})?", "write REGISTRY/NAME:TAG, and push it there before")
Image = Annotated[str, _called(_IMAGE, "image that a cluster can pull", _PUSHED)]


class Destination(Frozen):
    """The settings that every scheduler needs. Memory in bytes.

    gpu: name of the GPUs
    gpu_memory: bytes of each of them
    shared: the folder in which this machine writes run folders; `seen_as` is the same folder as the job's nodes see it
    image: the project's, if the job runs in a container
    """

    nodes: int = Field(ge=1, le=1024)
    gpus_per_node: int = Field(ge=0, le=64)
    ranks_per_node: int = Field(ge=1, le=1024)
    gpu: str = Field(default="", max_length=200)
    gpu_memory: float = Field(default=0.0, ge=0)
    cpus_per_node: int = Field(ge=1, le=4096)
    memory_per_node: float = Field(ge=2**30, description="1 GiB or more")
    shared: Folder
    image: Image = ""

    @model_validator(mode="after")
    def _gpu_for_every_rank(self) -> Self:
        if self.gpus_per_node and self.ranks_per_node > self.gpus_per_node:
            raise ValueError(
                f"{self.ranks_per_node} ranks per node need as many GPUs, not {self.gpus_per_node}; ask for more GPUs, or "
                "for none to run on CPUs"
            )
        if self.gpus_per_node and not self.gpu_memory:
            raise ValueError("say how much memory a GPU has (gpu_memory), so that it can be checked whether the job fits")
        return self

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def devices(self) -> Devices:
        """The job's share of the cluster, for `prepare`: as many GPUs as ranks, or the processors of all its nodes."""
        gpus = self.ranks if self.gpus_per_node else 0
        memory = (self.gpu_memory,) * gpus
        cores = self.nodes * self.cpus_per_node
        host_memory = self.nodes * self.memory_per_node
        return Devices(gpus=(self.gpu,) * gpus, memory=memory, cores=cores, host_memory=host_memory)

    def seen(self, folder: Path) -> str:
        """A run folder of this machine as the job's nodes see it. Raises InputError if they do not see it."""
        shared = Path(self.shared)
        if not folder.is_relative_to(shared) or folder == shared:
            raise InputError(f"{folder} is not in the shared folder {shared}, so the job could not read it")
        try:
            return self.taken_literally(_folder(f"{self.mount}/{folder.relative_to(shared).as_posix()}"))
        except ValueError as error:
            raise InputError(f"run folder: {error}") from None

    @property
    def mount(self) -> str:
        """The shared folder as the job's nodes see it."""
        raise NotImplementedError

    def taken_literally(self, path: str) -> str:
        """Return the path. Raises ValueError if the scheduler would change it."""
        return path


class Slurm(Destination):
    """A Slurm cluster. Without an image the job runs this very installation, which the nodes have to see at the same
    place; with one it runs in a container (Pyxis). Empty: the cluster's default."""

    scheduler: Literal["slurm"] = "slurm"
    partition: Partition = ""
    account: Account = ""
    seen_as: Folder | None = None

    @model_validator(mode="after")
    def _mountable(self) -> Self:
        self.taken_literally(self.mount)
        if self.image and set(self.mount) & {":", ","}:
            raise ValueError(f"'{self.mount}' cannot be mounted in a container; choose a folder without ':' and ','")
        return self

    @property
    def mount(self) -> str:
        return self.seen_as or self.shared

    def taken_literally(self, path: str) -> str:
        if "\\" in path or SLURM_JOB_ID in path:
            raise ValueError(f"Slurm would change '{path}'; choose a folder without '\\' and {SLURM_JOB_ID}")
        return path


class Kubernetes(Destination):
    """A Kubernetes cluster with Volcano. claim: the PersistentVolumeClaim with the files of the shared folder; it is
    mounted at seen_as."""

    scheduler: Literal["kubernetes"] = "kubernetes"
    image: Image = Field(min_length=1)
    namespace: Label = "default"
    queue: Names = "default"
    claim: Names
    seen_as: Folder = "/shared"

    @model_validator(mode="after")
    def _mountable(self) -> Self:
        if ":" in self.seen_as or self.seen_as == "/":
            raise ValueError(f"nothing can be mounted at '{self.seen_as}'; choose a folder other than /, without ':'")
        return self

    @property
    def mount(self) -> str:
        return self.seen_as


SCHEDULERS: dict[str, type[Slurm] | type[Kubernetes]] = {"slurm": Slurm, "kubernetes": Kubernetes}


def gpus_of(cluster: Cluster) -> dict[str, float | str]:
    """A destination's fields on its GPUs, for a drawn cluster: of several types the memory that all have."""
    return {
        "gpu": OR.join(dict.fromkeys(gpu.type for gpu in cluster.gpus)),
        "gpu_memory": min(gpu.memory for gpu in cluster.gpus),
    }


def as_drawn(cluster: Cluster) -> dict[str, int | float | str]:
    """The fields of a destination that a drawn cluster settles. Raises InputError if its nodes differ in size."""
    sizes = {len(node.gpus) for node in cluster.nodes}
    if len(sizes) > 1:
        raise InputError(
            f"the nodes of {cluster.name} have different numbers of GPUs; say how many nodes there are to be, and how many "
            "GPUs per node"
        )
    return gpus_of(cluster) | {"nodes": len(cluster.nodes), "gpus_per_node": sizes.pop()}

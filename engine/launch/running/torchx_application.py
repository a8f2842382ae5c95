"""A prepared launch as a TorchX application, and its exact text for Slurm or Kubernetes.

The job needs nothing but the project (its image, or its installation) and the run folder, which this machine writes and the
job's nodes see.
"""

import contextlib
import hashlib
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from engine.errors import InputError
from engine.launch.places.destination import FIRST_PORT, PORTS, SLURM_JOB_ID, Slurm
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.running.processes import FOR_EVERY_RANK, ROOT, WORKER
from engine.program import how_to_get_torchx

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppDef, AppDryRunInfo

ROLE = "switchyard"
"""TorchX's only role in the job: every node plays it."""

NODE = "engine.launch.running.node"
IN_IMAGE = "/switchyard"
"""Folder of the project in its image, as in the Dockerfile."""

EXPORTED = re.compile(
    "HOME|LANG|LC_[A-Z]+|LD_LIBRARY_PATH|LOGNAME|PATH|PYTHONPATH|TZ|USER|(FI|GLOO|NCCL|OFI_NCCL|TORCH_NCCL|UCX)_[A-Z0-9_]+"
)
"""Environment variables of this machine for a job on Slurm: the places of programs and libraries, and the use of the network.
All others stay here, for there are passwords and keys in them; Slurm would take all, and keep them with the job."""


def torchx() -> ModuleType:
    """`engine.launch.running.schedulers`. Raises InputError if TorchX is not installed."""
    try:
        from engine.launch.running import schedulers
    except ImportError as error:
        raise InputError(
            f"launches on clusters take TorchX, which is not installed completely ({error}); {how_to_get_torchx()}"
        ) from None
    return schedulers


@contextlib.contextmanager
def asking() -> "Iterator[Runner]":
    """Inside, TorchX's runner asks a cluster's scheduler; what goes wrong on the way is an InputError."""
    schedulers = torchx()
    with schedulers.as_input_errors(), schedulers.runner() as runner:
        yield runner


def app_of(launch: PreparedLaunch, folder: Path) -> "AppDef":
    """The launch as TorchX's application: one role, played once on every node, that runs torchrun by an argument list.
    Raises InputError if the launch was prepared for another number of ranks, or if the job would not see the folder.

    folder: the run folder on this machine, in the destination's shared folder
    """
    specs, destination, instructions = torchx().specs, launch.destination, launch.instructions
    if instructions.ranks != destination.ranks:
        raise InputError(
            f"the launch has {instructions.ranks} ranks, {destination.nodes} nodes of {destination.ranks_per_node} ranks have "
            f"{destination.ranks}"
        )
    if (instructions.backend == "nccl") != bool(destination.gpus_per_node):
        raise InputError(f"the launch was prepared for {instructions.backend}, not for the devices of this destination")
    seen, name = destination.seen(folder), job_name(launch, folder)
    port = FIRST_PORT + int(name[-8:], 16) % PORTS
    each = ["--nproc-per-node", str(destination.ranks_per_node), "--tee", "3"]
    if destination.nodes == 1:
        start = ["-m", "torch.distributed.run", "--standalone", *each]
    else:
        start = ["-m", NODE, specs.macros.rank0_env, str(port), specs.macros.replica_id, str(math.ceil(launch.limit))]
        start += ["--rdzv-id", name, "--nnodes", str(destination.nodes), *each]
    on_slurm = isinstance(destination, Slurm)
    # To arrive unchanged: TorchX fills in `$name`, Kubernetes `$(NAME)`, and both take `$$` for `$`.
    literal = seen.replace("$", "$$" if on_slurm else "$$$$")
    unit = 2**20 if on_slurm else 10**6  # M at Slurm and at Kubernetes
    role = specs.Role(
        name=ROLE,
        image=destination.image,
        entrypoint=sys.executable if on_slurm and not destination.image else "python",
        # torchrun leaves a folder for its logs behind, wherever it is told to.
        args=[*start, "--log-dir", literal, "--module", WORKER, literal],
        num_replicas=destination.nodes,
        env=FOR_EVERY_RANK | {"OMP_NUM_THREADS": str(max(1, destination.cpus_per_node // destination.ranks_per_node))},
        resource=specs.Resource(
            cpu=destination.cpus_per_node, gpu=destination.gpus_per_node, memMB=int(destination.memory_per_node // unit)
        ),
        port_map={"rendezvous": port} if destination.nodes > 1 else {},
        mounts=[] if on_slurm else [specs.VolumeMount(src=destination.claim, dst_path=destination.mount)],
    )
    return specs.AppDef(name=ROLE, roles=[role])


def request_for(launch: PreparedLaunch, folder: Path) -> "AppDryRunInfo":
    """TorchX's request for the job, completed with settings that TorchX has no word for."""
    app, destination = app_of(launch, folder), launch.destination
    with torchx().runner() as runner:
        if isinstance(destination, Slurm):
            limit = str(math.ceil(launch.limit / 60))
            request = runner.dryrun(app, "slurm", {"time": limit, "partition": destination.partition or None})
            _complete_for_slurm(request.request, destination, destination.seen(folder))
        else:
            where = {"namespace": destination.namespace, "queue": destination.queue}
            request = runner.dryrun(app, "kubernetes", where)
            _complete_for_kubernetes(request.request, job_name(launch, folder), launch.limit)
    return request


def dry_run(launch: PreparedLaunch, folder: Path) -> str:
    """The exact text of the submission: sbatch's script or Kubernetes' YAML. Takes no cluster and none of its tools."""
    request = request_for(launch, folder).request
    return request.materialize() if isinstance(launch.destination, Slurm) else str(request)


def _complete_for_slurm(request, destination: Slurm, seen: str) -> None:
    """Complete the script: its own log and folder; an account; only the environment variables that ranks need; no
    second start, which would overwrite the first one's measurements."""
    inside = seen.replace("%", "%%")  # Slurm's patterns begin with %
    request.cmd += [f"--chdir={seen}", f"--output={inside}/{batch_log_name('%j')}"]
    exported = sorted(filter(EXPORTED.fullmatch, os.environ))
    for node, part in enumerate(request.replicas.values()):
        del part.sbatch_opts["requeue"]
        # Without the number of tasks, Slurm 23.11 refuses GPUs per task.
        part.sbatch_opts |= {"nodes": "1", "ntasks": "1", "no-requeue": None, "export": ",".join(exported) or "NONE"}
        if destination.account:
            part.sbatch_opts["account"] = destination.account
        del part.srun_opts["error"]  # both streams in one file
        own = [f"{name}={value}" for name, value in part.env.items()]
        part.env = {}  # TorchX would export all that sbatch was started with, which also goes before these
        part.srun_opts |= {
            "export": ",".join([*exported, *own]),
            "output": f"{inside}/{log_name(SLURM_JOB_ID, node)}",
            # srun stopped taking this from sbatch in Slurm 22.05, and all ranks would share one processor.
            "cpus-per-task": str(destination.cpus_per_node),
        }
        if destination.image:
            part.srun_opts |= {
                "container-image": destination.image,
                "container-mounts": f"{destination.mount}:{destination.mount}",
                "container-workdir": IN_IMAGE,
            }
        else:
            part.srun_opts["chdir"] = str(ROOT)


def _complete_for_kubernetes(request, name: str, limit: float) -> None:
    """Complete the request: a name that tells its run, instead of a random one; a time limit, an end for all pods when
    one fails, and the user who wrote the run folder, so that the job may write into it."""
    import yaml  # not where there is a GPU and PyTorch alone

    text = str(request)
    resource = yaml.safe_load(text)
    resource = yaml.safe_load(text.replace(resource["metadata"]["name"], name))
    resource["spec"]["policies"] = [{"event": event, "action": "TerminateJob"} for event in ("PodFailed", "PodEvicted")]
    for task in resource["spec"]["tasks"]:
        task["template"]["spec"] |= {
            "activeDeadlineSeconds": math.ceil(limit),
            "securityContext": {"runAsUser": os.getuid(), "runAsGroup": os.getgid()},
        }
    request.resource = resource


def job_name(launch: PreparedLaunch, folder: Path) -> str:
    """Name of a job: the same for the same launch in the same folder."""
    return f"{ROLE}-{hashlib.sha256(f'{folder} {launch.instructions.digest}'.encode()).hexdigest()[:12]}"


def batch_log_name(job: str) -> str:
    """The file in the run folder with the output of Slurm and the script."""
    return f"slurm-{job}.out"


def log_name(job: str, node: int) -> str:
    """The file in the run folder with the output of a node's ranks on Slurm."""
    return f"slurm-{job}-{ROLE}-{node}.out"

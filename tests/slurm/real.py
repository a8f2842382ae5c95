"""A Slurm cluster on this machine, of Debian's packages: a controller and two nodes, without systemd, munge or cgroups."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

NODES = ("127.0.0.2", "127.0.0.3")
"""Ranks meet by the nodes' names, so these have to resolve: addresses of the loopback interface do."""

COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol")

CONFIGURATION = """\
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={patience}
KillWait=3
MessageTimeout=2
GresTypes=gpu
{nodes}
PartitionName=main Nodes=127.0.0.[2-3] Default=YES
PartitionName=short Nodes=127.0.0.[2-3] MaxTime=2
"""
"""Heterogeneous jobs, the only kind submitted, start by the backfill scheduler alone; two cores pose as sixteen a node, and
empty files as four GPUs."""

NODE = "NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=16 RealMemory=64000 Gres=gpu:4"


def missing() -> str | None:
    """Why there can be no Slurm here; None when there can."""
    absent = [command for command in COMMANDS if not shutil.which(command)]
    if absent:
        return f"no {absent[0]} on this machine (Debian: slurmctld, slurmd, slurm-client)"
    return None


TO_REST = 90
"""Seconds in which a cluster with killed processes comes to rest: Slurm asks a node again that has not answered."""


def until(holds: Callable[[], object], seconds: float, what: str, between: float = 0.1) -> None:
    """Wait for something that another process does, looking every `between` seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
        time.sleep(between)


class Cluster:
    """A controller and two nodes of 16 processors. patience: seconds for which a node may say nothing before it is down."""

    def __init__(self, folder: Path, patience: int = 20) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", *NODES):
            (folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        controller, *ports = _free_ports(1 + len(NODES))
        nodes = (NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports, strict=True))
        self.configuration = folder / "slurm.conf"
        self.configuration.write_text(
            CONFIGURATION.format(
                host=host,
                controller=controller,
                user=pwd.getpwuid(os.getuid()).pw_name,
                folder=folder,
                patience=patience,
                nodes="\n".join(nodes),
            )
        )

        for number in range(4):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-3]\n")

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        self.start_controller(new=True)
        for name in NODES:
            self.start_node(name)
        until(self.idle, 20, "node ready for jobs")

    def mend(self) -> None:
        if "slurmctld" not in self.daemons:
            self.start_controller()
        for name in NODES:
            if name not in self.daemons:
                self.start_node(name)

    def idle(self) -> bool:
        return self.say("sinfo", "-h", "-p", "main", "-o", "%T %D") == "idle 2"

    def say(self, *command: str) -> str:
        """Return the output of a command of Slurm; empty when it fails."""
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | self.environment).stdout.strip()

    def start_controller(self, new: bool = False) -> None:
        """Start the controller; unless it is a new one, with all that it knew."""
        self._start("slurmctld", ["slurmctld", "-D", *(["-i"] if new else [])], {})

    def stop_controller(self) -> None:
        """End the controller as an update of it does. Nodes and jobs go on."""
        self._end("slurmctld", signal.SIGTERM)

    def start_node(self, name: str) -> None:
        """Its daemon starts the programs of jobs with its own environment, by which they are found."""
        self._start(name, ["slurmd", "-D", "-N", name], {"SLURMD_NODENAME": name})

    def kill_node(self, name: str) -> None:
        """A node dies: its daemon and whatever runs on it, at once."""
        self._end(name, signal.SIGKILL)
        for process in self.processes(name):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def processes(self, name: str) -> Iterator[psutil.Process]:
        """The processes of jobs on a node, and those of Slurm that run them."""
        mine, spool = self.environment | {"SLURMD_NODENAME": name}, f"{self.folder / name}/"
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                # Those that watch over jobs write their title over their environment, and listen in the node's folder.
                watches = process.name() == "slurmstepd" and any(
                    link.laddr.startswith(spool) for link in process.net_connections("unix")
                )
                if watches or mine.items() <= process.environ().items():
                    yield process

    def stop(self) -> None:
        for name in NODES:
            self.kill_node(name)
        for name in list(self.daemons):
            self._end(name, signal.SIGKILL)

    def _start(self, name: str, command: list[str], more: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | self.environment | more
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        if daemon := self.daemons.pop(name, None):
            daemon.send_signal(number)
            daemon.wait(20)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]

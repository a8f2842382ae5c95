"""Questions to Slurm's own commands: the state of a job, the nodes of a partition, and the refusal of a job that could
never start."""

import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from engine.errors import InputError, one_line
from engine.launch.places.destination import Slurm

ANSWER_LIMIT = 60.0
"""Seconds that a command has to answer. It asks a controller that is away several times before it gives up."""

UNKNOWN_JOB = "Invalid job id"
"""Slurm's words for a job that it does not know (any more). Any other error says nothing of the job."""

PREFIX = re.compile(r"^[\w:]+ error: ")
"""The part of Slurm that reports an error."""

NO_REASON = ("", "None", "(null)")

SMALL_MEMORY = 1000
"""MB of a node's configured memory up to which TorchX takes it for not configured, and asks for none."""

GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)")
"""Number of GPUs in a node's generic resources, of each type."""


class MaybeSubmittedError(InputError):
    """Something went wrong, but the job has been submitted, or may have been."""


class Word(NamedTuple):
    """Slurm's word on one node of a job, such as PENDING, and the reason if Slurm gives one."""

    state: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason else self.state


class NodeKind(NamedTuple):
    """Nodes of a partition that are configured alike.

    minutes: for which the partition lets a job run
    memory: MB
    """

    partition: str
    default: bool
    minutes: float
    nodes: int
    cpus: int
    memory: int
    gpus: int


def asked(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """The answer of a command of Slurm. Raises FileNotFoundError if it is not installed, and InputError if it says
    nothing for `ANSWER_LIMIT`. text: its standard input."""
    try:
        return subprocess.run(command, input=text or "", capture_output=True, text=True, timeout=ANSWER_LIMIT)
    except subprocess.TimeoutExpired:
        raise InputError(f"{command[0]} has said nothing for {ANSWER_LIMIT:g} s") from None


def fault_of(answer: subprocess.CompletedProcess[str]) -> str:
    """The reason why a command failed, in its own words, on one line."""
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line] or lines
    if not errors:
        return f"{answer.args[0]} ended with exit code {answer.returncode}"
    return PREFIX.sub("", one_line(errors[-1]))


def words_on(job: str) -> list[Word]:
    """Slurm's word on every node of a job, none if it does not know the job any more: of its queue, which keeps a job
    that has ended for some minutes, and after that of its accounting, if there is one.

    Raises InputError if it cannot be asked, which says nothing of the job, and FileNotFoundError if it is not installed.
    """
    queue = asked(["squeue", "--noheader", "--states=all", "--format=%T %r", f"--jobs={job}"])
    if queue.returncode == 0 and queue.stdout.strip():
        said = [line.strip().partition(" ")[::2] for line in queue.stdout.splitlines() if line.strip()]
        return [Word(state, "" if reason.strip() in NO_REASON else reason.strip()) for state, reason in said]
    if shutil.which("sacct"):
        books = asked(["sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={job}"])
        if books.returncode == 0 and books.stdout.strip():
            return [Word(line.split()[0]) for line in books.stdout.splitlines() if line.strip()]
    if queue.returncode and UNKNOWN_JOB not in queue.stderr:
        raise InputError(f"Slurm does not answer: {fault_of(queue)}")
    return []


def refuse_impossible(destination: Slurm, limit: float) -> None:
    """Raise InputError for a job that no partition asked for could ever start: Slurm takes it and lets it wait for
    ever. Nodes that are only busy or down now count as there, and anything that Slurm does not tell is left to it.

    limit: of the job, in seconds
    """
    answer = asked(["sinfo", "--noheader", "--exact", "--noconvert", "--format=%P|%l|%D|%c|%m|%G"])
    kinds = _kinds(answer.stdout) if answer.returncode == 0 else []
    names = [kind.partition for kind in kinds if kind.default]
    if destination.partition:
        names = destination.partition.split(",")
    faults = []
    for name in dict.fromkeys(names):
        its = [kind for kind in kinds if kind.partition == name]
        fault = _fault(its, destination, math.ceil(limit / 60)) if its else None
        if fault is None:
            return
        faults.append(f"the partition {name} {fault}")
    if faults:
        raise InputError(f"Slurm could never start this job: {'; '.join(faults)}")


def _kinds(text: str) -> list[NodeKind]:
    """Read sinfo's output, one line a kind of node."""
    kinds = []
    for line in text.splitlines():
        name, longest, nodes, cpus, memory, gres = line.split("|")
        gpus = sum(map(int, GPUS.findall(gres)))
        kinds.append(
            NodeKind(name.rstrip("*"), name.endswith("*"), _minutes(longest), int(nodes), int(cpus), int(memory), gpus)
        )
    return kinds


def _minutes(text: str) -> float:
    """Minutes of `[days-]hours:minutes:seconds`, of `minutes:seconds`, or of a word for no limit."""
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (days or "0", *parts)):
        return math.inf
    seconds = sum(int(part) * 60**place for place, part in enumerate(reversed(parts)))
    return int(days or 0) * 1440 + seconds / 60


def _fault(kinds: Sequence[NodeKind], destination: Slurm, minutes: int) -> str | None:
    """The reason why a partition of these nodes can never run the job; None if it can."""
    longest = kinds[0].minutes
    if minutes > longest:
        return f"lets a job run for {longest:g} minutes, and this one has a limit of {minutes}; choose a shorter time limit"
    memory = int(destination.memory_per_node // 2**20)
    fitting = sum(
        kind.nodes
        for kind in kinds
        if kind.cpus >= destination.cpus_per_node
        and kind.gpus >= destination.gpus_per_node
        and (kind.memory >= memory or kind.memory <= SMALL_MEMORY)
    )
    if fitting >= destination.nodes:
        return None
    gpus = f", {destination.gpus_per_node} GPUs" if destination.gpus_per_node else ""
    each = f"{destination.cpus_per_node} CPUs{gpus} and {memory / 1024:g} GiB"
    there = sum(kind.nodes for kind in kinds)
    return f"has {there} nodes, {fitting} of them with {each}, and the job needs {destination.nodes} such nodes"

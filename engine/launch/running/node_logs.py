"""What the nodes of a cluster's job print: each one's log, and the cause of a failure as far as they tell it."""

import re
from collections.abc import Iterator
from pathlib import Path

from engine.errors import InputError, one_line
from engine.launch.places.destination import Destination, Slurm
from engine.launch.rank.failure import ENDED_BY_OTHERS, FIRST, Failures
from engine.launch.running.processes import OF_RANK
from engine.launch.running.torchx_application import ROLE, batch_log_name, log_name, torchx

SAID_BY_SLURM = re.compile(r"(?:srun|slurmstepd[^:]*): error: (.+)")
CONSEQUENCE = re.compile(r"Exited with exit code|Terminated|CANCELLED AT")
"""What Slurm says once something else has gone wrong."""

SIGNALLED = "SignalException"
"""How torchrun says that it was told to end. On a cluster the scheduler does that, to ranks as well, and says itself why."""


def node_lines(folder: Path, handle: str, destination: Destination, node: int) -> Iterator[str]:
    """What a node's ranks have printed so far, line by line; nothing before they have started."""
    if isinstance(destination, Slurm):
        # TorchX looks in the folder that this process happens to be in, and waits for the job to end.
        yield from _lines(folder / log_name(_number(handle), node))
        return
    schedulers = torchx()
    with schedulers.as_input_errors(), schedulers.runner() as runner:
        yield from runner.log_lines(handle, ROLE, node)


def cause(folder: Path, handle: str, destination: Destination) -> str:
    """Why a job failed, as far as its nodes have printed it, and where that is, in a sentence."""
    failures, printed = Failures(), False
    for node in range(destination.nodes):
        try:
            lines = list(node_lines(folder, handle, destination, node))
        except InputError:  # its log went with the job
            continue
        printed = printed or bool(lines)
        _take(failures, lines, destination.ranks_per_node)
    batch = list(_lines(folder / batch_log_name(_number(handle)))) if isinstance(destination, Slurm) else []
    by_slurm = [said[1] for said in map(SAID_BY_SLURM.match, batch) if said and not CONSEQUENCE.search(said[1])]
    said = [f"Slurm says '{one_line(text)}'" for text in by_slurm[:1] if not failures.certain]
    if failures.told:
        said.append(failures.reason)
    if isinstance(destination, Slurm) and not batch and not printed:
        return (
            f"its nodes have left no log in {folder}: they have not run, or they do not see it as {destination.seen(folder)} "
            "(--seen-as says where they do)"
        )
    return "; ".join([*said, f"what its nodes printed is in {folder}"])


def _take(failures: Failures, lines: list[str], ranks_per_node: int) -> None:
    """Note what one node's log says."""
    of_rank = [OF_RANK.fullmatch(line) for line in lines]
    # torchrun counts the ranks of its own node, and nodes are not numbered in the order in which they were asked for.
    first = next((int(mine[1]) // ranks_per_node * ranks_per_node for mine in of_rank if mine), None)
    for line, mine in zip(lines, of_rank, strict=True):
        if mine:
            failures.take(int(mine[1]), mine[2])
        elif ended := FIRST.search(line):
            if first is not None and int(ended[1]) != ENDED_BY_OTHERS:
                failures.ended(first + int(ended[2]), int(ended[1]))
        elif SIGNALLED not in line:
            failures.take(None, line)


def _lines(path: Path) -> Iterator[str]:
    """Of a file; none where there is none."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from lines


def _number(handle: str) -> str:
    """The job's, as Slurm has it."""
    return handle.rpartition("/")[2]

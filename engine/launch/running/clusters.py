"""The life of a launch on a cluster: written, submitted, asked for, ended, its nodes' logs and its results read, and
the cause of a failure as far as the nodes printed it.

Results are files in the run folder, so anybody who sees it can read them, with or without the cluster.
"""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from engine.errors import InputError, one_line
from engine.files import write_atomically
from engine.launch.places.destination import Destination, Kubernetes, Slurm
from engine.launch.preparation.launch import ROUTING, Check, PreparedLaunch
from engine.launch.preparation.place_checks import destination_checks
from engine.launch.rank.failure import ENDED_BY_OTHERS, FIRST, Failures
from engine.launch.rank.instructions import REPORT, read_instructions, write_instructions
from engine.launch.results.run import Run, read_run
from engine.launch.running.processes import OF_RANK
from engine.launch.running.slurm import MaybeSubmittedError, refuse_impossible
from engine.launch.running.torchx_application import ROLE, asking, batch_log_name, log_name, request_for
from engine.plan import Plan
from engine.schema import Kept
from engine.training import balanced_load
from engine.workload import RoutingTrace, Workload

SAID_BY_SLURM = re.compile(r"(?:srun|slurmstepd[^:]*): error: (.+)")
CONSEQUENCE = re.compile(r"Exited with exit code|Terminated|CANCELLED AT")
"""Slurm's words after something else has gone wrong."""

SIGNALLED = "SignalException"
"""torchrun's word when it was told to end. On a cluster the scheduler does that, to ranks as well, and gives the reason
itself."""

JOB = "job.json"
SUBMISSION = "submission"
"""An empty file in the run folder, made by the process that submits it: only one can."""

HANDLE = re.compile(r"slurm://[a-z]+/\d+|kubernetes://[a-z]+/[a-z0-9-]+:[a-z0-9-]+")


def node_lines(folder: Path, handle: str, destination: Destination, node: int) -> Iterator[str]:
    """The output of a node's ranks so far, line by line; nothing before they have started."""
    if isinstance(destination, Slurm):
        # TorchX looks in the folder that this process happens to be in, and waits for the job to end.
        yield from _lines(folder / log_name(_number(handle), node))
        return
    with asking() as runner:
        yield from runner.log_lines(handle, ROLE, node)


def cause(folder: Path, handle: str, destination: Destination) -> str:
    """The cause of a job's failure, as far as its nodes have printed it, and the place of their logs, in a sentence."""
    failures, printed = Failures(), False
    for node in range(destination.nodes):
        try:
            lines = list(node_lines(folder, handle, destination, node))
        except InputError:  # its log went with the job
            continue
        printed = printed or bool(lines)
        of_rank = [OF_RANK.fullmatch(line) for line in lines]
        # torchrun counts the ranks of its own node, and nodes are not numbered in the order in which they were asked for.
        first = next(
            (int(mine[1]) // destination.ranks_per_node * destination.ranks_per_node for mine in of_rank if mine), None
        )
        for line, mine in zip(lines, of_rank, strict=True):
            if mine:
                failures.take(int(mine[1]), mine[2])
            elif ended := FIRST.search(line):
                if first is not None and int(ended[1]) != ENDED_BY_OTHERS:
                    failures.ended(first + int(ended[2]), int(ended[1]))
            elif SIGNALLED not in line:
                failures.take(None, line)
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


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file; none if there is no file."""
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from lines


def _number(handle: str) -> str:
    """The job's number at Slurm."""
    return handle.rpartition("/")[2]


class ClusterJob(Kept):
    """The rest of a cluster job's run folder: the data for reading its results, and TorchX's handle once it has been submitted.

    plans: before they were folded onto the ranks
    workloads: names
    limit: seconds
    routing: the words on tokens that were not recorded
    """

    destination: Annotated[Slurm | Kubernetes, Field(discriminator="scheduler")]
    plans: tuple[Plan, ...]
    workloads: tuple[str, ...]
    limit: float
    routing: str = ""
    handle: str | None = None


@dataclass(frozen=True)
class Status:
    """The state of a job.

    state: pending, running, succeeded, failed, cancelled, unknown, or gone if its scheduler knows it no more
    message: the scheduler's own words
    over: true if nothing will change any more
    """

    state: str
    message: str
    over: bool

    @property
    def text(self) -> str:
        """The state with the scheduler's words, if they say more."""
        if self.message.lower().startswith(self.state):
            return self.state + self.message[len(self.state) :]
        return f"{self.state}: {self.message}" if self.message else self.state


@contextlib.contextmanager
def new_run_folder(launch: PreparedLaunch) -> Iterator[Path]:
    """A run folder of its own in the shared folder, written. It stays, unless the body fails and the job has not been
    submitted. Raises InputError if it cannot be made."""
    shared = launch.destination.shared
    try:
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=shared))
    except OSError as error:
        raise InputError(f"no run folder can be made in {shared}: {error.strerror}") from None
    try:
        write(launch, folder)
        yield folder
    except MaybeSubmittedError:
        raise
    except InputError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write(launch: PreparedLaunch, folder: Path) -> None:
    """Write the run folder: all that the job and a reader of its results need."""
    write_instructions(folder, launch.instructions, launch.workloads, launch.profile)
    names = tuple(workload.name for workload in launch.workloads)
    more = {"limit": launch.limit, "routing": launch.routing}
    _save(folder, ClusterJob(destination=launch.destination, plans=launch.plans, workloads=names, **more))


def submit(launch: PreparedLaunch, folder: Path) -> str:
    """Hand a launch with a written run folder to the cluster's scheduler and return TorchX's handle of the job.

    Raises InputError if a check failed, the job could never start there, the folder has been submitted before, or the
    cluster would not have it; MaybeSubmittedError if the job runs, or may run, all the same.
    """
    # Once more: the shared folder may have gone since the launch was prepared.
    replace(launch, checks=(*launch.checks, *destination_checks(launch.destination))).check()
    job = read_job(folder)
    with _submitting(folder):
        with asking() as runner:
            if isinstance(launch.destination, Slurm):
                refuse_impossible(launch.destination, launch.limit)
            handle = runner.schedule(request_for(launch, folder))
        try:
            _save(folder, job.model_copy(update={"handle": handle}))
        except InputError as error:
            raise MaybeSubmittedError(f"the job is submitted as {handle}, but {error}") from None
    return handle


@contextlib.contextmanager
def _submitting(folder: Path) -> Iterator[None]:
    """In the body, this is the only process that submits the folder. A folder that was not submitted in the end can be
    submitted again."""
    claimed = False
    if not read_job(folder).handle:
        try:
            with contextlib.suppress(FileExistsError):
                (folder / SUBMISSION).touch(exist_ok=False)
                claimed = True
        except OSError as error:
            raise InputError(f"{folder / SUBMISSION} cannot be written: {error.strerror}") from None
    if not claimed:
        by = read_job(folder).handle
        how = f"has been submitted as {by}" if by else "is being submitted, or has been by what ended before it said so"
        raise InputError(f"{folder} {how}; launch again for a folder of its own")
    try:
        yield
    except MaybeSubmittedError:
        raise
    except InputError:
        (folder / SUBMISSION).unlink(missing_ok=True)
        raise


def status(handle: str) -> Status:
    """State of a submitted job. Raises InputError if its scheduler cannot be asked."""
    with asking() as runner:
        answer = runner.status(_checked(handle))
    if answer is None:
        return Status("gone", "its scheduler does not know it any more", True)
    return Status(str(answer.state).lower(), answer.msg, answer.is_terminal())


def cancel(handle: str) -> None:
    """End a submitted job; one that is over already stays as it is."""
    with asking() as runner:
        runner.cancel(_checked(handle))


def log_lines(folder: Path, node: int) -> Iterator[str]:
    """The output of a node's ranks so far, line by line; nothing before they have started."""
    job = read_job(folder)
    if job.handle:
        yield from node_lines(folder, job.handle, job.destination, node)


def failure(folder: Path, now: Status) -> str:
    """A sentence on a submitted job that is over and has left no results: its end, the cause, and the place of its logs."""
    job = read_job(folder)
    return f"{job.handle} {now.text}; {cause(folder, job.handle, job.destination)}"


def read_job(folder: Path) -> ClusterJob:
    """Read the notes of `write` and `submit`. Raises InputError if the folder is not that of a cluster's job."""
    try:
        return ClusterJob.from_json((folder / JOB).read_bytes(), JOB)
    except OSError:
        raise InputError(f"{folder} is not the run folder of a job on a cluster") from None


def handle_of(folder: Path) -> str:
    """TorchX's handle of the job of a run folder. Raises InputError if it was not submitted by `submit`."""
    if handle := read_job(folder).handle:
        return handle
    raise InputError(f"{folder} was not submitted from here, so its job is not known; ask its scheduler")


def collect(folder: Path) -> Run:
    """Read the results of an ended job from its run folder, with the prediction. Raises InputError while there are
    none, and if they are wrong."""
    job = read_job(folder)
    results = [REPORT, *(f"events-{rank}.npz" for rank in range(job.destination.ranks))]
    missing = [name for name in results if not (folder / name).exists()]
    if missing:
        why = "the job was not submitted from here, has not ended, or has failed (its log says why)"
        if job.handle is not None:
            try:
                now = status(job.handle)
            except InputError as error:
                why = f"{job.handle} has not ended, or it has failed, and its scheduler cannot be asked ({error})"
            else:
                why = failure(folder, now) if now.over else f"{job.handle} is {now.text}"
        raise InputError(f"{folder} has no {missing[0]} yet: {why}")
    instructions, tokens = read_instructions(folder)
    models = [instructions.model] if instructions.model_b is None else [instructions.model, instructions.model_b]
    workloads: tuple[Workload, ...] = tuple(
        RoutingTrace(name, replayed.experts, model.experts, source_rank=replayed.source)
        for name, replayed, model in zip(job.workloads, tokens, models, strict=bool(tokens))
    )
    if instructions.step is not None and not workloads:  # with balanced routing
        workloads = (balanced_load(instructions.model),)
    made = (Check(ROUTING, True, job.routing),) if job.routing else ()
    known = next((replayed.profile for replayed in tokens if replayed.profile is not None), None)
    profile = None if known is None else RoutingTrace("profile", known, instructions.model.experts)
    launch = PreparedLaunch(job.plans, instructions, workloads, job.limit, made, destination=job.destination, profile=profile)
    return read_run(launch, folder, cores=job.destination.devices.cores)


def _save(folder: Path, job: ClusterJob) -> None:
    try:
        write_atomically(folder / JOB, job.to_json())
    except OSError as error:
        raise InputError(f"{folder / JOB} cannot be written: {error.strerror}") from None


def _checked(handle: str) -> str:
    """The handle, if it is one of ours."""
    if not HANDLE.fullmatch(handle):
        raise InputError(f"{handle[:80]!a} is no handle of a job; it looks like slurm://switchyard/1234")
    return handle

"""A launch by a cluster's scheduler: submitted, watched from this machine, its results read. Whatever happens to the watching,
the job goes on, and its results can be read from its run folder."""

import itertools
import json
import tempfile
import time
from collections import deque
from pathlib import Path

from engine.errors import InputError
from engine.files import write_atomically
from engine.launch import clusters, local
from engine.launch.destination import Destination
from engine.launch.prepare import Launch
from engine.launch.rank_logs import STANDING, Standing, Step, log_of
from engine.launch.spec import PROGRESS
from engine.result import Stop

POLL = 5.0
"""Seconds between two questions to the scheduler."""

PATIENCE = 24
"""Questions in a row that it may leave unanswered."""

LINES = 2000
"""Of a node's log that are kept."""


def write_new(launch: Launch, destination: Destination) -> Path:
    """Write a run folder of its own in the shared folder. Raises InputError when that cannot be."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=destination.shared))
    except OSError as error:
        raise InputError(f"no run folder can be made in {destination.shared}: {error.strerror}") from None
    clusters.write(launch, destination, folder)
    return folder


def run_on_cluster(launch: Launch, destination: Destination, seen: Path, stop: Stop, report) -> local.Run:
    """Submit a launch, wait for its end and read its results. Raises InputError when it fails or is stopped, which also ends
    the job on the cluster.

    seen: the folder into which goes what its nodes print, as of the ranks of a launch here
    """
    seen.mkdir()
    report(0.0, "writing the run folder", None, None)
    folder = write_new(launch, destination)
    handle = clusters.submit(launch, destination, folder)
    print(f"submitted as {handle}; its run folder is {folder}", flush=True)
    status = _wait(handle, folder, destination.nodes, seen, stop, report)
    _look(folder, destination.nodes, seen)
    if status.state in ("failed", "cancelled"):
        said = f": {status.message}" if status.message else ""
        raise InputError(f"{handle} {status.state}{said}; what its nodes printed is in {folder}")
    return clusters.collect(folder)


def _wait(handle: str, folder: Path, nodes: int, seen: Path, stop: Stop, report) -> clusters.Status:
    """Ask how the job stands until it is over."""
    unanswered = 0
    while True:
        if stop():
            clusters.cancel(handle)
            raise InputError(f"the launch was ended: stopped, and {handle} with it")
        try:
            status, unanswered = clusters.status(handle), 0
        except InputError as error:
            unanswered += 1
            if unanswered > PATIENCE:
                raise InputError(
                    f"{handle} may still run, but its scheduler cannot be asked: {error}; later, read its results by "
                    f"'python -m engine collect {folder}'"
                ) from None
            report(None, f"{handle}: no answer ({error})", None, None)
        else:
            if status.over:
                return status
            first = _look(folder, nodes, seen)[0]
            doing = f", {first.message}" if first else ""
            report(first.done if first else 0.0, f"{handle} is {status.state}{doing}", None, None)
        until = time.monotonic() + POLL
        while time.monotonic() < until and not stop():
            time.sleep(0.1)


def _look(folder: Path, nodes: int, seen: Path) -> list[Step | None]:
    """Copy the end of what every node has printed so far, and tell how far each is by it."""
    steps: list[Step | None] = []
    for node in range(nodes):
        try:
            lines = list(deque(clusters.log_lines(folder, node), LINES))
        except InputError as error:
            lines = [f"({error})\n"]
        told = (line.partition(PROGRESS)[2] for line in reversed(lines) if PROGRESS in line)
        steps.append(next(filter(None, map(_step, itertools.islice(told, 10))), None))
        write_atomically(log_of(seen, node), "".join(line if line.endswith("\n") else f"{line}\n" for line in lines))
    write_atomically(seen / STANDING, Standing(steps=tuple(steps)).to_json())
    return steps


def _step(text: str) -> Step | None:
    """What a progress line says; None of a torn one."""
    try:
        told = json.loads(text)
        return Step(done=min(max(float(told["done"]), 0.0), 1.0), message=str(told["message"]), time=time.time())
    except (ValueError, TypeError, KeyError):
        return None

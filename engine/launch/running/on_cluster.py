"""A launch by a cluster's scheduler: submitted, watched from this machine, its results read. Whatever happens to the watching,
the job goes on, and its results can be read from its run folder."""

import itertools
import json
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

from engine.errors import InputError
from engine.files import make_folder, write_atomically
from engine.launch.preparation.prepared import PreparedLaunch
from engine.launch.rank.instructions import PROGRESS
from engine.launch.rank.logs import STANDING, RankProgress, Standing, log_of
from engine.launch.results.run import Run
from engine.launch.running import clusters
from engine.result import Stop

POLL = 5.0
"""Seconds between two questions to the scheduler."""

PATIENCE = 1800.0
"""Seconds for which it may leave all questions unanswered, as while it is being updated. The job goes on meanwhile."""

LINES = 2000
"""Of a node's log that are kept."""


def run_on_cluster(launch: PreparedLaunch, seen: Path, stop: Stop, report) -> Run:
    """Submit a launch, wait for its end and read its results. Raises InputError when it fails or is stopped, which also ends
    the job on the cluster.

    seen: the folder into which goes what its nodes print, as of the ranks of a launch here
    """
    make_folder(seen)
    nodes = launch.destination.nodes
    report(0.0, "writing the run folder", None, None)
    with clusters.new_run_folder(launch) as folder:
        handle = clusters.submit(launch, folder)
    print(f"submitted as {handle}; its run folder is {folder}", flush=True)
    status = _wait(handle, folder, nodes, seen, stop, report)
    _look(folder, nodes, seen)
    if status.state in ("failed", "cancelled"):
        raise InputError(clusters.failure(folder, status))
    return clusters.collect(folder)


def _wait(handle: str, folder: Path, nodes: int, seen: Path, stop: Stop, report) -> clusters.Status:
    """Ask how the job stands until it is over."""
    answered = time.monotonic()
    while True:
        if stop():
            _end(handle)
        try:
            status = clusters.status(handle)
        except InputError as error:
            if time.monotonic() - answered > PATIENCE:
                raise InputError(
                    f"{handle} may still run, but its scheduler cannot be asked: {error}; later, read its results by "
                    f"'python -m engine collect {folder}'"
                ) from None
            report(None, f"{handle}: no answer ({error})", None, None)
        else:
            answered = time.monotonic()
            if status.over:
                return status
            first = _look(folder, nodes, seen)[0]
            doing = f", {first.message}" if first else ""
            report(first.done if first else 0.0, f"{handle} is {status.text}{doing}", None, None)
        until = time.monotonic() + POLL
        while time.monotonic() < until and not stop():
            time.sleep(0.1)


def _end(handle: str) -> NoReturn:
    """End the job, and with it the launch."""
    try:
        clusters.cancel(handle)
    except InputError as error:
        raise InputError(
            f"the launch was ended: stopped, but {handle} may go on, for it cannot be ended now: {error}"
        ) from None
    raise InputError(f"the launch was ended: stopped, and {handle} with it")


def _look(folder: Path, nodes: int, seen: Path) -> list[RankProgress | None]:
    """Copy the end of what every node has printed so far, and see how far each is by it."""
    steps: list[RankProgress | None] = []
    for node in range(nodes):
        try:
            lines = list(deque(clusters.log_lines(folder, node), LINES))
        except InputError as error:
            lines = [f"({error})\n"]
        newest_first = (line.partition(PROGRESS)[2] for line in reversed(lines) if PROGRESS in line)
        steps.append(next(filter(None, map(_progress, itertools.islice(newest_first, 10))), None))
        write_atomically(log_of(seen, node), "".join(line if line.endswith("\n") else f"{line}\n" for line in lines))
    write_atomically(seen / STANDING, Standing(steps=tuple(steps)).to_json())
    return steps


def _progress(text: str) -> RankProgress | None:
    """What a progress line says; None of a torn one."""
    try:
        fields = json.loads(text)
        done = min(max(float(fields["done"]), 0.0), 1.0)
        return RankProgress(done=done, message=str(fields["message"]), time=time.time())
    except (ValueError, TypeError, KeyError):
        return None

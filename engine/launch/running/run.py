"""Run a prepared launch, wherever it is to run."""

from pathlib import Path

from engine.launch.preparation.prepared import PreparedLaunch
from engine.launch.results.run import Run
from engine.launch.running.local import run_here
from engine.launch.running.on_cluster import run_on_cluster
from engine.result import Stop


def run(launch: PreparedLaunch, folder: Path, stop: Stop, report) -> Run:
    """Run a launch to its end and read what it measured: on this machine, in its testbed, or by its cluster's scheduler.
    Raises InputError when it fails or is stopped, with the reason.

    folder: its own; of a launch on a cluster what was seen of it, the run folder is in the destination's shared one. report:
    called with progress as a job's
    """
    run_there = run_here if launch.destination is None else run_on_cluster
    return run_there(launch, folder, stop, report)

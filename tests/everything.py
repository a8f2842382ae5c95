"""The files that only `make everything` runs: they need another program, or repeat in a browser what faster tests hold.

A single test of another file has the mark `everything` instead.
"""

import os
from pathlib import Path

from tests.cases.examples import EVERYTHING

HERE = Path(__file__).parent
WANTED = EVERYTHING in os.environ
"""True in `make everything`."""
PATHS = (
    "slurm",
    "test_cli_dask.py",
    "parallel/test_remote.py",
    "gpu",
    "launch/test_nccl_rules.py",
    "browser/test_jobs.py",
    "browser/test_launch.py",
    "browser/test_recordings.py",
    "browser/test_timeline.py",
    "browser/test_two_studios.py",
    "browser/test_visitor.py",
)
"""Folders and files below `tests`; of the browser's, every page's own flow is in `app` too, without Chromium."""


def is_left_out(path: Path) -> bool:
    """True if this run neither imports nor runs a file or folder of tests, by its absolute path."""
    return not WANTED and any(path.is_relative_to(HERE / left_out) for left_out in PATHS)

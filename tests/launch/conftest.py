"""Ranks that several tests of a module look at: launches and small programs, run once."""

import sys
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.results.run import Run
from engine.launch.running.local import run_here
from engine.result import never
from engine.systems.base import silent
from tests import warm


@pytest.fixture(scope="session")
def launch_once(tmp_path_factory, warm_process) -> Callable[[PreparedLaunch], Run]:
    """A function that runs a launch on warm ranks in a folder of its own, for fixtures of a module."""

    def launch_once(launch: PreparedLaunch) -> Run:
        folder = tmp_path_factory.mktemp("launch")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", str(warm.PYTHON))
            patch.setenv(warm.ADDRESS, str(warm_process))
            patch.setenv("SWITCHYARD_DATA", str(folder / "data"))
            return run_here(launch, folder / "run", never, silent)

    return launch_once


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone, for any number of ranks that instructions name."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

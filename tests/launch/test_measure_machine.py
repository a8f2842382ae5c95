"""Whose clock the measurement of a machine goes by."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from engine.launch.rank import measure_machine
from engine.launch.rank.context import RankContext
from engine.launch.rank.instructions import RankInstructions
from engine.launch.rank.measure_machine import seconds_of
from engine.launch.rank.recorder import Recorder
from tests.launch import lockstep
from tests.launch.test_local import MODEL, plan_for, recording

MEETING, PAUSE = 3e-5, 0.5


class Gpu:
    """A device whose time goes on by what it is given, not by what the host takes to give it. now: seconds"""

    now = 0.0

    def run(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(2e-3)  # of the host


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.when = gpu, None

    def record(self) -> None:
        self.when = self.gpu.now

    def synchronize(self) -> None:
        assert self.when is not None

    def elapsed_time(self, other: "Event") -> float:
        return (other.when - self.when) * 1e3


@pytest.fixture
def host() -> Iterator[RankContext]:
    """The only rank of a launch on the CPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    instructions = RankInstructions(plans=(plan_for(recording(4), "concurrent"),), model=MODEL, ranks=1, backend="gloo")
    yield lockstep.contexts_of(instructions)[0]
    dist.destroy_process_group()


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(gpu))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("the whole device was waited for"))
    meeting = type("Meeting", (), {"meet": lambda self: gpu.run(MEETING)})
    monkeypatch.setattr(measure_machine, "Communicator", lambda context: meeting())

    @contextlib.contextmanager
    def paused(self: Recorder) -> Iterator[None]:
        gpu.run(PAUSE)
        yield
        self._paused += PAUSE

    monkeypatch.setattr(Recorder, "paused", paused)
    return gpu


@pytest.fixture
def on_gpu(host, gpu) -> RankContext:
    """The same rank on that device."""
    device = torch.device("cuda", 0)
    return replace(host, device=device, recorder=Recorder(0, device))


def test_on_a_gpu_neither_handing_over_nor_waiting_counts(on_gpu, gpu):
    lengths = iter([9.0, 4e-3, 1e-3, 2e-3])  # the first is a warm-up
    seconds = seconds_of(lambda: gpu.run(next(lengths)), on_gpu, 3, before=lambda: gpu.run(5.0))
    assert seconds == pytest.approx(2e-3, rel=1e-6)


@pytest.mark.parametrize("between_layers", [False, True])
def test_on_a_gpu_a_meeting_is_what_the_device_makes_of_it(on_gpu, gpu, between_layers, monkeypatch):
    monkeypatch.setattr(measure_machine, "_uniform", lambda *_: (1, lambda: gpu.run(0.1), lambda: None))
    assert measure_machine._meeting(on_gpu, between_layers) == pytest.approx(MEETING, rel=1e-6)


def test_on_processors_the_hosts_clock_counts_without_pauses(host, monkeypatch):
    monkeypatch.setattr(measure_machine, "_uniform", lambda *_: (1, lambda: time.sleep(0.02), lambda: None))

    def work() -> None:
        time.sleep(0.02)
        host.recorder._paused += 0.01

    assert 0.01 <= seconds_of(work, host, 3) < 0.02
    assert 0 <= measure_machine._meeting(host, True) < 0.02

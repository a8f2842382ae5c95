"""Communication of a rank: tensors that pass through host memory, meetings, and the clock of a machine's measurement."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from engine.launch.rank import measure_machine
from engine.launch.rank.communicator import Communicator
from engine.launch.rank.context import RankContext
from engine.launch.rank.measure_machine import seconds_of
from engine.launch.rank.recorder import Recorder
from tests.launch import lockstep


@pytest.fixture
def communicator() -> Communicator:
    return Communicator(lockstep.only_context())


def swap(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    incoming.copy_(outgoing.flip(0))


def test_tensors_of_a_gpu_pass_through_host_memory_and_the_copies_are_noted(communicator, monkeypatch):
    """The GPU is the host here: only its stream has to be stood in for. Tensors of the host go as they are."""
    out, into, seen, noted = torch.arange(6.0).view(3, 2), torch.empty(3, 2), [], []
    communicator.carry(lambda a, b: (seen.extend((a, b)), swap(a, b)), out, into, lambda *marks: noted.append(marks))
    assert seen[0] is out and seen[1] is into and not noted and torch.equal(into, out.flip(0))
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append(True)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    communicator.in_host_memory = True
    out, into, seen, noted = torch.arange(6.0).view(3, 2), torch.empty(3, 2), [], []

    def exchange(a: torch.Tensor, b: torch.Tensor) -> None:
        assert waited and len(noted) == 1, "the copy to the host must be over before anything is sent"
        seen.extend((a, b))
        swap(a, b)

    communicator.carry(exchange, out, into, lambda begin, end: noted.append((begin.when, end.when)))
    assert not {tensor.data_ptr() for tensor in seen} & {out.data_ptr(), into.data_ptr()}
    assert torch.equal(into, out.flip(0)) and len(noted) == 2
    assert all(begin <= end for begin, end in noted) and noted[0][1] <= noted[1][0]


def test_on_gpus_a_meeting_keeps_only_the_stream_waiting(monkeypatch):
    summed = []
    communicator = Communicator(lockstep.only_context(backend="nccl", gpus=1))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: summed.append((tensor, group)))
    monkeypatch.setattr(dist, "barrier", lambda group: pytest.fail("a barrier stops the host"))
    communicator.meet()
    ((tensor, group),) = summed
    assert group is None and np.array_equal(tensor.numpy(), [0.0])


# Measurements of a machine.


MEETING, PAUSE = 3e-5, 0.5


class Gpu:
    """A device with a clock of its own: work moves it on, the host's time does not. now: seconds"""

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
def host(one_rank) -> RankContext:
    """The only rank of a launch on the CPU."""
    return lockstep.only_context()


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

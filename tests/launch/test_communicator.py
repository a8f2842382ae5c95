"""Communication of a rank: tensors that pass through host memory, meetings, the clock of a machine's measurement. Two models on
the same ranks: each has the output that it has alone, and one sends while the other computes."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank import colocated, measure_machine
from engine.launch.rank.colocated import Colocated, Lane
from engine.launch.rank.communicator import Communicator
from engine.launch.rank.context import RankContext
from engine.launch.rank.measure_machine import seconds_of
from engine.launch.running.local import run_here
from engine.plan import Travel
from engine.result import never
from engine.runtime.exchange.recorder import Recorder
from engine.systems.base import silent
from engine.timeline import Timeline
from tests.cases.launches import HOST, LAYERS, MODEL, OTHER, pair_of, recording, recording_b, sent
from tests.launch import lockstep

pytestmark = pytest.mark.usefixtures("warm_python")
RANKS = 3
PATIENCE = 20.0


@pytest.fixture
def lane(one_rank) -> Lane:
    """The lane of a launch of one rank, which is this process."""
    context = lockstep.only_context()
    return Lane(context, Communicator(context, *context.groups(1)), None, False)


def test_an_exchange_runs_beside_the_computation(lane):
    computed, done = threading.Event(), []
    first = lane.start(lambda: done.append(computed.wait(PATIENCE)))
    second = lane.start(lambda: done.append("second"))
    assert not done
    computed.set()
    second()
    assert done == [True, "second"]
    first()


def test_an_exchange_that_fails_is_told_where_it_is_waited_for(lane):
    wait = lane.start(mock.MagicMock(side_effect=ConnectionError("the peer is gone")))
    with pytest.raises(ConnectionError, match="the peer is gone"):
        wait()
    lane.start(lambda: None)()


def test_an_exchange_may_write_where_its_starter_may(one_rank):
    with torch.inference_mode():
        buffer = torch.zeros(3)
        context = lockstep.only_context()
        Lane(context, Communicator(context), None, False).start(lambda: buffer[:2].copy_(torch.ones(2)))()
    assert buffer.tolist() == [1, 1, 0]


def test_a_lane_over_gloo_works_on_the_gpu_of_its_rank(lane, monkeypatch):
    """The GPU is the host here: stand-ins are needed for the calls that name it."""
    gpu, chosen = torch.device("cuda", 1), threading.local()
    stand_ins = {"set_device": lambda device: setattr(chosen, "device", device), "Event": mock.MagicMock}
    stand_ins |= {"stream": lambda stream: contextlib.nullcontext(), "current_stream": lambda device: mock.MagicMock()}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    context = lockstep.only_context()
    used = []
    there = Lane(replace(context, device=gpu), lane.communicator, mock.MagicMock(), False)
    there.start(lambda: used.append(getattr(chosen, "device", "the first one")))()
    assert used == [gpu]


class Handed:
    """A stand-in for a model and its communicator that notes the operations of the host in their order."""

    def __init__(self, name: str, handed: list[str]) -> None:
        self.name, self.handed = name, handed

    def meet(self) -> None:
        self.handed.append(f"meet {self.name}")

    def exchange(self, kind: str, layer: int) -> None:
        self.handed.append(f"{kind} {self.name}")

    def __getattr__(self, step: str):
        return lambda layer: self.handed.append(f"{step} {self.name}")


ONE_BATCH = (["meet a", "{0} a", "{1} b", "meet b", "{0} b", "meet a", "meet b"], "concurrent", "concurrent", None)
PHASES = ["meet a", "{0} a", "meet a", "{1} b", "meet b", "{0} b", "meet b"]
PHASED = [("concurrent", "matched", None), ("matched", "concurrent", None), ("concurrent", "concurrent", "node")]


@pytest.mark.parametrize(("wanted", "mode_a", "mode_b", "unit"), [ONE_BATCH, *((PHASES, *phased) for phased in PHASED)])
def test_over_nccl_one_batch_waits_for_no_other_and_the_computation_of_a_for_no_phases_of_b(
    monkeypatch, wanted, mode_a, mode_b, unit
):
    handed: list[str] = []
    names = iter(("both", "a", "b"))
    monkeypatch.setattr(colocated, "Communicator", lambda *_: Handed(next(names), handed))
    monkeypatch.setattr(colocated, "kind_of_layers", lambda plan: lambda context, plan, model, number: model)
    monkeypatch.setattr(RankContext, "groups", lambda self, count: [None] * count)
    travel = None if unit is None else Travel(unit=unit)
    plan = pair_of(mode_a, mode_b, recording(4), recording_b()).model_copy(update={"travel": travel})
    Colocated(lockstep.only_context(plans=(plan,), model_b=OTHER, backend="nccl", gpus=1), plan).layer(0)
    dispatches, combines = ([word.format(*kinds) for word in wanted] for kinds in (("dispatch", "gate"), ("combine", "ffn")))
    assert handed == ["gate a", *dispatches, "ffn a", *combines, "aggregate a", "aggregate b"]


def test_tensors_of_a_gpu_pass_through_host_memory_and_the_copies_are_noted(monkeypatch):
    """The GPU is the host here: only its stream has to be stood in for. Tensors of the host go as they are."""
    communicator = Communicator(lockstep.only_context())
    out, into, seen, noted = torch.arange(6.0).view(3, 2), torch.empty(3, 2), [], []
    communicator.carry(lambda a, b: seen.extend((a, b)), out, into, lambda *marks: noted.append(marks))
    assert seen[0] is out and seen[1] is into and not noted
    stream = mock.MagicMock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    communicator.in_host_memory = True
    out, into, seen, noted = torch.arange(6.0).view(3, 2), torch.empty(3, 2), [], []

    def exchange(a: torch.Tensor, b: torch.Tensor) -> None:
        assert stream.synchronize.called and len(noted) == 1, "the copy to the host must be over before anything is sent"
        seen.extend((a, b))
        b.copy_(a.flip(0))

    communicator.carry(exchange, out, into, lambda begin, end: noted.append((begin.when, end.when)))
    assert not {tensor.data_ptr() for tensor in seen} & {out.data_ptr(), into.data_ptr()}
    assert torch.equal(into, out.flip(0)) and len(noted) == 2
    assert all(begin <= end for begin, end in noted) and noted[0][1] <= noted[1][0]


def test_on_gpus_a_meeting_keeps_only_the_stream_waiting(monkeypatch):
    summed = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: summed.append((tensor.tolist(), group)))
    monkeypatch.setattr(dist, "barrier", lambda group: pytest.fail("a barrier stops the host"))
    Communicator(lockstep.only_context(backend="nccl", gpus=1)).meet()
    assert summed == [([0.0], None)]


# Measurements of a machine.
MEETING, PAUSE = 3e-5, 0.5


class Gpu:
    """A device with a clock of its own: work moves it on, the host's time does not. now: seconds"""

    now = 0.0

    def run(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(2e-3)  # of the host


@pytest.fixture
def host(one_rank) -> RankContext:
    """The only rank of a launch on the CPU."""
    return lockstep.only_context()


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    gpu = Gpu()

    def event(enable_timing: bool) -> mock.MagicMock:
        own = mock.MagicMock(elapsed_time=lambda other: (other.when - own.when) * 1e3)
        own.record = lambda: setattr(own, "when", gpu.now)
        return own

    monkeypatch.setattr(torch.cuda, "Event", event)
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


# Real ranks.
def of(timeline: Timeline, model: int, kind: str, layer: int):
    events = timeline.events
    return events[(events["model"] == model) & (events["kind"] == kind) & (events["layer"] == layer)]


def test_two_models_in_every_order_on_fewer_ranks(tmp_path):
    trace, trace_b = recording(300), recording_b()
    plans = [pair_of(mode, mode, trace, trace_b) for mode in ("matched", "sequential", "concurrent")]
    plans.append(pair_of("matched", "concurrent", trace, trace_b))
    asked = Launch(tuple(plans), trace, MODEL, second=(trace_b, OTHER), ranks=RANKS, repeats=2, limit=120.0)
    launch = prepare(asked, HOST)
    assert launch.ready and [workload.tokens for workload in launch.workloads] == [300, 150]
    whole = run_here(launch, tmp_path / "run", never, silent)
    models, early = (launch.instructions.model, launch.instructions.model_b), Counter()
    for run in whole.runs:
        assert 0 <= run.difference.error <= 1e-5
        for number, model in enumerate(models):
            for layer in range(LAYERS):
                for kind in ("dispatch", "combine"):
                    both = (sent(timeline, kind, layer, RANKS, number) for timeline in (run.measured, run.predicted))
                    rows = [bytes / model.bytes_per_token for bytes in both]
                    # Of b, the copies of expert 7 divide over its homes: in half, or in whole rows.
                    assert rows[0].sum() > 0 and np.abs(rows[0] - rows[1]).max() <= (1e-6, 0.5 + 1e-6)[number]
        early += early_steps(run.measured)
    # On a busy machine what is sent may be there before the other model computes, now and then.
    assert early["gate"] and early["ffn"], "b never computed before a had sent"


def early_steps(timeline: Timeline) -> Counter[str]:
    """Assert the order of Aurora's table 2. Returns in how many layers b computed a step before a had sent that step's rows,
    which have no order."""
    early, steps = Counter(), ("gate", "dispatch", "ffn", "combine", "aggregate")
    order = [(kind, model) for kind in steps[::2] for model in range(2)]
    for layer in range(LAYERS):
        for rank in range(RANKS):
            here = timeline.events[(timeline.events["layer"] == layer) & (timeline.events["resource"] == rank)]
            computed = here[here["stream"] == "compute"].sort_values("start")
            assert list(zip(computed["kind"], computed["model"], strict=True)) == order
            assert (computed["end"].to_numpy()[:-1] <= computed["start"].to_numpy()[1:]).all()
        for model in range(2):
            for before, after in pairwise(steps):
                ended, begun = of(timeline, model, before, layer)["end"], of(timeline, model, after, layer)["start"]
                assert ended.max() <= begun.min()
        for computing, sending in (("gate", "dispatch"), ("ffn", "combine")):
            begun = of(timeline, 1, computing, layer)["start"].min()
            early[computing] += begun < of(timeline, 0, sending, layer)["end"].max()
    return early

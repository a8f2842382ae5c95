"""When the collectives of a step start, with collectives that only pass time."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.launch.rank.context import RankContext
from engine.launch.rank.instructions import RankInstructions
from engine.launch.step import measure_machine
from engine.launch.step.network import Network, StepError, last_computations, orders_of, simulated_order
from engine.launch.step.run import StepExecutor
from engine.overlap.transformer import transformer_step
from engine.runtime.exchange.recorder import Recorder
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, COMPUTE, POLICIES, Tasks
from tests.cases import steps
from tests.cases.examples import examples
from tests.cases.jobs import until
from tests.launch import lockstep

CPU = torch.device("cpu")
NONE = (None, None)
SHORT = 5e-4


def tasks_of(stream: list[int], edges: list[tuple[int, int]], pair: list[int] | None = None, holds=()) -> Tasks:
    count = len(stream)
    return Tasks(
        stream=np.array(stream),
        seconds=np.zeros((count, 1)),
        edges=np.array(sorted(set(edges))),
        release=np.zeros(count),
        pair=np.full(count, -1) if pair is None else np.array(pair),
        holds=np.isin(np.arange(count), list(holds)),
    )


class Run:
    """Executes tasks that each take the given seconds, and notes when they ran."""

    def __init__(self, tasks: Tasks, policy: str, seconds: list[float], one_order: bool = False) -> None:
        self.tasks, self.seconds = tasks, seconds
        self.span: dict[int, list[float]] = {}
        self.started: list[int] = []
        self.network = Network(tasks, policy, self.launch, CPU, NONE, one_order)

    def launch(self, task: int) -> Callable[[], None]:
        self.begin(task)

        def over() -> None:
            time.sleep(self.seconds[task])
            self.span[task].append(time.monotonic())

        return over

    def begin(self, task: int) -> None:
        self.started.append(task)
        self.span[task] = [time.monotonic()]

    def all(self) -> "Run":
        self.network.start()
        for task in np.flatnonzero(self.tasks.stream == COMPUTE).tolist():
            self.network.begin(task)
            self.begin(task)
            time.sleep(self.seconds[task])
            self.span[task].append(time.monotonic())
            self.network.finish(task)
        self.network.end()
        return self


@st.composite
def programs(draw):
    """A program in the shape of a step's: all-to-alls in a chain, reductions of gradients, an update at the end."""
    stream, edges, pair, holds = [], [], [], set()
    exchanges: list[int] = []
    for _ in range(draw(st.integers(2, 6))):
        computations = draw(st.integers(1, 3))
        for _ in range(computations):
            task = len(stream)
            edges += [(exchange, task) for exchange in exchanges[-1:] if draw(st.booleans())]
            stream.append(COMPUTE)
        if draw(st.booleans()):
            holds.add(len(stream) - 1)
        for _ in range(draw(st.integers(1, 2))):
            task = len(stream)
            edges += [(task - 1, task)] if stream[-1] == COMPUTE else []
            edges += [(exchange, task) for exchange in exchanges[-1:]]
            stream.append(ALL_TO_ALL)
            exchanges.append(task)
    computed = [task for task, kind in enumerate(stream) if kind == COMPUTE]
    reduced = draw(st.lists(st.sampled_from(computed), min_size=1, max_size=5))
    for reduced_task in reduced:
        edges.append((reduced_task, len(stream)))
        stream.append(ALL_REDUCE)
    update = len(stream)
    edges += [(task, update) for task, kind in enumerate(stream) if kind != COMPUTE]
    stream.append(COMPUTE)
    turn = -1
    for kind in stream:
        turn += kind == ALL_TO_ALL
        pair.append(turn // 2 if kind == ALL_TO_ALL else -1)
    seconds = [draw(st.sampled_from((0.0, SHORT, 2 * SHORT))) for _ in stream]
    return tasks_of(stream, edges, pair, holds), seconds


@settings(max_examples=examples(60), deadline=None)
@given(programs(), st.sampled_from(POLICIES))
def test_every_task_runs_once_after_what_it_needs_and_the_policy_holds(case, policy):
    tasks, seconds = case
    run = Run(tasks, policy, seconds).all()
    assert sorted(run.started) == list(range(len(seconds)))
    assert all(run.span[before][1] <= run.span[after][0] for before, after in tasks.edges.tolist())
    kinds = {kind: [task for task in run.started if tasks.stream[task] == kind] for kind in (ALL_TO_ALL, ALL_REDUCE)}
    queues = [run.started] if policy == "fifo" else kinds.values()
    for queue in queues:
        collectives = [task for task in queue if tasks.stream[task] != COMPUTE]
        assert all(run.span[a][1] <= run.span[b][0] for a, b in pairwise(collectives))
    # The order is the program's, whatever took how long.
    one_queue = [task for task in run.started if tasks.stream[task] != COMPUTE]
    assert orders_of(tasks, policy) == ([one_queue] if policy == "fifo" else [kinds[ALL_TO_ALL], kinds[ALL_REDUCE]])
    barred = []
    if policy == "priority":
        barred = [run.span[task] for task in [*kinds[ALL_TO_ALL], *np.flatnonzero(tasks.holds)]]
    if policy == "fixed":
        for number in set(tasks.pair.tolist()) - {-1}:
            own = [run.span[task] for task in np.flatnonzero(tasks.pair == number)]
            barred.append((min(start for start, _ in own), max(end for _, end in own)))
    for task in kinds[ALL_REDUCE]:
        assert not any(start < run.span[task][0] < end for start, end in barred)


@settings(max_examples=examples(30), deadline=None)
@given(programs(), st.sampled_from(POLICIES))
def test_in_one_order_whatever_takes_how_long(case, policy):
    """As over NCCL: every rank starts the collectives in the same order, which is the simulation's."""
    tasks, seconds = case
    wanted = simulated_order(tasks, policy)
    assert sorted(wanted) == np.flatnonzero(tasks.stream != COMPUTE).tolist()
    run = Run(tasks, policy, seconds, one_order=True).all()
    assert [task for task in run.started if tasks.stream[task] != COMPUTE] == wanted
    assert all(run.span[before][1] <= run.span[after][0] for before, after in tasks.edges.tolist())


def test_fair_all_reduces_do_not_wait_and_run_beside_computations_and_all_to_alls():
    stream = [COMPUTE, ALL_TO_ALL, ALL_REDUCE, COMPUTE, COMPUTE]
    tasks = tasks_of(stream, [(0, 1), (0, 2), (1, 4), (2, 4)], [-1, 0, -1, -1, -1])
    run = Run(tasks, "fair", [0.0, 0.05, 0.05, 0.05, 0.0]).all()
    starts, ends = [run.span[task][0] for task in (1, 2, 3)], [run.span[task][1] for task in (1, 2, 3)]
    assert max(starts) < min(ends)
    held = Run(tasks, "priority", [0.0, 0.05, 0.05, 0.05, 0.0]).all()
    assert held.span[2][0] >= held.span[1][1]


def test_collectives_are_ordered_by_the_last_computation_that_they_wait_for():
    stream = [COMPUTE, ALL_TO_ALL, COMPUTE, ALL_TO_ALL, COMPUTE, ALL_REDUCE, ALL_REDUCE, ALL_REDUCE]
    tasks = tasks_of(stream, [(0, 1), (1, 3), (2, 7), (4, 5), (0, 6), (3, 4)], [-1, 0, -1, 0, -1, -1, -1, -1])
    assert last_computations(tasks) == {1: 0, 3: 0, 5: 4, 6: 0, 7: 2}
    assert orders_of(tasks, "fair") == [[1, 3], [6, 7, 5]]
    assert orders_of(tasks, "fifo") == [[1, 3, 6, 7, 5]]


def test_a_collective_that_fails_ends_the_step_with_its_reason():
    tasks = tasks_of([COMPUTE, ALL_TO_ALL, COMPUTE], [(0, 1), (1, 2)], [-1, 0, -1])
    over = mock.MagicMock(side_effect=ConnectionError("rank 3 is gone"))
    network = Network(tasks, "fair", lambda task: over, CPU, NONE)
    network.start()
    network.begin(0)
    network.finish(0)
    with pytest.raises(StepError) as failure:
        network.begin(2)
    assert "rank 3 is gone" in str(failure.value.__cause__)


def test_threads_end_when_the_computation_fails():
    before = threading.active_count()
    tasks = tasks_of([COMPUTE, ALL_TO_ALL, ALL_REDUCE], [(0, 1), (0, 2)], [-1, 0, -1])
    network = Network(tasks, "fair", lambda task: lambda: None, CPU, NONE)
    network.start()
    assert threading.active_count() == before + 2
    network.fail(ValueError("out of memory"))
    until(lambda: threading.active_count() <= before, 5)


def test_all_plans_and_passes_have_the_same_streams(monkeypatch):
    """A GPU only by name: streams are counted, and nothing is started."""
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    gpu = torch.device("cuda", 0)
    context = replace(lockstep.only_context(backend="nccl", gpus=1), device=gpu, recorder=Recorder(0, gpu))
    for policy in ("fair", "fifo"):
        network = Network(tasks_of([COMPUTE], []), policy, lambda task: lambda: None, gpu, context.streams(2))
        for _ in range(3):
            network.start()
            network.end()
    assert made == [gpu, gpu] and network.streams[0] is not network.streams[1]


# Tensors on another device.
ELSEWHERE = torch.device("cpu", 0)
"""The device that tensors of the CPU are copied to before they are sent. PyTorch keeps it apart from the CPU."""


class Copies(TorchDispatchMode):
    """Numbers in every copy of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), more=None):
        if function is torch.ops.aten.copy_.default:
            self.sizes.append(args[1].numel())
        return function(*args, **(more or {}))


def launched(collective, *tensors: Tensor) -> tuple[float, float, float]:
    """The event of a collective that a rank launches through the host's memory and waits for."""
    context = SimpleNamespace(device=CPU, communication_device=ELSEWHERE, recorder=Recorder(0, CPU))
    executor = SimpleNamespace(context=context, _collective=lambda task: (collective, list(tensors)), _events={}, _sized={})
    StepExecutor._launch(executor, 7)()
    begin, end, size = executor._events[7]
    return begin.when, end.when, size


def test_only_what_is_sent_is_copied_from_a_gpu_and_only_what_is_received_back():
    sent, received = torch.arange(4.0), torch.full((6,), torch.nan)

    def exchange(outgoing: Tensor, incoming: Tensor) -> mock.MagicMock:
        assert {outgoing.data_ptr(), incoming.data_ptr()}.isdisjoint((sent.data_ptr(), received.data_ptr()))
        incoming.zero_()[:4].add_(outgoing.flip(0))
        return mock.MagicMock()

    with Copies() as copies:
        begin, end, size = launched(exchange, sent, received)
    assert copies.sizes == [4, 6], "room is enough for what is received"
    assert received.tolist() == [3, 2, 1, 0, 0, 0] and sent.tolist() == [0, 1, 2, 3]
    assert begin <= end and size == 16

    def add(summed: Tensor) -> mock.MagicMock:
        summed.mul_(2)
        return mock.MagicMock()

    with Copies() as copies:
        launched(add, sent)
    assert copies.sizes == [4, 4] and sent.tolist() == [0, 2, 4, 6], "gradients are summed up where they were copied to"


# The measurement of the machine.


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("staged", [False, True])
def test_collectives_are_measured_with_the_copies_that_the_step_will_pay_for(staged, monkeypatch):
    if staged:
        monkeypatch.setattr(RankContext, "communication_device", ELSEWHERE)
    about = {"model": steps.MODEL, "step": steps.STEP, "ranks": 4, "backend": "gloo"}
    context = RankContext(RankInstructions(plans=(steps.plan_of(),), **about), (), 0, CPU, Recorder(0, CPU))
    graph = transformer_step(steps.MODEL, steps.STEP, 4)
    with Copies() as copies:
        sent, seconds = measure_machine._all_to_all(context, graph, 1.0)
        numbers = sent / 4 * 4 / 3  # a rank's own part stays with it
        assert seconds > 0 and copies.sizes.count(numbers) == 2 * staged * (measure_machine.SHORT_REPEATS + 1)
        copies.sizes.clear()
        size, seconds = measure_machine._all_reduce(context, 1234)
    assert (size, copies.sizes.count(1234)) == (4 * 1234, 2 * staged * (measure_machine.REPEATS + 1)) and seconds > 0

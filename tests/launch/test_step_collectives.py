"""Collectives of a step whose tensors lie on another device than the one that sends them: the host passes for both."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.launch.rank.context import RankContext
from engine.launch.rank.instructions import RankInstructions
from engine.launch.rank.recorder import Recorder
from engine.launch.step import measure_machine
from engine.launch.step.run import StepExecutor
from engine.overlap.transformer import transformer_step
from tests.launch.step_ranks import CPU
from tests.launch.test_step import MODEL, STEP, plan_of

ELSEWHERE = torch.device("cpu", 0)
"""Where tensors of the CPU have to go to be sent. PyTorch keeps it apart from the CPU."""


class OnGpu(Tensor):
    """A tensor that passes for one of a GPU."""

    copied: list[Tensor]

    @classmethod
    def __torch_function__(cls, function, types, args=(), more=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function is Tensor.to:
                cls.copied.append(args[0])
                return args[0].as_subclass(Tensor).clone()
            if function is Tensor.copy_ and isinstance(args[1], cls):
                cls.copied.append(args[1])
            return function(*args, **(more or {}))


class Done:
    def wait(self) -> None:
        pass


@pytest.fixture
def copied(monkeypatch) -> list[Tensor]:
    """What was copied from the GPU, in this order."""
    monkeypatch.setattr(OnGpu, "copied", [], raising=False)
    return OnGpu.copied


def launched(collective, *tensors: Tensor) -> tuple[float, float, float]:
    """The event of a collective that a rank launches through the host's memory and waits for."""
    context = SimpleNamespace(device=CPU, communication_device=ELSEWHERE, recorder=Recorder(0, CPU))
    executor = SimpleNamespace(context=context, _collective=lambda task: (collective, list(tensors)), _events={})
    StepExecutor._launch(executor, 7)()
    begin, end, size = executor._events[7]
    return begin.when, end.when, size


def on_gpu(numbers: Tensor) -> Tensor:
    return numbers.as_subclass(OnGpu)


def test_only_what_is_sent_is_copied_from_a_gpu(copied):
    sent, received, seen = on_gpu(torch.arange(4.0)), on_gpu(torch.full((4,), torch.nan)), []

    def exchange(outgoing: Tensor, incoming: Tensor) -> Done:
        seen.extend((outgoing, incoming))
        incoming.copy_(outgoing.flip(0))
        return Done()

    begin, end, size = launched(exchange, sent, received)
    assert [tensor is sent for tensor in copied] == [True], "room is enough for what is received"
    assert not any(isinstance(tensor, OnGpu) for tensor in seen)
    assert received.tolist() == [3, 2, 1, 0] and sent.tolist() == [0, 1, 2, 3]
    assert begin <= end and size == 16


def test_gradients_are_summed_up_where_they_were_copied_to(copied):
    gradients = on_gpu(torch.arange(3.0))

    def add(summed: Tensor) -> Done:
        assert not isinstance(summed, OnGpu)
        summed.mul_(2)
        return Done()

    launched(add, gradients)
    assert len(copied) == 1 and gradients.tolist() == [0, 2, 4]


# The measurement of the machine.


class Copies(TorchDispatchMode):
    """Numbers in every copy of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), more=None):
        if function is torch.ops.aten.copy_.default:
            self.sizes.append(args[1].numel())
        return function(*args, **(more or {}))


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone, for whatever number of ranks the instructions name."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("staged", [False, True])
def test_collectives_are_measured_with_the_copies_that_the_step_will_pay_for(staged, monkeypatch):
    if staged:
        monkeypatch.setattr(RankContext, "communication_device", ELSEWHERE)
    instructions = RankInstructions(plans=(plan_of(),), model=MODEL, step=STEP, ranks=4, backend="gloo")
    context, graph = RankContext(instructions, (), 0, CPU, Recorder(0, CPU)), transformer_step(MODEL, STEP, 4)
    with Copies() as copies:
        sent, seconds = measure_machine._all_to_all(context, graph, 1.0)
        numbers = sent / 4 * 4 / 3  # a rank's own part stays with it
        assert seconds > 0 and copies.sizes.count(numbers) == 2 * staged * (measure_machine.SHORT_REPEATS + 1)
        copies.sizes.clear()
        size, seconds = measure_machine._all_reduce(context, 1234)
    assert (size, copies.sizes.count(1234)) == (4 * 1234, 2 * staged * (measure_machine.REPEATS + 1)) and seconds > 0

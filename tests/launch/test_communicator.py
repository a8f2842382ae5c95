"""What stands between a rank's tensors and the other ranks."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from engine.launch.rank.communicator import Communicator
from engine.launch.rank.instructions import RankInstructions
from tests.launch import lockstep
from tests.launch.test_local import MODEL, plan_for, recording


@pytest.fixture
def communicator() -> Communicator:
    instructions = RankInstructions(plans=(plan_for(recording(4), "concurrent"),), model=MODEL, ranks=1, backend="gloo")
    (context,) = lockstep.contexts_of(instructions)
    return Communicator(context)


def swap(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    incoming.copy_(outgoing.flip(0))


def test_tensors_of_the_host_go_as_they_are(communicator):
    out, into, seen, noted = torch.arange(6.0).view(3, 2), torch.empty(3, 2), [], []
    communicator.carry(lambda a, b: (seen.extend((a, b)), swap(a, b)), out, into, lambda *marks: noted.append(marks))
    assert seen[0] is out and seen[1] is into and not noted
    assert torch.equal(into, out.flip(0))


def test_tensors_of_a_gpu_pass_through_host_memory_and_the_copies_are_noted(communicator, monkeypatch):
    """The GPU is the host here: only its stream has to be stood in for."""
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
    instructions = RankInstructions(
        plans=(plan_for(recording(4), "concurrent"),), model=MODEL, ranks=1, backend="nccl", gpus=1
    )
    (context,) = lockstep.contexts_of(instructions)
    communicator = Communicator(context)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: summed.append((tensor, group)))
    monkeypatch.setattr(dist, "barrier", lambda group: pytest.fail("a barrier stops the host"))
    communicator.meet()
    ((tensor, group),) = summed
    assert group is None and np.array_equal(tensor.numpy(), [0.0])

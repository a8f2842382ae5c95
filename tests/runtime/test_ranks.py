"""Ranks that exchange: a backend that cannot reach the tensors is named at once, and a rank that is gone is one line."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

pytest.importorskip("transformers")

from engine.errors import LostRankError
from engine.launch.rank.joining import failure_of
from engine.runtime import apply
from engine.runtime.layer_plan import layer_plans
from engine.runtime.live import LiveExchange
from engine.runtime.ranks import all_or_none, among_ranks, check_device
from engine.runtime.weights import load_planned
from tests.cases.refusals import refusal
from tests.cases.tiny_models import model_of, plan_of

GONE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:7. This is typically"
NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled error, NCCL version 2\nncclError: it says.\nLast error:\n{}"
LOSSES = {
    "gloo": (RuntimeError(GONE), "Connection closed by peer [127.0.0.1]:7"),
    "the store": (dist.DistNetworkError("failed to recv, got 0 bytes"), "failed to recv, got 0 bytes"),
    "nccl": (
        dist.DistBackendError(NCCL.format("socketProgress: Connection closed by remote peer")),
        "socketProgress: Connection closed by remote peer",
    ),
}
OTHERS = {
    "nccl": dist.DistBackendError(NCCL.format("Duplicate GPU detected")),
    "the model's own": RuntimeError("shape '[3]' is invalid"),
    "no exchange at all": KeyError("gloo/"),
}


@pytest.fixture
def joined() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def over_nccl(joined) -> Iterator[None]:
    """The same, as if by NCCL, which not every machine has: with the devices that PyTorch gives it."""
    config = str(BackendConfig(dist.Backend("nccl")))
    with (
        mock.patch.object(dist, "get_backend_config", return_value=config),
        mock.patch.object(dist, "get_backend", return_value="nccl"),
    ):
        yield


def test_weights_for_the_host_are_not_loaded_among_ranks_that_exchange_from_gpus(over_nccl, tmp_path):
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    said = refusal(load_planned, tmp_path, plan_of(model, 1))
    assert said.startswith("the ranks exchange over nccl, which takes no tensors on the device cpu: ")
    assert "loading=Loading(device=…)" in said
    check_device(None, torch.device("cuda", 3))


def test_nor_does_a_model_on_the_host_exchange_there(over_nccl):
    way = layer_plans(plan_of(model_of("mixtral"), 2), 2, 0)[0]
    with mock.patch.object(dist, "get_world_size", return_value=2):
        exchange = LiveExchange(way, None)
    for call in (lambda: exchange.sum(torch.ones(2)), lambda: exchange.along(torch.ones(2, 1), [1, 1], [1, 1])):
        assert "nccl, which takes no tensors on the device cpu" in refusal(call)


def test_gloo_takes_both(joined):
    check_device(None, torch.device("cpu"))
    check_device(dist.group.WORLD, torch.device("cuda", 0))


@pytest.mark.parametrize("backend", LOSSES)
def test_a_rank_that_is_gone_is_one_line(joined, backend):
    error, cause = LOSSES[backend]
    with pytest.raises(LostRankError) as lost, among_ranks():
        raise error
    assert str(lost.value) == f"rank 0 lost another rank: {cause}; the output of that one or of what started it says why"
    assert failure_of(lost.value, 0) == (0, str(lost.value), True), "to a launch it is a consequence, and no cause"
    assert failure_of(error, 0) == (0, f"rank 0 lost another rank: {cause}", True)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_errors_stay_what_they_are(joined, kind):
    with pytest.raises(type(OTHERS[kind])) as raised, among_ranks():
        raise OTHERS[kind]
    assert raised.value is OTHERS[kind]


def test_generation_says_it_in_a_line_too(joined):
    model = mock.Mock(generate=mock.Mock(side_effect=LOSSES["gloo"][0]))
    apply._generate_together(model, 1)
    with pytest.raises(LostRankError, match="rank 0 lost another rank: Connection closed"):
        model.generate("tokens")


def test_a_rank_that_failed_itself_says_its_own_error_though_the_others_are_gone(joined):
    cpu, gone = torch.device("cpu"), mock.patch.object(dist, "all_gather", side_effect=LOSSES["gloo"][0])
    with pytest.raises(KeyError), gone, all_or_none(dist.group.WORLD, cpu, "loaded"):
        raise KeyError("mine")
    lost = pytest.raises(LostRankError, match="a rank ended before it had loaded: Connection closed by peer")
    with lost, gone, all_or_none(dist.group.WORLD, cpu, "loaded"):
        pass

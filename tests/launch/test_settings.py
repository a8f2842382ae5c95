"""Settings of a rank for CUDA, NCCL, PyTorch and its threads, made before it uses them. No GPU is needed."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.launch import worker
from engine.launch.calibration import sweep_rank
from engine.launch.calibration.sweep import REQUEST, Sweep
from engine.launch.rank import joining, settings
from engine.launch.rank.instructions import RankInstructions, write_instructions
from engine.launch.rank.settings import threads
from tests.cases.launches import MODEL, plan_for, recording

NAMES = (*settings.FOR_NCCL, "NCCL_LAUNCH_ORDER_IMPLICIT")
GPU = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """A rank's process without settings, with GPUs that are only counted."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for module in (worker, sweep_rank):
        monkeypatch.setattr(module, "leave_with_parent", lambda: None)
        monkeypatch.setattr(module, "joined", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(module, "reporting_failure", contextlib.nullcontext)
    yield
    torch.set_float32_matmul_precision("highest")


def launch(folder: Path, backend: str, see: Callable[[], None], monkeypatch) -> None:
    """A rank of a launch. see: called when it begins to run"""
    trace = recording(4)
    devices, plans = {"backend": backend, "gpus": 2 if backend == "nccl" else 0}, (plan_for(trace, "concurrent"),)
    instructions = RankInstructions(plans=plans, model=MODEL, ranks=2, **devices)
    write_instructions(folder, instructions, [trace])
    monkeypatch.setattr(worker, "run", lambda *_: see())
    worker.main(folder)


def calibrate(folder: Path, backend: str, see: Callable[[], None], monkeypatch) -> None:
    """A rank of a calibration."""
    sweep = Sweep(ranks=2, backend=backend, dtypes=("fp32",), seconds=1, repeats=1, held_out=1)
    (folder / REQUEST).write_text(sweep.to_json())
    monkeypatch.setattr(sweep_rank, "SweepRank", lambda *_: type("Rank", (), {"measure": lambda self: see()})())
    sweep_rank.main(folder)


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


WANTED = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


@pytest.mark.parametrize("start", [launch, calibrate])
def test_a_rank_of_nccl_has_its_settings_before_cuda_starts(start, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen.append(environment()) or 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(environment()))
    start(tmp_path, "nccl", lambda: seen.append(environment()), monkeypatch)
    assert len(seen) >= 2 and all(each == WANTED for each in seen)


def test_gloo_needs_no_settings_and_what_the_user_says_of_cuda_holds(monkeypatch):
    settings.settle("gloo")
    assert environment() == {}
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    settings.settle("nccl")
    assert environment() == WANTED | {"CUDA_MODULE_LOADING": "LAZY"}


@pytest.mark.parametrize("start", [launch, calibrate])
def test_a_rank_multiplies_fp32_in_fp32_whatever_pytorch_was_told(start, tmp_path, monkeypatch):
    seen = []
    torch.set_float32_matmul_precision("medium")
    start(tmp_path, "gloo", lambda: seen.append(torch.backends.cuda.matmul.allow_tf32), monkeypatch)
    assert seen == [False] and torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision == torch.backends.mkldnn.matmul.fp32_precision == "ieee"


def test_nccl_is_told_the_device_and_connects_at_once(monkeypatch):
    """The rules of `nccl_rules` have the consequence ("eager")."""
    made = []
    monkeypatch.setattr(joining, "_meet", lambda *_: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: made.append(how["device_id"]))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for backend, device in (("nccl", GPU), ("gloo", GPU), ("gloo", torch.device("cpu"))):
        with joining.joined(backend, 10.0, device):
            pass
    assert made == [GPU, None, None]


# Threads.
def test_as_many_as_there_are_processors_and_openmp_allows(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for limit, ranks, wanted in (("3", 1, 3), ("3", 4, 2), ("0", 1, 8), ("", 2, 4), ("x", 16, 1)):
        monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
        assert threads(ranks) == wanted
    monkeypatch.delenv("OMP_THREAD_LIMIT")
    assert threads(1) == 8


def test_products_are_whole():
    """Told to take two threads where OpenMP gives one, oneDNN leaves half of this product as it was in memory."""
    assert os.environ["OMP_THREAD_LIMIT"] == "1", "as in all tests"
    before = torch.get_num_threads()
    torch.set_num_threads(threads())
    try:
        for _ in range(20):
            torch.full((1, 5000), float("nan"), dtype=torch.bfloat16)  # leaves NaN behind in the memory that comes next
            product = torch.zeros((1, 64), dtype=torch.bfloat16) @ torch.zeros((64, 5000), dtype=torch.bfloat16)
            assert not product.isnan().any()
    finally:
        torch.set_num_threads(before)

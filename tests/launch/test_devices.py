"""What is attached: a stand-in for NVML in its place, and every way in which it can be missing."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from engine.catalogue import gpu_types
from engine.errors import InputError
from engine.launch.places.devices import Accelerator, Devices, attached, cluster_of
from tests.launch.nvml import GIB, Gpu, linked, plug_in, switched

CUBE = [
    (0, 1, 1),
    (0, 2, 1),
    (0, 3, 2),
    (0, 4, 2),
    (1, 2, 2),
    (1, 3, 1),
    (1, 5, 2),
    (2, 3, 2),
    (2, 6, 1),
    (3, 7, 1),
    (4, 5, 1),
    (4, 6, 1),
    (4, 7, 2),
    (5, 6, 2),
    (5, 7, 1),
    (6, 7, 2),
]


def pretend_cuda(monkeypatch, names: list[str], first: int = 0) -> None:
    """GPUs for PyTorch. first: which one of the machine's it is shown first"""
    properties = [
        SimpleNamespace(name=name, total_memory=80 * GIB, uuid=uuid) for uuid, name in enumerate(names, first)
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)


def test_a_machine_with_a_switch(monkeypatch):
    nvml = plug_in(monkeypatch, switched("NVIDIA H200", 8, links=18, memory=140 * GIB, generation=5))
    devices = attached()
    assert [gpu.name for gpu in devices.machine] == ["NVIDIA H200"] * 8
    assert devices.machine[0].memory == 140 * GIB
    assert devices.machine[0].pcie == pytest.approx(63e9)
    assert devices.machine[2].nvlinks == (18, 18, 0, 18, 18, 18, 18, 18)
    assert nvml.sessions == [1, 0], "NVML is to be shut down"
    drawn = cluster_of(devices.machine)
    (node,) = drawn.cluster.nodes
    assert set(node.gpus) == {gpu_types()["H200"].gpu()} and len(node.gpus) == 8
    assert node.link_bandwidth == pytest.approx(450e9)
    assert any("through a switch" in note for note in drawn.notes)


def test_gpus_that_are_wired_to_one_another(monkeypatch):
    plug_in(monkeypatch, linked("Tesla V100-SXM2-32GB", 8, CUBE, memory=32 * GIB, generation=3))
    machine = attached().machine
    assert machine[0].nvlinks == (0, 1, 1, 2, 2, 0, 0, 0) and all(sum(gpu.nvlinks) == 6 for gpu in machine)
    drawn = cluster_of(machine)
    assert drawn.cluster.nodes[0].link_bandwidth == pytest.approx(7 * 15.75e9 / 3)
    assert any("joined differently" in note for note in drawn.notes)


def test_a_container_with_some_of_the_gpus(monkeypatch):
    plug_in(monkeypatch, linked("Tesla V100-SXM2-32GB", 8, CUBE)[:4])
    assert attached().machine[0].nvlinks == (0, 1, 1, 2)


def test_no_nvlink_and_a_narrow_port(monkeypatch):
    plug_in(monkeypatch, [Gpu("NVIDIA L40S", 45 * GIB, bus=at, generation=4, width=8) for at in range(2)])
    devices = attached()
    assert devices.machine[1].nvlinks == (0, 0)
    assert cluster_of(devices.machine).cluster.nodes[0].link_bandwidth == pytest.approx(31.5e9 / 2)


def test_the_driver_does_not_tell_of_links(monkeypatch):
    gpus = switched("NVIDIA A100-SXM4-80GB", 2, links=12)
    plug_in(monkeypatch, gpus, forbidden=("nvmlDeviceGetNvLinkState", "nvmlDeviceGetMaxPcieLinkWidth"))
    machine = attached().machine
    assert [(gpu.nvlinks, gpu.pcie) for gpu in machine] == [(None, None)] * 2
    drawn = cluster_of(machine)
    assert drawn.cluster.nodes[0].link_bandwidth == pytest.approx(31.5e9)
    assert any("could not be read" in note for note in drawn.notes)


@pytest.mark.parametrize(
    ("failing", "part"),
    [
        ("nvmlInit", "Insufficient Permissions"),
        ("nvmlDeviceGetCount", "Insufficient Permissions"),
        ("nvmlDeviceGetMemoryInfo", "Insufficient Permissions"),
    ],
)
def test_no_permission(monkeypatch, failing, part):
    plug_in(monkeypatch, switched("NVIDIA H200", 2, links=18), forbidden=(failing,))
    pretend_cuda(monkeypatch, [])
    devices = attached()
    assert (devices.machine, devices.gpus) == ((), ())
    assert any("NVML" in note and part in note for note in devices.notes)
    assert devices.summary.startswith("no GPU attached")


def test_no_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    pretend_cuda(monkeypatch, [])
    devices = attached()
    assert devices.machine == () and any("nvidia-ml-py is not installed" in note for note in devices.notes)


def test_the_real_module_never_raises():
    devices = attached()
    assert devices.machine or len(devices.notes) == 2
    assert devices.cores > 0 and devices.host_memory > 0


def test_pytorch_is_the_second_source(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    pretend_cuda(monkeypatch, ["NVIDIA A100-SXM4-80GB"] * 2)
    devices = attached()
    assert devices.gpus == ("NVIDIA A100-SXM4-80GB",) * 2 and devices.memory == (80 * GIB,) * 2
    assert [gpu.type for gpu in devices.machine] == ["A100-80"] * 2
    drawn = cluster_of(devices.machine)
    assert len(drawn.cluster.gpus) == 2 and any("could not be read" in note for note in drawn.notes)
    assert devices.backend(2) == "nccl"


def test_what_only_the_driver_sees_runs_nothing(monkeypatch):
    plug_in(monkeypatch, switched("NVIDIA H200", 4, links=18))
    pretend_cuda(monkeypatch, [])
    devices = attached()
    assert len(devices.machine) == 4 and devices.gpus == () and devices.backend(2) == "gloo"
    assert "4 × NVIDIA H200 (PyTorch can use none of them)" in devices.summary
    assert any("without CUDA" in note or "no usable GPU" in note for note in devices.notes)
    pretend_cuda(monkeypatch, ["NVIDIA H200"])
    devices = attached()
    assert "PyTorch can use 1 of them" in devices.summary and "CUDA_VISIBLE_DEVICES" in devices.notes[0]


def test_what_other_processes_have_is_not_free(monkeypatch):
    """Whatever number a GPU has where only some are visible (CUDA_VISIBLE_DEVICES)."""
    gpus = switched("NVIDIA H200", 4, links=18)
    gpus[2].taken = 50 * GIB
    plug_in(monkeypatch, gpus)
    pretend_cuda(monkeypatch, ["NVIDIA H200"] * 2, first=1)
    devices = attached()
    assert devices.memory == (80 * GIB, 30 * GIB)
    assert [gpu.free for gpu in devices.machine] == [80 * GIB, 80 * GIB, 30 * GIB, 80 * GIB]
    assert [gpu.memory for gpu in devices.machine] == [80 * GIB] * 4, "a drawn GPU has all of it"
    pretend_cuda(monkeypatch, ["NVIDIA H200"], first=9)  # an instance of one (MIG), which NVML lists with its GPU
    assert attached().memory == (80 * GIB,)


def test_mixed_and_unknown_names():
    known, other = Accelerator("NVIDIA H100 80GB HBM3", 80 * GIB), Accelerator("NVIDIA A100-SXM-64GB", 64 * GIB)
    with pytest.raises(
        InputError, match=r"'NVIDIA A100-SXM-64GB' with 64 GiB is not in the catalogue.*choose.*A100-80"
    ):
        cluster_of([known, other])
    drawn = cluster_of([known, other], "A100-80")
    assert [gpu.type for gpu in drawn.cluster.gpus] == ["H100", "A100-80"]
    assert [gpu.memory for gpu in drawn.cluster.gpus] == [gpu_types()["H100"].memory, 64 * GIB]
    assert "A100-SXM-64GB" in drawn.notes[0] and "A100-80" in drawn.notes[0]
    with pytest.raises(InputError, match="no GPU type 'H9000'"):
        cluster_of([other], "H9000")


def test_a_machine_without_gpus_is_refused():
    with pytest.raises(InputError, match="no GPU on this machine"):
        cluster_of([])


def test_summaries():
    host = {"memory": (), "cores": 2, "host_memory": 8 * GIB}
    assert Devices(gpus=(), **host).summary == "no GPU attached; 2 CPU cores, 8 GiB free"
    assert Devices(gpus=("A", "A", "B"), **host).summary == "2 × A, 1 × B, 2 CPU cores"


def test_the_stand_in_has_only_what_nvml_has(monkeypatch):
    import pynvml

    stand_in = plug_in(monkeypatch, [])
    asked = [name for name in dir(stand_in) if name.startswith(("nvml", "NVML"))]
    assert isinstance(stand_in, ModuleType) and len(asked) > 10
    assert all(hasattr(pynvml, name) for name in asked)

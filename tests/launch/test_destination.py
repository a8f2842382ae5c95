"""Destinations of launches: clusters, and the devices that are attached, with a stand-in for NVML."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from engine.catalogue import cluster_presets, gpu_types
from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch.places.destination import Kubernetes, Slurm, as_drawn, gpus_of
from engine.launch.places.devices import Accelerator, Devices, attached, cluster_of
from engine.launch.preparation.place_checks import destination_checks
from engine.launch.running.torchx_application import app_of, dry_run
from tests.cases.cluster_launches import MODEL, SIZE, destination, launch_for
from tests.cases.refusals import refusal
from tests.launch.nvml import GIB, Gpu, linked, plug_in, switched

REFUSED = {
    "slurm partition partition": ["gpu\n#SBATCH --wrap=id", "gpu\n", "gpu;id", "$(id)", "gpu --uid=0"],
    "slurm account account": ["a,b", "-n"],
    "slurm image image": ["x --uid=0"],
    "slurm shared absolute": ["runs", "/runs/../etc"],
    "slurm shared printed": ["/runs\n#SBATCH --wrap=id"],
    "slurm shared change": ["/runs\\j", "/runs/${app_id}"],
    "slurm nodes nodes": [0],
    "slurm ranks_per_node as many GPUs": [5],
    "slurm gpu_memory gpu_memory": [0],
    "slurm memory_per_node memory_per_node": [float("nan")],
    "kubernetes namespace Kubernetes": ["A", "a.b", "a" * 64],
    "kubernetes queue Kubernetes": ["a\nb: c"],
    "kubernetes claim Kubernetes": ["../x", ""],
    "kubernetes image push it there": ["sha256:0123"],
    "kubernetes image image": ["", "a b"],
    "kubernetes seen_as mounted": ["/", "/a:b"],
    "kubernetes partition partition": ["gpu"],
}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_no_cluster_takes_is_refused_in_one_line(tmp_path, asked):
    scheduler, field, word = asked.split(maxsplit=2)
    for value in REFUSED[asked]:
        message = refusal(destination, scheduler, tmp_path, **{field: value})
        assert message.isprintable() and message.startswith("test: ") and word in message


def test_a_folder_that_the_job_would_not_see_is_refused(tmp_path):
    launch = launch_for(destination("slurm", tmp_path / "shared"))
    for name, word in (
        *(("../run", "absolute"), ("/elsewhere", "shared folder"), ("", "shared folder")),
        *(("a\nb", "printed"), ("a\\b", "change"), ("${app_id}", "change")),
    ):
        message = refusal(dry_run, launch, tmp_path / "shared" / name)
        assert word in message and message.isprintable()


def test_a_launch_for_other_devices_is_refused(tmp_path):
    launch = launch_for(destination("slurm", tmp_path))
    for more, part in (({"nodes": 1}, "8 ranks"), ({"gpus": 0, "ranks_per_node": 4}, "nccl")):
        other = replace(launch, destination=destination("slurm", tmp_path, **more))
        assert part in refusal(app_of, other, tmp_path / "run")


def test_a_launch_is_checked_against_the_devices_of_its_destination(tmp_path):
    on_gpus, on_cpus = destination("slurm", tmp_path), destination("slurm", tmp_path, gpus=0, ranks_per_node=4)
    assert on_gpus.ranks == on_cpus.ranks == 8
    launch = launch_for(on_gpus)
    assert launch.ready and (launch.instructions.backend, launch.instructions.model.dtype) == ("nccl", "bf16")
    assert launch_for(on_cpus).instructions.backend == "gloo" and on_cpus.devices.cores == 16
    assert on_cpus.devices.host_memory == 2 * SIZE["memory_per_node"]
    big = MODEL.model_copy(update={"d_model": 4096, "d_ff": 8192})
    small = destination("slurm", tmp_path, gpu_memory=2.0**28)
    assert launch_for(on_gpus, model=big).ready and not launch_for(small, model=big).ready
    assert all(check.passed for check in destination_checks(on_gpus))
    missing = destination("kubernetes", tmp_path / "missing")
    (*_, program, folder, port) = destination_checks(missing)
    assert program.passed and not folder.passed and port.passed and not launch_for(missing).ready
    (_, _, mounted, _) = destination_checks(destination("kubernetes", tmp_path))
    assert "/shared" in mounted.text
    mixed = on_gpus.model_copy(update={"gpu": as_drawn(cluster_presets()["mixed-8"].cluster)["gpu"]})
    nodes = [next(destination_checks(where)).text for where in (mixed, on_gpus, on_cpus)]
    assert ["scheduler's choice" in text for text in nodes] == [True, False, False]
    (_, here, *_) = destination_checks(on_gpus)
    assert sys.executable in here.text and "switchyard:1" in program.text


def test_a_drawn_cluster_says_what_to_ask_for():
    presets = cluster_presets()
    for preset in presets.values():
        drawn = as_drawn(preset.cluster)
        memory = [gpu.memory for gpu in preset.cluster.gpus]
        assert drawn["gpu_memory"] == min(memory)
        assert set(drawn["gpu"].split(" or ")) <= {gpu.type for gpu in preset.cluster.gpus}
        assert drawn["nodes"] * drawn["gpus_per_node"] == len(memory)
    node = max((node for preset in presets.values() for node in preset.cluster.nodes), key=lambda node: len(node.gpus))
    half = node.model_copy(update={"name": "half", "gpus": node.gpus[1:]})
    uneven = Cluster(name="uneven", nodes=(node, half))
    with pytest.raises(InputError, match="uneven have different numbers of GPUs"):
        as_drawn(uneven)
    assert gpus_of(uneven) == {"gpu": node.gpus[0].type, "gpu_memory": node.gpus[0].memory}


def test_destinations_are_saved_and_read_again(tmp_path):
    for kind, name in ((Slurm, "slurm"), (Kubernetes, "kubernetes")):
        where = destination(name, tmp_path)
        assert kind.from_json(where.to_json(), "saved") == where
    destination("slurm", tmp_path / "a,b:c")
    with pytest.raises(InputError, match="cannot be mounted"):  # in a container
        destination("slurm", tmp_path / "a,b:c", image="switchyard:1")


# Attached devices.
PEERS = [{1: 1, 2: 1, 3: 2, 4: 2}, {2: 2, 3: 1, 5: 2}, {3: 2, 6: 1}, {7: 1}, {5: 1, 6: 1, 7: 2}, {6: 2, 7: 1}, {7: 2}]
CUBE = [(gpu, peer, links) for gpu, peers in enumerate(PEERS) for peer, links in peers.items()]
"""The links of eight GPUs: two ends, and how many there are between them."""


def pretend_cuda(monkeypatch, names: list[str], first: int = 0) -> None:
    """GPUs for PyTorch. first: which one of the machine's it is shown first"""
    properties = [SimpleNamespace(name=name, total_memory=80 * GIB, uuid=uuid) for uuid, name in enumerate(names, first)]
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
    plug_in(monkeypatch, linked("Tesla V100-SXM2-32GB", 8, CUBE)[:4])  # a container with some of the GPUs
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


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo", "the module"])
def test_no_permission_or_no_module(monkeypatch, failing):
    plug_in(monkeypatch, switched("NVIDIA H200", 2, links=18), forbidden=(failing,))
    why = "NVML shows no GPU: Insufficient Permissions"
    if failing == "the module":
        monkeypatch.setitem(sys.modules, "pynvml", None)
        why = "nvidia-ml-py is not installed"
    pretend_cuda(monkeypatch, [])
    devices = attached()
    assert (devices.machine, devices.gpus) == ((), ()) and devices.summary.startswith("no GPU attached")
    assert any(why in note for note in devices.notes)


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


def test_mixed_and_unknown_names_and_none():
    known, other = Accelerator("NVIDIA H100 80GB HBM3", 80 * GIB), Accelerator("NVIDIA A100-SXM-64GB", 64 * GIB)
    with pytest.raises(InputError, match=r"'NVIDIA A100-SXM-64GB' with 64 GiB is not in the catalogue.*choose.*A100-80"):
        cluster_of([known, other])
    drawn = cluster_of([known, other], "A100-80")
    assert [gpu.type for gpu in drawn.cluster.gpus] == ["H100", "A100-80"]
    assert [gpu.memory for gpu in drawn.cluster.gpus] == [gpu_types()["H100"].memory, 64 * GIB]
    assert "A100-SXM-64GB" in drawn.notes[0] and "A100-80" in drawn.notes[0]
    with pytest.raises(InputError, match="no GPU type 'H9000'"):
        cluster_of([other], "H9000")
    with pytest.raises(InputError, match="no GPU on this machine"):
        cluster_of([])
    host = {"memory": (), "cores": 2, "host_memory": 8 * GIB}
    assert Devices(gpus=(), **host).summary == "no GPU attached; 2 CPU cores, 8 GiB free"
    assert Devices(gpus=("A", "A", "B"), **host).summary == "2 × A, 1 × B, 2 CPU cores"


def test_the_stand_in_has_only_what_nvml_has(monkeypatch):
    import pynvml

    stand_in = plug_in(monkeypatch, [])
    asked = [name for name in dir(stand_in) if name.startswith(("nvml", "NVML"))]
    assert isinstance(stand_in, ModuleType) and len(asked) > 10
    assert all(hasattr(pynvml, name) for name in asked)

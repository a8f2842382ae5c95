"""Destinations of launches: clusters, and the devices that are attached, with a stand-in for NVML."""

import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from engine.catalogue import cluster_presets, gpu_types
from engine.cluster import Cluster
from engine.launch.places.destination import as_drawn, gpus_of
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
    destination("slurm", tmp_path / "a,b:c")
    assert "cannot be mounted" in refusal(destination, "slurm", tmp_path / "a,b:c", image="switchyard:1"), "in a container"
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
    assert "uneven have different numbers of GPUs" in refusal(as_drawn, uneven)
    assert gpus_of(uneven) == {"gpu": node.gpus[0].type, "gpu_memory": node.gpus[0].memory}


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


V100, NO_LINKS = "Tesla V100-SXM2-32GB", ("nvmlDeviceGetNvLinkState", "nvmlDeviceGetMaxPcieLinkWidth")
NARROW = [Gpu("NVIDIA L40S", 45 * GIB, bus=at, generation=4, width=8) for at in range(2)]
MACHINES = {
    "through a switch": (switched("NVIDIA H200", 8, 18, 140 * GIB, 5), (), (0, *[18] * 7), 63e9, 450e9),
    "joined differently": (linked(V100, 8, CUBE), (), (0, 1, 1, 2, 2, 0, 0, 0), 15.75e9, 7 * 15.75e9 / 3),
    "": (NARROW, (), (0, 0), 31.5e9 / 2, 31.5e9 / 2),
    "could not be read": (switched("NVIDIA A100-SXM4-80GB", 2, 12), NO_LINKS, None, None, 31.5e9),
}
"""By a note on them: GPUs, calls that are denied, the first GPU's NVLinks, bytes/s of its port and of a link."""


@pytest.mark.parametrize("note", MACHINES)
def test_a_machine_is_drawn_with_its_links(monkeypatch, note):
    gpus, forbidden, nvlinks, port, bandwidth = MACHINES[note]
    nvml = plug_in(monkeypatch, gpus, forbidden)
    machine = attached().machine
    assert nvml.sessions == [1, 0], "NVML is to be shut down"
    assert [(gpu.name, gpu.memory) for gpu in machine] == [(gpu.name, gpu.memory) for gpu in gpus]
    assert machine[0].nvlinks == nvlinks and machine[0].pcie == (port and pytest.approx(port))
    drawn = cluster_of(machine)
    (node,) = drawn.cluster.nodes
    assert node.link_bandwidth == pytest.approx(bandwidth) and len(node.gpus) == len(gpus)
    assert any(note in told for told in drawn.notes)
    assert gpus[0].name != "NVIDIA H200" or set(node.gpus) == {gpu_types()["H200"].gpu()}


def test_a_container_has_links_to_the_gpus_that_it_has(monkeypatch):
    plug_in(monkeypatch, linked(V100, 8, CUBE)[:4])
    assert attached().machine[0].nvlinks == (0, 1, 1, 2)


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
    unknown = "'NVIDIA A100-SXM-64GB' with 64 GiB is not in the catalogue.*choose.*A100-80"
    assert re.search(unknown, refusal(cluster_of, [known, other]))
    drawn = cluster_of([known, other], "A100-80")
    assert [gpu.type for gpu in drawn.cluster.gpus] == ["H100", "A100-80"]
    assert [gpu.memory for gpu in drawn.cluster.gpus] == [gpu_types()["H100"].memory, 64 * GIB]
    assert "A100-SXM-64GB" in drawn.notes[0] and "A100-80" in drawn.notes[0]
    assert "no GPU type 'H9000'" in refusal(cluster_of, [other], "H9000")
    assert "no GPU on this machine" in refusal(cluster_of, [])
    host = {"memory": (), "cores": 2, "host_memory": 8 * GIB}
    assert Devices(gpus=(), **host).summary == "no GPU attached; 2 CPU cores, 8 GiB free"
    assert Devices(gpus=("A", "A", "B"), **host).summary == "2 × A, 1 × B, 2 CPU cores"


def test_the_stand_in_has_only_what_nvml_has(monkeypatch):
    import pynvml

    stand_in = plug_in(monkeypatch, [])
    asked = [name for name in dir(stand_in) if name.startswith(("nvml", "NVML"))]
    assert isinstance(stand_in, ModuleType) and len(asked) > 10
    assert all(hasattr(pynvml, name) for name in asked)

"""Where jobs of clusters go: what is refused, and what a launch is checked against."""

import sys
from dataclasses import replace

import pytest

from engine.catalogue import cluster_presets
from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch.places.destination import Kubernetes, Slurm, as_drawn, gpus_of
from engine.launch.preparation.place_checks import destination_checks
from engine.launch.running.torchx_application import app_of, dry_run
from tests.launch.launches_for_clusters import MODEL, SIZE, destination, launch_for


@pytest.mark.parametrize(
    ("scheduler", "field", "value", "word"),
    [
        ("slurm", "partition", "gpu\n#SBATCH --wrap=id", "partition"),
        ("slurm", "partition", "gpu\n", "partition"),
        ("slurm", "partition", "gpu;id", "partition"),
        ("slurm", "partition", "$(id)", "partition"),
        ("slurm", "partition", "gpu --uid=0", "partition"),
        ("slurm", "account", "a,b", "account"),
        ("slurm", "account", "-n", "account"),
        ("slurm", "image", "x --uid=0", "image"),
        ("slurm", "shared", "runs", "absolute"),
        ("slurm", "shared", "/runs/../etc", "absolute"),
        ("slurm", "shared", "/runs\n#SBATCH --wrap=id", "printed"),
        ("slurm", "shared", "/runs\\j", "change"),
        ("slurm", "shared", "/runs/${app_id}", "change"),
        ("kubernetes", "namespace", "A", "Kubernetes"),
        ("kubernetes", "namespace", "a.b", "Kubernetes"),
        ("kubernetes", "namespace", "a" * 64, "Kubernetes"),
        ("kubernetes", "queue", "a\nb: c", "Kubernetes"),
        ("kubernetes", "claim", "../x", "Kubernetes"),
        ("kubernetes", "claim", "", "Kubernetes"),
        ("kubernetes", "image", "sha256:0123", "push it there"),
        ("kubernetes", "image", "", "image"),
        ("kubernetes", "image", "a b", "image"),
        ("kubernetes", "seen_as", "/", "mounted"),
        ("kubernetes", "seen_as", "/a:b", "mounted"),
        ("kubernetes", "partition", "gpu", "partition"),
        ("slurm", "nodes", 0, "nodes"),
        ("slurm", "ranks_per_node", 5, "as many GPUs"),
        ("slurm", "gpu_memory", 0, "gpu_memory"),
        ("slurm", "memory_per_node", float("nan"), "memory_per_node"),
    ],
)
def test_what_no_cluster_takes_is_refused_in_one_line(tmp_path, scheduler, field, value, word):
    with pytest.raises(InputError) as refused:
        destination(scheduler, tmp_path, **{field: value})
    message = str(refused.value)
    assert message.isprintable() and word in message and message.startswith("test: ")


def test_a_container_cannot_have_every_folder(tmp_path):
    destination("slurm", tmp_path / "a,b:c")
    with pytest.raises(InputError, match="cannot be mounted"):
        destination("slurm", tmp_path / "a,b:c", image="switchyard:1")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("../run", "absolute"),
        ("/elsewhere", "shared folder"),
        ("a\nb", "printed"),
        ("a\\b", "change"),
        ("${app_id}", "change"),
        ("", "shared folder"),
    ],
)
def test_a_folder_that_the_job_would_not_see_is_refused(tmp_path, name, word):
    where = destination("slurm", tmp_path / "shared")
    with pytest.raises(InputError, match=word) as refused:
        dry_run(launch_for(where), tmp_path / "shared" / name)
    assert str(refused.value).isprintable()


def test_a_launch_for_other_devices_is_refused(tmp_path):
    where = destination("slurm", tmp_path)
    launch = launch_for(where)
    for other in (destination("slurm", tmp_path, nodes=1), destination("slurm", tmp_path, gpus=0, ranks_per_node=4)):
        with pytest.raises(InputError, match="8 ranks" if other.nodes == 1 else "nccl"):
            app_of(replace(launch, destination=other), tmp_path / "run")


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
        assert drawn["gpu_memory"] == min(memory) and all(
            part in {gpu.type for gpu in preset.cluster.gpus} for part in drawn["gpu"].split(" or ")
        )
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

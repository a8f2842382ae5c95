"""The check for machines with a GPU: its parts by machine, its message without a GPU, and that no check hides another."""

import json
import os
import shutil

import pytest
import torch

from engine.launch.places.devices import Accelerator, Devices
from tests.gpu import attached as looking
from tests.gpu import check
from tests.gpu.gemms import model_shapes
from tests.gpu.table import Finding, SkipError, needs
from tests.launch import nvml

GPU = Accelerator("NVIDIA H100 80GB HBM3", 80 * nvml.GIB)


def machine(gpus: int, seen: int | None = None) -> Devices:
    """A machine of which PyTorch can use so many GPUs, and the driver shows `seen`."""
    shown = (GPU,) * (gpus if seen is None else seen)
    return Devices((GPU.name,) * gpus, (GPU.memory,) * gpus, cores=8, host_memory=64 * nvml.GIB, machine=shown)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch, tmp_path):
    """This machine has none, whatever it is."""
    nvml.plug_in(monkeypatch, [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(looking, "DEV", tmp_path / "dev")
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, which=shutil.which: None if name == "nvidia-smi" else which(name))
    monkeypatch.setattr(check, "checks_for", lambda devices: pytest.fail("there is no GPU"))


def test_without_a_gpu_it_says_so_kindly(tmp_path, capsys, own_data_folder):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()  # the driver itself need not be a GPU
    assert check.main() == 0
    assert "no GPU here" in capsys.readouterr().out and not (own_data_folder / "gpu.json").exists()


def show(by: str, monkeypatch, folder) -> None:
    """Let GPUs be shown that PyTorch cannot use. folder: for files"""
    if by == "NVML":
        nvml.plug_in(monkeypatch, nvml.switched(GPU.name, 2, links=18))
    elif by == "file":
        (folder / "dev").mkdir()
        (folder / "dev" / "nvidia0").touch()
    else:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\necho 'GPU 0: {GPU.name} (UUID: GPU-1)'\n")
        program.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda name: str(program) if name == "nvidia-smi" else None)


SHOWN = {"NVML": f"NVML shows 2 × {GPU.name}", "file": "dev/nvidia0", "program": f"nvidia-smi shows GPU 0: {GPU.name}"}


@pytest.mark.parametrize(("by", "seen"), SHOWN.items())
def test_a_gpu_that_pytorch_cannot_use_fails(monkeypatch, tmp_path, capsys, by, seen):
    show(by, monkeypatch, tmp_path)
    assert check.main([f"--json={tmp_path / 'gpu.json'}"]) == 1
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL") and seen in line and f"PyTorch {torch.__version__}" in line
    assert last == f"0 ok, 1 FAIL, 0 skip; kept in {tmp_path / 'gpu.json'}"
    (row,) = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert row["result"] == "FAIL" and seen in row["text"]


def test_gpus_that_are_hidden_from_pytorch_are_named_with_what_hides_them(monkeypatch, capsys):
    show("NVML", monkeypatch, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check.main() == 1 and "CUDA_VISIBLE_DEVICES is ''" in capsys.readouterr().out


def test_every_check_has_its_own_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check, "attached", lambda: machine(1))
    folders, kept = [], tmp_path / "gpu.json"

    def good() -> list[Finding]:
        print("what a rank prints")
        folders.append(os.environ["SWITCHYARD_DATA"])
        return [Finding("3 ms", figures={"measured": 3e-3}), Finding("4 ms", "the other")]

    def broken() -> list[Finding]:
        print("the last words of a rank")
        raise ZeroDivisionError

    def elsewhere() -> list[Finding]:
        assert [row["name"] for row in json.loads(kept.read_text())["rows"]][-1] == "third", "kept as it goes"
        raise SkipError("not here")

    checks = {"first": broken, "second": good, "third": lambda: needs(False, "3 is not\n 4"), "fourth": elsewhere}
    before = os.environ["SWITCHYARD_DATA"]
    monkeypatch.setattr(check, "checks_for", lambda devices: checks)
    assert check.main(["--json", str(kept)]) == 1
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    rows = [["FAIL", "first", "ZeroDivisionError"], ["ok", "second", "3 ms"], ["ok", "second: the other", "4 ms"]]
    rows += [["FAIL", "third", "3 is not 4"], ["skip", "fourth", "not here"]]
    for line, (result, name, text) in zip(lines, rows, strict=False):
        assert line.startswith(result) and f"  {name}  " in line and line.endswith(f"  {text}")
    assert len(lines) == 6 and lines[-1].startswith("2 ok, 2 FAIL, 1 skip")
    assert "the last words of a rank" in printed.err and "what a rank prints" not in printed.err
    assert os.environ["SWITCHYARD_DATA"] == before != folders[0], "it leaves nothing in the data folder"
    whole = json.loads(kept.read_text())
    assert [[row["result"], row["name"], row["text"]] for row in whole["rows"]] == rows
    assert whole["rows"][1]["figures"] == {"measured": 3e-3} and whole["gpus"] == [GPU.name]
    assert whole["versions"]["torch"] == torch.__version__
    assert set(whole["versions"]) == {"python", "torch", "cuda", "nccl", "driver"}
    monkeypatch.setattr(check, "checks_for", lambda devices: {"second": good})
    assert check.main() == 0, "the table goes into the data folder"
    assert json.loads((tmp_path / "data" / "gpu.json").read_text())["rows"]


def test_a_table_that_cannot_be_kept_is_known_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        check.main(["--json", str(tmp_path / "nowhere" / "gpu.json")])
    assert end.value.code == 2 and "nowhere is not there" in capsys.readouterr().err


def test_machines_are_checked_with_every_number_of_their_gpus_and_one_is_shared_over_gloo(monkeypatch):
    monkeypatch.undo()
    alone, three = (check.checks_for(machine(gpus)) for gpus in (1, 3))
    counted = [f"{case}, {ranks}, NCCL" for ranks in ("1 rank", "2 ranks", "3 ranks") for case in check.CASES]
    one = counted[: len(check.CASES)]
    assert [name for name in alone if name.endswith("NCCL")] == [*one, "2 ranks and more, NCCL"]
    assert [name for name in three if name.endswith("NCCL")] == counted
    for checks in (alone, three):
        assert sum(name.endswith("4 ranks on one GPU, Gloo") for name in checks) == len(check.CASES)
    with pytest.raises(SkipError, match="one GPU here"):
        alone["2 ranks and more, NCCL"]()


def test_fewer_gpus_than_the_machine_has_are_a_fault_unless_somebody_hides_them(monkeypatch):
    monkeypatch.setattr(looking, "attached", lambda: machine(1, seen=2))
    monkeypatch.setattr(looking, "driver_version", lambda: "580.1")
    (row,) = check.tried("GPUs", looking.discovery, looking.Path(os.devnull))
    assert row.result == "FAIL" and "PyTorch can use 1 of them" in row.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (row,) = check.tried("GPUs", looking.discovery, looking.Path(os.devnull))
    assert row.result == "ok" and "driver 580.1" in row.text


def test_a_topology_is_left_out_without_nvidia_smi_and_shapes_are_those_of_the_catalogues_models():
    with pytest.raises(SkipError, match="no nvidia-smi"):
        looking.topology()
    shapes = model_shapes()
    assert (28672, 4096) in shapes and (4096, 14336) in shapes, "Mixtral's experts"
    assert (256, 7168) in shapes, "DeepSeek's router"

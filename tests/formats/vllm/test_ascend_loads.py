"""A tensor of expert loads, as vLLM-Ascend's script takes it."""

import zipfile

import numpy as np
import pytest
import torch

from engine.formats import identify, read_workload
from tests.formats.faults import refused


def saved(folder, tensor):
    torch.save(tensor, folder / "loads.pt")
    return folder / "loads.pt"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_counts_with_what_was_assumed(tmp_path, dtype):
    path = saved(tmp_path, torch.tensor([[0, 0, 0], [9, 2, 3]], dtype=dtype))
    assert identify(path).name == "torch-loads"
    load = read_workload(path)
    np.testing.assert_array_equal(load.load, [[9, 2, 3]])
    assert load.model_layers == (1,)
    assert [finding.code for finding in load.origin.findings] == ["assumed-counts"]


@pytest.mark.parametrize(
    ("tensor", "parts"),
    [
        (torch.ones(3), ("[layers, experts]", "[3]")),
        (torch.ones(2, 3, 4), ("[2, 3, 4]",)),
        (torch.ones(2, 3) > 0, ("bool",)),
        (torch.tensor([[1.0, -1.0]]), ("layer 0, expert 1",)),
        (torch.tensor([[0, 1, 1], [1, 0, 0]]), ("a placement",)),
        (torch.ones(1).expand(4000, 4000), ("more numbers than are stored",)),
    ],
)
def test_other_tensors(tmp_path, tensor, parts):
    refused(saved(tmp_path, tensor), *parts)


def test_other_things_that_torch_saves_are_not_taken_for_loads(tmp_path):
    assert "tensor of" not in refused(saved(tmp_path, {"a": torch.ones(2, 3)}))


def test_a_damaged_structure(tmp_path):
    """An operation that no unpickler knows (found by fuzzing)."""
    with zipfile.ZipFile(saved(tmp_path, torch.tensor([[9, 2, 3]]))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "damaged.pt", "w") as archive:
        for name, data in members.items():
            archive.writestr(
                name, data.replace(b"ctorch\nLongStorage\n", b"ctorch\nLongStorage\nb") if ".pkl" in name else data
            )
    refused(tmp_path / "damaged.pt", "is damaged")

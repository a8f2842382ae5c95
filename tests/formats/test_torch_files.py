"""What `torch.save` writes, read without calling anything in it."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch

from engine.errors import InputError
from engine.formats import identify, torch_files


def saved(folder, content, **options):
    path = folder / "file.pt"
    torch.save(content, path, **options)
    return path


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """The archive with its pickle changed: bytes to bytes."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)
    return path


def refused(path, *words):
    with pytest.raises(InputError) as caught:
        torch_files.load(path)
    assert str(caught.value).startswith(path.name)
    for word in words:
        assert word in str(caught.value)


def test_tensors_numbers_lists_and_none(tmp_path):
    content = {"a": torch.arange(3, dtype=torch.int32), "b": [1, 2.5, None, "x", (True,)], "c": {"d": torch.ones(2)}}
    loaded = torch_files.load(saved(tmp_path, content))
    assert loaded["b"] == content["b"]
    numbers = torch_files.array_of(tmp_path, loaded["a"], "a")
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [0, 1, 2]


def test_an_open_file(tmp_path):
    buffer = io.BytesIO()
    torch.save([1], buffer)
    assert torch_files.load(tmp_path / "elsewhere.pt", buffer) == [1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64, torch.float16, torch.bfloat16])
def test_every_kind_of_number(tmp_path, dtype):
    tensor = torch_files.load(saved(tmp_path, torch.tensor([0, 1], dtype=dtype)))
    assert torch_files.array_of(tmp_path, tensor, "").tolist() == [0, 1]


def test_a_tensor_of_more_numbers_than_are_stored(tmp_path):
    tensor = torch_files.load(saved(tmp_path, torch.zeros(1).expand(10**9, 10**9)))
    with pytest.raises(InputError, match="more numbers than are stored"):
        torch_files.array_of(tmp_path, tensor, "here")
    with pytest.raises(InputError, match="here: must be a tensor, not list"):
        torch_files.array_of(tmp_path, [1], "here")


def test_a_storage_that_claims_more_than_its_bytes(tmp_path):
    path = rewritten(
        saved(tmp_path, torch.arange(4, dtype=torch.int32)), lambda data: data.replace(b"K\x04t", b"J\x00\x00\x00\x10t")
    )
    refused(path, "damaged")


@pytest.mark.parametrize("content", [bytearray(3), torch.zeros(2).to_sparse(), torch.Size([1])])
def test_whatever_calls_more_is_refused(tmp_path, content):
    refused(saved(tmp_path, content), "holds more than tensors")


def test_a_pickle_that_runs_a_program_is_refused(tmp_path):
    path = rewritten(saved(tmp_path, {}), lambda data: b"cos\nsystem\n(S'true'\ntR.")
    refused(path, "os system")


def test_compressed_and_other_archives(tmp_path):
    refused(rewritten(saved(tmp_path, {}), bytes, zipfile.ZIP_DEFLATED), "is compressed")
    path = tmp_path / "other.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y")
    refused(path, "not what torch.save writes")


def test_limits(tmp_path, monkeypatch):
    path = saved(tmp_path, [torch.zeros(100), list(range(1000))])
    monkeypatch.setattr(torch_files, "MAX_PICKLE_BYTES", 1000)
    refused(path, "lists beside the tensors")
    monkeypatch.setattr(torch_files, "MAX_FILE_BYTES", 100)
    refused(path, "would unpack to more")


def test_files_before_version_1_6_are_bare_pickles(tmp_path):
    path = saved(tmp_path, {"logical_count": torch.ones(2)}, _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="Python pickle, which is never loaded"):
        identify(path)
    path.write_bytes(pickle.dumps({"logical_count": [1]}))
    with pytest.raises(InputError, match="Python pickle"):
        identify(path)

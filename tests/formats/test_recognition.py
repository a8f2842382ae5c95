"""What files are, by their content, and which of them are one recording."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import InputError
from engine.formats import identify, parts, read_workload
from engine.formats.format import BELONGS, Format
from engine.formats.known import FORMATS
from engine.formats.recognition import MOST_FILES

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
STATISTICS = {"logical_count": [[0, 0], [1, 2]]}


def written(path: Path, content: str | bytes | dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(content) if isinstance(content, dict) else content
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def torch_saved(content: dict) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def recording(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, experts=np.zeros((4, 2, 1), int))
    return path


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (STATISTICS, "sglang-statistics"),
        ("token,layer,expert\n0,0,1\n", "csv"),
        ({"nodes": []}, "cluster"),
        ({"name": "m", "experts": 2, "experts_per_token": 1, "d_model": 8}, "model"),
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "huggingface"),
        ({"name": "p", "placement": {}, "provenance": {}}, "plan"),
        ({"phase": "decode", "sequences": 1, "context": 1}, "serving-step"),
        ({"batch": 1, "sequence_length": 8, "heads": 2}, "training-step"),
        ({"schemaVersion": 1, "traceEvents": []}, "profiler-trace"),
        ({"name": "ours", "origin": "measured", "network": {"alpha": 1e-5, "beta": 1e-10}}, "cost-profile"),
        ({"name": "ours", "origin": "measured", "kind": "measured times"}, "measured-times"),
        ("# nThread 1 nGpus 8\n#       size         count      type\n#   out-of-place in-place\n", "nccl-tests"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n", "nvidia-topology"),
        ("operation,gpu,seconds\ngemm,H100,1\n", "measured-times-table"),
        ({"physical_to_logical_map": [[0, 1]]}, "engine-plan"),
        ("num_slots: 4\ninitial_global_assignments:\n  3: [0, 1, 2, 3]\n", "engine-plan"),
        ('{"record_type": "eplb_initial_mapping", "version": 1}\n', "engine-plan"),
        ("Expert,Node\n0,0\n", "exflow-plan"),
        ("[[1, 0, 2], [0, 1, 2]]", "engine-plan"),
        ("[[5, 0, 2], [0, 1, 9]]", "bare-list"),
        (torch_saved({"physical_to_logical_map": torch.zeros(1, 4, dtype=torch.int64)}), "engine-plan"),
        (torch_saved({"logical_count": torch.ones(1, 4, dtype=torch.int32)}), "sglang-statistics"),
    ],
)
def test_files_are_told_by_their_content(tmp_path, content, name):
    assert identify(written(tmp_path / "unnamed", content)).name == name


def test_every_sample_is_told():
    assert {identify(path).kind for path in SAMPLES.rglob("*.json")} == {"model", "cluster"}
    assert {identify(path).name for path in (SAMPLES / "tiny-moe").glob("*.npz")} == {"npz"}


def test_every_kind_belongs_somewhere_and_every_format_has_its_own_name():
    assert {format.kind for format in FORMATS} <= set(BELONGS)
    assert len({format.name for format in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00", "never loaded"),
        (b"\0\1\2\3", "binary file"),
        ("hello world", "text file that Switchyard cannot read"),
        ("notes, not tensors", "text file that Switchyard cannot read"),
        ({"a": 1, "b": 2}, "'a', 'b'"),
        ('{"a": ', r"not valid JSON \(Expecting value\); the file may be cut off"),
        ("\ufeffhello", "text file that"),
    ],
)
def test_what_nothing_reads_is_named(tmp_path, content, words):
    path = written(tmp_path / "file", content)
    with pytest.raises(InputError, match=words) as caught:
        identify(path)
    assert str(caught.value).startswith("file")


def test_what_is_no_recording_is_named_with_where_it_belongs(tmp_path):
    path = written(tmp_path / "cluster.json", {"nodes": []})
    with pytest.raises(InputError, match=r"is a cluster of the studio, not a recording; open it on the Cluster page"):
        read_workload(path)


@pytest.mark.parametrize("form", ["folder", "zip", "tar", "tar.gz"])
def test_folders_and_archives_are_the_files_in_them(tmp_path, form):
    inside, scratch = tmp_path / "inside", tmp_path / "scratch"
    scratch.mkdir()
    recording(inside / "deep" / "trace.npz")
    written(inside / "README.md", "What this is")
    written(inside / ".hidden.json", STATISTICS)
    packed = inside if form == "folder" else tmp_path / f"packed.{form}"
    if form == "zip":
        with zipfile.ZipFile(packed, "w") as archive:
            for path in inside.rglob("*"):
                archive.write(path, path.relative_to(inside))
    elif form != "folder":
        with tarfile.open(packed, "w:gz" if form == "tar.gz" else "w") as archive:
            archive.add(inside, "inside")
    (part,) = parts([packed], scratch)
    assert (part.format.name, part.name) == ("npz", "trace")
    assert read_workload(packed, scratch=scratch).tokens == 4


def test_names_that_climb_out_of_an_archive_are_left_out(tmp_path):
    scratch = tmp_path / "data" / "scratch"
    scratch.mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        for name in ("../../climbed.json", "/absolute.json", "..\\..\\climbed.json", "fine.json"):
            archive.writestr(name, json.dumps(STATISTICS))
    recognised = parts([tmp_path / "evil.zip"], scratch)
    assert all(path.is_relative_to(scratch) for part in recognised for path in part.paths)
    assert {path.name for path in tmp_path.rglob("*.json")} == {"fine.json", "absolute.json"}
    assert not list(tmp_path.glob("*.json"))


def test_archives_that_grow_too_large_are_refused(tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(MOST_FILES + 1):
            archive.writestr(f"{number}.json", "{}")
    with pytest.raises(InputError, match=r"many\.zip: holds more than 4,096 files"):
        parts([tmp_path / "many.zip"], scratch)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("large.csv", b"0" * 201 * 1024**2)
    with pytest.raises(InputError, match="200 MB in one"):
        parts([tmp_path / "bomb.zip"], scratch)


def test_several_recordings_are_not_taken_for_one(tmp_path):
    recording(tmp_path / "a.npz")
    written(tmp_path / "b.json", STATISTICS)
    with pytest.raises(InputError, match=r"2 recordings \(a and b\); give the files of one"):
        read_workload(tmp_path)


def test_files_of_one_recording_are_read_together(tmp_path, monkeypatch):
    def read(sources):
        return read_workload(recording(tmp_path / "joined.npz"), name=f"{sources[0].name} of {len(sources)}")

    ranks = Format(
        "ranks",
        "ranks",
        "routing",
        lambda glance: b"rank" in glance.head,
        read,
        lambda path: path.stem.rsplit("_", 1)[0],
    )
    monkeypatch.setattr("engine.formats.recognition.FORMATS", (ranks, *FORMATS))
    files = [written(tmp_path / f"{run}_{rank}.txt", "rank") for run in ("first", "second") for rank in (0, 1)]
    assert [(part.name, len(part.paths)) for part in parts(files)] == [("first", 2), ("second", 2)]
    assert read_workload(files[:2]).name == "first of 2"


def test_a_file_that_is_named_twice_is_one(tmp_path):
    path = recording(tmp_path / "trace.npz")
    (part,) = parts([path, path])
    assert part.paths == (path,)

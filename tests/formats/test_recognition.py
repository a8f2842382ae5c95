"""Recognition of files: formats, glances, sources, names of recordings, and foreign files."""

import json
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import formats
from engine.formats import identify, members, parts, read_cluster, read_model, read_plan, read_workload, split_member
from engine.formats.format import BELONGS, Glance
from engine.formats.known import FORMATS
from engine.formats.recognition import STRANGERS
from engine.formats.source import without_ids
from tests.cases.files import refused, saver
from tests.cases.fuzzing import answer_or_one_line, any_input
from tests.cases.plan_files import saved_tensors
from tests.cases.refusals import refusal

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
STATISTICS = {"logical_count": [[0, 0], [1, 2]]}
ROUTING = "token,layer,expert\n0,0,1\n"
written = saver("file")


def recording(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, experts=np.zeros((4, 2, 1), int))
    return path


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (ROUTING, "csv"),
        ({"schemaVersion": 1, "traceEvents": []}, "profiler-trace"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n", "nvidia-topology"),
        ("operation,gpu,seconds\ngemm,H100,1\n", "measured-times-table"),
        ({"physical_to_logical_map": [[0, 1]]}, "engine-plan"),
        ("num_slots: 4\ninitial_global_assignments:\n  3: [0, 1, 2, 3]\n", "engine-plan"),
        ('{"record_type": "eplb_initial_mapping", "version": 1}\n', "engine-plan"),
        ("[[1, 0, 2], [0, 1, 2]]", "engine-plan"),
        (saved_tensors({"physical_to_logical_map": torch.zeros(1, 4, dtype=torch.int64)}), "engine-plan"),
        (saved_tensors({"logical_count": torch.ones(1, 4, dtype=torch.int32)}), "sglang-statistics"),
    ],
)
def test_files_are_told_by_their_content(tmp_path, content, name):
    assert identify(written(tmp_path, content)).name == name


def test_every_sample_is_told_and_every_kind_belongs_somewhere():
    assert {identify(path).kind for path in SAMPLES.rglob("*.json")} == {"model", "cluster"}
    assert {identify(path).name for path in (SAMPLES / "tiny-moe").glob("*.npz")} == {"npz"}
    assert {format.kind for format in FORMATS} <= set(BELONGS)
    assert len({format.name for format in FORMATS}) == len(FORMATS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00", "never loaded"),
        (b"\0\1\2\3", "binary file"),
        (
            "0  1  2\n3  4  5\n",
            "a table of routing, loads or traffic: it has numbers, but not the names of columns and commas; save it",
        ),
        ("layer 2 expert 3 got 120 tokens", "it has the names of columns and numbers, but not commas; save it as CSV"),
        (
            "links: NV18 NV18, NV18 X",
            "nearest to the links of one machine's GPUs: it has rows of links, but not a head with every",
        ),
        (
            "size algbw busbw\n",
            "nearest to the output of nccl-tests: it has the head of its table, but not lines of ranks and rows",
        ),
        (
            "[INFO] [rank 0] sglang is up, 3 nodes",
            "nearest to a log of a serving engine: it has the engine, but not experts of",
        ),
        ("[2026-09-01 10:00] ready", "text file that Switchyard cannot read; docs/formats.md"),
        ("[1, 2", "not valid JSON"),
        ("hello world", "text file that Switchyard cannot read"),
        ({"a": 1, "b": 2}, "'a', 'b'"),
        ('{"a": ', r"not valid JSON (Expecting value); the file may be cut off"),
        ("\ufeffhello", "text file that"),
    ],
)
def test_a_file_that_nothing_reads_is_named(tmp_path, content, words):
    refused(written(tmp_path, content), words, read=identify)


def test_what_is_no_recording_is_named_with_where_it_belongs(tmp_path):
    path = written(tmp_path, {"nodes": []}, "cluster.json")
    refused(path, "is a cluster of the studio, not a recording; open it on the Cluster page")
    path = written(tmp_path, "Expert,Node\n0,0\n1,1\n", "solution.csv")
    refused(path, "is an ExFlow placement, not a recording; ", "Optimise page as what is deployed now")
    assert identify(path).kind == "plan"


@pytest.mark.parametrize("form", ["folder", "zip", "tar", "tar.gz"])
def test_folders_and_archives_are_the_files_in_them(tmp_path, form):
    inside, scratch = tmp_path / "inside", tmp_path / "scratch"
    scratch.mkdir()
    recording(inside / "deep" / "trace.npz")
    written(inside, "What this is", "README.md")
    written(inside, STATISTICS, ".hidden.json")
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


def test_archives_that_grow_too_large_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(formats.recognition, "MOST_FILES", 8)
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for number in range(9):
            archive.writestr(f"{number}.json", "{}")
    assert refusal(parts, [tmp_path / "many.zip"], tmp_path).startswith("many.zip: holds more than 8 files")
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w") as archive:
        archive.writestr("large.csv", b"0")
        archive.getinfo("large.csv").file_size = 201 * 1024**2  # as the archive's directory tells; nothing is unpacked
    assert "200 MB in one" in refusal(parts, [tmp_path / "bomb.zip"], tmp_path)


def test_several_recordings_and_no_file_are_not_taken_for_one(tmp_path):
    recording(tmp_path / "a.npz")
    written(tmp_path, STATISTICS, "b.json")
    assert "2 recordings (a and b); give the files of one" in refusal(read_workload, tmp_path)
    (part,) = parts([tmp_path / "a.npz", tmp_path / "a.npz"])  # named twice
    assert part.paths == (tmp_path / "a.npz",)
    refused(tmp_path / "none.csv", "no such file")
    (tmp_path / "folder.csv").mkdir()
    refused(tmp_path / "folder.csv", "is an empty folder")


def look_at(folder: Path, text: bytes) -> Glance:
    return Glance(written(folder, text))


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        *((b'\n {"a": [1]}' + after, True) for after in (b"", b"\n", b" \n\n")),
        *((b'{"a": [1]}' + after, False) for after in (b'\n{"a": 2}\n', b"\n\n3", b"\n" * 70_000 + b"x")),
    ],
)
def test_one_object_on_a_line_is_the_whole_file_unless_others_follow(tmp_path, text, whole):
    look = look_at(tmp_path, text)
    assert look.record == {"a": [1]}
    assert (look.json, look.keys) == (({"a": [1]}, {"a"}) if whole else (None, frozenset()))


def test_objects_over_several_lines_or_too_long_a_line_and_lists_of_ids(tmp_path, monkeypatch):
    look = look_at(tmp_path, b'{\n"a": {}\n}\n')
    assert (look.record, look.json) == ({}, {"a": {}})
    monkeypatch.setattr(formats.number_lists, "SHORTEST", 0)
    for text in (b'{"topk_experts": [[1, 2]]}', b'{\n"topk_experts": [[1, 2]]}'):
        look = look_at(tmp_path, text)
        assert isinstance(look.json["topk_experts"], np.ndarray)
        assert look.json["topk_experts"].tolist() == [[1, 2]]
    monkeypatch.setattr(formats.format, "MAX_LINE_BYTES", 12)
    look = look_at(tmp_path, b'{"a": {"b": {}}}')
    assert look.first_line == '{"a": {"b":'
    assert (look.record, look.json) == ({}, {"a": {"b": {}}})


EXTENSIONS = (".npz", ".npy", ".csv", ".parquet", ".json")
BEGINNINGS = (
    *(b"", b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00\x46\x00{'descr': '<i8', ", b"PAR1"),
    *(b"token,layer,expert\n", b"src,dst,bytes\n", b"expert_0,expert_1\n", b"1,2\n", b'{"logical_count":'),
    *(b"# Collective test starting:", b'{"traceEvents": [', b"#  Rank  0 ", b"\x1f\x8b"),
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"\n\n"),
)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_empty_and_too_large_a_file(tmp_path, extension):
    path = written(tmp_path, "", f"trace{extension}")
    refused(path, "empty")
    with path.open("wb") as file:
        file.truncate(300 * 1024**2)
    refused(path, "300 MB", "200 MB", "cut the recording")


@pytest.mark.parametrize("extension", [".npz", ".npy", ".parquet", ".log", ""])
def test_content_counts_not_the_name(tmp_path, extension):
    path = written(tmp_path, ROUTING, f"trace{extension}")
    assert read_workload(path).experts.tolist() == [[[1]]]
    with path.open("wb") as file:
        np.save(file, np.zeros((3, 2), int))
    assert read_workload(path).experts.shape == (3, 2, 1)
    if extension in EXTENSIONS:
        refused(written(tmp_path, b"\0\1\2\3", f"trace{extension}"), "is not", extension)


def test_utf16_text_and_line_ends_that_stay_out_of_messages(tmp_path):
    refused(written(tmp_path, ROUTING.encode("utf-16"), "trace.csv"), "UTF-8")
    refusal(read_workload, tmp_path / "a\nb.csv")
    refused(written(tmp_path, r'{"name": "x", "nodes": [], "a\nb": 1}', "cluster.json"), read=read_cluster)


def test_members_by_name(tmp_path):
    assert split_member("a/b.npz::intent") == (Path("a/b.npz"), "intent")
    assert split_member("a/b.npz") == (Path("a/b.npz"), None)
    for text in ("b.npz::", "::intent"):
        refusal(split_member, text)
    path = written(tmp_path, ROUTING)
    refused(path, "one workload", member="intent")
    assert members(path) == ()


@given(
    st.sampled_from(EXTENSIONS),
    st.sampled_from(BEGINNINGS),
    st.binary(max_size=300) | st.text('0123456789,.-eE\n" \r[]{}:nai', max_size=200).map(str.encode),
    st.sampled_from((b"", b"PAR1")),
)
@any_input
def test_random_bytes_parse_or_are_refused(tmp_path, extension, beginning, middle, end):
    path = written(tmp_path, beginning + middle + end, f"fuzz{extension}")
    for read in (
        read_workload,
        formats.read_costs,
        members,
        *((read_cluster, read_model, read_plan) if extension == ".json" else ()),
    ):
        answer = answer_or_one_line(lambda read=read: read(path))
        assert not isinstance(answer, str) or answer.startswith(path.name)


@pytest.mark.parametrize("limit", ["MAX_KEYS", "MAX_VALUES"])
def test_more_parts_than_memory_may_hold(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(formats.source, limit, 2)
    refused(written(tmp_path, '{"a": 1, "b": 2, "c": [3, 4]}', "cluster.json"), "has more than 2", read=read_cluster)


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (("routes-layer3.jsonl", "routes-layer12.jsonl"), "routes-layer#.jsonl"),
        (("550e8400-e29b-41d4-a716-446655440000.npz", "0b9c1f6e-03aa-4c8e-9d7f-b1e1a2c3d4e5.npz"), "#.npz"),
        (("chatcmpl-8f3adeadbeefcafe0123456789ab.json", f"chatcmpl-{'0' * 28}.json"), "chatcmpl-#.json"),
        (("cmpl-AbC123xYzQrS.json", "cmpl-9ZZtop0aaaaBB.json"), "cmpl-#.json"),
        (("step_100_rank0.npz", "step_20_rank13.npz"), "step_#_rank#.npz"),
    ],
)
def test_files_of_one_recording(names, common):
    assert {without_ids(Path(name)) for name in names} == {common}


def test_other_words_are_other_recordings():
    names = ("code.npz", "prose.npz", "deepseekv3-code.npz", "qwen3-code.npz", "beef.npz", "conversation.npz")
    assert len({without_ids(Path(name)) for name in names}) == len(names)


INDEX = {"metadata": {"total_size": 1}, "weight_map": {"model.layers.0.mlp.gate.weight": "model-00001.safetensors"}}
HEADER = json.dumps({"model.embed_tokens.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
FILES = {
    "tokenizer.json": ({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}}}, "a tokenizer"),
    "tokenizer_config.json": ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>"}, "a tokenizer"),
    "model.safetensors.index.json": (INDEX, "the index of a checkpoint"),
    "generation_config.json": ({"eos_token_id": 1, "transformers_version": "4.46.3"}, "a generation_config.json"),
    "model.safetensors": (struct.pack("<Q", len(HEADER)) + HEADER + b"\0\0", "weights of a model"),
    "router_state_rank0.pt": (saved_tensors({("decoder", None, 0): {"weight": torch.ones(2)}}), "a file of torch.save"),
    "model.gguf": (b"GGUF\x03\0\0\0" + bytes(64), "GGUF"),
    "report.nsys-rep": (b"\x0a\0NVIDIA" + bytes(64), "Nsight Systems"),
    "report.sqlite": (b"SQLite format 3\0" + bytes(64) + b"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL", "Nsight Systems"),
    "mlflow.db": (b"SQLite format 3\0" + bytes(64), "a database"),
    "trace.json": ([{"ph": "X", "pid": 1, "ts": 1, "dur": 2, "name": "step"}], "a Chrome trace"),
    "vllm.log": (
        b"INFO 11-23 12:00:00 [loggers.py:111] Engine 000: Avg prompt throughput: 12.0 tokens/s, Running: 1 reqs\n",
        "a log of vLLM",
    ),
    "eplb.log": (
        b"INFO 09-01 10:05:00 [eplb_state.py:500] EPLB step: avg_tokens=1.00, max_tokens=3, balancedness=0.3413\n",
        "EPLB's balancedness, but neither routing nor the experts",
    ),
    "npu.txt": ("+-----+\n| npu-smi 24.1.rc2   Version: 24.1.rc2 |\n", "the overview of npu-smi"),
    "amd.txt": ("+-----+\n| AMD-SMI 25.3.0   amdgpu version: 6.12 |\n", "of AMD's tools, but not the links"),
    "hccl.log": ("data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s): |\n", "the output of HCCL's tests"),
    "ib.txt": ("CA 'mlx5_0'\n\tCA type: MT4129\n", "a single network card"),
    "docker.log": ('{"log": "# size count\\n", "stream": "stdout"}\n' * 2, "a log in JSON, as Docker keeps it"),
    "balance.log": ("[2026-11-23 12:00:00 TP0] [Expert Balancedness] forward_pass_id=0\n", "a log of SGLang with its"),
    "hccl.json": ({"version": "1.0", "server_count": "1", "server_list": []}, "a table of addresses of Ascend NPUs"),
    "hccn.conf": ("address_0=10.0.0.1\nnetmask_0=255.255.255.0\n", "a table of addresses of Ascend NPUs"),
    "nvidia-smi.txt": (
        "Thu Nov 26\n| NVIDIA-SMI 550.54   Driver Version: 550.54 |\n| MIG devices: |\n",
        "the overview of nvidia-smi",
    ),
    "sglang.log": (
        b"[2026-11-23 12:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 6, #cached-token: 0\n",
        "a log of SGLang",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_it_is_named_with_what_to_do(tmp_path, name):
    content, named = FILES[name]
    said = refused(written(tmp_path, content, name), named)
    assert said.startswith(f"{name}: is ") and "Switchyard" not in said
    assert "; " in said and len(said) < 300


def test_it_is_told_from_a_model(tmp_path):
    for known in STRANGERS:
        assert any(named in known.is_ for _, named in FILES.values()), known.is_
    config = {"model_type": "mixtral", "transformers_version": "4.46.3", "num_local_experts": 8}
    assert identify(written(tmp_path, config, "config.json")).kind == "model"

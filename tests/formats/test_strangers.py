"""Well-known files that are no recordings are named, with what to bring instead."""

import json
import struct

import pytest

from engine.errors import InputError
from engine.formats import identify, read_workload
from engine.formats.recognition import STRANGERS

INDEX = {"metadata": {"total_size": 1}, "weight_map": {"model.layers.0.mlp.gate.weight": "model-00001.safetensors"}}
HEADER = json.dumps({"model.embed_tokens.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}).encode()
FILES = {
    "tokenizer.json": ({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}}}, "a tokenizer"),
    "tokenizer_config.json": ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>"}, "a tokenizer"),
    "model.safetensors.index.json": (INDEX, "the index of a checkpoint"),
    "generation_config.json": ({"eos_token_id": 1, "transformers_version": "4.46.3"}, "a generation_config.json"),
    "model.safetensors": (struct.pack("<Q", len(HEADER)) + HEADER + b"\0\0", "weights of a model"),
    "model.gguf": (b"GGUF\x03\0\0\0" + bytes(64), "GGUF"),
    "report.nsys-rep": (b"\x0a\0NVIDIA" + bytes(64), "Nsight Systems"),
    "report.sqlite": (b"SQLite format 3\0" + bytes(64) + b"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL", "Nsight Systems"),
    "mlflow.db": (b"SQLite format 3\0" + bytes(64), "a database"),
    "trace.json": ([{"ph": "X", "pid": 1, "ts": 1, "dur": 2, "name": "step"}], "a Chrome trace"),
    "vllm.log": (
        b"INFO 11-23 12:00:00 [loggers.py:111] Engine 000: Avg prompt throughput: 12.0 tokens/s, Running: 1 reqs\n",
        "a log of vLLM",
    ),
    "sglang.log": (
        b"[2026-11-23 12:00:00 TP0] Prefill batch. #new-seq: 1, #new-token: 6, #cached-token: 0\n",
        "a log of SGLang",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_it_is_named_with_what_to_do(tmp_path, name):
    content, named = FILES[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(InputError) as refused:
        read_workload(path)
    said = str(refused.value)
    assert said.startswith(f"{name}: is ") and named in said and "Switchyard" not in said
    assert "; " in said and "\n" not in said and len(said) < 300


def test_every_one_has_a_file_above(tmp_path):
    for known in STRANGERS:
        assert any(named in known.is_ for _, named in FILES.values()), known.is_


def test_a_placement_of_exflow_is_named(tmp_path):
    path = tmp_path / "solution.csv"
    path.write_text("Expert,Node\n0,0\n1,1\n")
    with pytest.raises(
        InputError, match=r"is an ExFlow placement, not a recording; .*Optimise page as what is deployed now"
    ):
        read_workload(path)
    assert identify(path).kind == "plan"


def test_a_config_json_stays_a_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mixtral", "transformers_version": "4.46.3", "num_local_experts": 8}))
    assert identify(path).kind == "model"

"""Routing logs of vLLM forks: a layer a file, a line a token."""

import json
from pathlib import Path

import pytest

from engine.formats import identify, read_workload
from engine.model import MoEModel
from tests.formats.faults import refused

# Two forward passes: a prompt of three tokens, then one generated token.
IDX = [0, 1, 2, 0]
CHOICES = {0: [[5, 1], [2, 0], [7, 3], [4, 6]], 3: [[0, 1], [1, 2], [2, 3], [3, 4]]}


def meta(**more: object) -> dict:
    return {"type": "meta", "model_id": "m", "vllm_version": "0.11", "device": "cuda", "seed": None, "top_k": 2} | more


def routes(layer: int, choices: list, idx: list = IDX) -> list[dict]:
    return [
        {
            "type": "route",
            "req_id": f"r{token // 3}",
            "token_idx": place,
            "layer": layer,
            "topk_ids": ids,
            "topk_weights": [0.75, 0.25],
        }
        for token, (place, ids) in enumerate(zip(idx, choices, strict=True))
    ]


def saved(folder: Path, records: list[dict], name: str = "routes-layer0.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def logged(folder: Path, layer: int, **more: object) -> Path:
    return saved(
        folder, [meta(layers_logged=[layer], **more), *routes(layer, CHOICES[layer])], f"routes-layer{layer}.jsonl"
    )


def codes(trace) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in trace.origin.findings]


def test_one_layer(tmp_path):
    path = logged(tmp_path, 0, num_experts=16)
    assert identify(path).name == "route-log"
    trace = read_workload(path)
    assert trace.experts.tolist() == [[ids] for ids in CHOICES[0]]
    assert (trace.num_experts, trace.sequence, trace.model_layers) == (16, None, None)
    assert codes(trace) == [("layers-logged", "ok")]
    assert trace.origin.findings[0].message.startswith("Layer 0 was logged")


def test_files_are_layers_of_one_recording(tmp_path):
    for layer in (3, 0):
        logged(tmp_path, layer)
    trace = read_workload(tmp_path)
    assert trace.name == "routes-layer"
    assert trace.experts.tolist() == [list(token) for token in zip(CHOICES[0], CHOICES[3], strict=True)]
    assert codes(trace) == [("layers-logged", "ok"), ("layers-of-several-runs", "warning")]
    assert "2 layers were logged: 0, 3" in trace.origin.findings[0].message


def test_layers_together_in_one_file(tmp_path):
    records = [record for pair in zip(routes(1, CHOICES[0]), routes(0, CHOICES[3]), strict=True) for record in pair]
    trace = read_workload(saved(tmp_path, [meta(), *records]))
    assert trace.experts[:, 1].tolist() == CHOICES[0]
    assert codes(trace) == [("layers-logged", "ok")]


def test_layers_of_other_passes(tmp_path):
    logged(tmp_path, 0)
    saved(tmp_path, [meta(), *routes(3, CHOICES[3], [0, 1, 0, 1])], "routes-layer3.jsonl")
    finding = read_workload(tmp_path).origin.findings[1]
    assert (finding.code, finding.severity) == ("layers-not-aligned", "error")
    assert (finding.rows, finding.layers) == ((2, 4), (1,))


@pytest.mark.parametrize(
    ("dense", "numbers"),
    [((0, 1, 2), (3,)), ((0,), (1, 4)), ((), (0, 3))],
    ids=["decoder layers", "MoE layers", "none dense"],
)
def test_numbers_of_layers(tmp_path, dense, numbers):
    """A number beyond the MoE layers, or of a dense one, shows how layers were counted."""
    layers = (3,) if len(dense) == 3 else (0, 3)
    model = MoEModel(name="m", layers=5, dense_layers=dense, experts=8, experts_per_token=2, d_model=8, d_ff=8)
    paths = [logged(tmp_path, layer) for layer in layers]
    assert read_workload(paths, model=model).model_layers == numbers


def test_lines_between_and_blank_ones(tmp_path):
    path = saved(tmp_path, [meta(), *routes(0, CHOICES[0])])
    path.write_text(path.read_text().replace("\n", '\n\n{"type": "flush"}\n', 2))
    assert read_workload(path).tokens == 4


def test_numbers_that_pyarrow_does_not_read_but_python_does(tmp_path):
    records = routes(0, CHOICES[0])
    path = saved(tmp_path, [meta(seed=1), *records])
    path.write_text(path.read_text().replace('"token_idx": 1,', '"token_idx": 1, "token_idx": 1,'))
    assert read_workload(path).experts[:, 0].tolist() == CHOICES[0]


def with_ids(ids: object) -> list[dict]:
    records = [meta(), *routes(0, CHOICES[0])]
    records[2]["topk_ids"] = ids
    return records


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        ([meta()], ("no lines of type 'route'",)),
        (with_ids([1]), ("line 3", "has 1 experts, the first line 2")),
        (with_ids(None), ("line 3", "has 0 experts")),
        (with_ids([1, 40000]), ("line 3", "expert 40000")),
        (with_ids([1, -2]), ("line 3", "expert -2")),
        (with_ids([1, None]), ("line 3", "expert None")),
        (with_ids([1, "2"]), ("line 3", "'topk_ids' is '[1, '2']'", "list of whole numbers")),
        (with_ids([1, 1.5]), ("line 3", "'topk_ids'")),
        (with_ids(7), ("line 3", "'topk_ids' is '7'")),
        (with_ids([1, 2**70]), ("line 3", "'topk_ids'")),
        ([meta(top_k=4), *routes(0, CHOICES[0])], ("top_k is 4",)),
        ([meta(), *routes(-1, CHOICES[0])], ("count from 0", "'-1'")),
        ([meta(), *(record | {"layer": None} for record in routes(0, CHOICES[0]))], ("line 2", "'layer'")),
        (
            [meta(), *(record | {"token_idx": "0"} for record in routes(0, CHOICES[0]))],
            ("line 2", "'token_idx'", "whole number"),
        ),
        ([meta(), *routes(0, [[], [], [], []])], ("line 2", "1 … 64")),
    ],
)
def test_bad_logs(tmp_path, records, parts):
    refused(saved(tmp_path, records), *parts)


def test_a_line_that_was_cut_short(tmp_path):
    path = saved(tmp_path, [meta(), *routes(0, CHOICES[0])])
    path.write_text(path.read_text()[:-20])
    refused(path, "line 5", "was cut short")


def test_layers_with_other_numbers_of_tokens(tmp_path):
    paths = [logged(tmp_path, 0), saved(tmp_path, [meta(), *routes(3, CHOICES[3][:3], IDX[:3])], "routes-layer3.jsonl")]
    with pytest.raises(
        ValueError, match=r"routes-layer3.jsonl: has 3 tokens .* layer 3, but layer 0 \(routes-layer0.jsonl\) 4"
    ):
        read_workload(paths)


def test_one_layer_twice(tmp_path):
    paths = [logged(tmp_path, 0), saved(tmp_path, [meta(), *routes(0, CHOICES[0])], "routes-layer1.jsonl")]
    with pytest.raises(ValueError, match=r"routes-layer1.jsonl: holds layer 0, and so does routes-layer0.jsonl"):
        read_workload(paths)

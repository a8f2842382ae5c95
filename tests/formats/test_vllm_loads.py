"""Expert loads of vLLM and vLLM-Ascend, and the routing logs of its forks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import check_recording, identify, read_workload
from engine.formats.step_spans import StepSpans
from engine.model import MoEModel
from tests.cases.examples import examples
from tests.cases.files import json_lines, refused, saver
from tests.cases.plan_files import saved_tensors, with_pickle
from tests.cases.recordings import holds
from tests.cases.refusals import refusal
from tests.cases.sglang import codes
from tests.cases.vllm import FIRST, META, MOVED, ROUTED, ROUTED_AT, SECOND, route_meta, routes, stats

saved_text = saver("stats.jsonl")


def saved(folder: Path, *records: dict, name: str = "stats.jsonl") -> Path:
    return saved_text(folder, json_lines(records), name)


@pytest.mark.parametrize("form", ["older", "newer"])
def test_both_forms(tmp_path, form):
    records = [stats(100, FIRST), stats(200, SECOND)]
    records = [META, *records] if form == "newer" else [record | {"num_ranks": 2} for record in records]
    path = saved(tmp_path, *records)
    assert identify(path).name == "vllm-eplb-loads"
    load = read_workload(path)
    holds(load, by_step=[[[12, 1, 5], [1, 11, 2]], [[5, 0, 0], [7, 5, 0]]], load=[[17, 1, 5], [8, 16, 2]], model_layers=(0, 1))
    holds(load, codes=[])
    model = MoEModel(name="m", layers=3, dense_layers=(0,), experts=3, experts_per_token=1, d_model=8, d_ff=8)
    assert read_workload(path, model=model).model_layers == (1, 2)  # MoE layers of the open model


def test_every_line_is_folded_by_its_own_map(tmp_path):
    load = read_workload(saved(tmp_path, stats(1, FIRST), stats(2, FIRST, MOVED), stats(3, FIRST, MOVED), stats(4, FIRST)))
    np.testing.assert_array_equal(load.by_step[:, 1], [[1, 11, 2], [1, 8, 5], [1, 8, 5], [1, 11, 2]])
    (finding,) = load.origin.findings
    assert (finding.code, finding.layers) == ("balancer-moved", (1,))
    assert "2 times, first before step 2" in finding.message


def test_markers_are_left_out_with_a_note(tmp_path):
    marks = {"record_type": "session_metadata", "argv": ["vllm"]}, {"record_type": "bench_run_start", "run_index": 0}
    (note,) = read_workload(saved(tmp_path, *marks, META, marks[1], stats(1, FIRST))).origin.findings
    assert (note.code, note.severity) == ("other-records", "ok")
    assert "'bench_run_start' (2), 'session_metadata' (1)" in note.message
    (note,) = read_workload(saved(tmp_path, stats(1, FIRST), {"record_type": "eplb_hints"})).origin.findings
    assert note.severity == "warning"
    (note,) = read_workload(saved(tmp_path, stats(1, FIRST), {"record_type": "\x1b[2J\n\ud800"})).origin.findings
    assert "'\ufffd[2J \ufffd' (1)" in note.message


def test_counts_of_idle_lines_restarts_and_copies(tmp_path):
    load = read_workload(saved(tmp_path, stats(5, FIRST), stats(6, [[0] * 4] * 2), stats(1, SECOND)))
    assert len(load.by_step) == 2
    assert codes(load) == ["steps-restart", "idle-steps"]
    counts = np.random.default_rng(1).integers(1, 500, (2, 64))
    identity = [list(range(64))] * 2
    for recorded, copies in ((counts * 8, True), (counts, False), (np.full((2, 64), 8), False)):
        checked = check_recording(read_workload(saved(tmp_path, stats(1, recorded.tolist(), identity))))
        assert ("divide-by-copies" in [finding.remedy for finding in checked]) == copies


@given(st.integers(1, 300), st.integers(0, 2**32 - 1))
@settings(max_examples=examples(30), deadline=None)
def test_spans_keep_every_step_in_order(steps, seed):
    loads = np.random.default_rng(seed).integers(0, 9, (steps, 2, 3))
    spans = StepSpans(2, 3)
    for load in loads:
        spans.add(load)
    if steps == 1:
        assert spans.by_step is None
        return
    width = 1
    while width * 64 < steps:
        width *= 2
    np.testing.assert_array_equal(spans.by_step, [loads[at : at + width].sum(axis=0) for at in range(0, steps, width)])


def test_no_spans_of_huge_loads():
    spans = StepSpans(1000, 10_000)
    spans.add(np.zeros((1000, 10_000)))
    assert spans.by_step is None


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        ([META], ("no eplb_load_stats line",)),
        ([stats(1, [[0] * 4] * 2)], ("no eplb_load_stats line with any tokens",)),
        ([stats(1, FIRST), META], ("line 2", "as the first line")),
        ([META | {"num_redundant_experts": 2}, stats(1, FIRST)], ("line 2", "3 experts on 4 slots", "2 of them are")),
        ([stats("one", FIRST)], ("line 1", "'step'", "'one'")),
        ([stats(1, FIRST[0])], ("line 1", "'expert_load'", "[layers][slots]")),
        ([stats(1, [["1", 2]])], ("'expert_load', lists of numbers",)),
        ([stats(1, [[10**400, 2, 3, 4]] * 2)], ("'expert_load', lists of numbers",)),
        ([stats(1, [[1, -2, 3, 4]] * 2)], ("line 1, expert_load, layer 0, slot 1", "-2")),
        ([stats(1, FIRST, [[0, 1, 2, 4], [0, 1, 2, 3]])], ("line 1, p2l_map, layer 0, slot 3", "expert 4")),
        ([stats(1, FIRST, [[0, 1, 2]] * 2)], ("[2, 4]", "[2, 3]")),
        ([stats(1, FIRST, None)], ("line 1", "needs 'p2l_map'")),
        ([stats(1, FIRST), stats(2, [[1, 2]], [[0, 1]])], ("step 2", "[1, 2]", "[2, 3]")),
    ],
)
def test_bad_files(tmp_path, records, parts):
    refused(saved(tmp_path, *records), *parts)


def test_a_line_that_was_cut_when_the_server_stopped_and_another_models_loads(tmp_path):
    path = saved(tmp_path, META, stats(1, FIRST))
    refused(path, "3 experts", "model has 4", num_experts=4)
    refused(saved_text(tmp_path, path.read_text() + '{"record_type": "eplb_load_st'), "line 3", "was cut short")


def saved_loads(folder, tensor):
    torch.save(tensor, folder / "loads.pt")
    return folder / "loads.pt"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.bfloat16])
def test_counts_with_what_was_assumed(tmp_path, dtype):
    path = saved_loads(tmp_path, torch.tensor([[0, 0, 0], [9, 2, 3]], dtype=dtype))
    assert identify(path).name == "torch-loads"
    holds(read_workload(path), load=[[9, 2, 3]], model_layers=(1,), codes=["assumed-counts"])


@pytest.mark.parametrize(
    ("tensor", "parts"),
    [
        (torch.ones(2, 3, 4), ("[2, 3, 4]",)),
        (torch.ones(2, 3) > 0, ("bool",)),
        (torch.tensor([[1.0, -1.0]]), ("layer 0, expert 1",)),
        (torch.tensor([[0, 1, 1], [1, 0, 0]]), ("a placement",)),
    ],
)
def test_other_tensors(tmp_path, tensor, parts):
    refused(saved_loads(tmp_path, tensor), *parts)


def test_other_things_that_torch_saves_and_a_damaged_structure(tmp_path):
    assert "tensor of" not in refused(saved_loads(tmp_path, {"a": torch.ones(2, 3)}))
    # An operation that no unpickler knows (found by fuzzing).
    data = saved_tensors(torch.tensor([[9, 2, 3]]))
    unknown = with_pickle(data, lambda pickled: pickled.replace(b"ctorch\nLongStorage\n", b"ctorch\nLongStorage\nb"))
    refused(saved_text(tmp_path, unknown, "damaged.pt"), "is damaged")


def saved_routes(folder: Path, records: list[dict], name: str = "routes-layer0.jsonl") -> Path:
    return saved(folder, *records, name=name)


def logged(folder: Path, layer: int, **more: object) -> Path:
    records = [route_meta(layers_logged=[layer], **more), *routes(layer, ROUTED[layer])]
    return saved_routes(folder, records, f"routes-layer{layer}.jsonl")


def severities(trace) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in trace.origin.findings]


def test_files_are_layers_of_one_recording(tmp_path):
    path = logged(tmp_path, 0, num_experts=16)
    assert identify(path).name == "route-log"
    trace = read_workload(path)
    holds(trace, experts=[[ids] for ids in ROUTED[0]], num_experts=16, sequence=None, model_layers=None)
    assert severities(trace) == [("layers-logged", "ok")]
    assert trace.origin.findings[0].message.startswith("Layer 0 was logged")
    for layer in (3, 0):
        logged(tmp_path, layer)
    trace = read_workload(tmp_path)
    holds(trace, name="routes-layer", experts=[list(token) for token in zip(ROUTED[0], ROUTED[3], strict=True)])
    assert severities(trace) == [("layers-logged", "ok"), ("layers-of-several-runs", "warning")]
    assert "2 layers were logged: 0, 3" in trace.origin.findings[0].message


def test_routes_of_layers_together_in_one_file_and_of_other_passes(tmp_path):
    records = [record for pair in zip(routes(1, ROUTED[0]), routes(0, ROUTED[3]), strict=True) for record in pair]
    trace = read_workload(saved_routes(tmp_path, [route_meta(), *records]))
    assert trace.scores.shape == trace.experts.shape and (trace.scores == (0.75, 0.25)).all()
    for some in (None, [0.5], [0.5, float("nan")]):
        odd = [*records[:-1], records[-1] | {"topk_weights": some}]
        assert read_workload(saved_routes(tmp_path, [route_meta(), *odd])).scores is None
    assert trace.experts[:, 1].tolist() == ROUTED[0]
    assert severities(trace) == [("layers-logged", "ok")]
    logged(tmp_path, 0)
    saved_routes(tmp_path, [route_meta(), *routes(3, ROUTED[3], [0, 1, 0, 1])], "routes-layer3.jsonl")
    finding = read_workload(tmp_path).origin.findings[1]
    assert (finding.code, finding.severity) == ("layers-not-aligned", "error")
    assert (finding.rows, finding.layers) == ((2, 4), (1,))


@pytest.mark.parametrize(
    ("dense", "numbers"), [((0, 1, 2), (3,)), ((0,), (1, 4)), ((), (0, 3))], ids=["decoder layers", "MoE layers", "none dense"]
)
def test_numbers_of_layers(tmp_path, dense, numbers):
    """A number beyond the MoE layers, or of a dense one, shows how layers were counted."""
    layers = (3,) if len(dense) == 3 else (0, 3)
    model = MoEModel(name="m", layers=5, dense_layers=dense, experts=8, experts_per_token=2, d_model=8, d_ff=8)
    assert read_workload([logged(tmp_path, layer) for layer in layers], model=model).model_layers == numbers


def test_lines_between_and_numbers_that_pyarrow_does_not_read_but_python_does(tmp_path):
    text = saved_routes(tmp_path, [route_meta(seed=1), *routes(0, ROUTED[0])]).read_text()
    for before, after, most in (
        ("\n", '\n\n{"type": "flush"}\n', 2),
        ('"token_idx": 1,', '"token_idx": 1, "token_idx": 1,', -1),
    ):
        assert read_workload(saved_text(tmp_path, text.replace(before, after, most))).experts[:, 0].tolist() == ROUTED[0]
    refused(saved_text(tmp_path, text[:-20]), "line 5", "was cut short")


def with_ids(ids: object) -> list[dict]:
    records = [route_meta(), *routes(0, ROUTED[0])]
    records[2]["topk_ids"] = ids
    return records


def with_all(**other: object) -> list[dict]:
    return [route_meta(), *(record | other for record in routes(0, ROUTED[0]))]


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        ([route_meta()], ("no lines of type 'route'",)),
        (with_ids([1]), ("line 3", "has 1 experts, the first line 2")),
        (with_ids(None), ("line 3", "has 0 experts")),
        (with_ids([1, 40000]), ("line 3", "expert 40000")),
        (with_ids([1, -2]), ("line 3", "expert -2")),
        (with_ids([1, "2"]), ("line 3", "'topk_ids' is '[1, '2']'", "list of whole numbers")),
        (with_ids([1, 2**70]), ("line 3", "'topk_ids'")),
        ([route_meta(top_k=4), *routes(0, ROUTED[0])], ("top_k is 4",)),
        ([route_meta(), *routes(-1, ROUTED[0])], ("count from 0", "'-1'")),
        (with_all(layer=None), ("line 2", "'layer'")),
        (with_all(token_idx="0"), ("line 2", "'token_idx'", "whole number")),
        ([route_meta(), *routes(0, [[], [], [], []])], ("line 2", "1 … 64")),
    ],
)
def test_bad_logs(tmp_path, records, parts):
    refused(saved_routes(tmp_path, records), *parts)


def test_layers_with_other_numbers_of_tokens_or_there_twice(tmp_path):
    first = logged(tmp_path, 0)
    other = saved_routes(tmp_path, [route_meta(), *routes(3, ROUTED[3][:3], ROUTED_AT[:3])], "routes-layer3.jsonl")
    said = refusal(read_workload, [first, other])
    assert said.startswith("routes-layer3.jsonl: has 3 tokens") and " layer 3, but layer 0 (routes-layer0.jsonl) 4" in said
    other = saved_routes(tmp_path, [route_meta(), *routes(0, ROUTED[0])], "routes-layer1.jsonl")
    assert "routes-layer1.jsonl: holds layer 0, and so does routes-layer0.jsonl" in refusal(read_workload, [first, other])

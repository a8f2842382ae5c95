"""Expert loads of vLLM's pull request #41141, in its older and its newer form."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import check_recording, identify, read_workload
from engine.formats.step_spans import StepSpans
from engine.model import MoEModel
from tests.cases.examples import examples
from tests.formats.faults import refused

META = {
    "record_type": "eplb_load_meta",
    "version": 1,
    "model": "test-model",
    "num_ranks": 2,
    "num_groups": 1,
    "num_nodes": 1,
    "num_layers": 2,
    "num_redundant_experts": 1,
}
MAP = [[0, 1, 2, 0], [2, 1, 0, 1]]
MOVED = [[0, 1, 2, 0], [2, 1, 0, 2]]


def stats(step: int, load: list, placed: list = MAP, **more: object) -> dict:
    return {
        "record_type": "eplb_load_stats",
        "version": 1,
        "step": step,
        "expert_load": load,
        "p2l_map": placed,
        **more,
    }


def saved(folder: Path, *records: dict) -> Path:
    path = folder / "stats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


FIRST, SECOND = [[10, 1, 5, 2], [2, 8, 1, 3]], [[1, 0, 0, 4], [0, 0, 7, 5]]


def codes(load) -> list[str]:
    return [finding.code for finding in load.origin.findings]


@pytest.mark.parametrize("form", ["older", "newer"])
def test_both_forms(tmp_path, form):
    records = [stats(100, FIRST), stats(200, SECOND)]
    records = [META, *records] if form == "newer" else [record | {"num_ranks": 2} for record in records]
    path = saved(tmp_path, *records)
    assert identify(path).name == "vllm-eplb-loads"
    load = read_workload(path)
    np.testing.assert_array_equal(load.by_step, [[[12, 1, 5], [1, 11, 2]], [[5, 0, 0], [7, 5, 0]]])
    np.testing.assert_array_equal(load.load, [[17, 1, 5], [8, 16, 2]])
    assert load.model_layers == (0, 1)
    assert codes(load) == []


def test_layers_are_moe_layers_of_the_open_model(tmp_path):
    model = MoEModel(name="m", layers=3, dense_layers=(0,), experts=3, experts_per_token=1, d_model=8, d_ff=8)
    assert read_workload(saved(tmp_path, stats(1, FIRST)), model=model).model_layers == (1, 2)


def test_every_line_is_folded_by_its_own_map(tmp_path):
    load = read_workload(
        saved(tmp_path, stats(1, FIRST), stats(2, FIRST, MOVED), stats(3, FIRST, MOVED), stats(4, FIRST))
    )
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


def test_types_of_lines_are_made_readable(tmp_path):
    (note,) = read_workload(saved(tmp_path, stats(1, FIRST), {"record_type": "\x1b[2J\n\ud800"})).origin.findings
    assert "'\ufffd[2J \ufffd' (1)" in note.message


def test_idle_lines_and_steps_that_restart(tmp_path):
    idle = [[0] * 4] * 2
    load = read_workload(saved(tmp_path, stats(5, FIRST), stats(6, idle), stats(1, SECOND)))
    assert len(load.by_step) == 2
    assert codes(load) == ["steps-restart", "idle-steps"]


def test_copies_of_data_parallel_ranks(tmp_path):
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
        ([META, META, stats(1, FIRST)], ("line 2", "as the first line")),
        ([stats(1, FIRST), META], ("line 2", "as the first line")),
        (
            [META | {"num_redundant_experts": 2}, stats(1, FIRST)],
            ("line 2", "3 experts on 4 slots", "2 of them are redundant"),
        ),
        ([stats("one", FIRST)], ("line 1", "'step'", "'one'")),
        ([stats(1, FIRST[0])], ("line 1", "'expert_load'", "[layers][slots]")),
        ([stats(1, [[1, 2], [3]])], ("'expert_load'", "as many slots")),
        ([stats(1, [["1", 2]])], ("'expert_load', lists of numbers",)),
        ([stats(1, [[10**400, 2, 3, 4]] * 2)], ("'expert_load', lists of numbers",)),
        ([stats(1, [[1, -2, 3, 4]] * 2)], ("line 1, expert_load, layer 0, slot 1", "-2")),
        ([stats(1, [[1, float("nan"), 3, 4]] * 2)], ("layer 0, slot 1", "nan")),
        ([stats(1, FIRST, [[0, 1, 2, 4], [0, 1, 2, 3]])], ("line 1, p2l_map, layer 0, slot 3", "expert 4")),
        ([stats(1, FIRST, [[0, 1, 2, -1]] * 2)], ("expert -1",)),
        ([stats(1, FIRST, [[0, 1, 2]] * 2)], ("[2, 4]", "[2, 3]")),
        ([stats(1, FIRST, None)], ("line 1", "needs 'p2l_map'")),
        ([stats(1, FIRST), stats(2, [[1, 2]], [[0, 1]])], ("step 2", "[1, 2]", "[2, 3]")),
    ],
)
def test_bad_files(tmp_path, records, parts):
    refused(saved(tmp_path, *records), *parts)


def test_a_line_that_was_cut_when_the_server_stopped(tmp_path):
    path = saved(tmp_path, META, stats(1, FIRST))
    path.write_text(path.read_text() + '{"record_type": "eplb_load_st')
    refused(path, "line 3", "was cut short")


def test_another_number_of_experts_than_the_models(tmp_path):
    refused(saved(tmp_path, stats(1, FIRST)), "3 experts", "model has 4", num_experts=4)

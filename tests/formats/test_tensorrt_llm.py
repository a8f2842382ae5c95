"""Recordings of TensorRT-LLM: its statistics, and counts of slots under a plan."""

import json

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from engine.formats import identify, parts, read_workload
from tests.cases.files import refused
from tests.cases.megatron import codes
from tests.cases.recordings import holds
from tests.cases.refusals import refusal
from tests.cases.tensorrt_llm import MODEL, recording

TWO_RANKS = [
    {"7_1": [1, 2, 3, 0], "7_2": [0, 0, 6, 0], "7_3": [6, 0, 0, 0], "8_1": [2, 0, 0, 0]},
    {"7_1": [1, 0, 0, 1], "7_2": [2, 0, 0, 0], "7_3": [0, 2, 0, 0], "8_1": [0, 0, 0, 4]},
]


def test_ranks_and_iterations_add_up(tmp_path):
    load = read_workload(recording(tmp_path / "run", TWO_RANKS), model=MODEL)
    holds(load, load=[[4, 2, 3, 5], [2, 0, 6, 0], [6, 2, 0, 0]], model_layers=(1, 2, 3), name="run")
    sources = [[[3, 2, 3, 0], [0, 0, 6, 0], [6, 0, 0, 0]], [[1, 0, 0, 5], [2, 0, 0, 0], [0, 2, 0, 0]]]
    steps = [[[2, 2, 3, 1], [2, 0, 6, 0], [6, 2, 0, 0]], [[2, 0, 0, 4], [0, 0, 0, 0], [0, 0, 0, 0]]]
    holds(load, by_source=sources, by_step=steps, codes={"slots-or-experts": "ok", "source-ranks": "ok"})


def test_steps_come_in_order_many_are_spans_and_counts_may_have_32_bits(tmp_path):
    load = read_workload(recording(tmp_path / "run", [{f"{iteration}_1": [iteration, 0, 0, 0] for iteration in (9, 10, 100)}]))
    assert load.by_step[:, 0, 0].tolist() == [9, 10, 100]  # whatever their names sort like
    load = read_workload(recording(tmp_path / "run", [{f"{iteration}_1": [1, 0, 0, 0] for iteration in range(130)}]))
    assert load.by_step.shape == (64, 1, 4)
    assert load.by_step[:, 0, 0].tolist() == [3] * 2 + [2] * 62
    save_file({"0_1": np.array([1, 2], np.int32)}, tmp_path / "rank0.safetensors")
    np.testing.assert_array_equal(read_workload(tmp_path / "rank0.safetensors").load, [[1, 2]])


ONE_MORE = {"name": "other", "experts_per_token": 1}


@pytest.mark.parametrize(
    ("ranks", "experts", "options", "said"),
    [
        # A load balancer makes the counts those of slots, and nothing in the files says so.
        ([{"0_1": [1] * 6}], 6, {"model": MODEL}, "counts 6 ids, but the model has 4 experts: a load balancer was on"),
        ([{"0_1": [1] * 6}], 6, {"num_experts": 4}, "these are its slots"),
        ([{"0_1": [1] * 2}], 2, {"model": MODEL}, "counts 2 experts, but the model has 4"),
        ([{"0_0": [1, 1, 0, 0]}], 4, {"model": MODEL}, "layer 0, which is dense in small"),
        (TWO_RANKS, 4, {"model": MODEL.model_copy(update=ONE_MORE)}, "2 experts per token, other has 1"),
    ],
)
def test_counts_that_are_not_of_the_models_experts(tmp_path, ranks, experts, options, said):
    assert said in refusal(read_workload, recording(tmp_path / "run", ranks, experts=experts), **options)


def test_counts_without_a_model_and_with_layers_missing(tmp_path):
    assert read_workload(recording(tmp_path / "run", [{"0_1": [1] * 6}], experts=6), num_experts=6).num_experts == 6
    assert codes(read_workload(recording(tmp_path / "two", TWO_RANKS)))["slots-or-experts"] == "warning"
    assert codes(read_workload(recording(tmp_path / "one", [{"0_1": [1, 1, 0, 0]}]), model=MODEL))["missing-layers"] == "error"


def test_the_layer_after_the_last_is_of_mtp(tmp_path):
    counts = {"0_1": [1, 1, 0, 0], "0_2": [1, 1, 0, 0], "0_3": [1, 1, 0, 0], "0_4": [0, 0, 3, 4]}
    load = read_workload(recording(tmp_path / "run", [counts, counts | {"0_4": [7, 0, 0, 0]}]), model=MODEL)
    holds(load, model_layers=(1, 2, 3), load=[[2, 2, 0, 0]] * 3)
    assert load.by_source.shape == (2, 3, 4)
    assert codes(load)["mtp-left-out"] == "warning"
    assert "its 14 token copies" in " ".join(finding.message for finding in load.origin.findings)


def test_tensor_parallel_copies_count_once(tmp_path):
    load = read_workload(recording(tmp_path / "run", [TWO_RANKS[0]] * 4), model=MODEL)
    np.testing.assert_array_equal(load.load, [[3, 2, 3, 0], [0, 0, 6, 0], [6, 0, 0, 0]])
    np.testing.assert_array_equal(load.by_step.sum(axis=0), load.load)
    assert load.by_source is None
    assert codes(load)["tensor-parallel-copies"] == "warning"


def test_pipeline_stages_have_their_own_layers(tmp_path):
    first, second = {"0_1": [1, 0, 0, 1]}, {"0_1": [0, 2, 0, 0]}
    third, fourth = {"0_2": [0, 1, 1, 0], "0_3": [2, 0, 0, 0]}, {"0_2": [2, 0, 0, 0], "0_3": [0, 2, 0, 0]}
    load = read_workload(recording(tmp_path / "run", [first, second, third, fourth]), model=MODEL)
    holds(load, by_source=[[[1, 0, 0, 1], [0, 1, 1, 0], [2, 0, 0, 0]], [[0, 2, 0, 0], [2, 0, 0, 0], [0, 2, 0, 0]]])


def test_a_missing_rank_is_said(tmp_path):
    spread = read_workload(recording(tmp_path / "run", TWO_RANKS, ep_size=4, experts_per_rank=1))
    folder = recording(tmp_path / "missing", [*TWO_RANKS, {"7_1": [9, 9, 9, 9]}])
    (folder / "rank1.safetensors").unlink()
    for load in (read_workload(folder), spread):  # fewer ranks than experts are spread over
        assert load.by_source is None
        assert codes(load)["missing-ranks"] == "warning"


def test_counts_are_held_against_tokens(tmp_path):
    tokens = [{"7_1": 3, "7_2": 3, "7_3": 3, "8_1": 1}, {"7_1": 1, "7_2": 1, "7_3": 1, "8_1": 2}]
    folder = recording(tmp_path / "run", TWO_RANKS, tokens=tokens, ep_size=2, experts_per_rank=2)
    (part,) = parts([folder])
    assert (part.format.name, len(part.paths)) == ("tensorrt-llm-statistics", 5)
    assert all(identify(path) is part.format for path in part.paths)
    load = read_workload(folder, model=MODEL)
    assert codes(load)["conservation"] == "ok"
    np.testing.assert_array_equal(load.demand(2)[:, 1], load.by_source[1])


def test_tokens_that_do_not_add_up(tmp_path):
    load = read_workload(recording(tmp_path / "run", TWO_RANKS, tokens=[{"7_1": 5}, {"7_1": 1}]), model=MODEL)
    assert codes(load)["conservation"] == "error"
    assert any("Rank 0 counts 8 token copies in model layer 1" in found.message for found in load.origin.findings)


def test_tensors_of_other_things_are_left_out(tmp_path):
    folder = recording(tmp_path / "run", TWO_RANKS)
    save_file({"7_1": np.zeros((4, 4), np.int32)}, folder / "cooccurrence_rank0.safetensors")
    save_file({"7_1": np.zeros((9, 2), np.int32)}, folder / "token_selected_experts_rank0.safetensors")
    load = read_workload(folder)
    assert codes(load)["further-tensors"] == "ok"
    assert load.load.sum() == 30


@pytest.mark.parametrize(
    ("tensors", "meta", "part"),
    [
        ({"0_1": np.array([1, -2, 0, 0])}, {}, "iteration 0, layer 1, id 1: a count must be at least 0, not -2"),
        ({"0_1": np.array([1, 2, 0])}, {}, "'0_1': must be int64 [4]"),
        ({"0_1": np.zeros(4, np.int64)}, {}, "every load is 0"),
        ({"0_1200": np.ones(4, np.int64)}, {}, "layer 1200 is out of range"),
        ({"0_1": np.ones(4, np.int64)}, {"num_experts": 5}, "must be int64 [5]"),
        (None, {"num_experts": 0}, "num_experts must be a whole number from 1"),
        (None, {"num_experts_per_token": None}, "num_experts_per_token must be"),
        (None, {"ep_size": -1}, "ep_size must be"),
    ],
)
def test_bad_counts_and_meta(tmp_path, tensors, meta, part):
    folder = recording(tmp_path / "run", TWO_RANKS[:1])
    if tensors:
        save_file(tensors, folder / "rank0.safetensors")
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": 4, "num_experts_per_token": 2, **meta}))
    said = refusal(read_workload, folder)
    assert said.startswith("rank0.safetensors" if tensors else "meta_info.json") and part in said


def test_files_that_are_cut_short_alone_or_there_twice(tmp_path):
    folder = recording(tmp_path / "run", TWO_RANKS)
    (folder / "rank0 (1).safetensors").write_bytes(save({"7_1": np.ones(4, np.int64)}))
    assert "second file of rank 0" in refusal(read_workload, folder)
    refused(folder / "meta_info.json", "the counts are missing")
    path = folder / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    refused(path, "is damaged (incomplete metadata, file not fully covered)")


PLAN = """num_slots: 6
layer_updates_per_iter: 0
initial_global_assignments:
  1: [0, 1, 2, 3, 0, 1]
  2: [3, 3, 2, 2, 1, 0]
  3: [3, 2, 1, 0, 0, 0]
"""
COUNTS = [
    {"5_1": [1, 2, 3, 4, 5, 6], "5_2": [1, 1, 2, 2, 3, 4], "5_3": [1, 2, 3, 4, 5, 6], "6_1": [9, 0, 0, 0, 0, 0]},
    {"5_1": [0, 0, 0, 0, 0, 7], "5_2": [7, 0, 0, 0, 0, 0], "5_3": [0, 0, 7, 0, 0, 0], "6_1": [0, 0, 0, 0, 0, 1]},
]
FOLDED = np.array([[15, 16, 3, 4], [4, 3, 4, 9], [15, 10, 2, 1]])


def slots(folder, plan=PLAN, name="moe.yaml"):
    recording(folder, COUNTS, experts=6)
    (folder / name).write_text(plan)
    return folder


def test_the_plan_beside_it_or_given_folds_them(tmp_path):
    load = read_workload(slots(tmp_path / "run"), model=MODEL)
    np.testing.assert_array_equal(load.load, FOLDED)
    np.testing.assert_array_equal(load.by_source[1], [[0, 8, 0, 0], [0, 0, 0, 7], [0, 7, 0, 0]])
    np.testing.assert_array_equal(load.by_step.sum(axis=0), FOLDED)
    assert codes(load) == {"slots-or-experts": "ok", "source-ranks": "ok"}
    folder, plan = recording(tmp_path / "other", COUNTS, experts=6), tmp_path / "run" / "moe.yaml"
    np.testing.assert_array_equal(read_workload(folder, model=MODEL, deployed=plan).load, FOLDED)
    assert "can only be read for a model" in refusal(read_workload, folder, deployed=plan)
    plan.write_text(PLAN.replace("iter: 0", "iter: 2"))
    assert codes(read_workload(tmp_path / "run", model=MODEL))["balancer-moved"] == "error"


def test_plans_that_did_not_run_or_may_not_have(tmp_path):
    folder = slots(tmp_path / "run", PLAN.replace("6\n", "8\n", 1).replace("]", ", 0, 1]"))
    said = refusal(read_workload, folder, model=MODEL)
    assert "counts 6 ids, but the model has 4 experts: " in said and " give the plan that ran" in said
    said = refusal(read_workload, folder, model=MODEL, deployed=folder / "moe.yaml")
    assert said.startswith("moe.yaml: has 8 slots per layer, but 6 ids were counted")
    folder = slots(tmp_path / "run")
    (folder / "same.yml").write_text(PLAN)
    np.testing.assert_array_equal(read_workload(folder, model=MODEL).load, FOLDED)
    (folder / "other.yaml").write_text(PLAN.replace("[0, 1, 2, 3, 0, 1]", "[0, 1, 2, 3, 3, 3]"))
    assert "moe.yaml and other.yaml differ, say which ran" in refusal(read_workload, folder, model=MODEL)


@pytest.mark.parametrize("row", [[3, 2, 1, 0], [0, 1, 2, 3]])
def test_as_many_slots_as_experts(tmp_path, row):
    """A balancer without redundant slots moves experts, too."""
    folder = recording(tmp_path / "run", [{key: row[:4] for key, row in rank.items()} for rank in COUNTS])
    counted = read_workload(folder, model=MODEL).load
    np.testing.assert_array_equal(counted[0], [10, 2, 3, 4])
    plan = folder / "moe.yaml"
    plan.write_text(f"num_slots: 4\nlayer_updates_per_iter: 0\ninitial_global_assignments: {{1: {row}, 2: {row}, 3: {row}}}\n")
    if row == [0, 1, 2, 3]:  # which moves none
        np.testing.assert_array_equal(read_workload(folder, model=MODEL).load, counted)
    else:
        said = refusal(read_workload, folder, model=MODEL)
        assert "give it with --deployed, or take it out of the folder" in said
        np.testing.assert_array_equal(read_workload(folder, model=MODEL, deployed=plan).load[:, ::-1], counted)


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        (PLAN.replace("num_slots", "slots"), "knows no field 'slots'"),
        (PLAN.replace("iter: 0", "iter: [0]"), "layer_updates_per_iter is"),
    ],
)
def test_a_broken_plan_beside_it_is_named(tmp_path, plan, part):
    said = refusal(read_workload, slots(tmp_path / "run", plan), model=MODEL)
    assert said.startswith("moe.yaml") and part in said

"""SGLang's statistics as JSON, dump and CSV, and the routed experts in its answers."""

import base64
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from engine.formats import identify, parts, read_workload
from engine.model import MoEModel
from engine.workload import DECODE, PREFILL
from tests.cases.files import json_lines, refused, saver
from tests.cases.recordings import finding_of, holds
from tests.cases.sglang import COUNTS_CSV, ROUTED_IDS, ROUTED_MODEL, ROUTED_TEXT, SMALL, codes, generated

statistics = saver("loads.json")


def dumped(folder, counts, name="expert_distribution_recorder_1764000000.5.pt", **more):
    """The dump of mode `stat`."""
    path = folder / name
    counts = torch.tensor(counts, dtype=torch.int32)
    torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None, **more}, path)
    return path


def test_dense_layers_are_left_out(tmp_path):
    load = read_workload(statistics(tmp_path, {"rank": 0, "logical_count": [[0, 0], [1, 2], [3, 4]]}))
    holds(load, load=[[1, 2], [3, 4]], model_layers=(1, 2), by_step=None)
    assert load.origin.format == "sglang-statistics"
    missed = read_workload(statistics(tmp_path, {"logical_count": [[0, 0], [1, 2], [0, 0]]}), model=SMALL)
    assert missed.model_layers == (1,)
    assert "Layer 2 without any tokens" in missed.origin.findings[0].message
    dense = read_workload(statistics(tmp_path, {"logical_count": [[9, 9], [1, 2], [3, 4]]}), model=SMALL)
    holds(dense, model_layers=(1, 2), codes=["counts-in-dense-layers"])
    other_model = statistics(tmp_path, {"logical_count": [[1, 2, 3], [1, 2, 3], [1, 2, 3]]})
    assert read_workload(other_model, model=SMALL).model_layers == (0, 1, 2)


def test_steps_are_kept_in_their_order_and_many_become_spans_of_equal_length(tmp_path):
    load = read_workload(statistics(tmp_path, {"logical_count": [[[1, 2]], [[3, 4]]]}))
    holds(load, load=[[4, 6]], by_step=[[[1, 2]], [[3, 4]]], codes=["step-order"])
    load = read_workload(dumped(tmp_path, [[[step + 1, 1]] for step in range(640)]))
    assert load.by_step.shape == (64, 1, 2)
    np.testing.assert_array_equal(load.by_step[:, 0, 1], 10)
    assert load.by_step[0, 0, 0] == sum(range(1, 11))
    np.testing.assert_array_equal(load.by_step.sum(axis=0), load.load)


def test_dumps_of_the_recorder_and_of_a_table_alone(tmp_path):
    path = dumped(tmp_path, [[[0, 0], [1, 2]], [[0, 0], [3, 4]]])
    holds(read_workload(path), load=[[4, 6]], model_layers=(1,))
    dumped(tmp_path, [[[1, 2]]], "expert_distribution_recorder_1764000099.5.pt")
    assert len(parts([tmp_path])) == 2  # recordings of their own
    torch.save({"logical_count": torch.tensor([[0.0, 0.0], [1.0, 2.5]])}, path)
    holds(read_workload(path), load=[[1, 2.5]], by_step=None)


@pytest.mark.parametrize(
    ("steps", "in_time", "code", "severity"),
    [
        ([1, 2, 0, 0], [1, 2], "empty-steps", "ok"),  # never filled to its end
        ([3, 0, 0, 1, 2], [1, 2, 3], "empty-steps", "ok"),  # round the end
        ([0, 0, 1, 2, 3, 0], [1, 2, 3], "empty-steps", "ok"),
        ([1, 0, 2, 3, 0, 0], [1, 2, 3], "empty-steps", "warning"),  # an idle step in between
        ([4, 1, 2, 3], [4, 1, 2, 3], "step-order", "warning"),  # full: cannot be told
    ],
)
def test_ring_buffers_begin_after_what_was_not_filled(tmp_path, steps, in_time, code, severity):
    load = read_workload(dumped(tmp_path, [[[step, 0], [0, step]] for step in steps]))
    holds(load, by_step=[[[step, 0], [0, step]] for step in in_time], codes=[code])
    assert load.origin.findings[0].severity == severity


def test_ranks_in_the_place_of_steps(tmp_path):
    """A coupled balancer's first axis is the rank that sent the tokens, in JSON and in `.pt`."""
    counts = [[[0, 0], [1, 2]], [[0, 0], [3, 0]], [[0, 0], [0, 0]]]
    for path in (
        dumped(tmp_path, counts, logical_count_layout="rank_layer_expert"),
        statistics(tmp_path, {"logical_count": counts, "logical_count_layout": "rank_layer_expert"}),
    ):
        holds(read_workload(path), load=[[4, 2]], by_source=[[[1, 2]], [[3, 0]], [[0, 0]]], by_step=None, codes=[])


def test_what_follows_the_models_layers_is_its_mtp_layer(tmp_path):
    path = statistics(tmp_path, {"logical_count": [[0, 0], [1, 2], [3, 4], [5, 6]]})
    assert read_workload(path).model_layers == (1, 2, 3)
    load = read_workload(path, model=SMALL)
    holds(load, model_layers=(1, 2), codes=["mtp-layer-left-out"])
    assert "Layer 3 left out" in load.origin.findings[0].message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"logical_count": [[1, 2], [3]]}, ("logical_count", "differ in length")),
        ({"logical_count": [1, 2]}, ("[layers, experts]",)),
        ({"logical_count": [[1, None]]}, ("numbers only",)),
        ({"logical_count": [[[1, 2]], [[1, -2]]]}, ("logical_count, step 1, layer 0, expert 1", "-2")),
        ('{"logical_count": [[1, NaN]]}', ("layer 0, expert 1", "nan")),
        ({"logical_count": [[0, 0]]}, ("every load is 0",)),
        ({"logical_count": []}, ("[0]",)),
        ({"logical_count": [[1, 2]], "logical_count_layout": "rank_layer_expert"}, ("[ranks, layers, experts]",)),
        ({"logical_count": [[[1, 2]]], "logical_count_layout": 7}, ("logical_count_layout", "'7'")),
        ({"logical_count": [[1]] * 1001}, ("1001 layers",)),
    ],
)
def test_bad_statistics(tmp_path, data, words):
    refused(statistics(tmp_path, data), *words)


def test_bad_dumps_and_long_texts_among_the_counts(tmp_path):
    path = dumped(tmp_path, [[[1, -2]]])
    refused(path, "step 0, layer 0, expert 1")
    refused(dumped(tmp_path, [[[1, 2]]]), "leave out '::x'", member="x")
    torch.save({"logical_count": [[1, 2]]}, path)
    refused(path, "logical_count", "must be a tensor, not list")
    torch.save([{"logical_count": 1}], path)
    refused(path, "'logical_count'")
    path = statistics(tmp_path, {"logical_count": [["x" * 10**6, *[1] * 63]]})
    tracemalloc.start()
    refused(path, "numbers only")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 1024**2


MODEL = MoEModel(name="small", layers=3, dense_layers=(0,), experts=4, experts_per_token=1, d_model=8, d_ff=8)
SECOND = "layer_id,expert_id,count\n2,0,2\n1,1,2\n"


def counts(folder, text, rank=0, time="1744000000.5"):
    return statistics(folder, text, f"expert_distribution_rank{rank}_timestamp{time}.csv")


def test_one_rank_and_several_are_sources(tmp_path):
    path = counts(tmp_path, COUNTS_CSV)
    assert identify(path).name == "sglang-counts-csv"
    holds(read_workload(path), load=[[5, 0, 1], [0, 6, 0]], model_layers=(1, 2), by_source=None)
    load = read_workload(path, model=MODEL)  # with experts that nobody chose
    np.testing.assert_array_equal(load.load, [[5, 0, 1, 0], [0, 6, 0, 0]])
    counts(tmp_path, COUNTS_CSV, 0)
    counts(tmp_path, SECOND, 2)
    load = read_workload(tmp_path)
    np.testing.assert_array_equal(load.load, [[5, 2, 1], [2, 6, 0]])
    np.testing.assert_array_equal(load.by_source[2], [[0, 2, 0], [2, 0, 0]])
    np.testing.assert_array_equal(load.by_source[1], 0)
    assert codes(load) == ["ranks-missing"]


def test_tensor_parallel_copies_count_once(tmp_path):
    for rank in range(4):
        counts(tmp_path, COUNTS_CSV, rank)
    holds(read_workload(tmp_path), load=[[5, 0, 1], [0, 6, 0]], by_source=None, codes=["copies-dropped"])


def test_each_dump_is_a_recording(tmp_path):
    for time in ("1744000000.5", "1744000099.5"):
        for rank in range(2):
            counts(tmp_path, (COUNTS_CSV, SECOND)[rank], rank, time)
    assert [len(part.paths) for part in parts([tmp_path])] == [2, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer_id,expert_id,count\n", ("has a header but no rows",)),
        ("layer_id,expert_id,count\n1,0,x\n", ("line 2", "'x'")),
        ("layer_id,expert_id,count\n1,0,5\n1,-1,5\n", ("line 3", "expert_id -1 is out of range")),
        ("layer_id,expert_id,count\n1,0,-5\n", ("count -5",)),
        ("layer_id,expert_id,count\n1,0,0\n", ("every load is 0",)),
        ("layer_id,expert_id,count\n1,0\n", ("line 2", "has 2 columns")),
    ],
)
def test_bad_counts(tmp_path, text, words):
    refused(counts(tmp_path, text), *words)


EXPERTS = [[[3, 7], [255, 1]], [[0, 4], [2, 0]], [[9, 8], [7, 6]]]


def saved(folder, *answers, name="answers.jsonl"):
    return statistics(folder, json_lines(answers), name)


def test_an_answer_is_a_sequence(tmp_path):
    trace = read_workload(saved(tmp_path, generated(), name="answer.json"), model=ROUTED_MODEL)
    holds(trace, experts=EXPERTS, num_experts=300, model_layers=(1, 2), sequence=[0, 0, 0])
    assert trace.phase.tolist() == [PREFILL, PREFILL, DECODE]  # 2 + 2 - 1 tokens were forwarded
    assert codes(trace) == []
    # routed_experts_start_len is not in the answer: the prompt has fewer rows than tokens.
    holds(read_workload(saved(tmp_path, generated(prompt=1000)), model=ROUTED_MODEL), phase=[PREFILL, PREFILL, DECODE])
    trace = read_workload(saved(tmp_path, *[generated()] * 3000), model=ROUTED_MODEL)
    assert (trace.tokens, trace.sequence[-1]) == (9000, 2999)


def test_lines_lists_and_folders_of_answers(tmp_path):
    answers = [generated(), generated(prompt=1, completion=3)]
    lines = saved(tmp_path, *answers)
    (tmp_path / "list").mkdir()
    listed = saved(tmp_path / "list", answers, name="answers.json")
    (tmp_path / "folder").mkdir()
    for at, answer in enumerate(answers):
        saved(tmp_path / "folder", answer, name=f"{at}.json")
    for path in (lines, listed, tmp_path / "folder"):
        trace = read_workload(path, model=ROUTED_MODEL)
        holds(trace, experts=EXPERTS * 2, sequence=[0, 0, 0, 1, 1, 1])
        holds(trace, phase=[PREFILL, PREFILL, DECODE, PREFILL, DECODE, DECODE])


@pytest.mark.parametrize(
    ("answer", "openai"),
    [
        ({"sglext": {"routed_experts": ROUTED_TEXT}, "choices": [{}]}, True),
        ({"choices": [{"sgl_ext": {"routed_experts": ROUTED_TEXT}}]}, True),
        ({"engine_data": {"routed_experts": ROUTED_TEXT}}, False),
        ({"token_ids": [1], "disaggregated_params": {"routed_experts": ROUTED_TEXT}}, False),
    ],
)
def test_wrappers(tmp_path, answer, openai):
    holds(read_workload(saved(tmp_path, answer), model=ROUTED_MODEL), experts=EXPERTS, phase=None)
    if openai:  # whose usage tells the phase
        answer = answer | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}
        assert read_workload(saved(tmp_path, answer), model=ROUTED_MODEL).phase.tolist() == [PREFILL] * 3


def test_narrower_numbers_and_what_was_not_captured(tmp_path):
    text = base64.b64encode(bytes(ROUTED_IDS)).decode()
    holds(read_workload(saved(tmp_path, generated(text, routed_experts_dtype="uint8")), model=ROUTED_MODEL), experts=EXPERTS)
    text = base64.b64encode(struct.pack("<18i", *[0] * 6, *ROUTED_IDS[6:])).decode()
    trace = read_workload(saved(tmp_path, generated(text)), model=ROUTED_MODEL)
    assert trace.experts[0].tolist() == [[-1, -1], [-1, -1]]
    assert "1 of 3 tokens (33 %) have no choice in any layer; of prefill" in finding_of(trace, "tokens-not-captured").message
    text = base64.b64encode(struct.pack("<6i", 0, 0, 0, 0, 2, 1)).decode()
    trace = read_workload(saved(tmp_path, generated(text, 1, 1)), model=ROUTED_MODEL)
    holds(trace, model_layers=(2,), codes=["layers-missing"])
    refused(saved(tmp_path, generated()), "open the model first, or give --model")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([generated(ROUTED_TEXT[:-4])], ("no whole number of tokens of 3 layers × 2", "(small)")),
        ([generated(prompt=1, completion=1)], ("3 tokens by the model's layers", "0 … 1")),
        ([generated(prompt=1, completion=9)], ("3 tokens by the model's layers", "8 … 9")),
        ([generated(), generated({"data": ROUTED_TEXT})], ("line 2", "no text in base64 but dict")),
        ([generated(routed_experts_dtype="float")], ("'float' is not one of int32",)),
        ([generated(), 3, "x", {"meta_info": 3}, {"choices": [4]}, generated("")], ("line 6", "at least one of each")),
        ([generated(base64.b64encode(struct.pack("<6i", 0, 0, 1, 2, 3, 300)).decode(), 1, 1)], ("expert 300",)),
        ([generated(base64.b64encode(bytes(24)).decode(), 1, 1)], ("no token has a choice",)),
    ],
)
def test_bad_answers(tmp_path, answers, words):
    refused(saved(tmp_path, *answers), *words, model=ROUTED_MODEL)


@pytest.mark.parametrize(
    ("counts", "prompt", "rows"),
    [
        ({"cached_tokens": 1}, 2, [1, 2]),
        ({"cached_tokens": 2}, 2, [2]),
        ({"cached_tokens": 0}, 2, [0, 1, 2]),
        ({"cached_tokens": 501}, 1000, [0, 1, 2]),  # of a prompt of which two rows were asked for
        ({"cached_tokens": 999}, 1000, [1, 2]),
        ({"cached_tokens": True, "prompt_tokens_details": {"cached_tokens": 1}}, 2, [1, 2]),
    ],
)
def test_rows_of_a_cached_prefix_are_left_out(tmp_path, counts, prompt, rows):
    read = read_workload(saved(tmp_path, generated(prompt=prompt, **counts), generated()), model=ROUTED_MODEL)
    assert read.experts.tolist() == [EXPERTS[row] for row in rows] + EXPERTS
    assert read.phase.tolist() == [[PREFILL, PREFILL, DECODE][row] for row in rows] + [PREFILL, PREFILL, DECODE]
    said = finding_of(read, "cached-left-out")
    assert said is None if len(rows) == 3 else said.message.startswith(f"{3 - len(rows)} of 6 rows")
    refused(saved(tmp_path, generated(cached_tokens=3)), "cached_tokens is 3, but the prompt has 2", model=ROUTED_MODEL)

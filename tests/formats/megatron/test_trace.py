"""Megatron-Core's router traces: tokens put together over layers, ranks and micro-batches."""

import json

import numpy as np
import pytest

from engine.errors import InputError
from engine.formats import parts, read_workload
from tests.formats.faults import refused
from tests.formats.megatron.recordings import MODEL, codes, record, run, trace


def test_layers_of_a_step_are_put_together(tmp_path):
    folder = trace(
        tmp_path / "run",
        [
            record(0, 0, 0, [[1, 2], [3, 4]]),
            record(0, 1, 0, [[5, 6], [7, 0]]),
            record(1, 0, 0, [[2, 1]]),
            record(1, 1, 0, [[0, 3]]),
        ],
    )
    read = read_workload(folder)
    np.testing.assert_array_equal(read.experts, [[[1, 2], [5, 6]], [[3, 4], [7, 0]], [[2, 1], [0, 3]]])
    assert read.model_layers == (0, 1)
    assert read.num_experts == 8
    assert read.source_rank.tolist() == [0, 0, 0]
    assert codes(read) == {}


def test_files_of_ranks_are_one_recording(tmp_path):
    folder = trace(tmp_path / "run", *(run([0, 1, 2, 3], rank, seed=rank) for rank in range(3)))
    (folder / "hidden_states_rank0.bin").write_bytes(b"\0\1" * 40)
    (part,) = parts([folder])
    assert part.format.name == "megatron-router-trace"
    assert len(part.paths) == 3


def test_data_parallel_ranks_are_sources_in_order_of_steps(tmp_path):
    folder = trace(
        tmp_path / "run",
        [record(0, 0, 0, [[0, 1]]), record(1, 0, 0, [[0, 2]])],
        [record(0, 0, 1, [[0, 3], [0, 4]]), record(1, 0, 1, [[0, 5]])],
    )
    read = read_workload(folder)
    assert read.experts[:, 0, 1].tolist() == [1, 3, 4, 2, 5]
    assert read.source_rank.tolist() == [0, 1, 1, 0, 1]


def test_the_rank_in_the_file_counts_not_its_name(tmp_path):
    folder = trace(tmp_path / "run", *([record(0, 0, rank, [[0, rank]] * (1 + rank % 2))] for rank in range(12)))
    read = read_workload(folder, stages=1)
    assert read.experts[:, 0, 1].tolist() == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 9, 10, 11, 11]


def test_micro_batches_of_a_training_step_follow_each_other(tmp_path):
    lines = [
        record(0, layer, 0, [[batch, 2 + layer], [batch, 4 + layer]])  # two micro-batches, forward one after the other
        for batch in (0, 1)
        for layer in (0, 1)
    ]
    read = read_workload(trace(tmp_path / "run", lines))
    assert read.experts.tolist() == [[[0, 2], [0, 3]], [[0, 4], [0, 5]], [[1, 2], [1, 3]], [[1, 4], [1, 5]]]


def test_recomputed_activations_count_once(tmp_path):
    lines = run([0, 1], 0, seed=1, steps=1) + run([1, 0], 0, seed=1, steps=1)
    read = read_workload(trace(tmp_path / "run", lines))
    assert read.tokens == 40
    assert codes(read)["recomputed-copies"] == "warning"


def test_tensor_parallel_copies_count_once(tmp_path):
    copies = [run([0, 1], rank, seed=rank // 2) for rank in range(4)]
    read = read_workload(trace(tmp_path / "run", *copies), stages=1)
    assert read.tokens == 2 * 80
    assert sorted(set(read.source_rank.tolist())) == [0, 1]
    assert codes(read)["tensor-parallel-copies"] == "warning"


def test_mtp_is_never_mixed_with_the_decoder(tmp_path):
    mtp = [record(step, 0, 0, [[6, 7]] * 5, block="mtp", mtp_idx=0) for step in range(2)]
    read = read_workload(trace(tmp_path / "run", run([0, 1, 2, 3], 0, seed=1) + mtp), model=MODEL)
    assert read.experts.shape == (80, 4, 2)
    alone = read_workload(trace(tmp_path / "alone", run([0, 1, 2, 3], 0, seed=1)), model=MODEL)
    np.testing.assert_array_equal(read.load, alone.load)
    assert codes(read)["mtp-left-out"] == "warning"


def test_saved_hidden_states_are_a_note(tmp_path):
    lines = [record(0, 0, 0, [[1, 2]], hs_offset=0, hs_bytes=8, hs_shape=[1, 4], logit_offset=0)]
    assert codes(read_workload(trace(tmp_path / "run", lines)))["sidecars"] == "ok"


def test_a_step_cut_short_is_left_out(tmp_path):
    read = read_workload(trace(tmp_path / "run", run([0, 1, 2, 3], 0, seed=1)[:-1]), model=MODEL)
    assert read.tokens == 40
    assert codes(read)["incomplete-steps"] == "warning"


def test_a_missing_rank_is_said(tmp_path):
    read = read_workload(trace(tmp_path / "run", run([0, 1], 0, seed=1), run([0, 1], 2, seed=2)))
    assert sorted(set(read.source_rank.tolist())) == [0, 1]
    assert codes(read)["missing-ranks"] == "warning"


def test_compact_json_and_choices_of_minus_one(tmp_path):
    lines = [record(0, 0, 0, [[1, -1], [2, 3]]), record(0, 1, 0, [[0, 1], [-1, -1]])]
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text("\n".join(json.dumps(line, separators=(",", ":")) for line in lines))
    assert read_workload(path).experts.tolist() == [[[1, -1], [0, 1]], [[2, 3], [-1, -1]]]


def test_a_step_without_tokens_on_a_rank(tmp_path):
    lines = [record(0, 0, 0, []), record(1, 0, 0, [[1, 2]])]
    read = read_workload(trace(tmp_path / "run", lines))
    assert read.experts.tolist() == [[[1, 2]]]
    assert codes(read) == {}


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (record(0, 0, 0, [[1, 2, 3]]), "line 2: token 0 has 3 experts, others 2"),
        (record(0, 0, 0, [[1, 2], [3]]), "line 2: token 1 has 1 experts, others 2"),
        (record(0, 0, 0, [[1, 40_000]]), "line 2: token 0 chose expert '40000'"),
        (record(0, 0, 0, [[1, 10**30]]), "line 2: token 0 chose expert"),
        (record(0, 0, 0, [[1, -2]]), "line 2: token 0 chose expert '-2'"),
        (record(0, 0, 0, [[1, 1.5]]), "line 2: token 0 chose expert '1.5'"),
        (record(0, 0, 0, [[1, None]]), "line 2: token 0 chose expert 'None'"),
        (record(0, 0, 0, [[1, 2]], num_tokens=10**12), "line 2: num_tokens is '1000000000000'"),
        (record(0, 0, 0, [[1, 2]], num_tokens="1"), "line 2: num_tokens is '1'"),
        (record(0, 0, 0, [[1, 2]], block="encoder"), "line 2: block must be decoder or mtp, not 'encoder'"),
        (record(0, 0, 1, [[1, 2]]), "line 2: is of rank 1"),
        (record(0, -1, 0, [[1, 2]]), "line 2: layer must be a whole number"),
        (record(0, True, 0, [[1, 2]]), "line 2: layer must be a whole number"),
        (record(2**40, 0, 0, [[1, 2]]), "line 2: step must be a whole number"),
        ({"step": 0, "layer": 0, "rank": 0}, "line 2: needs top_indices"),
        (record(0, 0, 0, [[1, 2]]) | {"top_indices": [1, 2]}, "line 2: needs top_indices"),
    ],
)
def test_bad_lines(tmp_path, line, part):
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text(json.dumps(record(0, 0, 0, [[1, 2]])) + "\n" + json.dumps(line))
    refused(path, part)


@pytest.mark.parametrize("end", ['{"step": 0', "[1, 2]", '{"step": 0}, {"step": 1}', '{"top_indices": [[1 2]]}'])
def test_lines_that_are_no_objects(tmp_path, end):
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text(json.dumps(record(0, 0, 0, [[1, 2]])) + "\n" + end)
    refused(path, "line 2")


def test_mtp_alone(tmp_path):
    lines = [record(0, 0, 0, [[1, 2]], block="mtp", mtp_idx=0)]
    refused(trace(tmp_path / "run", lines) / "router_trace_rank0.jsonl", "multi-token prediction (MTP) alone")


def test_ranks_of_different_runs(tmp_path):
    folder = trace(tmp_path / "run", run([0], 0, seed=1), [record(0, 0, 1, [[1, 2, 3]], topk=3)])
    with pytest.raises(InputError, match="have 2 and 3 experts per token"):
        read_workload(folder)


def test_no_tokens_at_all(tmp_path):
    refused(trace(tmp_path / "run", [record(0, 0, 0, [])]) / "router_trace_rank0.jsonl", "no record has any tokens")


def test_two_files_of_one_rank(tmp_path):
    folder = trace(tmp_path / "run", run([0], 0, seed=1))
    (folder / "router_trace_rank1.jsonl").write_bytes((folder / "router_trace_rank0.jsonl").read_bytes())
    with pytest.raises(InputError, match=r"is of rank 0, as is router_trace_rank0\.jsonl"):
        read_workload(folder)


def test_files_too_large_together(tmp_path, monkeypatch):
    folder = trace(tmp_path / "run", *(run([0], rank, seed=rank) for rank in range(2)))
    monkeypatch.setattr("engine.formats.megatron.trace.MOST_TEXT", 500)
    with pytest.raises(InputError, match="is one of 2 files of more than"):
        read_workload(folder)

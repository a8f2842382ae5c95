"""What goes out to other programs, held against their documented forms with the bare libraries."""

import json
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine.errors import InputError
from engine.formats.writers import MOST_TOKENS, write_recording
from engine.workload import DECODE, ExpertLoad, RoutingTrace
from tests.cases.examples import examples
from tests.formats.checks.recordings import MODEL, random_trace
from tests.formats.writers.recordings import loads, traces

quick = settings(max_examples=examples(15), deadline=None)


def torch_file(workload, folder, model=None):
    """A dump as anybody loads it: without unpickling anything but tensors."""
    written = write_recording(workload, folder / "a.pt", model=model)
    return torch.load(written.path, weights_only=True, map_location="cpu"), written.lost


@quick
@given(loads())
def test_a_dump_of_sglangs_recorder(tmp_path_factory, load):
    content, lost = torch_file(load, tmp_path_factory.mktemp("pt"))
    counts = content["logical_count"]
    keys = {"rank", "logical_count", "average_utilization_rate_over_window"}
    by_rank = load.by_step is None and load.by_source is not None
    assert set(content) == (keys | {"logical_count_layout"} if by_rank else keys)
    parts = load.by_step if load.by_step is not None else load.by_source if by_rank else load.load[None]
    assert counts.dtype == (torch.int64 if by_rank else torch.int32)
    assert tuple(counts.shape) == (len(parts), max(load.model_layers) + 1, load.num_experts)
    np.testing.assert_array_equal(counts[:, list(load.model_layers)].numpy(), np.rint(parts))
    dense = np.setdiff1d(np.arange(counts.shape[1]), load.model_layers)
    assert not counts[:, dense].any()
    assert any("rounded" in phrase for phrase in lost) == bool((parts != np.rint(parts)).any())


def test_counts_beyond_32_bits(tmp_path):
    content, _ = torch_file(ExpertLoad("l", np.array([[3e9, 1.0]]), (0,)), tmp_path)
    assert content["logical_count"].tolist() == [[[3_000_000_000, 1]]]


def test_statistics_have_a_row_for_every_decoder_layer(tmp_path):
    trace = random_trace(tokens=50, layers=6)
    written = write_recording(trace, tmp_path / "a.json", model=MODEL)
    content = json.loads(written.path.read_text())
    assert list(content) == ["logical_count"]
    counts = [np.bincount(trace.experts[:, layer].ravel(), minlength=16).tolist() for layer in range(6)]
    assert content["logical_count"] == [[0] * 16] * 2 + counts  # MODEL's layers 0 and 1 are dense
    assert written.lost == ("which token chose what: only counts are kept",)


def test_the_layers_of_the_model_are_not_guessed(tmp_path):
    for model, more in ((None, ""), (MODEL, ", and small has 6 MoE layers, not 5")):
        with pytest.raises(InputError, match=f"does not say which of the model's layers were recorded{more}; give"):
            write_recording(random_trace(layers=5), tmp_path / "a.json", model=model)
    assert list(tmp_path.iterdir()) == []


@quick
@given(traces())
def test_moe_balance(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    written = write_recording(trace, path)
    batches = defaultdict(dict)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        assert set(record) == {"layer", "batch_id", "origin_rows", "topk_experts"}
        assert record["layer"] not in batches[record["batch_id"]]
        batches[record["batch_id"]][record["layer"]] = record
    layers = list(trace.model_layers or range(trace.layers))
    experts, rows = [], []
    for number, batch in enumerate(batches.values()):
        assert list(batch) == layers and batch[layers[0]]["batch_id"] == number
        experts.append(np.stack([np.array(record["topk_experts"]) for record in batch.values()], axis=1))
        rows.append(batch[layers[0]]["origin_rows"])
        assert all(record["origin_rows"] == rows[-1] for record in batch.values())
    sequence = np.zeros(trace.tokens, np.int32) if trace.sequence is None else trace.sequence
    firsts = {number: int(np.flatnonzero(sequence == number)[0]) for number in np.unique(sequence)}
    order = np.concatenate([np.flatnonzero(sequence == number) for number in sorted(firsts, key=firsts.get)])
    np.testing.assert_array_equal(np.concatenate(experts), trace.experts[order])
    if trace.source_rank is None:
        assert not any(rows)
    else:
        np.testing.assert_array_equal(np.concatenate(rows), trace.source_rank[order])
    assert any("interleaved" in phrase for phrase in written.lost) == bool((np.diff(order) < 0).any())
    assert any("prefill" in phrase for phrase in written.lost) == (trace.phase is not None)


def test_long_sequences_are_several_batches(tmp_path):
    tokens = MOST_TOKENS + 5
    trace = RoutingTrace("t", np.zeros((tokens, 1, 1), np.int16), 1, phase=np.full(tokens, DECODE, np.int8))
    written = write_recording(trace, tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in written.path.read_text().splitlines()]
    assert [len(line["topk_experts"]) for line in lines] == [MOST_TOKENS, 5]
    assert "2 batches" in written.lost[0]


def test_a_table_of_loads_from_routing(tmp_path):
    trace = random_trace(tokens=50, layers=2, experts=4, k=1, model_layers=(3, 5))
    text = write_recording(trace, tmp_path / "a.csv", "loads-csv").path.read_text().replace('"', "").splitlines()
    assert text[0] == "layer,expert_0,expert_1,expert_2,expert_3"
    cells = [[float(cell) for cell in line.split(",")] for line in text[1:]]
    counts = [np.bincount(trace.experts[:, layer, 0], minlength=4).tolist() for layer in range(2)]
    assert cells == [[3, *counts[0]], [5, *counts[1]]]

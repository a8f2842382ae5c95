"""Written recordings: read back unchanged, in Switchyard's formats and in those of other programs."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import read_workload, writers
from engine.formats.writers import WRITERS, write_recording
from engine.workload import DECODE, ExpertLoad, Finding, Origin, RoutingTrace, TrafficMatrix
from tests.cases.examples import examples
from tests.cases.recordings import MODEL, random_trace
from tests.cases.refusals import refusal

seeds = st.integers(0, 2**32 - 1)

FINDINGS = (Finding(severity="warning", code="ring-order", message="Steps are „not“ in order.", layers=(0,), rows=(3, 9)),)


@st.composite
def traces(draw, columns=("sequence", "source_rank", "phase", "model_layers", "scores")) -> RoutingTrace:
    """Up to 40 tokens, with padding among their choices."""
    rng = np.random.default_rng(draw(seeds))
    tokens, layers, k = draw(st.integers(1, 40)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(k, 300))
    experts = rng.integers(-1, num_experts, (tokens, layers, k)).astype(np.int16)
    experts[0, 0, 0] = num_experts - 1  # a reader takes the number of experts from it
    parts = {
        "sequence": rng.integers(0, 5, tokens).astype(np.int32),
        "source_rank": rng.integers(0, 4, tokens).astype(np.int32),
        "phase": rng.integers(0, 2, tokens).astype(np.int8),
        "model_layers": tuple(np.cumsum(rng.integers(1, 4, layers)).tolist()),
        "scores": rng.random(experts.shape).astype(np.float32),
    }
    kept = {name: parts[name] for name in columns if draw(st.booleans())}
    return RoutingTrace("trace", experts, num_experts, **kept)


@st.composite
def loads(draw, columns=("by_source", "by_step")) -> ExpertLoad:
    """Whole numbers or fractions; every layer has some tokens."""
    rng = np.random.default_rng(draw(seeds))
    layers, experts, parts = draw(st.integers(1, 4)), draw(st.integers(1, 30)), draw(st.integers(2, 4))
    counts = rng.integers(0, 10**6, (parts, layers, experts)).astype(np.float64)
    counts[..., 0] += 1
    if draw(st.booleans()):
        counts = counts / 8  # exact in binary: sums come out the same in any order
    numbers = tuple(np.cumsum(rng.integers(1, 4, layers)).tolist())
    kept = {name: counts for name in columns if draw(st.booleans())}
    return ExpertLoad("loads", counts.sum(axis=0), numbers, **kept)


@st.composite
def traffic(draw) -> TrafficMatrix:
    """Fractions of bytes between 2 to 5 ranks, the last of which may be idle."""
    rng = np.random.default_rng(draw(seeds))
    layers, ranks = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    amounts = rng.random((layers, ranks, ranks)) * 1e9
    if draw(st.booleans()):
        amounts[:, -1] = amounts[:, :, -1] = 0
    return TrafficMatrix("traffic", amounts, float(rng.integers(1, 10**5)))


quick = settings(max_examples=examples(15), deadline=None)


def back(workload, name, to=None, **known):
    """Write a workload and return (the workload read back, the losses said)."""
    with TemporaryDirectory() as folder:
        written = write_recording(workload, Path(folder) / name, to)
        assert [file.name for file in Path(folder).iterdir()] == [name]  # no draft is left
        assert written.size == written.path.stat().st_size
        return read_workload(written.path, **known), written.lost


@quick
@given(st.one_of(traces(), loads(), traffic()))
def test_npz_carries_everything(workload):
    same, lost = back(replace(workload, origin=Origin(format="sglang-statistics", findings=FINDINGS)), "a.npz")
    assert (same.digest, lost) == (workload.digest, ())
    assert type(same) is type(workload)
    assert (same.origin.format, same.origin.findings) == ("npz", FINDINGS)
    assert back(workload, "a.npz")[0].origin.findings == ()


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_other_formats_carry_what_they_can(data):
    rows = ["a.csv", "a.parquet"]
    workload, name = data.draw(
        st.one_of(
            st.tuples(traces(columns=()), st.just("a.npy")),
            st.tuples(traces(columns=("sequence", "source_rank")), st.sampled_from(rows)),
            st.tuples(loads(columns=()), st.sampled_from([*rows, "a.json"])),
            st.tuples(traffic(), st.sampled_from([*rows, "a.npy"])),
        )
    )
    known = {"bytes_per_token": workload.bytes_per_token} if isinstance(workload, TrafficMatrix) else {}
    same, lost = back(workload, name, **known)
    assert (same.digest, lost) == (workload.digest, ("how many bytes a token copy is",) if known else ())


@quick
@given(st.one_of(traces(), loads(), traffic()))
def test_whatever_is_not_carried_is_said(workload):
    """A part that is not the same when it is read back has its phrase."""
    words = {"sequence": "sequence", "source_rank": "rank", "phase": "prefill", "model_layers": "layers of the model"}
    words |= {"by_source": "which rank", "by_step": "step", "scores": "scores"}
    for name, writer in WRITERS.items():
        if isinstance(workload, writer.carries) and name in ("npz", "npy", "csv", "parquet"):
            same, lost = back(workload, f"a{writer.suffix}", name)
            for part, word in words.items():
                before = getattr(workload, part, None)
                after = getattr(same, part, None)
                if isinstance(before, np.ndarray) and not np.array_equal(before, after if after is not None else ()):
                    assert any(word in phrase for phrase in lost), (name, part)


def test_lmdeploy_takes_a_bare_list_with_dense_rows(tmp_path):
    load = ExpertLoad("l", np.array([[1.0, 2.4], [3.0, 0.0]]), (1, 3))
    written = write_recording(load, tmp_path / "a.json", "lmdeploy")
    assert json.loads(written.path.read_text()) == [[0, 0], [1, 2], [0, 0], [3, 0]]
    assert written.lost == ("the fractions of counts, which are rounded",)
    assert np.array_equal(read_workload(written.path).load, [[1, 2], [3, 0]])


def test_what_cannot_be_written_is_refused(tmp_path):
    load = ExpertLoad("l", np.ones((2, 3)), (0, 1))
    said = refusal(write_recording, load, tmp_path / "a.npy")
    assert said.startswith("l: is expert loads, which a NumPy array cannot carry; npz, csv")
    assert "End the name in .npz" in refusal(write_recording, load, tmp_path / "a.dat")
    assert "'word'" in refusal(write_recording, load, tmp_path / "a.npz", "word")
    said = refusal(write_recording, load, tmp_path / "none" / "a.csv")
    assert said.startswith("a.csv: cannot be read or written")
    for model, more in ((None, ""), (MODEL, ", and small has 6 MoE layers, not 5")):
        said = refusal(write_recording, random_trace(layers=5), tmp_path / "a.json", model=model)
        assert f"does not say which of the model's layers were recorded{more}; give" in said
    assert list(tmp_path.iterdir()) == []


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
    assert not counts[:, np.setdiff1d(np.arange(counts.shape[1]), load.model_layers)].any()
    assert any("rounded" in phrase for phrase in lost) == bool((parts != np.rint(parts)).any())


def test_statistics_have_a_row_for_every_decoder_layer_and_as_many_bits_as_they_need(tmp_path):
    trace = random_trace(tokens=50, layers=6)
    written = write_recording(trace, tmp_path / "a.json", model=MODEL)
    content = json.loads(written.path.read_text())
    assert list(content) == ["logical_count"]
    counts = [np.bincount(trace.experts[:, layer].ravel(), minlength=16).tolist() for layer in range(6)]
    assert content["logical_count"] == [[0] * 16] * 2 + counts  # MODEL's layers 0 and 1 are dense
    assert written.lost == ("which token chose what: only counts are kept",)
    content, _ = torch_file(ExpertLoad("l", np.array([[3e9, 1.0]]), (0,)), tmp_path)
    assert content["logical_count"].tolist() == [[[3_000_000_000, 1]]]
    counts = np.arange(1.0, 13).reshape(2, 2, 3)
    load = ExpertLoad("l", counts.sum(axis=0), (0, 1), by_source=counts, by_step=counts)
    assert back(load, "a.csv")[1] == ("how much came from which rank", "how loads changed from step to step")
    assert back(replace(load, by_step=None), "a.json")[1] == ()


@settings(max_examples=examples(30), deadline=None)
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


def test_long_sequences_are_several_batches_and_loads_of_routing_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(writers, "MOST_TOKENS", 50)
    tokens = 55
    trace = RoutingTrace("t", np.zeros((tokens, 1, 1), np.int16), 1, phase=np.full(tokens, DECODE, np.int8))
    written = write_recording(trace, tmp_path / "a.jsonl")
    lines = [json.loads(line) for line in written.path.read_text().splitlines()]
    assert [len(line["topk_experts"]) for line in lines] == [50, 5]
    assert "2 batches" in written.lost[0]
    trace = random_trace(tokens=50, layers=2, experts=4, k=1, model_layers=(3, 5))
    text = write_recording(trace, tmp_path / "a.csv", "loads-csv").path.read_text().replace('"', "").splitlines()
    assert text[0] == "layer,expert_0,expert_1,expert_2,expert_3"
    cells = [[float(cell) for cell in line.split(",")] for line in text[1:]]
    counts = [np.bincount(trace.experts[:, layer, 0], minlength=4).tolist() for layer in range(2)]
    assert cells == [[3, *counts[0]], [5, *counts[1]]]

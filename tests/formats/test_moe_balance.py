"""Routing traces of moe-balance: a line a (layer, batch)."""

import json
from pathlib import Path

import pytest

from engine.formats import identify, read_workload
from tests.formats.faults import refused

CHOICES = {("a", 1): [[0, 5], [3, 2]], ("a", 2): [[4, 1], [0, 7]], ("b", 1): [[6, 5]], ("b", 2): [[2, 3]]}
ROWS = {"a": [1, 0], "b": [3]}


def line(layer: int, batch: object, experts: object, rows: object = (), **more: object) -> dict:
    return {"layer": layer, "batch_id": batch, "origin_rows": rows, "topk_experts": experts} | more


def lines(rows: bool = True, **more: object) -> list[dict]:
    """Layers in an order of their own, as a converter that goes through layers first writes them."""
    by_layer = sorted(CHOICES.items(), key=lambda item: -item[0][1])
    return [line(layer, batch, experts, ROWS[batch] if rows else [], **more) for (batch, layer), experts in by_layer]


def saved(folder: Path, records: list[dict]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_batches_and_their_rows(tmp_path):
    path = saved(tmp_path, lines(topk_weights=[[0.5, 0.5]]))
    assert identify(path).name == "moe-balance"
    trace = read_workload(path)
    assert trace.experts.tolist() == [[[0, 5], [4, 1]], [[3, 2], [0, 7]], [[6, 5], [2, 3]]]
    assert trace.sequence.tolist() == [0, 0, 1]
    assert trace.source_rank.tolist() == [1, 0, 3]
    assert trace.origin.findings == ()


def test_rows_may_be_open(tmp_path):
    assert read_workload(saved(tmp_path, lines(rows=False))).source_rank is None
    mixed = [record | ({"origin_rows": []} if record["batch_id"] == "b" else {}) for record in lines()]
    assert read_workload(saved(tmp_path, mixed)).source_rank is None


def test_a_request_written_for_every_row_counts_once(tmp_path):
    copies = [
        record | {"origin_rows": [row] * len(record["topk_experts"]), "origin_row": row}
        for row in range(4)
        for record in lines()
    ]
    trace = read_workload(saved(tmp_path, copies))
    assert (trace.tokens, trace.source_rank) == (3, None)
    (finding,) = trace.origin.findings
    assert finding.code == "copies-left-out"
    assert finding.message.startswith("6 of 8 batches")


def test_the_same_name_with_other_tokens_is_another_batch(tmp_path):
    records = [line(1, 7, [[row, 4]], [row], origin_row=row) for row in range(3)]
    trace = read_workload(saved(tmp_path, records))
    assert trace.experts[:, 0, 0].tolist() == trace.source_rank.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        ([line("1", 0, [[1]])], ("line 1", "'layer' is '1'")),
        ([line(-1, 0, [[1]])], ("line 1", "'layer' is '-1'")),
        ([line(1, None, [[1]])], ("line 1", "'batch_id'")),
        ([line(1, 0, [[1, 2], [3]])], ("line 1", "'topk_experts'", "[tokens][k]")),
        ([line(1, 0, [])], ("'topk_experts'",)),
        ([line(1, 0, [["1"]])], ("'topk_experts'",)),
        ([line(1, 0, [[1] * 65])], ("at most 64",)),
        ([line(1, 0, [[40000]])], ("outside 0 … 4095",)),
        ([line(1, 0, [[1]], [0, 1])], ("'origin_rows'", "each of 1 tokens")),
        ([line(1, 0, [[1]], [-1])], ("'origin_rows'",)),
        ([line(1, 0, [[1]], [5000])], ("'origin_rows'",)),
        ([line(1, 0, [[1]], "x")], ("'origin_rows'",)),
        ([line(1, 0, [[1]])] * 2, ("line 2", "layer 1 of batch '0' is there twice")),
        ([line(1, 0, [[1]]), line(2, 0, [[1]]), line(1, 1, [[1]])], ("batch '1' has no line of layer 2",)),
        ([line(1, 0, [[1]]), line(2, 0, [[1], [2]])], ("line 2", "2 tokens", "layer 1", "1 with k = 1")),
        ([line(1, 0, [[1]], [0]), line(2, 0, [[1]], [1])], ("line 2", "differ from those of layer 1")),
        ([line(1, 0, [[1]], [0]), line(2, 0, [[1]])], ("line 2", "differ from those of layer 1")),
        ([line(1, 0, [[1]]), line(1, 1, [[1, 2]])], ("line 2", "k = 2, the first batch 1")),
    ],
)
def test_bad_traces(tmp_path, records, parts):
    refused(saved(tmp_path, records), *parts)

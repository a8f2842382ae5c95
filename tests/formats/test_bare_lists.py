"""Bare JSON lists of counts."""

import json

import numpy as np
import pytest

from engine.formats import identify, read_workload
from engine.model import MoEModel
from tests.formats.faults import refused


def saved(folder, rows):
    path = folder / "counts.json"
    path.write_text(json.dumps(rows))
    return path


def test_counts_with_what_was_assumed(tmp_path):
    path = saved(tmp_path, [[0, 0, 0], [1, 2, 3], [4.5, 0, 1]])
    assert identify(path).name == "bare-list"
    load = read_workload(path)
    np.testing.assert_array_equal(load.load, [[1, 2, 3], [4.5, 0, 1]])
    assert load.model_layers == (1, 2)
    (finding,) = load.origin.findings
    assert (finding.code, finding.severity) == ("assumed-counts", "warning")
    assert "3 rows" in finding.message
    assert "3 columns" in finding.message


def test_rows_are_the_open_models_moe_layers_where_there_are_as_many(tmp_path):
    model = MoEModel(name="m", layers=4, dense_layers=(0, 1), experts=3, experts_per_token=1, d_model=8, d_ff=8)
    assert read_workload(saved(tmp_path, [[1, 2, 3], [3, 2, 1]]), model=model).model_layers == (2, 3)


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([[1, 2], [3]], ("as many in every layer",)),
        ([[1, 2], ["3", 4]], ("as many in every layer",)),
        ([[1, 2], [True, 4]], ("as many in every layer",)),
        ([[[1, 2]], [[3, 4]]], ("logical_count", "routed_experts")),
        ([[1], [2]], ("2 layers of 1 experts",)),
        ([[1, 2]] * 1001, ("1001 layers",)),
        ([[1, -2]], ("layer 0, expert 1", "-2")),
        ([[1, float("nan")]], ("layer 0, expert 1", "nan")),
        ([[0, 0]], ("every load is 0",)),
        ([[0, 1, 2, 0], [2, 1, 0, 1]], ("every row holds each number from 0 to 2", "a placement")),
    ],
)
def test_other_lists(tmp_path, rows, parts):
    refused(saved(tmp_path, rows), *parts)


def test_low_counts_are_no_placement(tmp_path):
    assert read_workload(saved(tmp_path, [[0, 1, 2, 0], [2, 1, 1, 1]])).layers == 2


def test_a_list_of_numbers_alone_is_nothing_that_is_read(tmp_path):
    refused(saved(tmp_path, [1, 2, 3]), "JSON that Switchyard does not recognise")

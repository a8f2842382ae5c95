"""SGLang's statistics JSON."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.formats import read_workload
from tests.formats.faults import refused

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "deepseek-r1-loads"


def statistics(folder, data):
    path = folder / "loads.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_dense_layers_are_left_out(tmp_path):
    load = read_workload(statistics(tmp_path, {"rank": 0, "logical_count": [[0, 0], [1, 2], [3, 4]]}))
    np.testing.assert_array_equal(load.load, [[1, 2], [3, 4]])
    assert load.model_layers == (1, 2)


def test_steps_are_summed(tmp_path):
    load = read_workload(statistics(tmp_path, {"logical_count": [[[1, 2]], [[3, 4]]]}))
    np.testing.assert_array_equal(load.load, [[4, 6]])


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        ([[1, 2]], ("JSON object", "a list")),
        ("3", ("JSON object", "a number")),
        ("{", ("line 1, column 2", "not valid JSON")),
        ("[" * 100_000, ("nested too deeply",)),
        ({"counts": 1}, ("'logical_count'", "'counts'")),
        ({"logical_count": [[1, 2], [3]]}, ("logical_count", "differ in length")),
        ({"logical_count": [1, 2]}, ("[layers, experts]",)),
        ({"logical_count": [["1", "2"]]}, ("numbers only",)),
        ({"logical_count": [[1, None]]}, ("numbers only",)),
        ({"logical_count": [[1, -2]]}, ("layer 0, expert 1", "-2")),
        ('{"logical_count": [[1, NaN]]}', ("layer 0, expert 1", "nan")),
        ({"logical_count": [[0, 0]]}, ("every load is 0",)),
        ({"logical_count": []}, ("[0]",)),
    ],
)
def test_bad_statistics(tmp_path, data, parts):
    refused(statistics(tmp_path, data), *parts)


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")
def test_real_loads():
    for path in sorted(DATA.glob("*.json")):
        load = read_workload(path)
        assert load.load.shape == (58, 256)
        assert load.model_layers == tuple(range(3, 61))

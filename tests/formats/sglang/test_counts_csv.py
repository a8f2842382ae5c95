"""The CSV of SGLang's recorder of April 2025."""

import numpy as np
import pytest

from engine.formats import identify, parts, read_workload
from engine.model import MoEModel
from tests.formats.faults import refused
from tests.formats.sglang.recorder import codes

MODEL = MoEModel(name="small", layers=3, dense_layers=(0,), experts=4, experts_per_token=1, d_model=8, d_ff=8)
FIRST = "layer_id,expert_id,count\n1,0,5\n1,2,1\n2,1,6\n"
SECOND = "layer_id,expert_id,count\n2,0,2\n1,1,2\n"


def counts(folder, text, rank=0, time="1744000000.5"):
    path = folder / f"expert_distribution_rank{rank}_timestamp{time}.csv"
    path.write_text(text)
    return path


def test_one_rank(tmp_path):
    path = counts(tmp_path, FIRST)
    assert identify(path).name == "sglang-counts-csv"
    load = read_workload(path)
    np.testing.assert_array_equal(load.load, [[5, 0, 1], [0, 6, 0]])
    assert load.model_layers == (1, 2)
    assert load.by_source is None


def test_experts_that_nobody_chose_come_from_the_model(tmp_path):
    np.testing.assert_array_equal(
        read_workload(counts(tmp_path, FIRST), model=MODEL).load, [[5, 0, 1, 0], [0, 6, 0, 0]]
    )


def test_ranks_are_sources(tmp_path):
    counts(tmp_path, FIRST, 0)
    counts(tmp_path, SECOND, 2)
    load = read_workload(tmp_path)
    np.testing.assert_array_equal(load.load, [[5, 2, 1], [2, 6, 0]])
    np.testing.assert_array_equal(load.by_source[2], [[0, 2, 0], [2, 0, 0]])
    np.testing.assert_array_equal(load.by_source[1], 0)
    assert codes(load) == ["ranks-missing"]


def test_tensor_parallel_copies_count_once(tmp_path):
    for rank in range(4):
        counts(tmp_path, FIRST, rank)
    load = read_workload(tmp_path)
    np.testing.assert_array_equal(load.load, [[5, 0, 1], [0, 6, 0]])
    assert load.by_source is None
    assert codes(load) == ["copies-dropped"]


def test_each_dump_is_a_recording(tmp_path):
    for time in ("1744000000.5", "1744000099.5"):
        for rank in range(2):
            counts(tmp_path, (FIRST, SECOND)[rank], rank, time)
    assert [len(part.paths) for part in parts([tmp_path])] == [2, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer_id,expert_id,count\n", ("has a header but no rows",)),
        ("layer_id,expert_id,count\n1,0,x\n", ("line 2", "'x'")),
        ("layer_id,expert_id,count\n1,0,5\n1,-1,5\n", ("line 3", "expert_id -1 is out of range")),
        ("layer_id,expert_id,count\n1000,0,5\n", ("layer_id 1000",)),
        ("layer_id,expert_id,count\n1,0,-5\n", ("count -5",)),
        ("layer_id,expert_id,count\n1,0,0\n", ("every load is 0",)),
        ("layer_id,expert_id,count\n1,0\n", ("line 2", "has 2 columns")),
    ],
)
def test_bad_counts(tmp_path, text, words):
    refused(counts(tmp_path, text), *words)

"""SGLang's statistics, as JSON and as its recorder dumps them."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.formats import identify, parts, read_workload
from engine.model import MoEModel
from tests.formats.faults import refused
from tests.formats.sglang.recorder import codes

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "deepseek-r1-loads"

SMALL = MoEModel(name="small", layers=3, dense_layers=(0,), experts=2, experts_per_token=1, d_model=8, d_ff=8)


def statistics(folder, data):
    path = folder / "loads.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def dumped(folder, counts, name="expert_distribution_recorder_1764000000.5.pt", **more):
    """The dump of mode `stat`."""
    path = folder / name
    counts = torch.tensor(counts, dtype=torch.int32)
    torch.save({"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None, **more}, path)
    return path


def test_dense_layers_are_left_out(tmp_path):
    load = read_workload(statistics(tmp_path, {"rank": 0, "logical_count": [[0, 0], [1, 2], [3, 4]]}))
    np.testing.assert_array_equal(load.load, [[1, 2], [3, 4]])
    assert load.model_layers == (1, 2)
    assert load.by_step is None
    assert load.origin.format == "sglang-statistics"


def test_steps_are_kept_in_their_order(tmp_path):
    load = read_workload(statistics(tmp_path, {"logical_count": [[[1, 2]], [[3, 4]]]}))
    np.testing.assert_array_equal(load.load, [[4, 6]])
    np.testing.assert_array_equal(load.by_step, [[[1, 2]], [[3, 4]]])
    assert codes(load) == ["step-order"]


def test_the_recorders_dump(tmp_path):
    load = read_workload(dumped(tmp_path, [[[0, 0], [1, 2]], [[0, 0], [3, 4]]]))
    np.testing.assert_array_equal(load.load, [[4, 6]])
    assert load.model_layers == (1,)


def test_a_table_alone_in_a_torch_file(tmp_path):
    torch.save({"logical_count": torch.tensor([[0.0, 0.0], [1.0, 2.5]])}, tmp_path / "counts.pt")
    load = read_workload(tmp_path / "counts.pt")
    np.testing.assert_array_equal(load.load, [[1, 2.5]])
    assert load.by_step is None


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
    np.testing.assert_array_equal(load.by_step, [[[step, 0], [0, step]] for step in in_time])
    assert codes(load) == [code]
    assert load.origin.findings[0].severity == severity


def test_many_steps_become_spans_of_equal_length(tmp_path):
    load = read_workload(dumped(tmp_path, [[[step + 1, 1]] for step in range(640)]))
    assert load.by_step.shape == (64, 1, 2)
    np.testing.assert_array_equal(load.by_step[:, 0, 1], 10)
    assert load.by_step[0, 0, 0] == sum(range(1, 11))
    np.testing.assert_array_equal(load.by_step.sum(axis=0), load.load)


def test_ranks_in_the_place_of_steps(tmp_path):
    """A coupled balancer's first axis is the rank that sent the tokens, in JSON and in `.pt`."""
    counts = [[[0, 0], [1, 2]], [[0, 0], [3, 0]], [[0, 0], [0, 0]]]
    for path in (
        dumped(tmp_path, counts, logical_count_layout="rank_layer_expert"),
        statistics(tmp_path, {"logical_count": counts, "logical_count_layout": "rank_layer_expert"}),
    ):
        load = read_workload(path)
        np.testing.assert_array_equal(load.load, [[4, 2]])
        np.testing.assert_array_equal(load.by_source, [[[1, 2]], [[3, 0]], [[0, 0]]])
        assert load.by_step is None
        assert codes(load) == []


def test_what_follows_the_models_layers_is_its_mtp_layer(tmp_path):
    path = statistics(tmp_path, {"logical_count": [[0, 0], [1, 2], [3, 4], [5, 6]]})
    assert read_workload(path).model_layers == (1, 2, 3)
    load = read_workload(path, model=SMALL)
    assert load.model_layers == (1, 2)
    assert codes(load) == ["mtp-layer-left-out"]
    assert "Layer 3 left out" in load.origin.findings[0].message


def test_counts_in_dense_layers_are_left_out_with_the_reason(tmp_path):
    load = read_workload(statistics(tmp_path, {"logical_count": [[9, 9], [1, 2], [3, 4]]}), model=SMALL)
    assert load.model_layers == (1, 2)
    assert codes(load) == ["counts-in-dense-layers"]


def test_layers_that_the_recorder_missed(tmp_path):
    load = read_workload(statistics(tmp_path, {"logical_count": [[0, 0], [1, 2], [0, 0]]}), model=SMALL)
    assert load.model_layers == (1,)
    assert "Layer 2 without any tokens" in load.origin.findings[0].message


def test_another_models_recording_is_read_as_it_is(tmp_path):
    path = statistics(tmp_path, {"logical_count": [[1, 2, 3], [1, 2, 3], [1, 2, 3]]})
    assert read_workload(path, model=SMALL).model_layers == (0, 1, 2)


def test_dumps_of_one_folder_are_recordings_of_their_own(tmp_path):
    for time in ("1764000000.5", "1764000099.5"):
        dumped(tmp_path, [[[1, 2]]], f"expert_distribution_recorder_{time}.pt")
    assert len(parts([tmp_path])) == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"logical_count": [[1, 2], [3]]}, ("logical_count", "differ in length")),
        ({"logical_count": [1, 2]}, ("[layers, experts]",)),
        ({"logical_count": [["1", "2"]]}, ("numbers only",)),
        ({"logical_count": [[1, None]]}, ("numbers only",)),
        ({"logical_count": [[1, -2]]}, ("layer 0, expert 1", "-2")),
        ({"logical_count": [[[1, 2]], [[1, -2]]]}, ("logical_count, step 1, layer 0, expert 1", "-2")),
        ('{"logical_count": [[1, NaN]]}', ("layer 0, expert 1", "nan")),
        ({"logical_count": [[0, 0]]}, ("every load is 0",)),
        ({"logical_count": [[[0, 0]], [[0, 0]]]}, ("every load is 0",)),
        ({"logical_count": []}, ("[0]",)),
        ({"logical_count": [[1, 2]], "logical_count_layout": "rank_layer_expert"}, ("[ranks, layers, experts]",)),
        ({"logical_count": [[[1, 2]]], "logical_count_layout": 7}, ("logical_count_layout", "'7'")),
        ({"logical_count": [[1]] * 1001}, ("1001 layers",)),
    ],
)
def test_bad_statistics(tmp_path, data, words):
    refused(statistics(tmp_path, data), *words)


def test_a_long_text_among_the_counts_takes_no_memory(tmp_path):
    path = statistics(tmp_path, {"logical_count": [["x" * 10**6, *[1] * 63]]})
    tracemalloc.start()
    refused(path, "numbers only")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * 1024**2


def test_bad_dumps(tmp_path):
    path = dumped(tmp_path, [[[1, -2]]])
    refused(path, "step 0, layer 0, expert 1")
    refused(dumped(tmp_path, [[[1, 2]]]), "leave out '::x'", member="x")
    torch.save({"logical_count": [[1, 2]]}, path)
    refused(path, "logical_count", "must be a tensor, not list")
    torch.save([{"logical_count": 1}], path)
    refused(path, "'logical_count'")


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")
def test_real_loads():
    for path in sorted(DATA.glob("*.json")):
        assert identify(path).name == "sglang-statistics"
        load = read_workload(path)
        assert load.load.shape == (58, 256)
        assert load.model_layers == tuple(range(3, 61))
        np.testing.assert_array_equal(load.load, np.array(json.loads(path.read_text())["logical_count"])[3:])
        assert load.origin.findings == ()

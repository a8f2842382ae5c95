"""Which layers the numbers in a Megatron-Core trace mean: proved by the recording or the model, or asked for."""

import json

import numpy as np
import pytest

from engine.cli import main
from engine.errors import InputError
from engine.formats import read_workload
from tests.formats.megatron.recordings import AFTER_DENSE, MODEL, codes, record, run, trace


def test_layers_counted_within_a_stage_are_placed_by_the_model(tmp_path):
    """Forward hooks: layer 0 of rank 0 and layer 0 of rank 2 are different layers."""
    ranks = [run([0, 1], rank, seed=rank) for rank in range(4)]
    read = read_workload(trace(tmp_path / "run", *ranks), model=MODEL)
    assert read.model_layers == (0, 1, 2, 3)
    assert read.tokens == 2 * 80
    assert sorted(set(read.source_rank.tolist())) == [0, 1]
    of_source = read.experts[read.source_rank == 0]
    np.testing.assert_array_equal(of_source[:40, 0], ranks[0][0]["top_indices"])
    np.testing.assert_array_equal(of_source[:40, 2], ranks[2][0]["top_indices"])
    assert codes(read) == {"pipeline-stages": "ok"}


def test_layers_counted_from_1_through_all_stages(tmp_path):
    """The sink of routing replay: the numbers prove the stages, even without a model."""
    folder = trace(tmp_path / "run", run([1, 2], 0, seed=0), run([3, 4], 1, seed=1))
    read = read_workload(folder)
    assert read.experts.shape == (80, 4, 2)
    assert read.model_layers is None
    assert codes(read) == {"pipeline-stages": "ok", "layer-numbering": "warning"}
    assert read_workload(folder, model=MODEL).model_layers == (0, 1, 2, 3)


@pytest.mark.parametrize("numbers", [[1, 2, 3, 4], [2, 3, 4, 5]])
def test_a_dense_first_layer_in_both_numberings(tmp_path, numbers):
    read = read_workload(trace(tmp_path / "run", run(numbers, 0, seed=0)), model=AFTER_DENSE)
    assert read.model_layers == (1, 2, 3, 4)


def test_numbers_without_0_or_a_model_may_be_either(tmp_path):
    folder = trace(tmp_path / "run", run([1, 2, 3, 4], 0, seed=0))
    read = read_workload(folder)
    assert read.model_layers is None
    assert codes(read)["layer-numbering"] == "warning"
    assert read_workload(folder, model=MODEL).model_layers == (0, 1, 2, 3)


def test_layers_counted_through_stages_of_several_ranks(tmp_path):
    """Layers 2 to 5, the first being dense, on two ranks a stage: four stages would repeat numbers."""
    ranks = [run([2, 3] if rank < 2 else [4, 5], rank, seed=rank) for rank in range(4)]
    assert read_workload(trace(tmp_path / "two", *ranks)).experts.shape == (160, 4, 2)
    ranks = [run([2, 3, 4, 5], rank, seed=rank) for rank in range(4)]
    assert read_workload(trace(tmp_path / "all", *ranks)).experts.shape == (320, 4, 2)


def test_uneven_stages_with_a_dense_first_layer(tmp_path):
    """Model layers 1, 2 of the first stage (0 is dense), 3 and 4 of the second, counted within it."""
    folder = trace(tmp_path / "run", run([1, 2], 0, seed=0), run([0, 1], 1, seed=1))
    assert read_workload(folder, model=AFTER_DENSE).model_layers == (1, 2, 3, 4)
    assert read_workload(folder).layers == 4


def test_the_same_layers_on_all_ranks_may_be_stages(tmp_path):
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=rank) for rank in range(4)))
    with pytest.raises(InputError, match=r"may be of 1 or 2 or 4 pipeline stages.*\(--stages.*\(--model\)"):
        read_workload(folder)
    assert read_workload(folder, stages=1).experts.shape == (320, 2, 2)
    assert read_workload(folder, stages=2).experts.shape == (160, 4, 2)
    assert read_workload(folder, stages=4).experts.shape == (80, 8, 2)


def test_a_number_that_does_not_fit_is_refused(tmp_path):
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=rank) for rank in range(4)))
    with pytest.raises(InputError, match="3 pipeline stages do not fit its 4 ranks; 1 or 2 or 4 would"):
        read_workload(folder, stages=3)
    with pytest.raises(InputError, match="which no number of pipeline stages makes the 4 MoE layers of small"):
        read_workload(folder, stages=4, model=MODEL)


def test_other_numbers_of_tokens_are_other_tokens(tmp_path):
    """Serving batches differ between data-parallel ranks; stages have the same ones."""
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=rank, tokens=10 + rank) for rank in range(2)))
    assert read_workload(folder).experts.shape == (2 * (10 + 11), 2, 2)


def test_the_same_choices_are_the_same_layer(tmp_path):
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=5) for rank in range(4)))
    read = read_workload(folder)
    assert read.experts.shape == (80, 2, 2)
    assert codes(read) == {"tensor-parallel-copies": "warning"}


def test_mtp_is_on_the_last_stage(tmp_path):
    ranks = [run([0, 1], rank, seed=rank) for rank in range(4)]
    for rank in (2, 3):
        ranks[rank] += [record(0, 0, rank, [[0, 1]] * 40, block="mtp", mtp_idx=0)]
    read = read_workload(trace(tmp_path / "run", *ranks))
    assert read.experts.shape == (160, 4, 2)


def test_one_rank_of_several_is_refused_under_its_model(tmp_path):
    folder = trace(tmp_path / "run", run([0, 1], 0, seed=0))
    with pytest.raises(InputError, match=r"has layers 0 … 1, .* give the files of all ranks"):
        read_workload(folder, model=MODEL)


def test_missing_ranks_leave_no_stages(tmp_path):
    folder = trace(tmp_path / "run", run([0, 1], 0, seed=0), run([0, 1], 3, seed=3))
    with pytest.raises(InputError, match="2 pipeline stages do not fit its 2 ranks; 1 would"):
        read_workload(folder, stages=2)


def test_layers_in_no_order_of_stages(tmp_path):
    folder = trace(tmp_path / "run", run([0, 1], 0, seed=0), run([0], 1, seed=1), run([0, 1], 2, seed=2))
    folder_of_three = read_workload(folder, stages=3)
    assert folder_of_three.layers == 5
    (folder / "router_trace_rank2.jsonl").unlink()
    trace(folder, run([0, 1], 3, seed=2))
    with pytest.raises(InputError, match="recorded different layers, in no order of pipeline stages"):
        read_workload(folder)


def test_training_steps_of_two_stages(tmp_path):
    ranks = [run([0, 1], rank, seed=rank, micro_batches=3) for rank in range(2)]
    read = read_workload(trace(tmp_path / "run", *ranks), model=MODEL)
    assert read.experts.shape == (2 * 3 * 40, 4, 2)
    np.testing.assert_array_equal(read.experts[40:80, 2], ranks[1][2]["top_indices"])


def test_stages_on_the_command_line(tmp_path, capsys):
    folder = trace(tmp_path / "run", *(run([0, 1], rank, seed=rank) for rank in range(4)))
    assert main(["inspect", str(folder), "--json"]) == 2
    assert "--stages" in capsys.readouterr().err
    assert main(["inspect", str(folder), "--stages", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["layers"], answer["tokens"]) == (4, 160)

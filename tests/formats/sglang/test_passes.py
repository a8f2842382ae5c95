"""SGLang's counts of every pass, one dump a rank."""

import numpy as np
import pytest
import torch

from engine.errors import InputError
from engine.formats import parts, read_workload
from tests.formats.faults import refused
from tests.formats.sglang.recorder import codes, dump, pass_record

# Three experts in four slots, of which expert 0 has two; the first layer is dense.
SLOTS = [[0, 1, 2, 0], [2, 0, 1, 0]]


def test_slots_are_folded_and_ranks_added(tmp_path):
    dump(tmp_path, [pass_record(7, 0, [[0] * 4, [1, 2, 4, 8]]), pass_record(8, 0, [[0] * 4, [1, 0, 0, 0]])], SLOTS, 0)
    dump(tmp_path, [pass_record(7, 1, [[0] * 4, [0, 1, 1, 1]]), pass_record(8, 1, [[0] * 4, [0, 0, 3, 0]])], SLOTS, 1)
    load = read_workload(tmp_path)
    assert load.model_layers == (1,)
    np.testing.assert_array_equal(load.load, [[12, 8, 2]])
    np.testing.assert_array_equal(load.by_source, [[[10, 4, 2]], [[2, 4, 0]]])
    np.testing.assert_array_equal(load.by_step, [[[12, 5, 1]], [[0, 3, 1]]])
    assert codes(load) == []
    assert load.origin.format == "sglang-passes"


def test_passes_stand_in_the_order_of_their_numbers(tmp_path):
    records = [pass_record(number, 0, [[0] * 4, [number, 1, 1, 0]]) for number in (12, 10, 11)]
    np.testing.assert_array_equal(read_workload(dump(tmp_path, records, SLOTS)).by_step[:, 0, 2], [10, 11, 12])


def test_a_rank_may_miss_passes(tmp_path):
    dump(tmp_path, [pass_record(number, 0, [[0] * 4, [1, 1, 1, 1]]) for number in (1, 2, 3)], SLOTS, 0)
    dump(tmp_path, [pass_record(number, 1, [[0] * 4, [5, 1, 0, 0]]) for number in (0, 3, 4)], SLOTS, 1)
    load = read_workload(tmp_path)
    np.testing.assert_array_equal(load.by_step[:, 0, 2], [6, 1, 11])
    np.testing.assert_array_equal(load.by_step.sum(axis=0), load.load)


def test_low_latency_ranks_count_what_they_receive(tmp_path):
    """Each rank knows its own slots alone: their sum is right, by rank they are not sources."""
    dump(tmp_path, [pass_record(1, 0, [[0] * 4, [3, 4, 0, 0]])], SLOTS, 0)
    dump(tmp_path, [pass_record(1, 1, [[0] * 4, [0, 0, 5, 6]])], SLOTS, 1)
    load = read_workload(tmp_path)
    np.testing.assert_array_equal(load.load, [[10, 5, 3]])
    assert load.by_source is None


def test_a_low_latency_rank_alone_is_refused(tmp_path):
    path = dump(tmp_path, [pass_record(1, 1, [[0] * 4, [0, 0, 5, 6]])], SLOTS, 1)
    refused(path, "low-latency", "that of rank 0 is missing")


def test_tensor_parallel_copies_count_once(tmp_path):
    for rank in range(4):
        dump(tmp_path, [pass_record(1, rank, [[0] * 4, [1, 2, 4, 8]])], SLOTS, rank, f"1764000000.{rank}")
    load = read_workload(tmp_path)
    np.testing.assert_array_equal(load.load, [[10, 4, 1]])
    assert load.by_source is None
    assert codes(load) == ["copies-dropped"]
    assert "3 of 4 ranks (1, 2, 3)" in load.origin.findings[0].message


def test_two_files_of_a_rank_are_no_copies(tmp_path):
    """The rank in the file counts, not that in its name."""
    for name in range(2):
        dump(tmp_path, [pass_record(1, 0, [[0] * 4, [1, 2, 4, 8]])], SLOTS, name)
    with pytest.raises(InputError, match="second file of rank 0"):
        read_workload(tmp_path)


def test_a_balancer_that_moved_is_found(tmp_path):
    dump(tmp_path, [pass_record(1, 0, [[0] * 4, [1, 2, 4, 8]])], SLOTS, 0)
    dump(tmp_path, [pass_record(1, 1, [[0] * 4, [2, 2, 4, 8]])], [[0, 1, 2, 0], [2, 0, 1, 1]], 1)
    load = read_workload(tmp_path)
    np.testing.assert_array_equal(load.load, [[12, 16, 3]])
    assert codes(load) == ["balancer-moved"]
    assert load.origin.findings[0].severity == "error"


def test_passes_of_a_draft_model_are_left_out(tmp_path):
    records = [pass_record(1, 0, [[0] * 4, [1, 2, 4, 8]]), pass_record(1, 0, [[9] * 4, [9] * 4], "speculative_draft")]
    load = read_workload(dump(tmp_path, records, SLOTS))
    np.testing.assert_array_equal(load.load, [[10, 4, 1]])
    assert codes(load) == ["draft-model-left-out"]


def test_two_dumps_in_a_folder_are_two_recordings(tmp_path):
    """The clocks of the ranks differ; a rank that comes again begins another recording."""
    for rank, time in ((0, "100.9"), (1, "101.2"), (1, "160.1"), (0, "160.3")):
        dump(tmp_path, [pass_record(1, rank, [[0] * 4, [rank, 1, 2, 3]])], SLOTS, rank, time)
    recordings = sorted(part.paths for part in parts([tmp_path]))
    assert [[path.name[len("expert_distribution_recorder_") :] for path in paths] for paths in recordings] == [
        ["100.9_0.pt", "101.2_1.pt"],
        ["160.1_1.pt", "160.3_0.pt"],
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(records=[]), ("no forward pass was recorded",)),
        (lambda data: data.update(records={}), ("'records'",)),
        (lambda data: data.pop("last_physical_to_logical_map"), ("'last_physical_to_logical_map'",)),
        (lambda data: data["records"].append(3), ("record 1", "'forward_pass_id'")),
        (lambda data: data["records"][0].pop("rank"), ("record 0", "'rank'")),
        (lambda data: data["records"][0].update(forward_pass_id=2**60), ("record 0", "'forward_pass_id'")),
        (lambda data: data["records"].append(data["records"][0] | {"rank": 1}), ("several ranks",)),
        (lambda data: data["records"][0].update(gatherer_key="draft"), ("passes of 'draft' alone",)),
        (lambda data: data["records"][0].update(global_physical_count=[1]), ("must be a tensor, not list",)),
        (
            lambda data: data["records"][0].update(global_physical_count=torch.ones(2, 3, dtype=torch.int32)),
            ("rank 0, forward pass 1, global_physical_count", "[2, 4]", "[2, 3]"),
        ),
        (lambda data: data["records"][0].update(global_physical_count=torch.ones(2, 4)), ("whole numbers", "float32")),
        (
            lambda data: data["records"][0].update(global_physical_count=-torch.ones(2, 4, dtype=torch.int32)),
            ("at least 0",),
        ),
        (lambda data: data["records"][0]["global_physical_count"].zero_(), ("every load is 0",)),
        (lambda data: data["last_physical_to_logical_map"].fill_(-1), ("last_physical_to_logical_map", "0 … 4095")),
        (lambda data: data.update(last_physical_to_logical_map=torch.ones(2)), ("[layers, slots]",)),
    ],
)
def test_bad_dumps(tmp_path, change, words):
    path = dump(tmp_path, [pass_record(1, 0, [[0] * 4, [1, 2, 4, 8]])], SLOTS)
    data = torch.load(path, weights_only=True)
    change(data)
    torch.save(data, path)
    refused(path, *words)


def test_ranks_of_different_models_are_refused(tmp_path):
    dump(tmp_path, [pass_record(1, 0, [[0] * 4, [1, 2, 4, 8]])], SLOTS, 0)
    path = dump(tmp_path, [pass_record(1, 1, [[0] * 2, [1, 2]])], [[0, 1], [1, 0]], 1)
    with pytest.raises(
        InputError, match=f"{path.name}: has 2 layers, 2 slots and 2 experts, but .*_0.pt has 2, 4 and 3"
    ):
        read_workload(tmp_path)

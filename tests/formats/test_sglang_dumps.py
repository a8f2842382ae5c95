"""Dumps of SGLang's recorder: tokens, forward passes and traffic."""

import numpy as np
import pytest
import torch

from engine.formats import members, parts, read_workload
from engine.workload import DECODE as DECODED
from engine.workload import PREFILL, TrafficMatrix
from tests.cases.files import refused
from tests.cases.recordings import holds
from tests.cases.refusals import refusal
from tests.cases.sglang import DECODE, EXTEND, IDLE, MIXED, VERIFY, codes, dump, pass_record, token_record, traffic_entry

# Four experts, the first of which has a replica in slot 4; the first layer is dense.
SLOTS = [[0, 1, 2, 3, 0], [3, 2, 1, 0, 0]]


def tokens(number, mode, positions, chosen, extended=None, rank=0, misc=None):
    """A pass of a model with a dense layer. chosen: the slots of every token in the MoE layer"""
    return token_record(number, rank, mode, positions, [[[]] * len(positions), chosen], extended, misc)


def test_slots_become_experts_of_the_moe_layers(tmp_path):
    trace = read_workload(dump(tmp_path, [tokens(1, EXTEND, [0, 1, 2], [[0, 3], [1, 4], [2, 0]], [3])], SLOTS))
    assert trace.experts.tolist() == [[[3, 0]], [[2, 0]], [[1, 3]]]
    assert trace.experts.dtype == np.int16
    holds(trace, num_experts=4, model_layers=(1,), sequence=[0, 0, 0], phase=[PREFILL] * 3, source_rank=None, codes=[])


def test_passes_of_other_k(tmp_path):
    path = dump(tmp_path, [tokens(1, EXTEND, [0], [[0]], [1])], [list(range(12))] * 2)
    data = torch.load(path, weights_only=True)
    data["records"][0]["topk_ids_of_layer"] = torch.arange(10, dtype=torch.int32).broadcast_to(2, 1, 10).contiguous()
    torch.save(data, path)
    assert read_workload(path).k == 10
    records = [tokens(at, EXTEND, [0], [[0, 1]], [1]) for at in (1, 2)]
    records[1]["topk_ids_of_layer"] = records[1]["topk_ids_of_layer"][:, :, :6].contiguous()
    refused(dump(tmp_path, records, SLOTS), "6 choices a token in some passes, 8 in others")


ONE_EACH = [[0], [1], [2], [3], [0]]


# Two requests, which a third one joins; the second one has ended.
JOINED = [(EXTEND, [0, 1, 2, 0, 1], [3, 2]), (DECODE, [3, 2], None), (EXTEND, [0, 1, 2, 3], [4])]
JOINED += [(DECODE, [4, 3, 4], None), (DECODE, [5, 5], None)]
CHUNKED = [(EXTEND, [0, 1], [2]), (EXTEND, [2, 3, 0], [2, 1]), (MIXED, [4, 5, 1], [2, 1])]
VERIFIED = [(VERIFY, [7, 8, 3, 4], None), (VERIFY, [9, 10, 5, 6], None)]


@pytest.mark.parametrize(
    ("passes", "sequences", "phases", "found"),
    [
        (JOINED, [0, 0, 0, 1, 1, 0, 1, 2, 2, 2, 2, 0, 1, 2, 0, 2], [5, 2, 4, 5], []),
        (CHUNKED, [0, 0, 0, 0, 1, 0, 0, 1], [7, 1], []),  # a prompt in chunks is one sequence
        (VERIFIED, [0, 0, 1, 1, 0, 0, 1, 1], [0, 8], ["drafts-verified"]),
    ],
)
def test_sequences_are_followed_through_passes(tmp_path, passes, sequences, phases, found):
    """phases: tokens of prefill and of decode in turn"""
    records = [
        tokens(number, mode, positions, ONE_EACH[: len(positions)], extended)
        for number, (mode, positions, extended) in enumerate(passes, 1)
    ]
    phase = [DECODED if at % 2 else PREFILL for at, count in enumerate(phases) for _ in range(count)]
    holds(read_workload(dump(tmp_path, records, SLOTS)), sequence=sequences, phase=phase, codes=found)


def test_ranks_are_sources_in_the_order_of_passes(tmp_path):
    dump(tmp_path, [tokens(2, EXTEND, [0], [[2]], [1]), tokens(1, EXTEND, [0], [[0]], [1])], SLOTS, 0, "100.5")
    dump(tmp_path, [tokens(1, EXTEND, [0, 1], [[1], [1]], [2], 1), tokens(2, IDLE, [], [], None, 1)], SLOTS, 1, "100.7")
    trace = read_workload(tmp_path)
    assert trace.experts[:, 0, 0].tolist() == [3, 2, 2, 1]
    holds(trace, source_rank=[0, 1, 1, 0], sequence=[0, 1, 1, 2])


@pytest.mark.parametrize(
    ("slot_of_rank", "idle", "sources", "found"),
    [
        ({0: 1, 1: 1}, (), None, {"copies-dropped": ""}),
        ({3: 1}, (), None, {"ranks-missing": "rank 0 and 2 more"}),
        ({0: 1, 1: 1, 3: 2}, (), None, {"copies-dropped": "", "ranks-missing": "rank 2 is missing"}),
        ({0: 1}, (1, 2), [0, 0], {}),  # idle ranks are no copies
    ],
)
def test_ranks_that_are_copies_missing_or_idle(tmp_path, slot_of_rank, idle, sources, found):
    for rank, slot in slot_of_rank.items():
        dump(tmp_path, [tokens(1, EXTEND, [0, 1], [[0], [slot]], [2], rank)], SLOTS, rank)
    for rank in idle:
        dump(tmp_path, [tokens(1, IDLE, [], [], None, rank)], SLOTS, rank)
    trace = read_workload(tmp_path)
    assert trace.tokens == 2 * len(set(slot_of_rank.values()))
    assert (None if trace.source_rank is None else trace.source_rank.tolist()) == sources
    assert codes(trace) == list(found)
    assert all(part in finding.message for finding, part in zip(trace.origin.findings, found.values(), strict=True))


def test_one_expert_twice_shows_that_the_balancer_moved_and_tokens_without_choices_are_left_out(tmp_path):
    """Slots 3 and 4 are both of expert 0: no router chooses the same expert twice."""
    trace = read_workload(dump(tmp_path, [tokens(1, EXTEND, [0, 1], [[0, 1], [3, 4]], [2])], SLOTS))
    assert codes(trace) == ["balancer-moved"]
    assert trace.origin.findings[0].rows == (1, 2)
    trace = read_workload(dump(tmp_path, [tokens(1, EXTEND, [0, 1, 2], [[0, 1], [], [2, 3]], [3])], SLOTS))
    holds(trace, tokens=2, codes=["tokens-without-choices"])


def dump_traffic(folder, shared):
    """Dump two passes of two ranks.

    shared: True if the records hold one list, as the recorder's do.
    """
    for rank, sent in enumerate(([3, 5], [7, 2])):
        lists = [[traffic_entry(1, sent)], [traffic_entry(1, sent)]]
        records = [tokens(at, EXTEND, [7 * rank], [[at]], [1], rank, lists[0 if shared else at]) for at in range(2)]
        dump(folder, records, SLOTS, rank)


def test_traffic_of_passes(tmp_path):
    dump_traffic(tmp_path, shared=False)
    path = next(tmp_path.iterdir())
    assert members(path) == ()  # a single file does not hold the traffic of all ranks
    assert read_workload(tmp_path, member="routing").tokens == 4
    traffic = read_workload(tmp_path, member="traffic", bytes_per_token=10.0)
    assert isinstance(traffic, TrafficMatrix)
    holds(traffic, bytes=[[[60, 100], [140, 40]]], bytes_per_token=10, codes=[])
    refused(dump(tmp_path, [tokens(1, EXTEND, [0], [[0]], [1])], SLOTS), "holds no traffic", member="traffic")
    for entry in (3, {"layer_id": 1}, {"layer_id": -1, "num_tokens_per_rank": [1, 2]}):
        path = dump(tmp_path, [tokens(1, EXTEND, [0], [[0]], [1], misc=[entry])], SLOTS)
        refused(path, "misc_objects", "'layer_id'", member="traffic")


def test_the_recorder_shares_one_list_over_all_passes(tmp_path):
    dump_traffic(tmp_path, shared=True)
    holds(read_workload(tmp_path, member="traffic"), bytes=[[[3, 5], [7, 2]]], codes=["traffic-of-last-pass"])
    path = sorted(tmp_path.iterdir())[0]
    refused(path, "rank 1 is missing", member="traffic")
    refused(path, "'bytes'", "routing, traffic", member="bytes")


@pytest.mark.parametrize("member", ["routing", "traffic"])
def test_two_files_of_a_rank(tmp_path, member):
    """The rank in the file counts, not that in its name."""
    dump_traffic(tmp_path, shared=True)
    dump(tmp_path, [tokens(7, EXTEND, [9], [[1]], [1], misc=[traffic_entry(1, [3, 5])])], SLOTS, 2)
    assert "second file of rank 0" in refusal(read_workload, tmp_path, member=member)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"forward_mode": None}, ("forward pass 1", "'forward_mode'")),
        ({"positions": [0]}, ("2 tokens, but 1 positions",)),
        ({"positions": [0, 2**70]}, ("positions", "list of whole numbers")),
        ({"extend_seq_lens": [0.5]}, ("extend_seq_lens", "list of whole numbers")),
        ({"topk_ids_of_layer": torch.zeros(2, 2, 8)}, ("whole numbers", "float32")),
        ({"topk_ids_of_layer": torch.zeros(3, 2, 8, dtype=torch.int32)}, ("[2 layers, tokens, k]", "[3, 2, 8]")),
        ({"topk_ids_of_layer": torch.full((2, 2, 8), 5, dtype=torch.int32)}, ("slot 5 is out of range",)),
        ({"topk_ids_of_layer": torch.full((2, 2, 8), -2, dtype=torch.int32)}, ("slot -2 is out of range",)),
        ({"topk_ids_of_layer": torch.full((2, 2, 8), -1, dtype=torch.int32)}, ("every id is −1",)),
        ({"topk_ids_of_layer": torch.zeros(1, dtype=torch.int32).expand(2, 2, 8)}, ("more numbers than are stored",)),
    ],
)
def test_bad_dumps(tmp_path, change, words):
    refused(dump(tmp_path, [tokens(1, EXTEND, [0, 1], [[0, 1], [1, 2]], [2]) | change], SLOTS), *words)


# Three experts in four slots, of which expert 0 has two; the first layer is dense.
PASS_SLOTS = [[0, 1, 2, 0], [2, 0, 1, 0]]


def one_pass(number, rank, counts, key="primary"):
    """A pass. counts: tokens of every slot in the MoE layer"""
    return pass_record(number, rank, [[0] * 4, counts], key)


def test_slots_are_folded_and_ranks_added(tmp_path):
    for rank, counts in enumerate((([1, 2, 4, 8], [1, 0, 0, 0]), ([0, 1, 1, 1], [0, 0, 3, 0]))):
        dump(tmp_path, [one_pass(7, rank, counts[0]), one_pass(8, rank, counts[1])], PASS_SLOTS, rank)
    load = read_workload(tmp_path)
    holds(load, model_layers=(1,), load=[[12, 8, 2]], by_source=[[[10, 4, 2]], [[2, 4, 0]]])
    holds(load, by_step=[[[12, 5, 1]], [[0, 3, 1]]], codes=[])
    assert load.origin.format == "sglang-passes"


def test_passes_stand_in_the_order_of_their_numbers_and_a_rank_may_miss_some(tmp_path):
    records = [one_pass(number, 0, [number, 1, 1, 0]) for number in (12, 10, 11)]
    np.testing.assert_array_equal(read_workload(dump(tmp_path, records, PASS_SLOTS)).by_step[:, 0, 2], [10, 11, 12])
    dump(tmp_path, [one_pass(number, 0, [1, 1, 1, 1]) for number in (1, 2, 3)], PASS_SLOTS, 0)
    dump(tmp_path, [one_pass(number, 1, [5, 1, 0, 0]) for number in (0, 3, 4)], PASS_SLOTS, 1)
    load = read_workload(tmp_path)
    np.testing.assert_array_equal(load.by_step[:, 0, 2], [6, 1, 11])
    np.testing.assert_array_equal(load.by_step.sum(axis=0), load.load)


def test_low_latency_ranks_count_what_they_receive(tmp_path):
    """Each rank knows its own slots alone: their sum is right, by rank they are not sources."""
    refused(dump(tmp_path, [one_pass(1, 1, [0, 0, 5, 6])], PASS_SLOTS, 1), "low-latency", "that of rank 0 is missing")
    dump(tmp_path, [one_pass(1, 0, [3, 4, 0, 0])], PASS_SLOTS, 0)
    holds(read_workload(tmp_path), load=[[10, 5, 3]], by_source=None)


def test_copies_of_passes_count_once(tmp_path):
    for rank in range(4):
        dump(tmp_path, [one_pass(1, rank, [1, 2, 4, 8])], PASS_SLOTS, rank, f"1764000000.{rank}")
    load = read_workload(tmp_path)
    holds(load, load=[[10, 4, 1]], by_source=None, codes=["copies-dropped"])
    assert "3 of 4 ranks (1, 2, 3)" in load.origin.findings[0].message


def test_a_balancer_that_moved_is_found_and_passes_of_a_draft_model_are_left_out(tmp_path):
    records = [one_pass(1, 0, [1, 2, 4, 8]), pass_record(1, 0, [[9] * 4, [9] * 4], "speculative_draft")]
    holds(read_workload(dump(tmp_path, records, PASS_SLOTS)), load=[[10, 4, 1]], codes=["draft-model-left-out"])
    dump(tmp_path, [one_pass(1, 0, [1, 2, 4, 8])], PASS_SLOTS, 0)
    dump(tmp_path, [one_pass(1, 1, [2, 2, 4, 8])], [[0, 1, 2, 0], [2, 0, 1, 1]], 1)
    load = read_workload(tmp_path)
    holds(load, load=[[12, 16, 3]], codes=["balancer-moved"])
    assert load.origin.findings[0].severity == "error"


def test_two_dumps_in_a_folder_are_two_recordings(tmp_path):
    """The clocks of the ranks differ; a rank that comes again begins another recording."""
    for rank, time in ((0, "100.9"), (1, "101.2"), (1, "160.1"), (0, "160.3")):
        dump(tmp_path, [one_pass(1, rank, [rank, 1, 2, 3])], PASS_SLOTS, rank, time)
    recordings = sorted(part.paths for part in parts([tmp_path]))
    names = [[path.name.removeprefix("expert_distribution_recorder_") for path in paths] for paths in recordings]
    assert names == [["100.9_0.pt", "101.2_1.pt"], ["160.1_1.pt", "160.3_0.pt"]]


INT32 = torch.int32


def record_of(data):
    return data["records"][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.update(records=[]), ("no forward pass was recorded",)),
        (lambda data: data.pop("last_physical_to_logical_map"), ("'last_physical_to_logical_map'",)),
        (lambda data: record_of(data).pop("rank"), ("record 0", "'rank'")),
        (lambda data: record_of(data).update(forward_pass_id=2**60), ("record 0", "'forward_pass_id'")),
        (lambda data: data["records"].append(record_of(data) | {"rank": 1}), ("several ranks",)),
        (lambda data: record_of(data).update(gatherer_key="draft"), ("passes of 'draft' alone",)),
        (lambda data: record_of(data).update(global_physical_count=torch.ones(2, 3, dtype=INT32)),
         ("rank 0, forward pass 1, global_physical_count", "[2, 4]", "[2, 3]")),
        (lambda data: record_of(data).update(global_physical_count=torch.ones(2, 4)), ("whole numbers", "float32")),
        (lambda data: record_of(data).update(global_physical_count=-torch.ones(2, 4, dtype=INT32)), ("at least 0",)),
        (lambda data: record_of(data)["global_physical_count"].zero_(), ("every load is 0",)),
        (lambda data: data["last_physical_to_logical_map"].fill_(-1), ("last_physical_to_logical_map", "0 … 4095")),
        (lambda data: data.update(last_physical_to_logical_map=torch.ones(2)), ("[layers, slots]",)),
    ],
)  # fmt: skip
def test_bad_dumps_of_passes(tmp_path, change, words):
    path = dump(tmp_path, [one_pass(1, 0, [1, 2, 4, 8])], PASS_SLOTS)
    data = torch.load(path, weights_only=True)
    change(data)
    torch.save(data, path)
    refused(path, *words)


def test_ranks_of_different_models_are_refused(tmp_path):
    dump(tmp_path, [one_pass(1, 0, [1, 2, 4, 8])], PASS_SLOTS, 0)
    path = dump(tmp_path, [pass_record(1, 1, [[0] * 2, [1, 2]])], [[0, 1], [1, 0]], 1)
    said = refusal(read_workload, tmp_path)
    assert said.startswith(f"{path.name}: has 2 layers, 2 slots and 2 experts, but ") and "_0.pt has 2, 4 and 3" in said

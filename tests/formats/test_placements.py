"""Plan files of every engine: hand-written ones, round trips, and the published plans of DeepSeek-R1 and ExFlow."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import formats
from engine.catalogue import model_presets, node_types
from engine.cluster import Cluster
from engine.compare.redundancy import project_evenly
from engine.costs import Datasheet
from engine.formats.placements import TARGETS, facts_of_log, open_plan_file, read_deployed, recognise, write_placement
from engine.formats.placements.exflow import read_table, write
from engine.formats.source import one_clear_line
from engine.plan import Placement, Plan, SendOrder
from engine.problem import Problem, make_problem
from engine.result import Provenance
from engine.systems import SYSTEMS
from engine.systems.base import run
from engine.timeline import balancedness
from tests.cases import checkers
from tests.cases import plan_files as golden
from tests.cases.examples import examples
from tests.cases.files import refused, saver
from tests.cases.plan_files import (
    EVEN,
    NAMES,
    SINGLE,
    TINY,
    check,
    even_cases,
    held_by,
    model_of,
    placed,
    rank_map,
    saved_tensors,
)
from tests.cases.refusals import refusal

WITH_REPLICAS = {
    "sglang": (golden.SGLANG, ""),
    "sglang with MTP": (golden.SGLANG_MTP, "layer 3, after the last decoder layer, is the MTP layer's and left out"),
    "tensorrt-llm": (golden.TENSORRT_LLM, ""),
    "tensorrt-llm with MTP": (golden.TENSORRT_LLM_MTP, "layer 3 is the MTP layer's and left out"),
    "tensorrt-llm with an alias": (golden.TENSORRT_LLM_ALIAS, "layer 3 is the MTP layer's and left out"),
    "vllm": (golden.VLLM, ""),
    "vllm with MTP": (golden.VLLM_MTP, "layer 2 is the MTP layer's and left out"),
    "vllm log": (golden.VLLM_META + golden.VLLM_STATS + golden.VLLM_LATER, "the mapping of the last record of loads (line 3)"),
    "vllm log, then a marker": (golden.VLLM_META + golden.VLLM_LATER + '{"record_type": "bench_run_start"}\n', "(line 2)"),
    "vllm log, old": (golden.VLLM_STATS + golden.VLLM_LATER.rstrip(), "the mapping of the last record of loads (line 2)"),
    "hygon": (golden.HYGON, "the map of 'TinyMTPModel' is left out"),
    "hygon, legacy": (golden.HYGON_LEGACY, "its 2 rows are MoE layers; SGLang would ask for all 3 decoder layers"),
    "ascend": (golden.ASCEND, ""),
    "ascend with MTP": (golden.ASCEND_MTP, "layer 2 is the MTP layer's and left out"),
    "table": (golden.TABLE, ""),
    "table, as a spreadsheet saves it": ("\ufeff" + golden.TABLE.replace("\n", "\r\n"), ""),
}  # fmt: skip


@pytest.mark.parametrize("case", WITH_REPLICAS)
def test_two_layers_with_replicas(case, tmp_path):
    text, note = WITH_REPLICAS[case]
    path = tmp_path / "deployed.txt"  # told by its content
    path.write_bytes(text.encode())
    assert read_deployed(path, TINY, 2) == EVEN
    notes = open_plan_file(path).deployed(TINY, 2).notes
    assert len(notes) == bool(note) and all(note in text for text in notes)


def read_as(name: str, content: str | bytes) -> Placement:
    """The placement of `TINY` on two GPUs in a file."""
    return recognise(Path(name), content.encode() if isinstance(content, str) else content).deployed(TINY, 2).placement


def test_sglang_as_pt_and_the_map_that_ran_last_in_a_recorder_dump():
    rows = json.loads(golden.SGLANG)["physical_to_logical_map"]
    for value in (torch.tensor(rows), torch.tensor(rows, dtype=torch.int32), rows):
        assert read_as("map.pt", saved_tensors({"physical_to_logical_map": value})) == EVEN
    record = {"forward_pass_id": 3, "rank": 0, "gatherer_key": "primary", "global_physical_count": torch.ones(3, 6)}
    content = saved_tensors({"records": [record], "last_physical_to_logical_map": torch.tensor(rows, dtype=torch.int32)})
    read = recognise(Path("dump.pt"), content).deployed(TINY, 2)
    assert read.placement == EVEN and "recorder" in read.format


def test_vllm_s_expert_map():
    """An expert's place on each rank; the last columns are of redundant experts."""
    table = np.full((2, 2, 6), -1, np.int32)
    for layer, row in enumerate(EVEN.experts_of_gpu):
        for gpu, held in enumerate(row):
            table[layer, gpu, list(held)] = np.arange(len(held))
    saved = saved_tensors(torch.from_numpy(table))
    assert read_as("expert_map.pth", saved) == EVEN == recognise(Path("expert_map.pth"), saved).deployed(TINY, None).placement
    for place, value, said in (((0, 0), -1, "is in no slot"), ((0, 0, 5), 0, "beyond the 4"), ((0, 0, 0), -2, "below -1")):
        wrong = table.copy()
        wrong[place] = value
        if value == -1:
            wrong[0] = -1
        assert said in refusal(read_as, "expert_map.pth", saved_tensors(torch.from_numpy(wrong)))
    assert "[2 MoE layers, 2 ranks, 4 experts]" in refusal(read_as, "x.pt", saved_tensors(torch.from_numpy(table[:, :1])))


def test_exflow_and_a_permutation():
    """Layer 1: GPU 0 has the experts 3 and 1. Layer 2: GPU 0 has 0 and 2."""
    exflow = "Expert,Node\n0,1\n1,0\n2,1\n3,0\n4,0\n5,1\n6,0\n7,1\n"
    assert held_by(read_as("x", exflow)) == [[[1, 3], [0, 2]], [[0, 2], [1, 3]]]
    # Expert 0 moves to position 2, expert 1 to 1, expert 2 to 3 and expert 3 to 0.
    assert held_by(read_as("x", "[[2, 1, 3, 0], [0, 2, 1, 3]]")) == [[[3, 1], [0, 2]], [[0, 2], [1, 3]]]


def test_a_plan_of_the_studio(tmp_path):
    plan = Plan(name="p", placement=EVEN, send_order=SendOrder(mode="concurrent"), provenance=Provenance(optimiser="test"))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    assert open_plan_file(path).plan == plan
    assert read_deployed(path, TINY, 2) == EVEN


def test_default_layouts_as_vllm_has_them():
    """30 experts on 8 ranks, vllm #21497."""
    model = model_of(2, (0,), 30)
    linear, dealt = (held_by(read_deployed(word, model, 8))[0] for word in ("linear", "round-robin"))
    assert list(map(len, linear)) == list(map(len, dealt)) == [4, 4, 4, 4, 4, 4, 3, 3]
    assert [expert for held in linear for expert in held] == list(range(30))
    assert dealt == [list(range(rank, 30, 8)) for rank in range(8)]
    assert read_deployed("round_robin", model, 8) == read_deployed(Path("round-robin"), model, 8)
    more_gpus = read_deployed("linear", model_of(1, (), 2), 3)
    assert held_by(more_gpus) == [[[0], [1], []]]
    assert np.array_equal(more_gpus.slots, [[1, 1, 0]])


def test_an_ascend_map_goes_by_place():
    content = json.loads(golden.ASCEND)
    for layer in content["layer_list"]:
        layer["device_list"].reverse()
    read = recognise(Path("map.json"), json.dumps(content).encode()).deployed(TINY, 2)
    assert held_by(read.placement) == [row[::-1] for row in held_by(EVEN)]
    assert "4 entries are not at the place" in read.notes[0]


def test_an_expert_twice_on_a_gpu_is_dead_with_ascend_and_may_run_elsewhere():
    """The second copy on a device takes the first one's place in its table."""
    twice = golden.ASCEND.replace('"device_expert": [3, 0, 1]', '"device_expert": [3, 0, 3]')
    read = recognise(Path("map.json"), twice.encode()).deployed(TINY, 2)
    assert held_by(read.placement)[0] == [[0, 1, 2], [3, 0]]
    assert read.notes == ("1 slots with a second copy of an expert on the same device are dead and left out",)
    # DeepSeek's EPLB lays experts out like this, and SGLang serves it.
    row = "[0, 0, 2, 3, 1, 1]"
    assert held_by(read_as("x", f'{{"physical_to_logical_map": [{row}, {row}, {row}]}}'))[0] == [[0, 0, 2], [3, 1, 1]]


KEEPS_ORDER = set(TARGETS) - {"exflow", "megatron"}


def in_order(placement: Placement) -> list[list[int]]:
    """The experts of a layer's slots, GPU after GPU."""
    return [[expert for held in row for expert in held] for row in held_by(placement)]


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_what_is_written_keeps_the_rules_and_is_read_back(target, data):
    model, placement = data.draw(even_cases(replicas=target not in SINGLE))
    for name in NAMES[target]:
        (content,) = write_placement(target, placement, model, name).files.values()
        back = recognise(Path(name), content).deployed(model, placement.gpus)
        alone = recognise(Path(name), content).deployed(model, None).placement  # of however many GPUs
        assert in_order(alone) == in_order(back.placement)
        if target in KEEPS_ORDER:
            assert back.placement == placement
            assert check(target, content, model, placement.gpus) == held_by(placement)
        else:
            sorted_rows = [[sorted(held) for held in row] for row in held_by(placement)]
            assert held_by(back.placement) == check(target, content, model, placement.gpus) == sorted_rows
        assert back.notes == ()


@given(st.lists(st.lists(st.sets(st.integers(0, 4), max_size=5), min_size=3, max_size=3), min_size=1, max_size=3))
@settings(max_examples=examples(50), deadline=None)
def test_a_table_carries_uneven_placements_and_empty_gpus(rows):
    model = model_of(len(rows) + 1, (0,), 5)
    rows = [[sorted(held) for held in row[:-1]] + [sorted(row[-1] | set(range(5)).difference(*row))] for row in rows]
    placement = placed(*rows, model=model)
    (content,) = write_placement("csv", placement, model, "plan.csv").files.values()
    assert recognise(Path("plan.csv"), content).deployed(model, 3).placement == placement
    assert check("csv", content, model, 3) == rows


LOADS = Path(__file__).resolve().parents[3] / "shared" / "data" / "deepseek-r1-loads"


def balance(plan: Plan, problem: Problem) -> float:
    """Mean over the layers of mean / most tokens of a GPU."""
    return float(balancedness(np.einsum("le,leg->lg", problem.workload.load, plan.placement.share)).mean())


def test_what_eplb_lays_twice_on_a_gpu_is_refused_and_projected():
    """DeepSeek's greedy packing puts two replicas of an expert on one GPU in some layers; a second one there serves nobody."""
    h100, model = node_types()["hgx-h100"], model_presets()["DeepSeek-R1"].model
    cluster = Cluster(name="32 H100", nodes=tuple(h100.node(f"n{node}") for node in range(4)), latency=1e-5)
    problem = make_problem(formats.read_workload(LOADS / "decode_in2000out100.json"), cluster, model, Datasheet())
    plan = run(SYSTEMS["eplb"], problem, {"redundant": 1, "algorithm": "eplb"}).result.solution
    said = refusal(write_placement, "sglang", plan, model)
    assert re.search(r"expert \d+ twice on GPU \d+; export its even projection", said)
    projection = project_evenly(plan, problem)
    twice = sum(len(slots) - len(set(slots)) for row in held_by(plan.placement) for slots in row)
    assert projection.slots == 9 and projection.added == projection.dropped == twice > 0
    (content,) = write_placement("sglang", projection.plan, model).files.values()
    assert checkers.sglang(content, 61, (0, 1, 2), 256, 32) == held_by(projection.plan.placement)
    assert balance(projection.plan, problem) >= balance(plan, problem) - 0.005
    assert projection.after.total <= projection.before.total * 1.005


PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "exflow-mixtral-solutions"
LAYERS, EXPERTS = 32, 8


def read_placement(path: Path, experts: int, gpus: int | None = None) -> np.ndarray:
    """Read int64[layer, expert] from a file with an unknown number of layers."""
    with one_clear_line(path):
        return read_table(path, path.read_text(encoding="utf-8-sig"), experts, gpus)


def text_of(gpu_of_expert: np.ndarray, gpus: int) -> str:
    layers, experts = gpu_of_expert.shape
    placement = Placement.from_gpu_of_expert(gpu_of_expert, gpus, tuple(range(layers)))
    return write(placement, model_of(layers, (), experts), "x.csv").content.decode()


table = saver("placement.csv")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Expert,GPU\n0,0\n", ("line 1", "Expert,Node")),
        ("Expert,Node\n", ("no rows",)),
        ("Expert,Node\n0,0\n1,1\n2,0\n", ("3 rows", "layers of 2")),
        ("Expert,Node\n0,0\n1\n", ("line 3", "1 columns")),
        ("Expert,Node\n0,0\n1,x\n", ("line 3", "Node", "'x'")),
        ("Expert,Node\n0,0\n1,99999999999999999999\n", ("line 3", "Node")),
        ("Expert,Node\n0,0\n2,1\n", ("line 3", "Expert 2", "0 … 1")),
        ("Expert,Node\n0,0\n0,1\n", ("line 3", "second row for expert 0")),
        ("Expert,Node\n0,0\n1,0\n2,0\n3,1\n", ("layer 0", "GPU 0 holds 2 of 2")),
        ("Expert,Node\n0,0\n1,2\n", ("GPU 0 holds 1 of 2", "every one of the 3 GPUs")),
        ('Expert,Node\n"0,0\n', ("damaged",)),
    ],
)
def test_bad_tables(tmp_path, text, parts):
    refused(table(tmp_path, text), *parts, read=read_placement, experts=2)


def test_rows_in_any_order_more_gpus_than_named_and_bad_calls(tmp_path):
    path = table(tmp_path, "Expert,Node\n0,0\n1,1\n")
    refused(path, "GPUs are 0 … 0", "line 3", read=read_placement, experts=2, gpus=1)
    refused(path, "GPU 0 holds 1 of 2", read=read_placement, experts=2, gpus=4)
    assert "at least one" in refusal(read_placement, path, 0)
    text = "\ufeffExpert, Node\r\n3,0\r\n\r\n0,1\r\n2,1\r\n1,0\r\n"  # rows in any order, and blank lines
    np.testing.assert_array_equal(read_placement(table(tmp_path, text), 2), [[1, 0], [1, 0]])
    twice = Placement(experts=2, experts_of_gpu=(((0, 1), (0, 1)),), model_layers=(0,))
    said = refusal(write, twice, model_of(1, (), 2), "x.csv")
    assert "ExFlow has no replicas, but layer 0 (model layer 0) has 4 copies of 2 experts" in said


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published ExFlow placements are not here")
def test_published_mixtral_placements():
    """Exactly 8 / P experts on each of P GPUs in each layer, written back byte for byte up to line ends. The costs in their
    names, hops to another GPU of a trace that was not published, can not be made again from the placement."""
    for path, gpus in zip(sorted(PUBLISHED.glob("*.csv")), (4, 8), strict=True):
        place = read_placement(path, EXPERTS, gpus)
        assert place.shape == (LAYERS, EXPERTS) and f"_intra{gpus}_" in path.name
        assert (np.array([np.bincount(row, minlength=gpus) for row in place]) == EXPERTS // gpus).all()
        assert text_of(place, gpus).split() == path.read_text().split()


STARTED = "INFO 09-01 10:00:00 [api_server.py:1] vLLM API server version 0.11\n"
EPLB_STEP = "INFO 09-01 10:05:00 [eplb_state.py:5] EPLB step: 100 avg_tokens=1.0, max_tokens=3, balancedness=0.34\n"


@pytest.mark.parametrize(
    ("text", "row", "notes"),
    [
        (STARTED + rank_map(0, [0, 1]) + rank_map(1, [2, 3]), [[0, 1], [2, 3]], ["the same in all layers"]),
        (rank_map(1, [1, 3], said="round_robin") + rank_map(0, [0, 2], said=""), [[0, 2], [1, 3]], ["the same in all layers"]),
        (
            rank_map(0, [0, 1, 2], total=6) + rank_map(1, [3, 4, 5], total=6) + EPLB_STEP,
            [[0, 1, 2], [3, 0, 1]],
            ["EPLB moves experts later", "last balancedness was 0.34", "2 slots are redundant"],
        ),
        (
            "".join(rank_map(rank, [rank], ranks=4) for rank in range(4)) + rank_map(0, [0, 1]) + rank_map(1, [2, 3]),
            [[0, 1], [2, 3]],  # started again on fewer
            ["the same in all layers"],
        ),
    ],
)
def test_expert_maps_in_a_log_of_vllm(tmp_path, text, row, notes):
    path = tmp_path / "server.log"
    path.write_text(text)
    deployed = open_plan_file(path).deployed(TINY, 2)
    assert held_by(deployed.placement) == [row, row] == held_by(open_plan_file(path).deployed(TINY, None).placement)
    assert len(deployed.notes) == len(notes) and all(part in note for part, note in zip(notes, deployed.notes, strict=True))
    assert formats.identify(path).name == "vllm-log"


@pytest.mark.parametrize(
    ("text", "gpus", "parts"),
    [
        (rank_map(0, [0, 1]), 2, ("1 of 2 EP ranks, not of rank 1", "'linear' and so may you")),
        (rank_map(0, [0, 2], said="round_robin"), 2, ("'round-robin'",)),
        (rank_map(0, [0, 1]) + rank_map(1, [2, 3])[:-8], 2, ("1 of 2 EP ranks",)),  # cut
        (rank_map(0, [0, 1]) + rank_map(1, [2, 3]), 4, ("2 EP ranks, but there are 4 GPUs",)),
        (rank_map(0, [0, 1, 2, 3], total=8) + rank_map(1, [4, 5, 6, 7], total=8), 2, ()),
        (rank_map(0, [0, 1, 2, 3, 8], total=10) + rank_map(1, [4, 5, 6, 7, 9], total=10), 2, ("places 10 experts", "has 4")),
        (rank_map(0, [0, 1]) + rank_map(1, [2, 2]), 2, ("expert 3 is in no slot",)),
    ],
)
def test_logs_of_vllm_that_do_not_place_the_model(tmp_path, text, gpus, parts):
    path = tmp_path / "server.log"
    path.write_text(text)
    if parts:
        refused(path, *parts, read=lambda path: read_deployed(path, TINY, gpus))
    else:  # twice as many slots as experts
        assert held_by(read_deployed(path, TINY, gpus))[0] == [[0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(("ranks", "said"), [(3, "without rank 3;"), (2, "without rank 2 and 1 more;")])
def test_a_log_says_which_ranks_it_lacks(tmp_path, ranks, said):
    path = tmp_path / "server.log"
    path.write_text("".join(rank_map(rank, [rank], ranks=4) for rank in range(ranks)))
    assert said in facts_of_log(path)[0].message

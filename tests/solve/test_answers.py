"""`solve KERNEL`: JSON in, JSON out. Kernels have tests of their own; here are the shape of every answer, small ones by hand,
options, and arrays of instances."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.overlap import pipeline_degree
from engine.overlap.weight_gradients import kernel as weight_gradients
from engine.placement.coactivation import instance as coactivation
from engine.placement.coactivation.kernel import compile_ahead
from engine.placement.replication import instance as replication
from engine.placement.replication import kernel as replicate
from engine.simulate.priority import schedule_network
from engine.solve import KERNELS, face
from engine.solve.placing import CoactivationInstance, ReplicateInstance
from engine.solve.scheduling import PipelineDegreeInstance, WeightGradientsInstance
from tests.benchmarks.bench_weight_gradients import backward_pass
from tests.cases import kernels
from tests.cases.examples import examples
from tests.cases.placements import permutation_affinity, random_tokens, topic_tokens
from tests.oracles.placing import check_coactivation, check_replication
from tests.oracles.recomputed import carried_out, held_against_the_rules

ROOT = Path(__file__).parent.parent.parent


DEEP = dict(zip(kernels.LAYER, (0.01, 1, 4, 0.02, 1, 9, 64), strict=True))
ORDER_OF_FOUR = {"traffic": [[9e6, 1e6, 0, 4e6], [2e6, 0, 5e6, 1e6], [0, 3e6, 0, 8e6], [6e6, 1e6, 2e6, 0]]}
TO_THE_THIRD = {"traffic": [[0, 0, 6], [0, 0, 6], [0, 0, 0]], "bandwidth": [1, 1, 2]}
NODES = {"transitions": permutation_affinity(4, 8, 400).tolist(), "gpus": 4, "gpus_per_node": 2}
TOKENS = {
    "experts": random_tokens(3, 30, 8, 3, 0, missing=0.05).tolist(),
    "source_gpu": [token % 4 for token in range(30)],
    "gpus": 4,
}
TRADE = {"tokens": [[4, 1, 0], [2, 6, 1], [0, 3, 9]], "bandwidth": [10, 5, 20], "seconds_per_token": [0.1, 0.3, 0.05]}
EXACT, SEARCH = '{"time_limit": 30}', '{"exact": false}'


@pytest.mark.parametrize(
    ("kernel", "instance", "wanted"),
    [
        *[
            (kernel, instance, {"status": "OPTIMAL"})
            for kernel, instance in (
                ("order", ORDER_OF_FOUR | {"bandwidth": [3e9, 1e9, 2e9, 5e8]}),
                ("assign", TRADE),
                ("affinity", NODES | {"cost_node": 9, "staged": True}),
                ("replicate-devices", kernels.DEVICES | {"algorithm": "best"}),
            )
        ],
        ("order", TO_THE_THIRD, {"objective": 12.0}),  # matched unless told otherwise
        ("order", TO_THE_THIRD | {"mode": "shared"}, {"objective": 6.0}),
        ("order", {"traffic": [[3, 0], [0, 4]], "bandwidth": 2}, {"objective": 0, "bound": 0, "phases": []}),
        ("assign", {"tokens": [[7]], "bandwidth": [1], "seconds_per_token": [2]}, {"objective": 14}),
        # Expert 0 of a sends much and receives little: it shares with the expert of b that does the opposite.
        (
            "colocate",
            dict(zip(kernels.FOUR, ([9, 1], [1, 9], [8, 2], [2, 8]), strict=True)),
            {"partner": [1, 0], "objective": 11},
        ),
        # Experts 0 and 2 belong together, and 1 and 3: 10 of the 33 hops leave only when they are split up.
        ("affinity", kernels.AFFINITY, {"status": "OPTIMAL", "objective": 6, "gpu_hops": 6, "node_hops": 0}),
        # Experts 0 and 2 fire together, and 1 and 3: only tokens that are not at home send a row, two of five.
        (
            "coactivation",
            kernels.COACTIVATION,
            {"status": "OPTIMAL", "objective": 2, "rows": [2], "gpu_of_expert": [[0, 1, 0, 1]]},
        ),
        # Expert 0 has three quarters of all tokens, so its GPU has at least 1.5 times the mean.
        (
            "coactivation",
            kernels.COACTIVATION | {"experts": [[[0, 1], [0, 2], [0, 3], [0, -1], [0, -1]]], "cap": 1.2},
            {"status": "INFEASIBLE", "imbalance": [1.5]},
        ),
        ("replicate", {"load": [[4, 3, 2, 1, 1, 1]], "slots": 8, "gpus": 3, "slots_of_gpu": [4, 2, 2], "speed": [2, 1, 1]}, {}),
        ("replicate-devices", kernels.DEVICES | {"algorithm": "lina"}, {}),
        ("popularity", kernels.POPULARITY | {"top_k": 3}, {"objective": 6.0}),
        *[
            ("pipeline-degree", DEEP | way, wanted)
            for way, wanted in (
                ({}, {"degree": 20, "status": "OPTIMAL"}),
                ({"streams": 2}, {"status": "OPTIMAL"}),
                ({"order": "interleaved"}, {"status": "OPTIMAL"}),
                ({"algorithm": "printed"}, {"degree": 2, "status": "FEASIBLE"}),
            )
        ],
        ("weight-gradients", kernels.GRADIENTS, {"alltoall_of_dw": [0, 1], "objective": 19, "bound": 19, "status": "OPTIMAL"}),
        (
            "weight-gradients",
            kernels.GRADIENTS | {"algorithm": "greedy"},
            {"alltoall_of_dw": [-1, 0], "objective": 10, "bound": 19},
        ),
        ("weight-gradients", kernels.SPLIT, {"objective": 22, "bound": 22.0, "status": "OPTIMAL"}),
        *[
            ("weight-gradients", instance, {"objective": 0, "alltoall_of_dw": [-1] * len(instance["dw"])})
            for instance in (
                {"alltoall": [1, 2], "dw": [], "allowed": []},
                {"alltoall": [], "dw": [1, 2], "allowed": [[], []]},
                {"alltoall": [], "dw": [1, 2], "allowed": []},
            )
        ],
        # The first part's 1, the network's 4.5, the last part's 1.5; the operator that cannot be cut comes behind.
        (
            "partition",
            kernels.CHAIN,
            {"objective": 8, "bound": 8, "ranges": [{"first": 0, "last": 2, "parts": 2}, {"first": 3, "last": 3, "parts": 1}]},
        ),
        # The first part's 1 and the network's 4.5; then 2 and 1, uncut. The bound is the one of all ranges.
        ("partition", kernels.CHAIN | {"max_range": 2}, {"objective": 8.5, "bound": 8, "status": "FEASIBLE"}),
        (
            "partition-axes",
            {"domains": {"x": [0, "0"]}, "constraints": [{"tensors": ["x"], "allowed": [["0"]]}], "count": True},
            {"axis_of_tensor": {"x": "0"}, "solutions": 1},
        ),
        ("partition-axes", kernels.AXES | {"count": True}, {"status": "OPTIMAL", "satisfiable": True, "solutions": 2}),
        (
            "partition-axes",
            kernels.AXES
            | {"constraints": [*kernels.AXES["constraints"], {"tensors": ["x", "z"], "allowed": [[0, 1]]}], "count": True},
            {"status": "INFEASIBLE", "satisfiable": False, "solutions": 0, "axis_of_tensor": None, "bound": 0},
        ),
        *[
            ("priority", kernels.PRIORITY | {"policy": policy, "micro_op": size}, {"objective": 3, "finish": 8})
            for policy, size in (("priority", None), ("fair", None), ("fifo", 5))
        ],
        ("priority", {"alltoall": [], "allreduce": []}, {"status": "OPTIMAL", "objective": 0, "finish": 0, "events": []}),
        # Experts of one GPU share a row.
        *[
            ("travel", kernels.TRAVEL | {"gpu_of_expert": [2] * 4, "source_gpu": [0, 0], "travel": travel}, {"objective": rows})
            for travel, rows in (("copies", 5), ("gpu", 2), ("node", 2))
        ],
    ],
)
def test_by_hand(solver, kernel, instance, wanted):
    answer = solver.checked(kernel, instance, **wanted)
    for phase in answer["phases"] if kernel == "order" else ():
        assert set(phase) == {"duration", "sends"} and all(set(send) == {"src", "dst", "bytes"} for send in phase["sends"])


def test_a_proof_only_if_it_is_asked_for(solver):
    solver.checked("weight-gradients", kernels.SPLIT, SEARCH, objective=22, bound=24.0, status="FEASIBLE")


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_array_in_is_an_array_out(solver, kernel):
    instance = kernels.INSTANCES[kernel]
    alone, answers = solver.checked(kernel, instance), solver.answer(kernel, [instance])
    assert [set(answer) for answer in answers] == [set(alone)] and solver.answer(kernel, []) == []


def test_arrays_keep_their_order(solver):
    instances = [{"traffic": (np.ones((n, n)) * 6).tolist(), "bandwidth": 2} for n in (1, 3, 2)]
    answers = solver.answer("order", instances)
    assert [answer["objective"] for answer in answers] == [pytest.approx(3 * (n - 1)) for n in (1, 3, 2)]


LIMITED = {
    "order": {"traffic": np.random.default_rng(3).integers(1, 10**6, (48, 48)).tolist(), "bandwidth": 1e6},
    "colocate": dict(zip(kernels.FOUR, np.random.default_rng(3).random((4, 60)).tolist(), strict=True)),
    "colocate-heterogeneous": {"cost": np.random.default_rng(3).random((9, 9, 9)).tolist()},
    "replicate": kernels.REPLICATE,
    "replicate-devices": {"popularity": (1 / np.arange(1, 33)).tolist(), "devices": 16, "max_experts_per_device": 3},
    "weight-gradients": kernels.gradients_of(backward_pass(24, 8)),
    "pipeline-degree": kernels.LAYER,
    "partition": {"ops": kernels.CHAIN["ops"][:3] * 50},
    "partition-axes": kernels.AXES | {"count": True},
}


@pytest.mark.parametrize("kernel", LIMITED)
def test_a_time_limit_keeps_a_legal_answer_and_says_so(solver, kernel):
    answer = solver.checked(kernel, LIMITED[kernel], '{"time_limit": 1e-9}', status="TIME_LIMIT")
    assert kernel not in ("partition", "replicate-devices") or answer["bound"] < answer["objective"]
    assert kernel != "partition-axes" or answer["solutions"] is None


HARD = {
    "affinity": {"transitions": permutation_affinity(10, 128, 30000).tolist(), "gpus": 16},
    "coactivation": {
        "experts": [topic_tokens(4096, 256, 8, seed).tolist() for seed in range(3)],
        "source_gpu": (np.arange(4096) % 32).tolist(),
        "gpus": 32,
    },
    "colocate": dict(zip(kernels.FOUR, np.random.default_rng(0).random((4, 512)).tolist(), strict=True)),
    "replicate": {"loads": (np.random.default_rng(8).random((4, 30, 64)) ** 4).tolist(), "slots": 96, "gpus": 16},
    "replicate-devices": {"popularity": (1 / np.arange(1, 13)).tolist(), "devices": 6, "max_experts_per_device": 3},
}


@pytest.mark.clock
@pytest.mark.parametrize("kernel", HARD)
def test_a_time_limit_holds_in_seconds(solver, kernel, monkeypatch):
    monkeypatch.setattr("engine.placement.affinity.kernel.SEARCH_SHARE", 1e9)
    monkeypatch.setattr("engine.placement.affinity.kernel.BOUND_SHARE", 1e9)
    compile_ahead()
    answer = solver.checked(kernel, HARD[kernel], '{"time_limit": 0.2}')
    assert answer["runtime"] < 3 and answer["status"] in (["OPTIMAL"] if kernel == "colocate" else ["TIME_LIMIT", "FEASIBLE"])


@pytest.mark.parametrize("more", [{"cap": 1.5, "expert_count": 16}, {"gpus_per_node": 2, "travel": "node"}])
def test_rows_and_imbalance_of_coactivation_layer_by_layer(solver, more):
    problem = TOKENS | more
    answer = solver.checked("coactivation", problem, EXACT, status="OPTIMAL")
    place, experts, source = (np.array(table) for table in (answer["gpu_of_expert"], problem["experts"], problem["source_gpu"]))
    wanted = check_coactivation(place, experts, source, 4, problem.get("gpus_per_node"), problem.get("travel", "gpu"))
    assert (answer["rows"], answer["imbalance"]) == (wanted[0], pytest.approx(wanted[1]))
    assert len(answer["gpu_of_expert"][0]) == more.get("expert_count", 8)


# The schemas, which name the options of kernels without importing them


def test_the_options_of_the_schemas_are_those_of_the_kernels():
    assert all(face(kernel) for kernel in KERNELS)
    for schema, field, known in (
        (CoactivationInstance, "travel", coactivation.Travel),
        (ReplicateInstance, "split", replication.Split),
        (ReplicateInstance, "algorithm", replicate.Algorithm),
        (WeightGradientsInstance, "algorithm", weight_gradients.Algorithm),
        (PipelineDegreeInstance, "streams", pipeline_degree.Streams),
        (PipelineDegreeInstance, "order", pipeline_degree.Order),
    ):
        assert get_args(schema.model_fields[field].annotation) == get_args(known)
    assert pipeline_degree.MOST_PARTS in [
        getattr(rule, "le", None) for rule in PipelineDegreeInstance.model_fields["max_degree"].metadata
    ]


def test_one_kernel_is_loaded_without_the_others():
    code = (
        "import json, sys; from engine.solve import Options, solve\n"
        f"solve('assign', json.loads('{json.dumps(kernels.INSTANCES['assign'])}'), Options())\n"
        "loaded = {'torch', 'numba', 'ortools', 'networkx', 'engine.placement.affinity', 'engine.overlap', 'engine.simulate'}\n"
        "sys.exit(' '.join(loaded & set(sys.modules)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr.strip()) == (0, "")


def test_through_a_real_process(warm_python):
    def run(text: str, *more: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "engine", "solve", "order", *more]
        return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)

    good = run(json.dumps(kernels.ORDER), "--options", '{"time_limit": 10, "seed": 0, "exact": true}')
    assert (good.returncode, good.stderr) == (0, "")
    held_against_the_rules("order", kernels.ORDER, json.loads(good.stdout))
    bad = run('{"traffic": ')
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert bad.stderr.startswith("error: ") and "Traceback" not in bad.stderr


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_two_tier_answers_are_carried_out_byte_by_byte(solver, data):
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    numbers = st.one_of(st.just(0), st.integers(1, 10**6))
    rates = st.lists(st.sampled_from([5e9, 1.25e10]), min_size=sum(sizes), max_size=sum(sizes))
    row = st.lists(numbers, min_size=sum(sizes), max_size=sum(sizes))
    instance = {
        "traffic": data.draw(st.lists(row, min_size=sum(sizes), max_size=sum(sizes))),
        "bandwidth": data.draw(st.one_of(st.floats(1, 1e11), rates)),
        "link_bandwidth": data.draw(st.sampled_from([4.5e11, 1e9])),
        "gpus_per_node": sizes if len(set(sizes)) > 1 or data.draw(st.booleans()) else sizes[0],
    }
    makespan, bound = carried_out(instance, answer := solver.checked("two-tier", instance))
    assert answer["objective"] == pytest.approx(makespan, rel=1e-9)
    assert answer["bound"] == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize(("split", "loads"), [("free", [kernels.LOAD]), ("equal", [kernels.LOAD, kernels.LOAD[::-1]])])
@pytest.mark.parametrize("algorithm", ["best", "eplb"])
def test_balancedness_for_one_and_several_loads(solver, split, loads, algorithm):
    instance = ({"load": kernels.LOAD} if len(loads) == 1 else {"loads": loads}) | {"slots": 16, "gpus": 8, "split": split}
    answer = solver.checked("replicate", instance | {"algorithm": algorithm}, SEARCH)
    balance = check_replication(np.array(answer["physical_to_logical"]), np.array(loads, float), 8, split=split)
    assert np.array(answer["balancedness"]) == pytest.approx(balance, rel=1e-6)


def test_priority_by_hand(solver):
    instance = kernels.PRIORITY | {"micro_op": 2.5, "overhead": 0.5}
    answer = solver.checked("priority", instance, status="FEASIBLE", objective=1, bound=0, finish=9)
    keys = ("kind", "index", "piece", "start", "end")
    rows = [("allreduce", 0, 0, 0, 3), ("alltoall", 0, 0, 3, 6), ("allreduce", 0, 1, 6, 9)]
    assert answer["events"] == [dict(zip(keys, row, strict=True)) for row in rows]


@pytest.mark.parametrize("policy", ["priority", "fair", "fifo"])
def test_events_of_priority_are_those_of_the_kernel(solver, policy):
    rng = np.random.default_rng(5)
    alltoall, allreduce = rng.random((4, 2)) * [9, 1], rng.random((5, 2)) * [9, 3]
    instance = {"alltoall": alltoall.tolist(), "allreduce": allreduce.tolist(), "micro_op": 0.4, "policy": policy}
    result = schedule_network(alltoall, allreduce, 0.4, 0.0, policy)
    answer = solver.checked("priority", instance, objective=result.objective, bound=result.bound)
    starts = [event["start"] for event in answer["events"]]
    assert starts == sorted(starts) and answer["finish"] == max(event["end"] for event in answer["events"])


@pytest.mark.parametrize(
    ("travel", "fabric", "links", "most"),
    [
        ("copies", {(1, 2): 1, (1, 3): 1, (2, 1): 1}, {(1, 0): 1, (2, 3): 1}, 2),
        ("gpu", {(1, 2): 1, (1, 3): 1, (2, 1): 1}, {(1, 0): 1, (2, 3): 1}, 2),
        # GPU 1 is the second of its node and enters the other at GPU 3; GPU 2 the first, and enters at GPU 0
        ("node", {(1, 3): 1, (2, 0): 1}, {(1, 0): 1, (3, 2): 1, (0, 1): 1, (2, 3): 1}, 1),
    ],
)
def test_travel_by_hand(solver, travel, fabric, links, most):
    answer = solver.checked("travel", kernels.TRAVEL | {"travel": travel}, status="OPTIMAL", objective=most, bound=most)
    for name, wanted in (("fabric", fabric), ("links", links)):
        rows = answer[name]
        assert {(a, b): rows[a][b] for a in range(4) for b in range(4) if rows[a][b]} == wanted, name

"""Clusters, models and problems: sizes that must agree, and what a person is told when they do not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cluster import Cluster
from engine.costs import Datasheet
from engine.errors import InputError
from engine.model import MoEModel
from engine.plan import Placement, Plan, SendOrder
from engine.problem import MEMORY_SHARE, Problem
from engine.result import Provenance
from engine.simulate.work import Load
from engine.workload import RoutingTrace
from tests.cases.examples import examples
from tests.strategies import cluster_of, clusters, make_gpu, make_model, placements, problems, seeds

# Cluster


@settings(max_examples=examples(100), deadline=None)
@given(clusters(1))
def test_gpus_are_numbered_in_the_order_of_the_nodes(cluster):
    numbered = [(place, gpu) for place, node in enumerate(cluster.nodes) for gpu in node.gpus]
    assert cluster.gpus == tuple(gpu for _, gpu in numbered)
    assert cluster.node_of_gpu.tolist() == [place for place, _ in numbered]
    assert cluster.values("send_bandwidth").tolist() == [gpu.send_bandwidth for _, gpu in numbered]
    assert [name.split(" · ")[1] for name in cluster.gpu_names] == [gpu.type for gpu in cluster.gpus]


@settings(max_examples=examples(60), deadline=None)
@given(clusters(1))
def test_a_cluster_survives_json(cluster):
    again = Cluster.from_json(cluster.to_json(), "again")
    assert (again, again.digest) == (cluster, cluster.digest)
    assert cluster.model_copy(update={"latency": cluster.latency + 1}).digest != cluster.digest


def test_a_cluster_without_a_link_is_the_same_as_one_that_says_so():
    data = cluster_of(make_gpu()).model_dump()
    assert data["nodes"][0]["link_bandwidth"] is None
    shorter = {**data, "nodes": [{"name": "node", "gpus": data["nodes"][0]["gpus"]}]}
    assert Cluster.from_dict(shorter, "x").digest == Cluster.from_dict(data, "x").digest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data["nodes"].append(data["nodes"][0]), "two nodes are called 'node'"),
        (lambda data: data["nodes"][0]["gpus"].clear(), "nodes → 0 → gpus: "),
        (lambda data: data["nodes"].clear(), "nodes: "),
        (lambda data: data["nodes"][0]["gpus"][1].update(send_bandwidth=0), "gpus → 1 → send_bandwidth: .*greater"),
        (lambda data: data["nodes"][0].update(link_bandwidth=-1), "link_bandwidth: "),
        (lambda data: data["nodes"][0].update(link_bandwidth=5e-324), "link_bandwidth: .*equal to 0.001"),
        (lambda data: data["nodes"][0]["gpus"][1].update(flops_fp16=1e308), "flops_fp16: .*less than or equal to 10"),
        (lambda data: data.update(latency=-1), "latency: "),
        (lambda data: data.update(latency=1e308), "latency: .*equal to 3600"),
        (lambda data: data.update(latency=float("inf")), "latency: .*finite"),
        (lambda data: data.update(switch="big"), "switch: "),
        (lambda data: data["nodes"][0]["gpus"][0].pop("memory"), "memory: "),
    ],
)
def test_faulty_clusters_are_refused_with_the_place(change, says):
    data = cluster_of(make_gpu(), make_gpu()).model_dump(mode="json")
    change(data)
    with pytest.raises(InputError, match=f"^cluster.json: .*{says}"):
        Cluster.from_dict(data, "cluster.json")


def test_rates_by_number_format():
    card = make_gpu(flops=8e12)
    assert [card.flops(dtype) for dtype in ("fp32", "fp16", "bf16", "fp8")] == [4e12, 8e12, 8e12, 8e12]
    assert card.model_copy(update={"flops_fp8": 16e12}).flops("fp8") == 16e12


# Model


def test_sizes_of_a_known_model():
    """Mixtral 8x7B: 45.1 G of its 46.7 G weights are in experts."""
    model = MoEModel(
        name="Mixtral", layers=32, experts=8, experts_per_token=2, d_model=4096, d_ff=14336, ffn_matrices=3
    )
    assert model.bytes_per_expert * 8 * 32 / 2 == pytest.approx(45.1e9, rel=1e-3)
    assert model.bytes_per_token == 8192
    assert model.ffn_flops_per_token == model.bytes_per_expert  # two FLOP and two bytes to a weight
    assert model.moe_layers == tuple(range(32))


@settings(max_examples=examples(100), deadline=None)
@given(st.sets(st.integers(0, 9), max_size=9))
def test_dense_layers_are_left_out(dense):
    model = MoEModel(name="m", layers=10, dense_layers=tuple(dense), experts=4, experts_per_token=1, d_model=8, d_ff=8)
    assert set(model.moe_layers) | dense == set(range(10))
    assert len(model.moe_layers) + len(dense) == 10
    assert list(model.moe_layers) == sorted(model.moe_layers)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"experts_per_token": 5}, "experts_per_token is 5, but there are only 4 experts"),
        ({"dense_layers": (0, 0)}, "names a layer twice"),
        ({"dense_layers": (3,)}, "must lie in 0 … 2"),
        ({"dense_layers": (-1,)}, "must lie in 0 … 2"),
        ({"dense_layers": (0, 1, 2)}, "nothing to plan"),
        ({"layers": 0}, "layers: "),
        ({"dtype": "fp64"}, "dtype: "),
        ({"d_ff": 0}, "d_ff: "),
        ({"ffn_matrices": 4}, "ffn_matrices: "),
        ({"heads": 4}, "heads: "),
    ],
)
def test_faulty_models_are_refused_with_the_reason(changes, says):
    data = {"name": "m", "layers": 3, "experts": 4, "experts_per_token": 1, "d_model": 8, "d_ff": 8}
    MoEModel.from_dict(data, "model")
    with pytest.raises(InputError, match=f"^model.json: .*{says}"):
        MoEModel.from_dict(data | changes, "model.json")


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((3, 4, 1), "the model has 2 MoE layers, the recording 3"),
        ((2, 5, 1), "the model has 4 experts, the recording 5"),
        ((2, 4, 2), "the model has 1 experts per token, the recording 2"),
    ],
)
def test_a_recording_of_another_model_is_refused(sizes, says):
    model = make_model(2, 4)
    model.check_recording(2, 4, 1, "log")
    model.check_recording(2, 4, None, "log")
    with pytest.raises(InputError, match=f"narrow does not fit the recording log: {says}"):
        model.check_recording(*sizes, "log")


# Problem


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_traffic_carries_every_copy_to_a_host_of_its_expert(data):
    problem = data.draw(problems())
    placement = data.draw(placements(problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus)))
    traffic = Load(problem, placement).traffic
    width = problem.model.bytes_per_token
    np.testing.assert_allclose(traffic.sum(axis=2), problem.demand.sum(axis=2) * width)
    for layer, row in enumerate(placement.experts_of_gpu):
        slots = [expert for held in row for expert in held]
        for gpu, held in enumerate(row):
            wanted = sum(problem.demand[layer][:, expert] / slots.count(expert) for expert in held)
            np.testing.assert_allclose(traffic[layer][:, gpu], wanted * width)


@settings(max_examples=examples(60), deadline=None)
@given(problems())
def test_tokens_are_copies_over_k(problem):
    trace = problem.workload
    copies = (trace.experts >= 0).sum(axis=(0, 2))
    np.testing.assert_allclose(problem.tokens_of_rank.sum(axis=1) * trace.k, copies)


def test_problems_check_what_they_are_made_of():
    trace = RoutingTrace("log", np.zeros((2, 1, 1), dtype=np.int16), 4, source_rank=np.array([0, 3]))
    with pytest.raises(InputError, match="source rank 3"):
        Problem(trace, cluster_of(make_gpu(), make_gpu()), make_model(1, 4), Datasheet())
    with pytest.raises(InputError, match="does not fit the recording log"):
        Problem(trace, cluster_of(*[make_gpu()] * 4), make_model(2, 4), Datasheet())


@settings(max_examples=examples(60), deadline=None)
@given(seeds, st.integers(1, 4))
def test_as_many_experts_as_there_are_slots_fit_and_no_more(seed, layers):
    rng = np.random.default_rng(seed)
    model = make_model(layers, 12)
    per_slot = model.bytes_per_expert * layers / MEMORY_SHARE
    cards = [make_gpu(memory=float(per_slot * rng.uniform(0.5, 9))) for _ in range(3)]
    trace = RoutingTrace("log", np.zeros((1, layers, 1), dtype=np.int16), 12)
    problem = Problem(trace, cluster_of(*cards), model, Datasheet())
    slots = problem.expert_slots_of_gpu()
    for gpu in range(3):
        for held, fits in ((slots[gpu], True), (slots[gpu] + 1, False)):
            # Only this GPU is asked; the others hold one copy of everything, whatever their memory.
            roomy = Problem(trace, with_room(problem.cluster, gpu), model, Datasheet())
            row = [list(range(12))] * 3
            row[gpu] = list(range(held))
            placement = Placement(experts=12, experts_of_gpu=[row] * layers, model_layers=range(1, layers + 1))
            if fits:
                roomy.check_memory(placement)
            else:
                with pytest.raises(InputError, match=f"GPU {gpu} · type-0 would hold .* add GPUs"):
                    roomy.check_memory(placement)


def with_room(cluster: Cluster, tight: int) -> Cluster:
    """The cluster with ample memory everywhere but on one GPU."""
    cards = [
        card if gpu == tight else card.model_copy(update={"memory": 1e12}) for gpu, card in enumerate(cluster.gpus)
    ]
    return cluster_of(*cards)


def test_a_plan_is_refused_when_its_experts_do_not_fit():
    trace = RoutingTrace("log", np.zeros((1, 1, 1), dtype=np.int16), 2)
    model = make_model(1, 2)
    problem = Problem(trace, cluster_of(*[make_gpu(memory=1.5 * model.bytes_per_expert)] * 2), model, Datasheet())
    crowded = Placement(experts=2, experts_of_gpu=(((0, 1), ()),), model_layers=(1,))
    plan = Plan(
        name="crowded",
        placement=crowded,
        send_order=SendOrder(mode="concurrent"),
        provenance=Provenance(optimiser="test"),
    )
    with pytest.raises(InputError, match="GPU 0 · type-0 would hold"):
        problem.check_plan(plan)

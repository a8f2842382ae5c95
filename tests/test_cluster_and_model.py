"""Clusters, their links and ports, models and problems: sizes that must agree, and the errors when they do not."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.catalogue import cluster_presets, gpu_types, node_types
from engine.catalogue.packaged import links_of_types, nodes_without_links, usual_links, with_usual_links
from engine.cluster import Cluster, Efficiency, Node, contention_points, shares
from engine.costs import Datasheet
from engine.errors import InputError
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Placement
from engine.problem import MEMORY_SHARE, Problem
from engine.simulate.work import Load
from engine.workload import RoutingTrace
from tests.cases.examples import tried
from tests.cases.launch_plans import plan_with
from tests.cases.refusals import refusal
from tests.costs.silicon import needs_tables
from tests.strategies import cluster_of, clusters, efficiencies, make_gpu, make_model, placements, problems, seeds

# Cluster


@tried(100, clusters(1))
def test_gpus_are_numbered_in_the_order_of_the_nodes_and_a_cluster_survives_json(cluster):
    numbered = [(place, gpu) for place, node in enumerate(cluster.nodes) for gpu in node.gpus]
    assert cluster.gpus == tuple(gpu for _, gpu in numbered)
    assert cluster.node_of_gpu.tolist() == [place for place, _ in numbered]
    assert cluster.values("send_bandwidth").tolist() == [gpu.send_bandwidth for _, gpu in numbered]
    assert [name.split(" · ")[1] for name in cluster.gpu_names] == [gpu.type for gpu in cluster.gpus]
    again = Cluster.from_json(cluster.to_json(), "again")
    assert (again, again.digest) == (cluster, cluster.digest)
    assert ("efficiency" in cluster.to_json()) == (cluster.efficiency is not None)
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


# Model


def test_sizes_of_a_known_model_and_rates_by_number_format():
    """Mixtral 8x7B: 45.1 G of its 46.7 G weights are in experts."""
    card = make_gpu(flops=8e12)
    assert [card.flops(dtype) for dtype in ("fp32", "fp16", "bf16", "fp8")] == [4e12, 8e12, 8e12, 8e12]
    assert card.model_copy(update={"flops_fp8": 16e12}).flops("fp8") == 16e12
    model = MoEModel(name="Mixtral", layers=32, experts=8, experts_per_token=2, d_model=4096, d_ff=14336)
    assert model.bytes_per_expert * 8 * 32 / 2 == pytest.approx(45.1e9, rel=1e-3)
    assert model.bytes_per_token == 8192
    assert model.ffn_flops_per_token == model.bytes_per_expert  # two FLOP and two bytes to a weight


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


def test_a_recording_of_another_model_is_refused():
    model = make_model(2, 4)
    model.check_recording(2, 4, 1, "log")
    model.check_recording(2, 4, None, "log")
    for place, (name, here, there) in enumerate((("MoE layers", 2, 3), ("experts", 4, 5), ("experts per token", 1, 2))):
        sizes = [2, 4, 1]
        sizes[place] = there
        said = f"narrow does not fit the recording log: the model has {here} {name}, the recording {there}"
        assert said in refusal(model.check_recording, *sizes, "log")


# Problem


@tried(80, st.data())
def test_traffic_carries_every_copy_to_a_host_of_its_expert(data):
    problem = data.draw(problems())
    placement = data.draw(placements(problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus)))
    traffic, trace = Load(problem, placement).traffic, problem.workload
    np.testing.assert_allclose(problem.tokens_of_rank.sum(axis=1) * trace.k, (trace.experts >= 0).sum(axis=(0, 2)))
    width = problem.model.bytes_per_token
    np.testing.assert_allclose(traffic.sum(axis=2), problem.demand.sum(axis=2) * width)
    for layer, row in enumerate(placement.experts_of_gpu):
        slots = [expert for held in row for expert in held]
        for gpu, held in enumerate(row):
            wanted = sum(problem.demand[layer][:, expert] / slots.count(expert) for expert in held)
            np.testing.assert_allclose(traffic[layer][:, gpu], wanted * width)


def test_problems_check_what_they_are_made_of():
    trace = RoutingTrace("log", np.zeros((2, 1, 1), dtype=np.int16), 4, source_rank=np.array([0, 3]))
    assert "source rank 3" in refusal(Problem, trace, cluster_of(make_gpu(), make_gpu()), make_model(1, 4), Datasheet())
    said = refusal(Problem, trace, cluster_of(*[make_gpu()] * 4), make_model(2, 4), Datasheet())
    assert "does not fit the recording log" in said


@tried(60, seeds, st.integers(1, 4), st.integers(0, 1))
def test_as_many_experts_as_there_are_slots_fit_and_a_plan_with_more_is_refused(seed, layers, place):
    """On one GPU; the other has room for all, whatever its slots."""
    model, more = make_model(layers, 12), np.random.default_rng(seed).uniform(0.5, 9)
    trace = RoutingTrace("log", np.zeros((1, layers, 1), dtype=np.int16), 12)
    cards = [make_gpu(memory=1e12), make_gpu(memory=1e12)]
    cards[place] = make_gpu(memory=float(model.bytes_per_expert * layers / MEMORY_SHARE * more))
    problem = Problem(trace, cluster_of(*cards), model, Datasheet())
    slots = problem.expert_slots_of_gpu()[place]
    for held, fits in ((slots, True), (slots + 1, False)):
        row = [list(range(12))] * 2
        row[place] = list(range(held))
        placement = Placement(experts=12, experts_of_gpu=[row] * layers, model_layers=range(1, layers + 1))
        says = pytest.raises(InputError, match=f"GPU {place} · type-0 would hold .* add GPUs")
        with nullcontext() if fits else says:
            problem.check_plan(plan_with(placement))


def cluster(*types: str, link: float | None = None) -> Cluster:
    gpus = tuple(gpu_types()[kind].gpu() for kind in types)
    return Cluster(name="c", nodes=(Node(name="n", gpus=gpus, link_bandwidth=link), Node(name="o", gpus=gpus[:1])))


@pytest.mark.parametrize("name", node_types())
def test_the_catalogues_nodes_of_linked_gpus_have_exactly_these_links(name: str) -> None:
    node = node_types()[name]
    links = usual_links([node.gpu] * node.count)
    if links is None:
        others = ("L40S", "RTX 2080 Ti", "MI300X", "MI325X", "MI355X")
        assert node.gpu in others, "PCIe, a bridge that is sold apart, or links whose number goes by that of the GPUs"
    elif node.link_bandwidth is not None:
        assert (links.bandwidth, links.latency) == (node.link_bandwidth, node.link_latency)


@needs_tables
def test_packaged_types_only_where_their_nodes_are_linked_faster_than_by_pcie() -> None:
    links = links_of_types()
    assert {"GB200", "GB300", "B300-SXM"} <= set(links) and links["GB200"].bandwidth == 900e9
    assert not {"H100-PCIe", "A100-PCIe", "L4", "A30"} & set(links)


def test_a_node_of_eight_h100_without_links_is_found_and_mended() -> None:
    bare = cluster(*["H100"] * 8)
    assert [node.name for node in nodes_without_links(bare)] == ["n"]
    mended = with_usual_links(bare)
    assert not nodes_without_links(mended) and mended.nodes[0].link_bandwidth == 450e9
    assert mended.nodes[1] == bare.nodes[1], "a GPU alone needs none"


def test_nothing_is_said_of_nodes_that_come_with_no_links_or_have_them_and_of_the_papers_own_testbeds() -> None:
    for types in (("L40S",) * 8, ("RTX 2080 Ti",) * 2, ("H100", "V100-16"), ("H100",)):
        assert not nodes_without_links(cluster(*types)) and usual_links(types) is usual_links(["made up"] * 2) is None
    slow = cluster("H100", "H100", link=1e9)
    assert not nodes_without_links(slow) and with_usual_links(slow) == slow
    for preset in cluster_presets().values():
        assert not nodes_without_links(preset.cluster)


@given(efficiencies(), st.integers(1, 20))
def test_shares_never_rise_and_meet_their_points(efficiency, most):
    table = efficiency.table(most)
    assert table.shape == (2, most) and np.all(table > 0) and np.all(table <= 1)
    assert np.all(np.diff(table, axis=1) <= 1e-15)
    for points, row in zip((efficiency.fabric, efficiency.links), table, strict=True):
        for sends, share in points:
            if sends <= most:
                assert row[sends - 1] == pytest.approx(share)
    assert efficiency.is_none == (efficiency.table(20).min() == 1)


def test_every_further_send_costs_as_much_time():
    slower = 1 / shares(contention_points(0.1, 8), np.arange(1, 11))
    assert slower == pytest.approx([1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.7, 1.7])
    assert contention_points(0.1, 1) == ((1, 1.0),)
    said = "ports reach 90 % of their rate with 1 send, 50 % with 8; links keep their full rate (assumed) (by hand)"
    assert Efficiency(fabric=((1, 0.9), (8, 0.5)), origin="by hand").in_words == said


FAULTY_POINTS = {"larger share": [[1, 0.5], [2, 0.6]], "ascending": [[2, 0.5], [2, 0.5]], "at least 1 item": []}
FAULTY_POINTS |= {"greater than or equal to 1": [[0, 0.5]], "less than or equal to 1": [[1, 1.5]]}


@pytest.mark.parametrize("fault", FAULTY_POINTS)
def test_faulty_points_are_named(fault):
    assert fault in refusal(Efficiency.from_dict, {"fabric": FAULTY_POINTS[fault]}, "file")


def test_a_network_has_the_rates_of_one_send_and_shares_of_those():
    cluster = cluster_of(*[make_gpu(send=1e6)] * 3, efficiency=Efficiency(fabric=((1, 0.8), (2, 0.4))))
    network = Network.of(cluster)
    assert network.send.tolist() == network.receive.tolist() == [8e5] * 3
    assert network.share.tolist() == [[1, 0.5, 0.5, 0.5], [1] * 4] and network.contended
    assert network.rate(np.array([0, 0, 5]), np.array([1, 2, 9])).tolist() == [8e5, 4e5, 4e5]
    again = network.with_efficiency(Efficiency(fabric=contention_points(1.0, 2)))
    assert again.send.tolist() == [8e5] * 3 and again.share[0, :2].tolist() == [1, 0.25]

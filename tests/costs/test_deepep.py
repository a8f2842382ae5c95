"""DeepEP's tables as a source of network costs: measured times come out again, and others are called estimates."""

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.catalogue import gpu
from engine.cluster import Cluster, Node
from engine.costs import Combined, Datasheet, DeepEP, Silicon, choice, deepep
from engine.costs.scaled import Scaled
from engine.errors import InputError
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Placement, Plan, Travel
from engine.problem import make_problem
from engine.simulate import bound_of_plan, simulate
from engine.simulate.fabric import Fabric
from engine.simulate.flows import all_to_all
from engine.workload import RoutingTrace
from tests.cases.examples import tried
from tests.cases.launch_plans import plan_with
from tests.oracles.plans import check_plan

COSTS = Combined(Datasheet(), DeepEP())
MODEL = MoEModel(name="R1-like", layers=1, experts=256, experts_per_token=8, d_model=7168, d_ff=2048)


@pytest.fixture(autouse=True, scope="module")
def tables() -> None:
    """Skips all tests without the tables. Reading them takes more than a second, which collecting need not wait for."""
    if not deepep.measured_exchanges(deepep.FOLDER):
        pytest.skip("aiconfigurator-core is not installed")


def h100s(nodes: int, **changes) -> Cluster:
    card = gpu("H100").model_copy(update={"send_bandwidth": deepep.PORT, "receive_bandwidth": deepep.PORT})
    machines = tuple(Node(name=f"n{place}", gpus=(card,) * 8, link_bandwidth=deepep.LINK) for place in range(nodes))
    return Cluster(name="H100", nodes=machines).model_copy(update=changes)


def exchange_of(nodes: int, kind: str, unit: str = "node"):
    return next(
        series
        for series in deepep.measured_exchanges(deepep.FOLDER)
        if (series.nodes, series.kind, series.unit) == (nodes, kind, unit)
    )


def benchmark_plan(nodes: int, tokens: int) -> tuple[Plan, object]:
    """The benchmark's routing on contiguous experts, tokens of every GPU."""
    gpus = 8 * nodes
    chosen = deepep.benchmark_experts(nodes, "node")[: tokens * gpus, None, :].astype(np.int16)
    trace = RoutingTrace("benchmark", chosen, 256, source_rank=np.repeat(np.arange(gpus), tokens).astype(np.int32))
    placement = Placement.from_gpu_of_expert(np.arange(256)[None] // (256 // gpus), gpus, (0,))
    travel = deepep.travel_of("node")
    return plan_with(placement, travel=travel), make_problem(trace, h100s(nodes), MODEL, COSTS, travel=travel)


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_a_whole_plan_takes_what_was_measured(nodes):
    """Tokens routed as in the benchmark, through simulation and check: dispatch and combine within five per cent of the tables,
    which hold means of many tokens."""
    tokens = 256
    plan, problem = benchmark_plan(nodes, tokens)
    timeline = simulate(plan, problem)
    for kind, seconds in timeline.seconds_of_kind().items():
        if kind in ("dispatch", "combine"):
            exchange = exchange_of(nodes, kind)
            assert seconds == pytest.approx(exchange.seconds[exchange.tokens == tokens][0], rel=0.05), kind
    assert check_plan(plan, problem) == pytest.approx(timeline.total, rel=1e-9)
    assert bound_of_plan(plan, problem) <= timeline.total * (1 + 1e-9)
    assert all(said in timeline.cost_source for said in ("DeepEP's exchanges, measured", "one row per node, fp8 out"))


def test_rows_of_the_benchmark():
    """By hand: with two nodes all but 1 / C(256, 8) · C(128, 8) tokens cross; copies spread evenly."""
    from math import comb

    assert deepep.rows_of_token(2, "node") == pytest.approx(1 - comb(128, 8) / comb(256, 8), abs=2e-3)
    assert deepep.rows_of_token(4, "node") == pytest.approx(3 * (1 - comb(192, 8) / comb(256, 8)), rel=5e-3)
    assert deepep.rows_of_token(8, "copies") == pytest.approx(8 * 7 / 8, rel=5e-3)
    groups = np.sort(deepep.benchmark_experts(8, "node") // 32, axis=1)
    assert ((np.diff(groups, axis=1) > 0).sum(axis=1) + 1).max() == 4  # DeepSeek's limit


@tried(
    80,
    st.sampled_from(("dispatch", "combine")),
    st.sampled_from(("node", "copies")),
    st.sampled_from((1, 2, 3, 4, 6, 8, 40)),
    st.floats(1e3, 1e11),
    st.floats(1.01, 4),
)
def test_more_bytes_never_take_less_time(kind, unit, nodes, size, factor):
    curves = deepep.ExchangeCurves(deepep.measured_exchanges(deepep.FOLDER))
    rate = deepep.LINK if nodes == 1 else deepep.PORT

    def seconds(size: float) -> float:
        fabric, links = curves(kind, unit, nodes, *((0.0, size) if nodes == 1 else (size, 0.0)))
        return size / rate / (links if nodes == 1 else fabric)

    # Two neighbouring small sizes were measured some per cent the wrong way round.
    assert seconds(size * factor) >= 0.9 * seconds(size)


DRAWN = h100s(2, latency=5e-6)


@pytest.mark.parametrize(
    ("cost", "cluster", "place", "tokens"),
    [
        (COSTS, h100s(2), 12, 1),
        (DeepEP(), DRAWN, 0, 1),  # start-ups are in the measured times
        (Scaled(COSTS, tokens=8.0), h100s(2), 10, 8),
    ],
    ids=["skewed", "drawn with start-ups", "more tokens"],
)
def test_an_exchange_is_as_long_as_its_busiest_port_alone_was_measured_to_be(cost, cluster, place, tokens):
    exchange, traffic = exchange_of(2, "dispatch"), np.zeros((16, 16))
    traffic[3, 11] = exchange.size[place] / tokens
    at_work = cost.network(cluster).carrying("dispatch", "node", traffic)
    took = all_to_all("concurrent", None, traffic, at_work).seconds
    assert took == pytest.approx(exchange.seconds[place], rel=1e-6)


def test_collectives_that_are_not_in_the_tables_take_drawn_rates_and_start_ups():
    for collective in ("all_to_all", "all_reduce"):
        assert getattr(DeepEP(), collective)(DRAWN, 1e6) == getattr(Datasheet(), collective)(DRAWN, 1e6)
    network = Network.of(DRAWN)
    assert network.carrying("dispatch", "gpu", np.ones((16, 16))) is network


def test_what_was_not_measured_is_refused_or_called_an_estimate():
    cluster = h100s(2)
    lacks = DeepEP().lacks_network
    assert lacks(cluster) is None and DeepEP().beyond(cluster) is None
    assert "up to 8 nodes" in DeepEP().beyond(h100s(9)) and "to lie between" in DeepEP().beyond(h100s(3))
    a100 = cluster.nodes[0].model_copy(update={"gpus": (gpu("A100-80"),) * 8})
    assert "not of A100-80" in lacks(Cluster(name="c", nodes=(a100,)))
    short = cluster.nodes[0].model_copy(update={"gpus": cluster.gpus[:4]})
    assert "nodes of 8 GPUs" in lacks(Cluster(name="c", nodes=(short,)))
    slow = cluster.nodes[0].model_copy(update={"link_bandwidth": 300e9})
    assert "links inside nodes of 450 GB/s" in lacks(Cluster(name="c", nodes=(slow,)))
    plan, problem = benchmark_plan(2, 8)
    with pytest.raises(InputError, match="not with one row per GPU"):
        simulate(plan.model_copy(update={"travel": Travel(unit="gpu")}), problem)
    with pytest.raises(InputError, match="no times of computation"):
        DeepEP().gemm(cluster.gpus[0], np.ones(1), 8, 8, "bf16")


def test_an_estimate_says_so_in_every_timeline():
    plan, problem = benchmark_plan(2, 8)
    three = h100s(3)
    gpus = len(three.gpus)
    placement = Placement.from_gpu_of_expert(np.arange(256)[None] % gpus, gpus, (0,))
    plan = plan.model_copy(update={"placement": placement})
    there = make_problem(problem.workload, three, MODEL, COSTS, travel=plan.travel)
    said = "an estimate: DeepEP was measured on 1, 2, 4, 8 nodes, 3 are taken to lie between"
    assert said in simulate(plan, there).cost_source
    assert Combined(Silicon(), DeepEP()).beyond(three) == DeepEP().beyond(three)


def test_json_and_back():
    assert choice.from_dict(choice.to_dict(COSTS)) == COSTS
    assert choice.short(choice.to_dict(COSTS)) == "datasheet, network by DeepEP's tables"


def test_two_models_at_once_have_no_measured_price():
    with pytest.raises(InputError, match="measured one at a time"):
        Fabric(COSTS.network(h100s(2)))

"""The copy that serves a rank's tokens under each engine's rule, against plain readings of the rules; plans for the rules."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.optimize import linprog

from engine.cluster import Cluster, Node
from engine.costs import Datasheet
from engine.errors import InputError
from engine.placement import dispatch_rules
from engine.placement.dispatch_rules import choices_of_ranks, copy_of_rank, hosts_of_tokens, least_busy, shares_of_ranks
from engine.placement.replication.by_rank import RULES, RankedInstance, replicate_by_rank
from engine.placement.replication.eplb import eplb
from engine.plan import Placement, Travel
from engine.problem import make_problem
from engine.simulate.work import Load
from engine.systems import SYSTEMS, run
from engine.timeline import balancedness
from engine.workload import ExpertLoad, RoutingTrace
from tests import everything
from tests.cases.examples import tried
from tests.oracles.dispatch import copies_of_rank
from tests.strategies import make_gpu, make_model


@st.composite
def placements(draw):
    """(placement, ranks of a node) with copies anywhere, two on a GPU too."""
    nodes, per_node = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks, experts = nodes * per_node, draw(st.integers(2, 6))
    slots = -(-experts // ranks) + draw(st.integers(0, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = [rng.permutation(np.r_[np.arange(experts), rng.integers(0, experts, ranks * slots - experts)]) for _ in range(2)]
    return Placement.from_slots(
        np.array(rows), np.full(ranks, slots), experts, draw(st.sampled_from([(0, 1), (2, 4)]))
    ), per_node


@tried(80, placements(), st.sampled_from(["nearest-static", "nearest-dynamic", "fixed"]))
def test_every_rank_has_the_copies_of_the_rule(drawn, rule):
    placement, per_node = drawn
    travel, load = Travel(replicas=rule, ranks_per_node=per_node), np.ones(placement.experts)
    table = np.stack([choices_of_ranks(placement, travel, layer, load)[0] for layer in range(placement.layers)], axis=1)
    read = [copies_of_rank(placement, travel, rank) for rank in range(placement.gpus)]
    assert np.array_equal(table, np.array([[[-1 if gpu is None else gpu for gpu in row] for row in each] for each in read]))


def test_more_copies_than_a_generators_pool_are_drawn_from_as_python_does():
    slots = np.r_[np.zeros(60, int), np.arange(1, 5)][None]
    placement = Placement.from_slots(np.roll(slots, 3), np.full(16, 4), 5, (0,))
    travel = Travel(replicas="nearest-static")
    assert copy_of_rank(placement, travel)[0].tolist() == [copies_of_rank(placement, travel, rank)[0] for rank in range(16)]


def test_the_sequence_is_longer_than_ranks_get_in_it():
    for layers, ranks, experts, slots in ((1, 2, 1, 2), (3, 16, 8, 16), (4, 48, 6, 48), (2, 64, 64, 128)):
        rows, shape = np.tile(np.arange(slots) % experts, (layers, 1)), (layers, ranks, experts)
        placement = Placement.from_slots(rows, np.full(ranks, slots // ranks), experts, tuple(range(layers)))
        copies, used = dispatch_rules.copies_of(placement), np.zeros(ranks, dtype=np.int64)
        numbers = dispatch_rules.drawn_numbers(placement.model_layers, ranks, experts, slots)
        dispatch_rules.draw(*copies, numbers, used, dispatch_rules.near_copies(*copies, shape, ranks))
        assert used.max() < len(numbers)


@tried(60, placements(), st.sampled_from(["nearest-static", "nearest-dynamic", "fixed", "lp", None]), st.integers(0, 2**32))
def test_tokens_go_where_the_shares_say_and_only_to_copies(drawn, rule, seed):
    placement, per_node = drawn
    rng, travel = np.random.default_rng(seed), Travel(replicas=rule, ranks_per_node=per_node)
    experts = rng.integers(-1, placement.experts, (400, 2))
    source = rng.integers(0, placement.gpus, 400)
    load = np.bincount(experts[experts >= 0], minlength=placement.experts).astype(float)
    share = np.broadcast_to(shares_of_ranks(placement, travel, 0, load), (placement.gpus, placement.experts, placement.gpus))
    assert share.sum(axis=2) == pytest.approx(1) and not share[:, placement.share[0] == 0].any()
    if rule is None:
        return
    hosts = hosts_of_tokens(placement, travel, 0, experts, source)
    assert (hosts[experts < 0] == -1).all()
    real = experts >= 0
    demand = np.zeros(share.shape[:2])
    np.add.at(demand, (np.broadcast_to(source[:, None], experts.shape)[real], experts[real]), 1.0)
    served = np.zeros((placement.experts, placement.gpus))
    np.add.at(served, (experts[real], hosts[real]), 1.0)
    expected = np.einsum("re,reg->eg", demand, share)
    # Followed token by token a table is exact; turns and divisions end in whole tokens.
    slack = 0 if rule in ("nearest-static", "fixed") else placement.gpus + 0.05 * load.max(initial=0)
    if rule != "nearest-dynamic":
        assert np.abs(served - expected).max() <= slack


def test_the_fixed_rule_counts_ranks():
    placement = Placement(experts=3, experts_of_gpu=(((0, 1), (0, 2), (0, 1)),), model_layers=(0,))
    fixed = copy_of_rank(placement, Travel(replicas="fixed"))
    assert fixed[0].tolist() == [[0, 0, 1], [1, 2, 1], [2, 0, 1]]


def test_the_linear_programme_divides_what_no_rank_has_near():
    load = np.array([60.0, 20.0, 40.0, 0.0, 25.0])
    placement = Placement(experts=5, experts_of_gpu=(((0, 1), (0, 2), (0, 1), (3, 4)),), model_layers=(0,))
    share = shares_of_ranks(placement, Travel(replicas="lp", ranks_per_node=1), 0, load)
    assert load @ share[3] == pytest.approx([40, 40, 40, 25], rel=0.01)  # as if all divided so
    assert share[0, 0].tolist() == [1, 0, 0, 0] and share[2, 1].tolist() == [0, 0, 1, 0]  # but some hold a copy
    assert shares_of_ranks(placement, Travel(replicas="lp"), 0, 0 * load)[3] == pytest.approx(placement.share[0])


@tried(20, st.integers(0, 2**32), st.integers(1, 4))
def test_five_steps_come_near_the_optimum_where_copies_were_planned(seed, spare):
    load = np.random.default_rng(seed).lognormal(0, 1, 64)
    slots = eplb(load[None], 64 + 8 * spare, 8)[0].reshape(8, -1)
    held = np.array([[expert in row for row in slots] for expert in range(64)])
    share = least_busy(held / held.sum(axis=1, keepdims=True), load)
    assert share.sum(axis=1) == pytest.approx(1) and (share >= 0).all() and not share[~held].any()
    expert, gpu = np.nonzero(held)
    busiest, whole = np.zeros((8, len(gpu) + 1)), np.zeros((64, len(gpu) + 1))
    busiest[gpu, np.arange(len(gpu))], busiest[:, -1] = load[expert], -1.0
    whole[expert, np.arange(len(gpu))] = 1.0
    best = linprog(np.r_[np.zeros(len(gpu)), 1.0], busiest, np.zeros(8), whole, np.ones(64)).fun
    assert best * (1 - 1e-9) <= (load @ share).max() <= 1.03 * best


def balance_of(solution, instance):
    """float64[load, layer] ideal over busiest, by the rule's own table."""
    layers = instance.demand.shape[1]
    numbers = instance.model_layers or tuple(range(layers))
    placement = Placement.from_slots(solution, instance.slots_of_gpu, instance.demand.shape[3], numbers)
    travel, found = Travel(replicas=instance.rule, ranks_per_node=instance.ranks_per_node), []
    for demand in instance.demand:
        share = [shares_of_ranks(placement, travel, layer, demand[layer].sum(axis=0)) for layer in range(layers)]
        time = np.array([np.einsum("re,reg->g", here, each) for here, each in zip(demand, share, strict=True)]) / instance.speed
        found.append(demand.sum(axis=(1, 2)) / instance.speed.sum() / time.max(axis=1))
    return np.array(found)


@pytest.mark.parametrize("rule", RULES)
def test_replicas_are_planned_for_the_rule_and_nothing_beats_the_bound(rule):
    rng = np.random.default_rng(3)
    load = rng.pareto(1.2, (1, 3, 32)) + 0.1
    demand = np.repeat(load[:, :, None] / 16, 16, axis=2) * rng.uniform(0.9, 1.1, (1, 3, 16, 1))
    instance = RankedInstance(demand, np.full(16, 4), np.ones(16), rule, 4, (1, 2, 7))
    result = replicate_by_rank(instance)
    own = balance_of(result.solution, instance)
    assert own.min() == pytest.approx(result.objective) and result.objective <= result.bound * (1 + 1e-12)
    assert result.bound == pytest.approx(1 / instance.bound.max())
    even = np.tile(np.r_[np.arange(32), np.arange(32)], (3, 1))
    assert own.mean() > balance_of(even, instance).mean() + 0.1
    assert (replicate_by_rank(instance).solution == result.solution).all()


@pytest.mark.parametrize("rule", RULES)
def test_the_best_of_all_placements_is_found_or_nearly(rule):
    short = []
    for seed in range(9 if everything.WANTED else 4):  # one has four experts, and sixteen times as many placements
        rng, experts = np.random.default_rng(seed), 3 + (seed % 4 == 3)
        demand = (rng.pareto(1.2, (1, 1, 1, experts)) + 0.1) * rng.uniform(0.5, 1.5, (1, 1, 4, 1))
        instance = RankedInstance(demand, np.full(4, 2), np.ones(4), rule, (1, 2, 4)[seed % 3])
        result, every = replicate_by_rank(instance), product(combinations(range(experts), 2), repeat=4)
        rows = [np.array(row).reshape(1, -1) for row in every if len(set().union(*row)) == experts]
        best = max(balance_of(row, instance).min() for row in rows)
        assert result.objective <= best * (1 + 1e-9) <= result.bound * (1 + 2e-9)
        short.append(1 - result.objective / best)
    assert np.mean(short) < 0.01


def test_hot_experts_get_a_copy_in_every_node():
    load = np.r_[8.0, np.ones(14)]
    demand = np.repeat(load[None, None, None] / 8, 8, axis=2)
    result = replicate_by_rank(RankedInstance(demand, np.full(8, 3), np.ones(8), "nearest-static", 2))
    nodes = np.unique(np.flatnonzero(result.solution[0] == 0) // 6)
    assert len(nodes) == 4 and result.objective > 0.9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "lp"}, "rule: must be one of"),
        ({"slots_of_gpu": np.array([1, 1])}, "room for every expert"),
        ({"slots_of_gpu": np.array([4, 4])}, "at most one slot"),
        ({"demand": -np.ones((1, 1, 2, 3))}, "finite values of at least 0"),
    ],
)
def test_instances_are_checked(change, message):
    given_ = {"demand": np.ones((1, 1, 2, 3)), "slots_of_gpu": np.array([2, 2]), "speed": np.ones(2)}
    given_ |= {"rule": "fixed", "ranks_per_node": 1}
    with pytest.raises(InputError, match=message):
        RankedInstance(**(given_ | change))


def two_nodes(experts, k, layers):
    """400 tokens of uneven popularity on two linked nodes of two GPUs."""
    rng = np.random.default_rng(5)
    weight = 1 / np.arange(1, experts + 1)
    chosen = np.array([[rng.choice(experts, k, False, weight / weight.sum()) for _ in range(layers)] for _ in range(400)])
    nodes = [Node(name=name, gpus=[make_gpu(0)] * 2, link_bandwidth=1e11) for name in "ab"]
    trace, model = RoutingTrace("t", chosen.astype(np.int16), experts), make_model(layers, experts, k)
    return make_problem(trace, Cluster(name="two nodes", nodes=nodes), model, Datasheet())


@pytest.mark.parametrize("rule", ["nearest-static", "nearest-dynamic", "fixed", "lp"])
@pytest.mark.parametrize("unit", ["copies", "gpu", "node"])
def test_loads_and_rows_follow_the_rule(rule, unit):
    problem = two_nodes(4, 2, 2)
    problem = replace(problem, travel=Travel(unit=unit, replicas=rule).on_nodes([2, 2]))
    rows = [[[0, 1], [0, 2], [3, 0], [1, 2]], [[0, 1], [2, 3], [0, 1], [2, 3]]]
    placement = Placement(experts=4, experts_of_gpu=rows, model_layers=problem.model.moe_layers)
    load = Load(problem, placement, problem.travel)
    by_token = np.zeros((2, 4, 4))
    for layer, hosts in enumerate(load.hosts):
        np.add.at(by_token[layer], (problem.workload.experts[:, layer], hosts), 1.0)
    assert np.array_equal(load.served, by_token)
    assert load.served.sum(axis=2) == pytest.approx(problem.workload.load)
    numbers = problem.model.moe_layers
    counted = ExpertLoad("l", problem.workload.load, numbers, by_source=problem.demand.transpose(1, 0, 2))
    known = Load(replace(problem, workload=counted), placement, problem.travel)
    assert np.abs(known.served - load.served).max() <= (1e-9 if rule in ("nearest-static", "fixed") else 6)
    size = problem.model.bytes_per_token
    assert known.copies_moved.sum(axis=1) == pytest.approx(known.served.sum(axis=1) * size)
    if unit == "copies":
        assert known.traffic.sum(axis=1) == pytest.approx(known.served.sum(axis=1) * size)


def test_replication_plans_for_the_rule_of_the_problem():
    problem, found = two_nodes(8, 1, 3), {}
    for rule in (None, "nearest-static"):
        outcome = run(SYSTEMS["eplb"], replace(problem, travel=Travel(replicas=rule).on_nodes([2, 2])), {})
        plan, travel = outcome.result.solution, Travel(replicas="nearest-static", ranks_per_node=2)
        found[rule] = float(balancedness(Load(problem, plan.placement, travel).served.sum(axis=1)).min())
        assert (plan.travel and plan.travel.replicas, "in turn" in outcome.notes["copies by other rules"].value) == (rule, True)
    assert found["nearest-static"] >= found[None]

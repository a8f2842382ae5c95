"""Rows of a dispatch against a count token by token, and their mean where only chances are known."""

from itertools import combinations
from math import comb, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.communication.travel import Stops, places_of, rows_by_chance, rows_of_tokens, rows_to_all, touched_by_chance
from engine.costs import Datasheet
from engine.network import off_diagonal
from engine.plan import Placement, Travel
from engine.problem import Problem, make_problem
from engine.simulate.work import Load
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.examples import tried
from tests.cases.samples import in_nodes
from tests.oracles.plans import rows_of_layer
from tests.strategies import make_model, placements, problems, seeds, travels


@st.composite
def placed(draw, **options) -> tuple[Problem, Placement]:
    problem = draw(problems(travelling=True, **options))
    sizes = problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus)
    return problem, draw(placements(*sizes))


@tried(200, placed(), st.sampled_from(("copies", "gpu", "node")))
def test_rows_agree_with_a_reading_token_by_token(case, unit):
    problem, placement = case
    source = problem.workload.rank_of_token(problem.network.gpus)
    for layer in range(problem.workload.layers):
        hosts = placement.hosts(layer, problem.workload.experts[:, layer])
        rows = rows_of_tokens(hosts, source, problem.stops, unit)
        np.testing.assert_array_equal(rows, rows_of_layer(placement, problem, layer, Travel(unit=unit), source.tolist()))


@tried(60, placed(layers=(1, 1)), st.sampled_from(("gpu", "node")))
def test_by_chance_is_certain_where_it_is(case, unit):
    """With one expert per token, rows by chance are the rows of the tokens in the mean."""
    problem, placement = case
    trace = problem.workload
    first = RoutingTrace("first", trace.experts[:, :, :1], trace.num_experts, source_rank=trace.source_rank)
    gpus, single = (len(problem.cluster.gpus), Placement.from_gpu_of_expert(placement.gpu_of_expert, placement.gpus, (1,)))
    demand = first.demand(gpus)[0]
    tokens = demand.sum(axis=1)
    likely = demand / np.where(tokens > 0, tokens, 1.0)[:, None] @ single.share[0]
    touched = places_of(likely, problem.stops) if unit == "node" else likely
    hosts = single.hosts(0, first.experts[:, 0])
    expected = rows_of_tokens(hosts, first.rank_of_token(gpus), problem.stops, unit)
    np.testing.assert_allclose(rows_by_chance(touched, tokens, problem.stops, unit), expected, atol=1e-9)


@pytest.mark.parametrize("unit", ["gpu", "node"])
def test_loads_alone_give_nearly_the_rows_of_tokens_that_choose_independently(unit):
    """64 experts, 4 a token, drawn without any affinity: the estimate from their loads is within a few per cent."""
    rng = np.random.default_rng(1)
    popularity = rng.dirichlet(np.full(64, 2.0))
    chosen = np.argsort(-(rng.gumbel(size=(6000, 1, 64)) + np.log(popularity)), axis=2)[:, :, :4].astype(np.int16)
    trace = RoutingTrace("log", chosen, 64)
    model = make_model(1, 64, 4)
    placement = Placement.from_gpu_of_expert(np.arange(64)[None] // 16, 4, model.moe_layers)
    travel, cluster = Travel(unit=unit), in_nodes(4, 2, 4e6)
    exact, estimate = (
        off_diagonal(Load(make_problem(workload, cluster, model, Datasheet()), placement, travel).traffic[0])
        for workload in (trace, ExpertLoad("loads", trace.load, model.moe_layers))
    )
    assert np.array_equal(exact > 0, estimate > 0)
    assert estimate[exact > 0] == pytest.approx(exact[exact > 0], rel=0.06)
    assert estimate.sum() == pytest.approx(exact.sum(), rel=0.01)


@given(travels)
def test_row_bytes(travel):
    model = make_model(1, 8, 2)  # 64 numbers of 16 bits
    out, back = travel.row_bytes(model)
    assert out == {None: 128, "fp8": 64 + 4}[travel.dispatch] + (0 if travel.unit == "copies" else 2 * 4)
    assert back == {None: 128, "bf16": 128, "fp32": 256}[travel.combine]


@tried(60, st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_every_row_of_an_all_gather_reaches_every_gpu_once_and_crosses_once_a_node(rows, data):
    domain = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows))))
    rows, stops = np.array(rows, dtype=float), Stops(domain)
    moved, away = rows_to_all(rows, stops), domain[:, None] != domain[None, :]
    assert moved.sum(axis=0).tolist() == [rows.sum()] * len(rows)
    crossing = np.where(away, moved, 0).sum()
    assert crossing == sum(rows[domain != node].sum() for node in set(domain))
    sizes = {node: (domain == node).sum() for node in set(domain)}
    for gpu, mine in enumerate(domain):
        even = rows[domain == mine].sum() / sizes[mine]
        assert abs(np.where(away, moved, 0)[gpu].sum() - even * (len(sizes) - 1)) < len(sizes)


@tried(100, st.integers(2, 7), st.integers(1, 3), st.integers(1, 3), seeds)
def test_against_all_sets(experts, k, places, seed):
    k, rng = min(k, experts), np.random.default_rng(seed)
    weight = rng.gamma(1.5, size=experts) + 0.05
    share = rng.dirichlet(np.ones(places), experts)
    sets = list(combinations(range(len(weight)), k))
    chance = np.array([prod(weight[expert] for expert in chosen) for chosen in sets])
    chance /= chance.sum()
    present = np.array([sum(p for p, chosen in zip(chance, sets, strict=True) if e in chosen) for e in range(len(weight))])
    missed = np.array([prod(1 - share[expert] for expert in chosen) for chosen in sets])
    touched = 1 - chance @ missed
    # Loads are all that is known of the weights
    assert touched_by_chance(present * 1000, k, share) == pytest.approx(touched, abs=2e-4)


def test_equal_loads_are_combinatorics():
    """256 experts, 8 a token, 4 nodes of 64: 4 · (1 − C(192, 8) / C(256, 8))."""
    touched = touched_by_chance(np.ones(256), 8, np.eye(4)[np.arange(256) // 64])
    assert touched.sum() == pytest.approx(4 * (1 - comb(192, 8) / comb(256, 8)), rel=1e-9)


def test_many_layers_at_once_are_each_by_itself():
    rng = np.random.default_rng(3)
    load, share = rng.zipf(1.6, (5, 24)).clip(0, 40).astype(float), np.eye(6)[np.arange(24) // 4]
    whole = touched_by_chance(load, 4, share)
    for layer in range(5):
        assert whole[layer] == pytest.approx(touched_by_chance(load[layer], 4, share), abs=1e-4)


def test_an_expert_that_every_token_has_and_one_that_none_has():
    share = np.eye(3)
    assert touched_by_chance(np.array([100.0, 100.0, 0.0]), 2, share) == pytest.approx([1, 1, 0], abs=1e-4)
    # More copies than tokens can have: the recording counted something twice, and the rest is shared out
    assert touched_by_chance(np.array([150.0, 25.0, 25.0]), 2, share) == pytest.approx([1, 0.5, 0.5], abs=1e-4)
    assert touched_by_chance(np.zeros(3), 2, share).tolist() == [0, 0, 0]

"""Bounds of a layer: below every placement, whatever the prices; limits of rows against every set of experts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import InputError
from engine.placement.best.bound import Bounded, Prices, Proof, prices_of
from engine.placement.best.together import Caps, Tier, by_eigenvalues, by_rows
from engine.plan import Plan, SendOrder, Travel
from engine.problem import Problem
from engine.result import never
from engine.simulate import simulate
from engine.systems import SYSTEMS, run
from engine.systems.aurora_exclusive import fixed_compute
from engine.systems.best_layers import LayersOf, bound_of
from engine.workload import ExpertLoad
from tests.cases.best_layers import COPIES, FEWEST, GPU, NODE, drawn, every_held, held_at_random, plan_of
from tests.cases.examples import tried
from tests.oracles.bounds import check_limit
from tests.oracles.plans import seconds_by_ports
from tests.strategies import problems, seeds

ONE_LAYER = problems(layers=(1, 1), experts=(2, 7), travelling=True)


def without_tokens(problem: Problem) -> Problem:
    return replace(problem, workload=ExpertLoad("loads", problem.workload.load, problem.model.moe_layers))


@tried(500, ONE_LAYER, st.booleans(), st.integers(0, 3), st.booleans(), st.sampled_from((0.0, 0.0, 1.0)), seeds, fewest=40)
def test_no_placement_is_below_with_any_knobs(problem, loads, spare, filled, work, seed):
    """With the slots of that placement, or with any slots."""
    problem = without_tokens(problem) if loads else problem
    held = held_at_random(problem, spare, seed)
    slots, experts = sum(map(len, held)), problem.workload.num_experts
    total = simulate(plan_of([held], problem), problem).total
    room = np.array([len(here) for here in held]) if filled else np.full(len(held), experts)
    bound = bound_of(problem, room, slots, never, work)
    assert bound is not None or (loads and slots > experts and problem.travel.replicas not in (None, "fewest"))
    assert bound is None or 0 <= bound <= total * (1 + 1e-9)


@tried(100, ONE_LAYER, st.integers(0, 1), fewest=2)
def test_no_plan_of_any_system_is_below(problem, redundant):
    for name in ("linear", "eplb", "aurora"):
        wanted = {"time_limit": 0.1, "redundant": redundant}
        known = SYSTEMS[name].options.model_fields
        try:
            plan = run(SYSTEMS[name], problem, {key: value for key, value in wanted.items() if key in known}).result.solution
        except InputError:
            continue
        slots = plan.placement.slots[0]
        bound = bound_of(problem, slots, int(slots.sum()), never)
        assert bound <= simulate(in_plain_order(plan), problem).total * (1 + 1e-9), name


def in_plain_order(plan: Plan) -> Plan:
    return plan.model_copy(update={"send_order": SendOrder(mode="concurrent"), "claim": None})


@pytest.mark.parametrize(
    ("travel", "spare", "room", "links"),
    [
        (COPIES, 0, 2, True),
        (COPIES, 2, 3, False),
        (GPU, 0, 2, False),
        (GPU, 2, 3, False),
        (NODE, 0, 4, True),
        (FEWEST[1], 2, 3, True),
        (Travel(unit="gpu", replicas="nearest-dynamic", ranks_per_node=1), 2, 3, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.everything) for seed in range(1, 12))])
def test_any_prices_prove_a_bound(travel, spare, room, links, seed):
    """The least of all placements, and prices at random and of a linear programme."""
    problem, rng, room = drawn(seed, travel, links=links), np.random.default_rng(seed), np.full(3, room)
    least = min(seconds_by_ports(plan_of([held], problem), problem)[0] for held in every_held(4, room, 4 + spare))
    bounded = LayersOf(problem, problem.network, 1.0, room, 4 + spare).bounded(0, travel.replicas is not None and spare > 0)
    proof = Proof(bounded, 9.0)
    for prices in (prices_of(bounded, proof.part), at_random(bounded, rng)):
        for longest in (np.inf, bounded.shortest * rng.uniform(1, 3)):
            proof.seconds = 9.0 if longest < np.inf else 0.0
            proof.look(prices, longest)
    assert proof.least <= least * (1 + 1e-9)


def at_random(bounded: Bounded, rng: np.random.Generator) -> Prices:
    there, back = (rng.dirichlet(np.full(len(bounded.start), 0.3)) for _ in range(2))
    size = float(bounded.least.max())
    return Prices(
        there, back, rng.exponential(0.5, 3), rng.exponential(size, 3), np.zeros(0, dtype=int), np.zeros((3, 0)), size
    )


@tried(100, st.integers(2, 7), st.integers(1, 4), st.integers(1, 7), seeds)
def test_a_group_never_costs_less_than_its_experts_one_by_one(experts, choices, slots, seed):
    """Capped by slots and by seconds, on lines that are searched and that stay."""
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((30, experts)) / rng.dirichlet(np.ones(experts)), axis=1)[:, : min(choices, experts)]
    chosen[:, 1:][rng.random(chosen[:, 1:].shape) < 0.3] = -1
    source, of_kind = rng.integers(0, 2, 30), rng.random(2)
    tier = Tier(np.zeros(1, dtype=int), (np.zeros((1, 2), dtype=int),) * 2, np.arange(2), np.zeros((2, experts)))
    tier.know(chosen, source)
    tokens, size, slots = [row[row >= 0].tolist() for row in chosen], rng.random(experts), min(slots, experts)
    for capped in (False, True):
        caps = Caps(slots, size if capped else np.zeros(0), float(size.sum() * rng.uniform(0.2, 1)))
        for seconds in (caps.seconds, 1.5 * caps.seconds) if capped else (np.inf,):
            for way in (by_rows, by_eigenvalues):
                slope, limit = way(tier, of_kind, caps)
                for lines, proven in ((slope, limit), (0.5 * slope, way(tier, of_kind, caps, 0.5 * slope)[1])):
                    part = tier.alone(of_kind, lines, tier.most(experts)) + proven.at(slots, seconds if capped else 0.0)
                    check_limit(tokens, of_kind[source], size, slots, seconds, part)


def test_rows_of_experts_that_fire_together_are_bounded_closely():
    """Two teams of four that always fire together on two GPUs: a row a token, which either way of limits proves."""
    chosen = np.repeat([[0, 1, 2, 3], [4, 5, 6, 7]], 10, axis=0)
    tier = Tier(np.zeros(1, dtype=int), (np.zeros((1, 1), dtype=int),) * 2, np.zeros(1, dtype=int), np.zeros((1, 8)))
    tier.know(chosen, np.zeros(20, dtype=int))
    for way in (by_rows, by_eigenvalues):
        slope, limit = way(tier, np.ones(1), Caps(4, np.zeros(0), np.inf))
        parts = tier.alone(np.ones(1), slope, 4) + limit.at(4, 0.0)
        assert parts.sum() == pytest.approx(20, rel=0.03)


def test_fixed_times_and_start_ups_count():
    problem = drawn(0, GPU, links=True)
    problem = replace(problem, cluster=problem.cluster.model_copy(update={"latency": 1.0}))
    bound = bound_of(problem, np.full(3, 4), 4, never)
    fixed = sum(float(step.max()) for step in fixed_compute(problem).values())
    assert bound >= fixed + 2.0

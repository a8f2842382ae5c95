"""Experts that fire together against every placement of small instances, and under changes that must not matter."""

import time
from itertools import product

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import IllegalError
from engine.placement.coactivation import CoactivationInstance, coactivation
from engine.placement.coactivation.copies import served, with_copies
from engine.placement.coactivation.exact import fewest_rows
from engine.placement.coactivation.instance import nets_between, nets_of
from engine.placement.coactivation.relaxation import Relaxation, facets, tangent
from engine.placement.coactivation.search import Task, swap, tables_of
from engine.result import Limits, Status
from tests.cases.examples import tried
from tests.cases.placements import planted_tokens, random_tokens, topic_tokens
from tests.cases.samples import every_placement
from tests.oracles.placing import check_coactivation

SHORT = Limits(0.2, wall=100, exact=False)
SHAPES = [(experts, gpus, None, "gpu") for experts, gpus in ((4, 2), (6, 3), (6, 2), (5, 5))]
SHAPES += [(8, 4, 2, "node"), (8, 4, 2, "gpu"), (6, 6, 3, "node"), (6, 6, 1, "node"), (4, 4, 4, "node")]


def made(shape, choices: int, tokens: int, cap: float | None, seed: int, layers: int = 1) -> CoactivationInstance:
    experts, gpus, per_node, travel = shape
    rng = np.random.default_rng(seed)
    chosen = random_tokens(layers, tokens, experts, min(choices, experts), seed, missing=0.1)
    source = rng.integers(-1 if seed % 3 == 0 else 0, gpus, tokens)
    return CoactivationInstance(chosen, source, gpus, per_node, travel, cap, experts)


def check(result, instance: CoactivationInstance) -> tuple[list[int], list[float]]:
    """Check that the answer is legal and its objective right; (rows, imbalance) of every layer, token by token."""
    rows, imbalance = check_coactivation(
        *(result.solution, instance.experts, instance.source_gpu, instance.gpus, instance.gpus_per_node),
        instance.travel,
        None if result.status in (Status.INFEASIBLE, Status.TIME_LIMIT) else instance.cap,
    )
    assert result.solution.dtype == np.int64
    assert result.objective == sum(rows)
    assert result.bound <= result.objective
    assert instance.rows(result.solution).tolist() == rows
    assert instance.imbalance(result.solution).tolist() == pytest.approx(imbalance)
    return rows, imbalance


caps, seed = st.sampled_from([None, 1.0, 1.2, 1.6]), st.integers(0, 2**32 - 1)


@tried(20, st.builds(made, st.sampled_from(SHAPES), st.integers(1, 4), st.integers(1, 40), caps, seed), fewest=4)
def test_equals_every_placement(instance):
    result, searched = (coactivation(instance, limits) for limits in (Limits(wall=100), SHORT))
    check(result, instance)
    check(searched, instance)
    problem = instance.experts, instance.source_gpu, instance.gpus, instance.gpus_per_node, instance.travel
    every = every_placement(1, instance.expert_count, instance.gpus)
    places = [(imbalance[0], rows[0]) for rows, imbalance in (check_coactivation(place, *problem) for place in every)]
    least = min(imbalance for imbalance, _ in places)
    allowed = max(least, instance.cap or np.inf) + 1e-9
    best = min(rows for imbalance, rows in places if imbalance <= allowed)
    assert result.objective == best
    if instance.cap is None or least <= instance.cap + 1e-9:
        assert result.status is Status.OPTIMAL and result.bound == best
    else:
        assert result.status is Status.INFEASIBLE
        assert instance.imbalance(result.solution)[0] == pytest.approx(least)
    # The search, which does not see the exact method, on its own.
    assert searched.objective == best


@pytest.mark.parametrize("shape", [(12, 3, None, "gpu"), (12, 4, None, "gpu"), (16, 4, 2, "node"), (16, 8, None, "gpu")])
@pytest.mark.parametrize("cap", [None, 1.15])
def test_search_finds_the_optimum_of_dynamic_programming(shape, cap):
    instance = made(shape, 3, 200, cap, 5, layers=2)
    exact = coactivation(instance, Limits(60))
    assert exact.status is Status.OPTIMAL
    check(exact, instance)
    searched = coactivation(instance, Limits(2, wall=100, exact=False))
    check(searched, instance)
    assert searched.objective == exact.objective


@pytest.mark.parametrize(("stray", "travel"), [(0.0, "gpu"), (0.15, "gpu"), (0.15, "node")])
def test_planted_partitions_are_recovered(stray, travel):
    chosen, planted = planted_tokens(3000, 64, 8, 6, stray)
    instance = CoactivationInstance(chosen[None], np.full(3000, -1), 8, 2, travel, None, 64)
    result = coactivation(instance, Limits(0.5, wall=100))
    check(result, instance)
    assert result.objective <= instance.rows(planted[None])[0]
    if not stray:
        assert result.status is Status.OPTIMAL and result.objective == 3000


def test_the_cap_is_kept_where_a_search_finds_a_way_and_else_the_load_is_least():
    chosen = np.stack([topic_tokens(1000, 64, 6, seed) for seed in range(2)])
    free = CoactivationInstance(chosen, np.arange(1000) % 8, 8)
    capped = CoactivationInstance(chosen, np.arange(1000) % 8, 8, cap=1.05)
    without, within = (coactivation(instance, SHORT) for instance in (free, capped))
    assert within.status is Status.FEASIBLE and within.objective > without.objective
    assert free.imbalance(without.solution).max() > 1.05 >= capped.imbalance(within.solution).max()
    # An expert that every token goes to: its GPU has at least its tokens and those of the seven lightest.
    chosen = np.concatenate([chosen[:1] % 63, np.full((1, 1000, 1), 63)], axis=2)
    hot = CoactivationInstance(chosen, np.arange(1000) % 8, 8, cap=1.05)
    result = coactivation(hot, SHORT)
    load = np.sort(hot.load(0))
    assert result.status is Status.INFEASIBLE
    assert hot.imbalance(result.solution)[0] * load.sum() / 8 == pytest.approx(load[-1] + load[:7].sum())


def test_busy_gpus_count_where_asked():
    instance = CoactivationInstance(topic_tokens(3000, 64, 6, topics=30)[None], np.full(3000, -1), 8)

    def busiest(result) -> int:
        place = result.solution[0]
        return max(int((place[instance.experts[0]] == gpu).any(axis=1).sum()) for gpu in range(8))

    rows, ports = (coactivation(instance, SHORT, port_weight=weight) for weight in (0.0, 1.0))
    check(ports, instance)
    assert busiest(ports) < busiest(rows) and rows.objective < ports.objective


def test_inside_nodes_few_rows_go_over_links():
    """Pairs of experts that always fire together: a node holds both, and so does one GPU of it."""
    rng = np.random.default_rng(0)
    pair, other = rng.integers(0, 16, (2, 2000))
    chosen = np.stack([2 * pair, 2 * pair + 1, 2 * other, 2 * other + 1], axis=1)
    instance = CoactivationInstance(rng.permutation(32)[chosen][None], np.full(2000, -1), 16, 4, "node")
    place = coactivation(instance, SHORT).solution[0]
    together = place[instance.experts[0, :, 0]] == place[instance.experts[0, :, 1]]
    assert together.all()


@pytest.mark.clock
def test_same_seed_same_answer_and_a_stop_answers_soon():
    chosen = np.stack([topic_tokens(4096, 256, 8, seed) for seed in range(2)])
    one_layer = CoactivationInstance(chosen[:1, :500] % 64, np.arange(500) % 8, 8)
    ours, theirs = (coactivation(one_layer, Limits(0.2, wall=100, seed=7)) for _ in range(2))
    assert (ours.solution == theirs.solution).all() and ours.bound == theirs.bound
    instance = CoactivationInstance(chosen, np.arange(4096) % 32, 32, 8, "node", 1.2)
    start = time.perf_counter()
    result = coactivation(instance, Limits(600), lambda: time.perf_counter() > start + 0.2)
    assert time.perf_counter() - start < 5  # a second on a machine that does nothing else
    assert result.status in (Status.CANCELLED, Status.INFEASIBLE)
    check_coactivation(result.solution, chosen, instance.source_gpu, 32, 8, "node")


def test_layers_without_tokens_and_a_single_gpu():
    empty = np.full((2, 3, 2), -1)
    result = coactivation(CoactivationInstance(empty, np.zeros(3, dtype=int), 2, cap=1.0, expert_count=4))
    assert (result.status, result.objective) == (Status.OPTIMAL, 0)
    alone = CoactivationInstance(random_tokens(1, 9, 4, 2, 0), np.array([0] * 8 + [-1]), 1, cap=1.0)
    result = coactivation(alone)
    assert (result.status, result.objective) == (Status.OPTIMAL, 1)


def test_the_validator_finds_what_is_broken():
    experts, source = np.array([[[0, 1], [2, 3]]]), np.array([0, -1])
    assert check_coactivation([[0, 0, 1, 1]], experts, source, 2) == ([1], [1.0])
    assert check_coactivation([[0, 1, 1, 0]], experts, source, 2) == ([3], [1.0])
    assert check_coactivation([[0, 1, 2, 3]], experts, source, 4, 2, "node") == ([1], [1.0])
    for place, part in (([[0, 0, 0, 1]], "wanted 2"), ([[0, 0, 1, 2]], "no GPU 2"), ([], "placed")):
        with pytest.raises(IllegalError, match=part):
            check_coactivation(place, experts, source, 2)
    with pytest.raises(IllegalError, match="above"):
        check_coactivation([[0, 1, 0, 1]], np.array([[[0, 2], [0, 2]]]), source, 2, cap=1.5)


@tried(20, st.sampled_from([(6, 3, None, "gpu"), (8, 4, 2, "node"), (8, 8, 2, "gpu")]), st.integers(0, 2**32 - 1), fewest=4)
def test_tokens_choose_the_copies_that_send_fewest_rows(shape, seed):
    instance = made(shape, 4, 12, None, seed)
    rng = np.random.default_rng(seed)
    holds = rng.random((instance.expert_count, instance.gpus)) < 0.3
    holds[np.arange(instance.expert_count), rng.integers(0, instance.gpus, instance.expert_count)] = True
    gpu, rows = served(instance, 0, holds)
    fewest = 0
    for token, source, at in zip(instance.experts[0], instance.source_gpu, gpu, strict=True):
        chosen = [expert for expert in token if expert >= 0]
        assert [a for a in at if a >= 0] == [a for e, a in zip(token, at, strict=True) if e >= 0 and holds[e, a]]
        home = {source // instance.group_size} if source >= 0 else set()
        ways = product(*(np.flatnonzero(holds[expert]) // instance.group_size for expert in chosen))
        fewest += min(len(set(way) - home) for way in ways)
    assert rows == fewest


@pytest.mark.parametrize(("travel", "per_node"), [("gpu", None), ("node", 2)])
def test_spare_slots_save_rows(travel, per_node):
    chosen = topic_tokens(2000, 64, 6, topics=20)[None]
    instance = CoactivationInstance(chosen, np.arange(2000) % 8, 8, per_node, travel)
    place = coactivation(instance, SHORT).solution
    rows = [instance.rows(place)[0]]
    for spare in (0, 1, 2):
        holds = with_copies(instance, place, spare)
        assert holds[0, np.arange(64), place[0]].all() and holds[0].sum(axis=0).max() <= 8 + spare
        rows.append(served(instance, 0, holds[0])[1])
    assert rows[0] == rows[1] > rows[2] > rows[3]
    assert rows[2] < 0.95 * rows[1]
    assert (with_copies(instance, place, 1, stop=lambda: True).sum(axis=2) == 1).all()


def rows_of(experts: np.ndarray, home: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Rows of every token to other groups: int64[token]."""
    reached = [{int(group[expert]) for expert in token if expert >= 0} for token in experts]
    return np.array([len(groups - {int(own)}) for groups, own in zip(reached, home, strict=True)])


@tried(
    30,
    st.sampled_from([(8, 4), (8, 2), (12, 3), (9, 3), (6, 6)]),
    st.integers(1, 6),
    st.integers(1, 60),
    st.integers(-1, 0),
    st.sampled_from([None, 1.0, 1.2]),
    st.integers(0, 2**32 - 1),
)
def test_no_step_of_the_bound_is_above_the_optimum(shape, choices, tokens, least_home, cap, seed):
    experts, groups = shape
    chosen = random_tokens(1, tokens, experts, min(choices, experts), seed, missing=0.15)[0]
    home = np.random.default_rng(seed).integers(least_home, groups, tokens)
    nets = nets_of(chosen, home, groups, experts)
    load = np.bincount(chosen[chosen >= 0], minlength=experts)
    most = int((cap or 0) * load.sum() / groups)
    place, most = fewest_rows(nets, Task(load, groups, 1, most, 0.0), cap is not None)
    relaxation = Relaxation(chosen, home, groups, experts, load / max(most, 1) if cap else None)
    for step in range(60):
        relaxation.iterate()
        assert step % 6 or relaxation.evaluate() <= rows_of(chosen, home, place).sum() + 1e-6


@tried(40, st.sampled_from([(12, 3), (8, 4), (12, 6), (16, 2)]), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_lines_are_under_every_placement_wherever_they_are_drawn(shape, choices, seed):
    """`tangent` at any matrix, even one that is no placement's."""
    experts, groups = shape
    rng = np.random.default_rng(seed)
    chosen = -np.sort(-random_tokens(1, 20, experts, choices, seed, missing=0.1)[0].astype(np.int32), axis=1)
    home = rng.integers(-1, groups, 20)
    vertices = experts + groups
    drawn_at = rng.random((vertices, vertices)) * rng.random()
    np.fill_diagonal(drawn_at, 1.0)
    slope = np.empty((vertices, vertices))
    lines = facets(choices, experts // groups, groups)
    own = np.where(home < 0, -1, home + experts)
    constant = tangent(chosen, own, np.ones(20), drawn_at, lines, slope)
    for _ in range(20):
        group = np.append(rng.permutation(experts) % groups, np.arange(groups))
        same = group[:, None] == group
        assert constant - slope[same].sum() <= rows_of(chosen, home, group).sum() + 1e-6


def test_lines_of_whole_tokens_touch_every_way_to_divide_few_experts():
    """Six experts that no home has, two to a group: three groups; all in one group: one."""
    lines = facets(6, 8, 8)[6]
    for pairs, rows in ((0, 6), (3, 3), (6, 2), (15, 1)):
        assert (lines[:, 0] + lines[:, 1] * pairs).max() == pytest.approx(rows, abs=1e-6)


@pytest.mark.parametrize(("kind", "worst"), [("planted", 0.0), ("topics", 0.25), ("outside", 0.15), ("capped", 0.2)])
def test_the_gap_is_as_small_as_it_was(kind, worst):
    chosen = planted_tokens(2000, 64, 8, 6, 0.0)[0] if kind == "planted" else topic_tokens(2000, 64, 6, topics=20)
    source = np.arange(2000) % 8 if kind == "topics" else np.full(2000, -1)
    cap = 1.2 if kind == "capped" else None
    instance = CoactivationInstance(chosen[None], source, 8, cap=cap, expert_count=64)
    result = coactivation(instance, Limits(20, wall=200))
    assert 0 <= result.gap <= worst


def test_tables_say_what_every_swap_costs_and_after_many_are_those_made_anew():
    rng = np.random.default_rng(2)
    instance = CoactivationInstance(random_tokens(1, 60, 12, 4, 1), rng.integers(0, 4, 60), 4)
    nets, place = nets_between(instance, 0), rng.permutation(12) % 4
    tables, rows = tables_of(nets, place), instance.rows(place[None])[0]
    for _ in range(100):
        i, j = rng.choice(12, 2, replace=False)
        g, h = tables.group[[i, j]]
        if g != h:
            rows += tables.joining[g, j] - tables.alone[i] + tables.shared[i, j]
            rows += tables.joining[h, i] - tables.alone[j] + tables.shared[j, i]
            swap(tables, nets, i, j)
            assert instance.rows(tables.group[None])[0] == nets.rows(tables.group) == rows
    for ours, anew in zip(tables, tables_of(nets, tables.group), strict=True):
        assert (ours == anew).all()

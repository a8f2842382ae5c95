"""Affinity placement against every placement of tiny instances, planted placements, and changes that must not matter."""

import importlib
import time
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from engine.errors import IllegalError, InputError
from engine.placement.affinity import exact
from engine.placement.affinity.exact import chain_optimum, printed_program
from engine.placement.affinity.kernel import AffinityInstance, affinity, affinity_printed
from engine.placement.affinity.moves import Prices, cross, divide_anew
from engine.placement.affinity.search import best_layer, gpu_of_expert, greedy_chain, held_by_gpu, polish, rearranged, search
from engine.placement.transitions import kept, transitions
from engine.result import Limits, Status
from tests import everything
from tests.cases.examples import tried
from tests.cases.placements import counts_of, permutation_affinity, planted_affinity, topic_affinity
from tests.cases.samples import every_placement
from tests.oracles.placing import check_affinity

kernel = importlib.import_module("engine.placement.affinity.kernel")
FAR = 1e9


def random_counts(layers: int, experts: int, seed: int, kind: str = "integer") -> np.ndarray:
    rng, shape = np.random.default_rng(seed), (layers - 1, experts, experts)
    if kind == "integer":
        return rng.integers(0, 9, shape).astype(np.float64)
    return rng.integers(0, 40, shape) * (rng.random(shape) < 0.2) * 1.0 if kind == "sparse" else rng.random(shape)


def check(result, instance: AffinityInstance) -> tuple[float, float, float]:
    """Check that the answer is legal and its objective right; (cost, node_hops, gpu_hops), recomputed hop by hop."""
    worth = check_affinity(
        *(result.solution, instance.transitions, instance.gpus, instance.gpus_per_node, instance.cost_gpu), instance.cost_node
    )
    assert result.solution.dtype == np.int64
    assert result.objective == pytest.approx(worth[0], rel=1e-9, abs=1e-9)
    assert result.bound <= result.objective
    assert instance.hops(result.solution) == pytest.approx(worth[1:], rel=1e-9, abs=1e-9)
    return worth


TINY = [(3, 4, 2, None), (4, 4, 2, 1), (2, 6, 3, None), (2, 6, 2, None), (2, 4, 4, 2), (3, 3, 3, None), (2, 4, 4, 1)]
tiny = st.builds(
    lambda shape, seed, kind, cost: AffinityInstance(random_counts(shape[0], shape[1], seed, kind), *shape[2:], *cost),
    st.sampled_from(TINY),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["integer", "sparse", "float"]),
    st.sampled_from([(1.0, 1.0), (1.0, 9.0), (2.0, 3.5), (3.0, 1.0), (0.0, 1.0)]),
)


@tried(50, tiny)
def test_equals_every_placement(instance):
    result = affinity(instance)
    assert result.status is Status.OPTIMAL
    check(result, instance)
    best = min(map(instance.cost, every_placement(instance.layers, instance.experts, instance.gpus)))
    assert result.objective == result.bound == pytest.approx(best, rel=1e-9, abs=1e-9)


@tried(6, st.integers(0, 2**32 - 1), st.sampled_from(["integer", "float"]), fewest=3)
def test_a_stage_without_a_price_is_a_stage(seed, kind):
    for (layers, experts, gpus, size), cost in product(
        [(3, 4, 2, None), (2, 4, 4, 4), (3, 4, 2, 1), (2, 4, 4, 2)], [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0), (2.0, 3.0)]
    ):
        instance = AffinityInstance(random_counts(layers, experts, seed, kind), gpus, size, *cost)
        said = []
        result = affinity(instance, staged=True, report=lambda *progress, said=said: said.append(progress))
        _, *hops = check(result, instance)
        if result.status is Status.OPTIMAL:
            assert tuple(hops) == pytest.approx(min(map(instance.hops, every_placement(layers, experts, gpus))), abs=1e-9)
        assert (result.status is Status.OPTIMAL) == (kind == "integer" or size != 2), (
            "fractions of hops have no weight above all"
        )
        assert said[-1] == (result.objective, result.bound)


@pytest.mark.parametrize(
    ("experts", "gpus", "gpus_per_node"), [(8, 4, 4), (8, 4, 2), *(((9, 3, 3), (10, 2, 2)) if everything.WANTED else ())]
)
def test_search_finds_the_optimum_of_dynamic_programming(experts, gpus, gpus_per_node):
    """The search, which never sees the exact method, on instances beyond counting all placements."""
    for seed in range(2 if everything.WANTED and experts < 9 else 1):
        counts = permutation_affinity(3, experts, 2000, seed=seed)
        node = np.arange(gpus) // gpus_per_node
        node_price = 0.0 if gpus_per_node == gpus else 3.0
        prices = Prices(counts, gpus, gpus_per_node, 1.0, node_price)
        cost = np.where(node[:, None] == node, 1.0, 1.0 + node_price) * (1 - np.eye(gpus))
        exact = chain_optimum(counts, cost, gpus_per_node)
        start = greedy_chain(prices, 0, np.arange(experts) % gpus)
        place = search(prices, [start], 0.2, time.perf_counter() + FAR, seed)
        assert prices.worth(place) == pytest.approx(prices.worth(exact), rel=1e-12)


@pytest.mark.parametrize("hops", ["in a node", "across nodes", "in a layer too"])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 10])
def test_dividing_two_gpus_anew_gains_what_it_says_and_is_optimal_for_few_experts(size, hops):
    gpus, layers, experts, gpus_per_node = 4, 3, 4 * size, 2
    rng = np.random.default_rng(size)
    prices = Prices(counts := random_counts(layers, experts, size), gpus, gpus_per_node, 1.0, 2.0)
    if hops == "in a layer too":
        both = np.concatenate([counts, counts[:1]])
        within = (both + both.transpose(0, 2, 1)) * ~np.eye(experts, dtype=bool)
        prices = Prices(counts, gpus, gpus, 1.0, 0.0, within)
    place = np.array([rng.permutation(experts) % gpus for _ in range(layers)])
    p, q = (1, 2) if hops == "across nodes" else (2, 3)
    held = held_by_gpu(place, gpus)[None]
    (gain,) = divide_anew(held, prices, np.array([0]), np.array([p]), np.array([q]), 1e-9)
    after = gpu_of_expert(held[0])
    assert prices.worth(after) == pytest.approx(prices.worth(place) + gain) and (gain > 0 or size == 1)
    assert ((after == place) | np.isin(place, (p, q))).all()
    if size < 3:
        best = -np.inf
        for ways in product(set(permutations([p] * size + [q] * size)), repeat=layers):
            trial = place.copy()
            trial[np.isin(place, (p, q))] = np.concatenate(ways)
            best = max(best, prices.worth(trial))
        assert prices.worth(after) == pytest.approx(best)


MORE_SHAPES = ((12, 32, 16, 0.15), (24, 64, 32, 0.3), (6, 32, 4, 0.3)) if everything.WANTED else ()


@pytest.mark.parametrize(("layers", "experts", "gpus", "strength"), [(12, 32, 8, 0.3), *MORE_SHAPES])
def test_planted_placements_are_recovered(layers, experts, gpus, strength):
    counts, planted = planted_affinity(layers, experts, gpus, 20000, strength)
    instance = AffinityInstance(counts, gpus)
    result = affinity(instance, Limits(3 if experts < 64 else 10, wall=100))  # seconds of work, at any load
    check(result, instance)
    assert result.objective <= instance.cost(planted)
    assert result.bound >= 0.98 * result.objective
    # Same groups, whatever their names.
    assert all(len({*zip(ours, theirs, strict=True)}) == gpus for ours, theirs in zip(result.solution, planted, strict=True))


def test_perfect_affinity_costs_nothing_and_uniform_transitions_the_same_for_every_placement():
    counts, _ = planted_affinity(6, 16, 4, 4000, 1.0)
    result = affinity(AffinityInstance(counts, 4), Limits(2, wall=60))
    assert (result.objective, result.bound, result.status) == (0, 0, Status.OPTIMAL)
    instance = AffinityInstance(np.full((4, 12, 12), 7.0), 4)
    result = affinity(instance, Limits(2, wall=60))
    assert (result.objective, result.bound, result.status) == (*[0.75 * instance.transitions.sum()] * 2, Status.OPTIMAL)
    assert affinity(AffinityInstance(permutation_affinity(20, 64, 30000), 64)).gap == 0  # one expert to a GPU


def test_far_under_the_usual_placement_with_a_gap(monkeypatch):
    """The instance is smaller than the benchmark's, of the same family, and limited by its work alone, not by the clock."""
    monkeypatch.setattr(kernel, "SEARCH_CAP", FAR)
    monkeypatch.setattr(kernel, "BOUND_CAP", FAR)
    instance = AffinityInstance(permutation_affinity(6, 24, 10000), 6)
    linear = np.tile(np.arange(24) // 4, (6, 1))
    seen = []
    result = affinity(instance, Limits(1.0, wall=60), report=lambda objective, bound: seen.append((objective, bound)))
    check(result, instance)
    assert result.objective < 0.65 * instance.cost(linear)
    assert result.gap < 0.08
    objectives, bounds = np.array(seen).T
    assert (np.diff(objectives) <= 0).all() and (bounds <= objectives).all()
    assert seen[-1] == (result.objective, result.bound)


def test_polish_improves_until_no_layer_alone_can_be_placed_better():
    prices = AffinityInstance(topic_affinity(6, 16, 3000), 4).prices()
    drawn = np.array([np.random.default_rng(layer).permutation(16) % 4 for layer in range(6)])
    polished = polish(prices, drawn)
    check_affinity(polished, prices.counts, 4)
    assert prices.worth(polished) > prices.worth(drawn)
    for layer in range(6):
        trial = polished.copy()
        trial[layer] = best_layer(prices, polished, layer)
        assert prices.worth(trial) <= prices.worth(polished) + 1e-6


@tried(60, st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 5), st.sampled_from([0, 1, 3, 40]))
def test_experts_that_go_round_cycles_end_as_an_assignment_problem_does(seed, gpus, size, ties):
    """ties: worth in so many whole numbers, or any worth if 0"""
    rng = np.random.default_rng(seed)
    worth = rng.integers(0, ties, (gpus, gpus * size)) * 1.0 if ties else rng.random((gpus, gpus * size))
    place = rearranged(worth, rng.permutation(gpus * size) % gpus, 1e-12)
    assert (np.bincount(place, minlength=gpus) == size).all()
    slots = np.repeat(worth, size, axis=0)
    best = slots[linear_sum_assignment(slots, maximize=True)].sum()
    assert worth[place, np.arange(gpus * size)].sum() == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_crossing_takes_every_layer_from_the_best_source():
    """Against every choice of sources with every naming of the GPUs."""
    rng = np.random.default_rng(4)
    for seed in range(4):
        counts = random_counts(3, 6, seed)
        places = np.array([[rng.permutation(6) % 3 for _ in range(3)] for _ in range(2)])
        crossed = cross(counts, places, 3)
        cost, _, _ = check_affinity(crossed, counts, 3)
        names = [np.array(order) for order in permutations(range(3))]
        best = min(
            AffinityInstance(counts, 3).cost(np.array([name[places[m, layer]] for layer, (m, name) in enumerate(chosen)]))
            for chosen in product(product(range(2), names), repeat=3)
        )
        assert cost == best


@pytest.mark.parametrize("nodes", [None, 2])
def test_same_seed_same_answer_whatever_the_clock(monkeypatch, nodes):
    instance = AffinityInstance(permutation_affinity(5, 16, 3000), 4, nodes, 1.0, 3.0 if nodes else 1.0)
    monkeypatch.setattr(kernel, "EXACT_WORK", 0)
    first, second = (affinity(instance, Limits(0.2, wall=FAR, seed=5)) for _ in range(2))
    assert first.status is second.status is Status.FEASIBLE
    np.testing.assert_array_equal(first.solution, second.solution)
    assert first.bound == second.bound


@pytest.mark.parametrize("nodes", [None, 2])
@pytest.mark.parametrize("after", [0, 1, 7, 60])
@pytest.mark.clock
def test_cancelled_work_has_a_legal_answer(after, nodes):
    instance = AffinityInstance(permutation_affinity(8, 32, 4000), 8, nodes, 1.0, 3.0 if nodes else 1.0)
    asked = iter(range(10**9))
    for staged in (False, True):
        start = time.perf_counter()
        result = affinity(instance, stop=lambda: next(asked) >= after, staged=staged)
        assert result.status is Status.CANCELLED
        check(result, instance)
        assert time.perf_counter() - start < 3


def test_the_validator_refuses():
    counts = np.ones((1, 4, 4))
    assert check_affinity(np.array([[0, 0, 1, 1], [1, 0, 0, 1]]), counts, 2) == (8, 0, 8)
    assert check_affinity(np.array([[0, 0, 1, 1], [1, 0, 0, 1]]), counts, 2, 1, 1, 3) == (24, 8, 0)
    for place in ([[0, 0, 0, 1]] * 2, [[0, 0, 1, 2]] * 2, [[0, 0, 1]] * 2, [[0, 0, 1, 1]], [[0, 0, 1, -1]] * 2):
        with pytest.raises(IllegalError):
            check_affinity(np.array(place), counts, 2)


def test_transitions_replay_the_tokens():
    rng = np.random.default_rng(0)
    experts = rng.integers(-1, 8, (50, 4, 3)).astype(np.int16)
    counted, first = transitions(experts, 8), transitions(experts, 8, first_choice=True)
    place = np.array([rng.permutation(8) % 4 for _ in range(4)])
    steps = [(layer, *pair) for token in experts for layer in range(3) for pair in product(token[layer], token[layer + 1])]
    ends = [(place[layer, here], place[layer + 1, there]) for layer, here, there in steps if min(here, there) >= 0]
    assert counted.sum() == len(ends) and first.sum() == ((experts[:, :-1, 0] >= 0) & (experts[:, 1:, 0] >= 0)).sum()
    stays, node_stays = (np.mean([here // size == there // size for here, there in ends]) for size in (1, 2))
    assert kept(place, counted) == pytest.approx(stays)
    assert kept(place, counted, np.arange(4) // 2) == pytest.approx(node_stays)
    assert AffinityInstance(counted, 4).cost(place) == pytest.approx(len(ends) * (1 - stays))
    walk = rng.integers(0, 8, (100, 5))
    np.testing.assert_array_equal(transitions(walk[:, :, None], 8), counts_of(walk, 8))


def test_transitions_of_nothing_and_of_nonsense():
    assert transitions(np.zeros((0, 3, 2), dtype=np.int16), 4).sum() == 0
    assert transitions(np.zeros((5, 1, 2), dtype=np.int16), 4).shape == (0, 4, 4)
    assert kept(np.zeros((2, 4), dtype=np.int64), np.zeros((1, 4, 4))) == 1.0
    for wrong, says in ((np.full((1, 2, 1), 4), "ids"), (np.zeros((3, 2), dtype=np.int16), "token, layer, k")):
        with pytest.raises(InputError, match=says):
            transitions(wrong, 4)
    with pytest.raises(InputError, match="belong together"):
        kept(np.zeros((2, 4), dtype=np.int64), np.zeros((1, 5, 5)))


# The paper's integer program


@pytest.mark.parametrize(
    ("layers", "experts", "gpus", "node", "kind"),
    [
        (3, 4, 2, None, "integer"),
        (3, 4, 4, None, "float"),
        (2, 6, 3, None, "sparse"),
        (2, 4, 2, 1, "integer"),
        (2, 4, 4, 2, "float"),
    ],
)
def test_the_printed_program_reaches_the_optimum_of_small_instances(layers, experts, gpus, node, kind):
    instance = AffinityInstance(random_counts(layers, experts, 5, kind), gpus, node, 2.0, 7.0)
    result, places = affinity_printed(instance, Limits(60)), every_placement(layers, experts, gpus)
    _, node_hops, _ = check(result, instance)
    if node == 2:  # two programs: the first has fewest hops between nodes, and both together prove nothing
        assert node_hops == pytest.approx(min(instance.hops(place)[0] for place in places))
        assert result.status is not Status.OPTIMAL and result.bound <= min(instance.cost(place) for place in places) + 1e-9
    else:
        assert result.status is Status.OPTIMAL and result.objective == pytest.approx(affinity(instance).objective)
        assert result.bound == result.objective == pytest.approx(min(instance.cost(place) for place in places))


def test_one_variable_for_all_tokens_of_a_hop_is_the_program_token_by_token():
    """Equation 8 with a variable for every token, by another solver."""
    milp, rng = importlib.import_module("scipy.optimize").milp, np.random.default_rng(0)
    tokens = rng.integers(0, 4, (30, 3))
    held = np.arange(3 * 4 * 2).reshape(3, 4, 2)
    rows, variables = [], held.size + 30 * 2
    for number, (token, layer) in enumerate(product(range(30), range(2))):
        here, there = held[layer, tokens[token, layer]], held[layer + 1, tokens[token, layer + 1]]
        for gpu, sign in product(range(2), (1, -1)):
            row = np.zeros(variables)
            row[[here[gpu], there[gpu], held.size + number]] = sign, -sign, -1
            rows.append((row, -np.inf, 0))
    for group, right in [*((held[layer, expert], 1) for layer, expert in product(range(3), range(4)))] + [
        (held[layer, :, gpu], 2) for layer, gpu in product(range(3), range(2))
    ]:
        row = np.zeros(variables)
        row[group] = 1
        rows.append((row, right, right))
    cost = np.arange(variables) >= held.size
    limits = [np.array(column) for column in zip(*rows, strict=True)]
    answer = milp(cost.astype(float), constraints=limits, integrality=np.ones(variables), bounds=(0, 1))
    place, bound, proven = printed_program(transitions(tokens[:, :, None].astype(np.int16), 4), 2, Limits(60))
    assert (
        proven
        and bound == pytest.approx(answer.fun)
        and check_affinity(place, transitions(tokens[:, :, None], 4), 2)[0] == bound
    )


def test_a_printed_program_ends_with_a_legal_answer_and_refuses_to_outgrow_the_memory(monkeypatch):
    instance = AffinityInstance(permutation_affinity(6, 16, 2000), 8, 4, 1.0, 9.0)
    stopped = affinity_printed(instance, Limits(60), lambda: True)
    assert stopped.status is Status.CANCELLED and check(stopped, instance)
    short = affinity_printed(instance, Limits(0.05))
    assert (
        short.status is Status.TIME_LIMIT
        and short.bound <= affinity(instance, Limits(0.5)).objective
        and check(short, instance)
    )
    monkeypatch.setattr(exact, "MOST_ROWS", 100)
    with pytest.raises(InputError, match=r"inequalities \(at most 100\); use stages=staged"):
        affinity_printed(instance)

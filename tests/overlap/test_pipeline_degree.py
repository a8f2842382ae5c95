"""The pipeline degree: against equations 9-12 walked part by part, every order of a single network, and exact arithmetic."""

from fractions import Fraction
from itertools import combinations
from math import ceil

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import InputError
from engine.overlap import pipeline_degree as module
from engine.overlap.pipeline_degree import DegreeInstance, best_degree, pipeline_degree, pipeline_seconds
from engine.overlap.pipemoe_printed import algorithm1, best_case, cases, pipemoe_printed
from engine.result import Status
from tests.cases.examples import tried
from tests.oracles.overlapping import check_pipeline

WAYS = [(1, "dispatch-first"), (1, "interleaved"), (2, "dispatch-first")]
NUMBERS = ("alpha_comm", "beta_comm", "size_comm", "alpha_comp", "beta_comp", "size_comp")

ways = st.sampled_from(WAYS)
whole = st.integers(0, 12).map(float)
seconds = whole | st.floats(0, 10, allow_subnormal=False)
lines = st.fixed_dictionaries(dict.fromkeys(NUMBERS, seconds))


def simulated(coefficients: dict[str, float], parts: int, streams: int, order: str) -> float:
    comm = coefficients["alpha_comm"] + coefficients["beta_comm"] * coefficients["size_comm"] / parts
    comp = coefficients["alpha_comp"] + coefficients["beta_comp"] * coefficients["size_comp"] / parts
    return check_pipeline([comm] * parts, [comp] * parts, [comm] * parts, streams, order)


def random_instance(layers: int, seed: int, max_degree=20, streams: int = 1, order: str = "dispatch-first"):
    rng = np.random.default_rng(seed)
    alpha = 10.0 ** rng.uniform(-5, -2, (2, layers))
    work = 10.0 ** rng.uniform(-4, 0, (2, layers))
    return DegreeInstance(alpha[0], work[0], 1.0, alpha[1], work[1], 1.0, max_degree, streams, order)


@tried(200, st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=9), ways)
def test_closed_forms_equal_the_walk(tables, way):
    parts = np.array(tables).T
    times = pipeline_seconds(*parts, *way)
    for r, (d, e, c) in enumerate(parts.T, start=1):
        assert times[r - 1] == pytest.approx(check_pipeline([d] * r, [e] * r, [c] * r, *way), rel=1e-12)


def walk_any_order(sends: str, d: float, e: float, c: float) -> float:
    """The end of a pipeline on one network that sends in the order of `sends`, such as DDCC; inf if it cannot."""
    network = compute = 0.0
    computed = []
    for kind in sends:
        if kind == "D":
            network += d
            compute = max(compute, network) + e
            computed.append(compute)
        elif not computed:
            return np.inf
        else:
            network = max(network, computed.pop(0)) + c
    return network


@tried(80, st.integers(1, 4), seconds, seconds, seconds)
def test_dispatch_first_is_the_best_of_all_orders_of_one_network(parts, d, e, c):
    orders = []
    for places in combinations(range(2 * parts), parts):
        orders.append("".join("D" if place in places else "C" for place in range(2 * parts)))
    best = min(walk_any_order(order, d, e, c) for order in orders)
    times = [np.full((1, parts), value) for value in (d, e, c)]
    assert pipeline_seconds(*times)[0, -1] == pytest.approx(best, rel=1e-12)
    assert pipeline_seconds(*times, 1, "interleaved")[0, -1] >= best * (1 - 1e-12)


@tried(150, lines, st.integers(1, 24), ways)
def test_equals_brute_force_and_takes_the_smallest_of_ties(coefficients, max_degree, way):
    result = pipeline_degree(DegreeInstance(**coefficients, max_degree=max_degree, streams=way[0], order=way[1]))
    every = [simulated(coefficients, r, *way) for r in range(1, max_degree + 1)]
    degree = int(result.solution[0])
    assert result.status is Status.OPTIMAL and result.solution.dtype == np.int64
    assert result.objective == pytest.approx(min(every), rel=1e-11)
    assert result.objective * (1 - 2e-12) <= result.bound <= result.objective
    assert every[degree - 1] == pytest.approx(result.objective, rel=1e-12)
    assert all(slower > min(every) * (1 + 5e-13) for slower in every[: degree - 1])


def test_without_start_up_ties_go_to_the_smallest_degree_in_exact_arithmetic():
    """T(r) = max(2 N, 2 N / r + E): constant from some r on, where rounding makes neighbours differ in the last digit."""
    most = 40
    for n in range(8):
        for e in range(16):
            network, experts = Fraction(n, 7), Fraction(e, 7)
            every = [max(2 * network, 2 * network / r + experts) for r in range(1, most + 1)]
            if e < 2 * n:
                assert every.index(min(every)) + 1 == min(most, ceil(Fraction(2 * n, 2 * n - e)))
            instance = DegreeInstance(0, n / 7, 1, 0, e / 7, 1, most)
            assert pipeline_degree(instance).solution.tolist() == [every.index(min(every)) + 1], (n, e)


def test_a_billionth_is_no_tie():
    none = np.zeros((1, 2))
    assert best_degree(none, np.array([[1 + 1e-9, 0.5]]), none).solution.tolist() == [2]
    assert best_degree(none, np.array([[1 + 1e-14, 0.5]]), none).solution.tolist() == [1]


@tried(100, lines, ways, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_no_cut_equal_or_not_is_faster_than_the_limit(coefficients, way, sizes):
    instance = DegreeInstance(**coefficients, max_degree=30, streams=way[0], order=way[1])
    limit = instance.limit()[0] * (1 - 1e-12)
    assert (instance.time_of_degree()[0] >= limit).all()
    share = np.array(sizes) / sum(sizes)
    comm = (coefficients["alpha_comm"] + coefficients["beta_comm"] * coefficients["size_comm"] * share).tolist()
    comp = (coefficients["alpha_comp"] + coefficients["beta_comp"] * coefficients["size_comp"] * share).tolist()
    assert check_pipeline(comm, comp, comm, *way) >= limit


def test_the_limit_is_met_where_one_resource_is_never_idle():
    # One part: 2 · 3 + 4 is also the need of the experts alone and of two start-ups without bytes.
    assert DegreeInstance(3, 0, 1, 1, 3, 1, 9).limit().tolist() == [10.0]
    # Two parts fill the network: 2 · 2 · 1 + 2 · 10, against the limit 2 + 2 · 10.
    short = DegreeInstance(1, 10, 1, 0, 1, 1, 9)
    assert short.limit().tolist() == [22.0] and pipeline_degree(short).objective == 23.0
    assert DegreeInstance(1, 10, 1, 0, 1, 1, 9, streams=2).limit().tolist() == [12.0]


@pytest.mark.parametrize("way", WAYS)
def test_layers_and_blocks_are_each_by_itself_and_tables_are_as_lines(way, monkeypatch):
    instance = random_instance(40, 3, np.arange(1, 41), *way)
    result = pipeline_degree(instance)
    lines = [getattr(instance, name) for name in NUMBERS]
    alone = [
        pipeline_degree(DegreeInstance(*(line[[layer]] for line in lines), layer + 1, *way)) for layer in range(instance.layers)
    ]
    assert [int(of_layer.solution[0]) for of_layer in alone] == result.solution.tolist()
    assert len(set(result.solution.tolist())) > 3 and (result.solution <= instance.max_degree).all()
    assert sum(of_layer.objective for of_layer in alone) == pytest.approx(result.objective)
    monkeypatch.setattr(module, "BLOCK", 100)
    blocks = pipeline_degree(instance)
    assert blocks.solution.tolist() == result.solution.tolist() and blocks.objective == result.objective
    within, (comm, comp) = random_instance(40, 3, 25, *way), instance.parts(slice(None), 25)
    by_table, by_line = best_degree(comm, comp, comm, *way), pipeline_degree(within)
    assert by_table.solution.tolist() == by_line.solution.tolist() and by_table.objective == by_line.objective
    few = random_instance(6, 11, 10, *way)
    printed = pipemoe_printed(few)  # scored on the streams of the instance, and never better than the exact one
    chosen = few.time_of_degree()[np.arange(6), printed.solution - 1]
    assert printed.objective == pytest.approx(chosen.sum(), rel=1e-12)
    assert printed.bound == pytest.approx(pipeline_degree(few).objective, rel=1e-12)
    assert (printed.status is Status.OPTIMAL) == (printed.gap < 1e-12)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_cancelled_search_has_legal_degrees_and_a_valid_bound(after, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 200)
    instance = random_instance(50, 2)
    asked = iter(range(10**6))
    result, optimum = pipeline_degree(instance, lambda: next(asked) >= after), pipeline_degree(instance)
    assert result.status is Status.CANCELLED
    assert result.solution.tolist() == optimum.solution.tolist()[: 10 * after] + [1] * (50 - 10 * after)
    assert result.bound < optimum.objective < result.objective
    times = instance.time_of_degree()[np.arange(50), result.solution - 1]
    assert result.objective == pytest.approx(times.sum(), rel=1e-12)


@tried(80, st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 8), ways)
def test_tables_equal_brute_force(seed, layers, most, way):
    rng = np.random.default_rng(seed)
    tables = rng.integers(0, 9, (3, layers, most)).astype(np.float64)
    tables[:, :, 1:][rng.random((3, layers, most - 1)) < 0.15] = np.inf
    result = best_degree(*tables, *way)
    total = 0.0
    for layer, degree in enumerate(result.solution):
        every = {
            r: check_pipeline(*([time] * r for time in tables[:, layer, r - 1]), *way)
            for r in range(1, most + 1)
            if np.isfinite(tables[:, layer, r - 1]).all()
        }
        assert degree == min(every, key=lambda r: (every[r], r))
        total += every[degree]
    assert result.objective == result.bound == total and result.status is Status.OPTIMAL


GOOD = dict.fromkeys(NUMBERS, 1.0) | {"max_degree": 4}
ONES = np.ones((2, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: bad}, name) for name in NUMBERS for bad in (-1.0, np.nan, np.inf)),
        *(({"max_degree": bad}, "max_degree") for bad in (0, 100_001, 2.0, [1, 0])),
        ({"beta_comm": [1, 2], "max_degree": [1, 2, 3]}, "one number per layer"),
        *(({"size_comm": bad}, "one number per layer") for bad in ([], [[1.0]])),
        *((bad, "too large") for bad in ({"beta_comm": 1e308}, {"size_comp": 1e308, "beta_comp": 1e308})),
        ({"alpha_comm": [1e307] * 9}, "too large"),
        ({"streams": 3}, "streams: must be 1 or 2, not 3"),
        ({"order": "random"}, "order: must be"),
        ({"streams": 2, "order": "interleaved"}, "set streams to 1"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(InputError, match=message):
        DegreeInstance(**GOOD | change)


@pytest.mark.parametrize("bad", [np.ones((2, 2)), np.ones(3), -ONES, np.nan * ONES, np.inf * ONES, np.ones((0, 3))])
def test_bad_tables_are_named(bad):
    with pytest.raises(InputError, match=r"experts|dispatch"):
        best_degree(ONES, bad, ONES)
    with pytest.raises(InputError, match="too large"):
        best_degree(1e308 * ONES, ONES, ONES)


def test_printed_line_5_overrates_a_whole_layer_with_long_experts():
    # Whole: 2 · 1 + 2 · 0.1 + 0.5 + 5 = 7.7, by line 5 12.1; in two parts the experts alone set the time, 8.1.
    a, b, c, d = coefficients = (1.0, 0.1, 0.5, 5.0)
    assert (algorithm1(*coefficients), best_case(cases(*coefficients), 2 * a + 2 * b + c + d)) == (2, 1)
    instance = DegreeInstance(a, b, 1, c, d, 1, 16)
    result = pipemoe_printed(instance)
    assert result.solution.tolist() == [2] and pipeline_degree(instance).solution.tolist() == [1]
    assert (result.objective, result.bound, result.status) == (pytest.approx(8.1), pytest.approx(7.7), Status.FEASIBLE)


def test_printed_line_6_believes_in_a_pipeline_that_cannot_be():
    # Experts are longer than all-to-alls at every degree, so Q1 never holds; line 7 has 2 · 2 · 0.01 + 2 · 4 = 8.04 at two
    # parts, where the experts alone need 9.
    seconds, degree = cases(0.01, 4.0, 0.02, 9.0)[0]
    assert (degree, seconds(degree)) == (2, pytest.approx(8.04))
    result = pipemoe_printed(DegreeInstance(0.01, 4.0, 1, 0.02, 9.0, 1, 64))
    assert result.solution.tolist() == [2] and result.gap == pytest.approx(0.33, abs=0.005)


@pytest.mark.parametrize(("network", "experts"), [(2.0, 1.0), (1.0, 2.0), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_printed_rule_with_equal_start_ups(alpha, network, experts):
    instance = DegreeInstance(alpha, network, 1, alpha, experts, 1, 12)
    result, exact = pipemoe_printed(instance), pipeline_degree(instance)
    assert 1 <= result.solution[0] <= 12
    coefficients = {name: float(getattr(instance, name)[0]) for name in NUMBERS}
    parts = int(result.solution[0])
    assert result.objective == pytest.approx(simulated(coefficients, parts, instance.streams, instance.order))
    assert result.objective >= result.bound == pytest.approx(exact.objective)


def test_printed_rule_can_be_stopped_and_is_cut_to_the_most_parts():
    instance = DegreeInstance(0.001, [1, 1, 1], 1, 0.0001, 9, 1, 5)
    asked = iter(range(10))
    result = pipemoe_printed(instance, lambda: next(asked) >= 2)
    assert result.status is Status.CANCELLED and result.solution[2] == 1
    assert result.bound == pytest.approx(pipeline_degree(instance).objective) and result.objective > result.bound
    # r_2 = ceil(2 / 0.009) = 223 and f_3 is least near sqrt(2 · 1 / 0.001) = 45.
    assert algorithm1(0.01, 1.0, 0.001, 3.0) == 45
    assert pipemoe_printed(DegreeInstance(0.01, 1, 1, 0.001, 3, 1, 7)).solution.tolist() == [7]

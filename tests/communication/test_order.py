"""Orders of one all-to-all, judged by `tests.oracles.communication` and by an LP over all matchings."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import strategies as st
from scipy.optimize import linprog

from engine.communication.algorithm1 import algorithm1
from engine.communication.order import matched_bound, order, shared_bound
from engine.errors import StoppedError
from engine.result import Status
from tests.cases.examples import tried
from tests.cases.refusals import refusal
from tests.oracles.communication import check_schedule

EXACT = 1e-9
KINDS = ("integer", "fractional", "sparse", "zero rows", "single hot", "spread", "permuted sums", "all zero")


def traffic_of(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    traffic = rng.integers(0, 9, (n, n)).astype(float)
    if kind == "fractional":
        traffic = rng.random((n, n))
    elif kind == "sparse":
        traffic = rng.random((n, n)) * (rng.random((n, n)) < 2 / n)
    elif kind == "zero rows":
        traffic[rng.random(n) < 0.4] = 0
    elif kind == "single hot":
        traffic = np.zeros((n, n))
        traffic[rng.integers(n), rng.integers(n)] = rng.random() * 1e6
    elif kind == "spread":
        traffic = 10 ** rng.uniform(-8, 0, (n, n))
    elif kind == "permuted sums":  # every line has the same sum: no slack anywhere
        traffic = sum(rng.random() * np.eye(n)[rng.permutation(n)] for _ in range(2 * n))
        np.fill_diagonal(traffic, 0)
    elif kind == "all zero":
        traffic = np.zeros((n, n))
    return traffic


@st.composite
def instances(draw, largest: int = 14):
    n = draw(st.integers(1, largest))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    traffic = traffic_of(draw(st.sampled_from(KINDS)), n, rng)
    if draw(st.booleans()):
        send, receive = (rng.choice([100.0, 80.0, 50.0, 40.0], n) for _ in range(2))
    else:
        send = receive = np.full(n, 10 ** rng.uniform(-3, 12))
    return traffic, send, receive


@tried(300, instances())
def test_an_order_reaches_its_bound(instance):
    traffic, send, receive = instance
    for mode, least in (("matched", matched_bound), ("shared", shared_bound)):
        result = order(traffic, send, receive, mode)
        makespan, bound = check_schedule(result.solution, traffic, send, receive, mode)
        assert makespan == pytest.approx(bound, rel=EXACT)
        assert result.status == Status.OPTIMAL
        assert result.objective == pytest.approx(makespan, rel=1e-12)
        assert result.bound == pytest.approx(bound, rel=1e-12) == least(traffic, send, receive)
        if mode == "matched":
            assert result.solution.phases <= max(np.count_nonzero(traffic - np.diag(np.diag(traffic))), 1)
        assert order(traffic + np.eye(len(traffic)) * 1e9, send, receive, mode).solution == result.solution
    assert result.bound <= matched_bound(traffic, send, receive) * (1 + EXACT)


@tried(40, instances(largest=4))
def test_no_combination_of_matchings_is_faster(instance):
    traffic, send, receive = instance
    n = len(traffic)
    seconds = traffic / np.minimum(send[:, None], receive)
    np.fill_diagonal(seconds, 0)
    # Full permutations suffice: a pair may also idle in its configuration, so coverage is an inequality.
    use = np.array([np.eye(n)[list(p)].ravel() for p in permutations(range(n))])
    scale = seconds.max() or 1.0
    best = linprog(np.ones(len(use)), A_ub=-use.T, b_ub=-seconds.ravel() / scale)
    assert best.status == 0
    assert order(traffic, send, receive).objective / scale == pytest.approx(best.fun, rel=1e-7)


@pytest.mark.parametrize("kind", ["fractional", "spread", "integer"])
def test_phases_are_few_on_many_gpus(kind):
    n, rate = 48, np.full(48, 1e9)
    traffic = traffic_of(kind, n, np.random.default_rng(3))
    result = order(traffic, rate, rate)
    makespan, bound = check_schedule(result.solution, traffic, rate, rate, "matched")
    assert makespan == pytest.approx(bound, rel=EXACT)
    assert result.solution.phases <= 4 * n


def test_transfers_below_the_rounding_unit_are_still_sent():
    traffic = np.array([[0, 1.0, 1e-17], [1e-30, 0, 1.0], [1.0, 1e-20, 0]])
    result = order(traffic, np.ones(3), np.ones(3))
    check_schedule(result.solution, traffic, np.ones(3), np.ones(3), "matched")
    pairs = zip(result.solution.src, result.solution.dst, strict=True)
    assert set(pairs) == set(zip(*np.nonzero(traffic), strict=True))
    assert result.status == Status.OPTIMAL


@tried(100, instances())
def test_algorithm_1_is_legal(instance):
    traffic, send, receive = instance
    result = algorithm1(traffic, send, receive)
    makespan, bound = check_schedule(result.solution, traffic, send, receive, "matched")
    assert makespan >= bound * (1 - EXACT)
    assert result.objective == pytest.approx(makespan, rel=1e-12)
    assert result.status == (Status.OPTIMAL if makespan <= bound * (1 + EXACT) else Status.FEASIBLE)


def test_algorithm_1_misses_the_bound_and_can_be_stopped():
    ones = np.ones(3)
    # GPU 0 comes first and takes 0→1, 0→2 and, at the same time, 1→0; 1→2 then waits for receiver 2 while 0→2 runs.
    traffic = np.array([[0, 1, 1], [1, 0, 1], [0, 0, 0]])
    result = algorithm1(traffic, ones, ones)
    makespan, bound = check_schedule(result.solution, traffic, ones, ones, "matched")
    assert result.status == Status.FEASIBLE
    assert (makespan, bound) == (pytest.approx(3), pytest.approx(2))
    assert order(traffic, ones, ones).objective == pytest.approx(2)
    with pytest.raises(StoppedError):
        algorithm1(traffic, ones, ones, lambda: True)


@pytest.mark.parametrize("steps", [0, 3])
def test_stop_leaves_a_legal_order(steps):
    asked = iter(range(100))
    traffic, rate = traffic_of("fractional", 8, np.random.default_rng(0)), np.ones(8)
    result = order(traffic, rate, rate, "matched", lambda: next(asked) >= steps)
    makespan, bound = check_schedule(result.solution, traffic, rate, rate, "matched")
    assert result.status == Status.CANCELLED
    assert makespan >= bound
    assert result.solution.phases == steps + 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"traffic": [[0, 1], [1]]}, "traffic and bandwidths must be rectangular arrays of numbers"),
        ({"traffic": [[0, 1, 1], [1, 0, np.nan], [1, 1, 0]]}, "traffic[1][2] is not a finite number (nan)"),
        ({"traffic": [[0, np.inf, 1], [1, 0, 1], [1, 1, 0]]}, "traffic[0][1] is not a finite number (inf)"),
        ({"traffic": np.full((3, 3), 1e308)}, "traffic is too large for its bandwidths: the time to send it is not"),
        ({"receive": [1.0, 0.0, 1.0]}, "receive[1] must be a positive bandwidth (0)"),
        ({"send": [1.0, 1.0, np.nan]}, "send[2] must be a positive bandwidth (nan)"),
        ({"mode": "both"}, 'mode must be "matched" or "shared", not \'both\''),
    ],
)
def test_input_errors_say_where(change, message):
    given = {"traffic": np.ones((3, 3)), "send": np.ones(3), "receive": np.ones(3), "mode": "matched"}
    assert refusal(order, **given | change).startswith(message)

"""GEMM times on a grid: what makes one, and what measured times make of it."""

from itertools import product

import numpy as np
import pytest

from engine.costs import GemmTimes, MeasuredTimes, Profiled
from engine.costs.gemm_table import REACH, GemmTable
from engine.errors import InputError
from tests.strategies import make_gpu

GPU = make_gpu()
M, N, K = (1, 8, 64), (16, 512), (32, 128, 1024)


def power_law(m, n, k):
    """Straight in the logarithms, so that interpolation meets it exactly everywhere."""
    return 1e-7 * m**0.9 * n**0.7 * k**0.8


POINTS = [(m, n, k, power_law(m, n, k)) for m, n, k in product(M, N, K)]


def profiled(points, **changes) -> Profiled:
    gemm = (GemmTimes(gpu="type-0", dtype="bf16", points=points),)
    return Profiled(MeasuredTimes(name="grid", origin="a test", gemm=gemm, **changes))


def test_a_complete_grid_is_recognised_in_any_order():
    table = GemmTable.of(POINTS[::-1])
    assert (table.m.tolist(), table.n.tolist(), table.k.tolist()) == (list(M), list(N), list(K))
    assert table.seconds[1, 0, 2] == power_law(8, 16, 1024)


@pytest.mark.parametrize(
    "points",
    [
        POINTS[1:],  # a corner is missing
        [*POINTS[1:], POINTS[1]],  # as many, but one twice
        [point for point in POINTS if point[1] == 16],  # one n only
        [(m, 4 * m, 2 * m, 1.0) for m in range(1, 9)],  # a diagonal
    ],
)
def test_anything_else_is_no_grid(points):
    assert GemmTable.of(points) is None


def test_measured_times_on_a_grid_are_interpolated_between_shapes():
    cost = profiled(POINTS)
    m = np.array([1.0, 3.0, 20.0, 64.0])
    for n, k in ((16, 32), (100, 32), (77, 500), (512, 1024)):
        assert cost.gemm(GPU, m, n, k, "bf16") == pytest.approx(power_law(m, n, k))
    assert float(cost.gemm(GPU, 0.0, 77, 500, "bf16")) == 0.0
    # Wider than anything measured: at the edge's throughput.
    assert float(cost.gemm(GPU, 8, 1024, 128, "bf16")) == pytest.approx(2 * power_law(8, 512, 128))


def test_a_size_measured_several_times_counts_by_its_median_and_the_grid_stays_one():
    more = [*POINTS, (8, 16, 32, 3 * power_law(8, 16, 32)), (8, 16, 32, 2 * power_law(8, 16, 32))]
    assert float(profiled(more).gemm(GPU, 8, 16, 32, "bf16")) == pytest.approx(2 * power_law(8, 16, 32))
    assert float(profiled(more).gemm(GPU, 64, 77, 500, "bf16")) == pytest.approx(power_law(64, 77, 500))


def test_far_more_rows_than_measured_are_refused():
    cost = profiled(POINTS)
    assert float(cost.gemm(GPU, REACH * 64, 16, 32, "bf16")) == pytest.approx(REACH * power_law(64, 16, 32))
    with pytest.raises(InputError, match="measured up to m = 64 and 320 is asked for") as caught:
        cost.gemm(GPU, 5 * 64, 16, 32, "bf16")
    assert "\n" not in str(caught.value)


def test_more_rows_never_take_less_time_than_fewer():
    bumpy = [(m, n, k, seconds * (5 if m == 8 else 1)) for m, n, k, seconds in POINTS]
    seconds = profiled(bumpy).gemm(GPU, np.geomspace(1, 200, 50), 100, 100, "bf16")
    assert (np.diff(seconds) >= 0).all()


def test_shapes_that_form_no_grid_keep_to_the_nearest():
    cost = profiled([point for point in POINTS if (point[1], point[2]) != (512, 1024)])
    assert float(cost.gemm(GPU, 8, 16, 32, "bf16")) == pytest.approx(power_law(8, 16, 32))
    start_up = power_law(1, 16, 32)
    predicted = start_up + (power_law(8, 512, 128) - start_up) * 8
    assert float(cost.gemm(GPU, 8, 512, 1024, "bf16")) == pytest.approx(predicted)

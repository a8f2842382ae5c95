"""What a calibration measures in the time that it has."""

from itertools import pairwise, product

import pytest

from engine.launch.calibration import sweep
from engine.launch.calibration.sweep import Grid, Speed, Sweep, grid_for, grids, held_out_shapes

GPU = Speed(start_up=5e-6, multiply_add=2 / 600e12, bookkeeping=2e-3)
CPU = Speed(start_up=3e-6, multiply_add=2 / 50e9, bookkeeping=5e-3)


def sweep_of(**changes) -> Sweep:
    settings = {"ranks": 2, "backend": "gloo", "dtypes": ("fp32",), "seconds": 30.0, "repeats": 7, "held_out": 8}
    return Sweep(**(settings | changes))


def test_the_parts_share_all_of_the_time():
    pair, single = sweep_of(), sweep_of(ranks=1)
    assert sum(pair.allowance(part) for part in sweep.PARTS) == pytest.approx(30)
    assert sum(single.allowance(part) for part in sweep.PARTS if part not in sweep.COLLECTIVES) == pytest.approx(30)
    assert single.allowance("gemm") > pair.allowance("gemm")


def test_a_fast_device_gets_every_size_and_a_slow_one_what_it_can_do_in_time():
    fast, slow, slowest = (grid_for(speed, 15, 7, 1e12) for speed in (GPU, CPU, Speed(1e-3, 1e-6, 1.0)))
    assert (fast.m, fast.n, fast.k) == (sweep.M, sweep.N, sweep.K)
    assert slow.seconds(CPU, 7) <= 15 < fast.seconds(CPU, 7)
    assert slow.m[-1] >= 128 and slow.n[-1] >= 1536 and slow.k[-1] >= 1536
    assert slowest == grids()[-1], "where nothing fits, the least that tells anything"
    assert grid_for(GPU, 1.0, 3, 1e12).seconds(GPU, 3) <= 1.0


def test_a_grid_that_does_not_fit_in_memory_is_passed_over():
    small = grid_for(GPU, 15, 7, 1e8)
    assert small.numbers <= 1e8 < Grid(sweep.M, sweep.N, sweep.K).numbers


def test_time_is_the_sum_over_all_points():
    grid = Grid((1, 100), (8, 1000), (128, 1000))
    each = [max(CPU.start_up, m * n * k * CPU.multiply_add) for m, n, k in product(grid.m, grid.n, grid.k)]
    work = sum(sweep.WARM_UPS * seconds + 5 * max(seconds, sweep.BATCH_SECONDS) for seconds in each)
    assert grid.seconds(CPU, 5) == pytest.approx(work + 4 * CPU.bookkeeping)


def test_every_grid_is_one_and_keeps_narrow_routers():
    for grid in grids():
        for axis in (grid.m, grid.n, grid.k):
            assert len(axis) >= 2 and list(axis) == sorted(set(axis))
        assert grid.m[0] == 1 and grid.n[0] == 8
    numbers = [grid.numbers for grid in grids()]
    assert numbers == sorted(numbers, reverse=True)
    # Thinned out, a grid reaches as far.
    for whole, thin in zip(grids()[::2], grids()[1::2], strict=True):
        assert (whole.m[-1], whole.n[-1], whole.k[-1]) == (thin.m[-1], thin.n[-1], thin.k[-1])
        assert set(thin.m) < set(whole.m) and set(thin.n) <= set(whole.n) and set(thin.k) <= set(whole.k)


NARROW = Grid((1, 4), (8, 24), (128, 144))
"""With 36 shapes inside, of which 8 are its own."""


@pytest.mark.parametrize("grid", [grids()[0], grids()[-1], NARROW], ids=["first", "last", "narrow"])
def test_held_out_shapes_are_inside_and_new(grid):
    shapes = held_out_shapes(grid, 24, seed=3)
    assert shapes == held_out_shapes(grid, 24, seed=3) != held_out_shapes(grid, 24, seed=4)
    assert len(set(shapes)) == 24 and not set(shapes) & set(product(grid.m, grid.n, grid.k))
    for m, n, k in shapes:
        assert grid.m[0] <= m <= grid.m[-1] and grid.n[0] <= n <= grid.n[-1] and grid.k[0] <= k <= grid.k[-1]
        assert n % 8 == 0 and k % 8 == 0


def test_sizes_of_buffers_span_decades():
    sizes = sweep.buffer_sizes()
    assert (sizes[0], sizes[-1]) == (sweep.SMALLEST, sweep.LARGEST)
    assert all(b == sweep.FACTOR * a for a, b in pairwise(sizes))

"""Times measured on a device as costs: curves, profiles and calibrations."""

import json

import numpy as np
import pytest
from hypothesis import strategies as st

from engine import costs
from engine.catalogue import gpu
from engine.cluster import Cluster, Node
from engine.costs.device_profile import DeviceProfile
from engine.costs.gemm_table import REACH, Curve, GemmTable
from engine.costs.measured import medians
from engine.costs.silicon import MACHINES, gemm_table
from engine.errors import InputError
from engine.formats import read_costs
from engine.launch.calibration import sweep
from engine.simulate.flows import all_to_all
from tests.cases.examples import tried
from tests.cases.refusals import refusal
from tests.costs import device_profiles as planted
from tests.costs.silicon import needs_tables
from tests.strategies import cluster_of, make_gpu

GPU = make_gpu()
SHAPES = ((64.0, 32.0), (256.0, 32.0), (64.0, 512.0))


def gemm_seconds(m, n, k):
    return 1e-5 + 2e-10 * m * n * k


def measured(**changes) -> costs.MeasuredTimes:
    points = [(m, n, k, gemm_seconds(m, n, k)) for n, k in SHAPES for m in (1.0, 16.0, 256.0)]
    sizes = (1e3, 1e5, 1e7)
    fields = {
        "name": "bench",
        "origin": "a test",
        "gemm": (costs.GemmTimes(gpu="type-0", dtype="bf16", points=points),),
        "memory": (costs.MemoryTimes(gpu="type-0", points=[(size, 1e-6 + size * 1e-9) for size in sizes]),),
        "collectives": (
            costs.CollectiveTimes(operation="all_to_all", ranks=4, points=[(size, 2e-5 + size * 3e-8) for size in sizes]),
            costs.CollectiveTimes(operation="all_reduce", ranks=4, points=[(size, 4e-5 + size * 5e-8) for size in sizes]),
        ),
    }
    return costs.MeasuredTimes(**(fields | changes))


def with_gemms(points: list[tuple[float, ...]]) -> costs.Profiled:
    return costs.Profiled(measured(gemm=(costs.GemmTimes(gpu="type-0", dtype="bf16", points=points),)))


def fabric(count: int) -> Cluster:
    return cluster_of(*[GPU] * count, latency=0.5)


def linked(count: int) -> Cluster:
    return Cluster(name="l", nodes=(Node(name="n", gpus=(GPU,) * count, link_bandwidth=1e3, link_latency=0.5),))


# Curves

points = st.lists(
    st.tuples(st.integers(1, 10**9), st.floats(1e-6, 10)), min_size=1, max_size=15, unique_by=lambda point: point[0]
)


@tried(100, points)
def test_a_curve_meets_its_points_and_stays_between_neighbours(points):
    curve = Curve.through(points)
    sizes, seconds = np.array(sorted(points)).T
    best = np.array([seconds[at:].min() for at in range(len(seconds))])
    np.testing.assert_allclose(curve.at(sizes, "x"), best, rtol=1e-12)
    middle = (sizes[1:] + sizes[:-1]) / 2
    np.testing.assert_allclose(curve.at(middle, "x"), (best[1:] + best[:-1]) / 2, rtol=1e-6)
    assert float(curve.at(sizes[0] / 2, "x")) == pytest.approx(best[0])
    assert float(curve.at(sizes[-1] * REACH, "x")) == pytest.approx(seconds[-1] * REACH)
    assert float(curve.at(0.0, "x")) == 0


def test_repetitions_count_by_their_median_and_far_beyond_the_largest_size_is_refused_with_what_to_do():
    assert Curve.through([(2, 5.0), (1, 1.0), (2, 1.0), (2, 3.0)]).seconds.tolist() == [1.0, 3.0]
    assert medians([(2, 7, 5.0), (2, 7, 1.0), (1, 9, 4.0), (2, 7, 2.0)]) == ((1, 9, 4.0), (2, 7, 2.0))
    curve = Curve.through([(1, 1.0), (10, 2.0)])
    says = r"^a thing was measured up to size 10 and 41 is asked for.*measure larger sizes"
    with pytest.raises(InputError, match=says):
        curve.at(np.array([1.0, 41.0]), "a thing")


# The cost model


@tried(60, st.lists(st.floats(0, 900), min_size=2, max_size=10), st.sampled_from([*SHAPES, (128.0, 100.0), (8.0, 4096.0)]))
def test_with_growing_measurements_no_size_takes_less_time_than_a_smaller_one(rows, shape):
    cost = costs.Profiled(measured())
    rows = np.sort(rows)
    assert np.all(np.diff(cost.gemm(GPU, rows, *shape, "bf16")) >= -1e-15)
    assert np.all(np.diff(cost.memory_pass(GPU, rows * 1e4)) >= 0)
    assert np.all(np.diff(cost.all_to_all(fabric(4), rows * 1e4)) >= 0)


def test_an_unmeasured_shape_grows_from_its_nearest_and_single_sizes_make_a_line():
    """With times of a line over the work, scaling all but the start-up by n·k is exact."""
    cost = with_gemms([(m, 64.0, 32.0, 1e-5 + 2e-10 * (m - 1) * 64 * 32) for m in (1.0, 16.0, 256.0)])
    assert float(cost.gemm(GPU, 100.0, 128, 96, "bf16")) == pytest.approx(1e-5 + 2e-10 * 99 * 128 * 96)
    assert float(cost.gemm(GPU, 0.0, 128, 96, "bf16")) == 0
    # The nearest shape is nearest in ratios.
    shapes = {(64.0, 64.0): 1.0, (1024.0, 1024.0): 10.0}
    cost = with_gemms([(m, n, k, level * m) for (n, k), level in shapes.items() for m in (1.0, 2.0)])
    assert float(cost.gemm(GPU, 2.0, 300, 300, "bf16")) == pytest.approx(1 + 19 * (300 / 1024) ** 2)
    assert float(cost.gemm(GPU, 2.0, 200, 200, "bf16")) == pytest.approx(1 + 1 * (200 / 64) ** 2)
    # Single sizes of several shapes make a line.
    cost = with_gemms([(16.0, n, 32.0, gemm_seconds(16, n, 32)) for n in (32.0, 64.0, 1024.0)])
    assert float(cost.gemm(GPU, 100, 200, 300, "bf16")) == pytest.approx(gemm_seconds(100, 200, 300), rel=1e-6)


def test_sixteen_bit_floats_stand_for_each_other_and_nothing_else_does():
    cost = costs.Profiled(measured())
    assert float(cost.gemm(GPU, 16, 64, 32, "fp16")) == float(cost.gemm(GPU, 16, 64, 32, "bf16"))
    with pytest.raises(InputError, match=r"no GEMM times of fp32 on type-0 \(it has: bf16 on type-0\); measure them"):
        cost.gemm(GPU, 16, 64, 32, "fp32")
    with pytest.raises(InputError, match="on type-5"):
        cost.gemm(make_gpu(5), 16, 64, 32, "bf16")


def test_memory_without_times_is_the_datasheets_and_said():
    cost = costs.Profiled(measured(memory=()))
    assert float(cost.memory_pass(GPU, 1e6)) == float(costs.Datasheet().memory_pass(GPU, 1e6))
    assert "memory by the datasheet" in cost.source
    assert "memory" not in costs.Profiled(measured()).source
    with pytest.raises(InputError, match="no memory times for type-1"):
        costs.Profiled(measured()).memory_pass(make_gpu(1), 1.0)


PAIRS = Cluster(name="c", nodes=tuple(Node(name=name, gpus=(GPU, GPU), link_bandwidth=1e12) for name in "ab"))
"""Nodes with links, which send the rest over the measured fabric."""


@pytest.mark.parametrize("cluster", [fabric(4), linked(4), PAIRS], ids=["fabric", "links", "both"])
def test_the_network_takes_as_long_as_measured_for_even_traffic(cluster):
    network = costs.Profiled(measured()).network(cluster)
    for size in (1e3, 1e7):
        simulated = all_to_all("concurrent", None, np.full((4, 4), size / 4), network).seconds
        assert simulated == pytest.approx(2e-5 + size * 3e-8, rel=1e-6)


def test_another_number_of_gpus_was_not_measured():
    cost = costs.Profiled(measured())
    assert cost.lacks_network(fabric(4)) is None
    assert cost.lacks_network(fabric(1)) is None
    assert "no all-to-all over 3 GPUs (it has 4)" in cost.lacks_network(fabric(3))
    for work, size in ((cost.network, ()), (cost.all_to_all, (1.0,)), (cost.all_reduce, (1.0,))):
        with pytest.raises(InputError, match="add the datasheet or a measurement over as many GPUs"):
            work(fabric(3), *size)
    assert "has no GEMM times at all" in costs.Profiled(measured(gemm=())).lacks_computation(fabric(2))
    assert "no times for type-3 (it has type-0)" in cost.lacks_computation(cluster_of(make_gpu(3)))


def test_an_all_reduce_without_times_runs_on_the_measured_network():
    cost = costs.Profiled(measured(collectives=measured().collectives[:1]))
    assert "all-reduce as a ring or tree on that network" in cost.source
    # The measured line: 4e-8 seconds for each byte sent; a ring sends 1.5 times the buffer in 6 steps.
    assert float(cost.all_reduce(fabric(4), 1e7)) == pytest.approx(6 * 2e-5 + 1.5 * 1e7 * 4e-8, rel=1e-6)


# The document


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"gemm": [], "memory": [], "collectives": []}, "no times in it"),
        ({"extra": 1}, "extra"),
        ({"memory": [{"gpu": "a", "points": [[1, 0]]}]}, "memory → 0 → points → 0 → 1: Input should be greater than or equal"),
        ({"memory": [{"gpu": "a", "points": []}]}, "memory → 0 → points"),
        ({"memory": [{"gpu": "a", "points": [[1, 1]]}] * 2}, "two entries for memory a; put their points together"),
        ({"gemm": [{"gpu": "a", "dtype": "int4", "points": [[1, 1, 1, 1]]}]}, "dtype"),
        ({"collectives": [{"operation": "all_to_all", "ranks": 1, "points": [[1, 1]]}]}, "ranks"),
        ({"kind": "something"}, "kind"),
    ],
)
def test_bad_documents_are_refused_with_the_place(change, part):
    assert costs.MeasuredTimes.from_json(measured().to_json(), "x") == measured()
    message = refusal(lambda: costs.MeasuredTimes.from_dict(json.loads(measured().to_json()) | change, "times.json"))
    assert message.startswith("times.json: ") and part in message


# Fitted lines


def test_fitted_lines_price_collectives_also_on_other_numbers_of_gpus():
    cost = costs.AlphaBeta(costs.fit_profile(measured()))
    assert float(cost.all_to_all(fabric(4), 5e6)) == pytest.approx(2e-5 + 5e6 * 3e-8, rel=1e-6)
    assert float(cost.all_reduce(fabric(4), 5e6)) == pytest.approx(4e-5 + 5e6 * 5e-8, rel=1e-6)
    # Of three the all-reduce follows from the network that was fitted: 1e7 · 4/3 at 4e-8 s a byte.
    assert float(cost.all_reduce(fabric(3), 1e7)) == pytest.approx(4 * 2e-5 + 4 / 3 * 1e7 * 4e-8, rel=1e-6)


def test_a_fit_takes_the_dtype_asked_for():
    slow, fast = ([(m, 8.0, 8.0, level * m) for m in (1.0, 2.0)] for level in (4.0, 1.0))
    both = measured(
        gemm=(
            costs.GemmTimes(gpu="type-0", dtype="bf16", points=slow),
            costs.GemmTimes(gpu="type-0", dtype="fp16", points=fast),
        )
    )
    for dtype, level in (("bf16", 4.0), ("fp16", 1.0)):
        assert costs.fit_profile(both, dtype).gemm["type-0"].beta == pytest.approx(level / 64)
    with pytest.raises(InputError, match="bench: neither GEMMs of fp8 nor an all-to-all"):
        costs.fit_profile(measured(collectives=()), "fp8")
    alone = costs.fit_profile(measured(gemm=(), memory=()))  # the network alone has no computation
    assert "no GEMM times at all" in costs.AlphaBeta(alone).lacks_computation(fabric(4))
    assert alone.alone == 1


CARD = gpu("H200")
CLUSTER = Cluster(name="four", nodes=(Node(name="n", gpus=(CARD,) * 4, link_bandwidth=1e9),))


def test_planted_lines_are_recovered():
    fits = {fit.operation: fit for fit in planted.device_profile().fits}
    lines = {
        "gemm": planted.GEMM,
        "memory": planted.MEMORY,
        "all_to_all": planted.ALL_TO_ALL,
        "exchange": planted.EXCHANGE,
        "all_reduce": planted.ALL_REDUCE,
    }
    assert set(fits) == set(lines)
    for operation, line in lines.items():
        fit = fits[operation]
        assert fit.line.alpha == pytest.approx(line.alpha, rel=1e-6)
        assert fit.line.beta == pytest.approx(line.beta, rel=1e-6)
        assert fit.line.error < 1e-9
        assert fit.rate == pytest.approx((2 if operation == "gemm" else 1) / line.beta, rel=1e-6)
    assert [fits[operation].spread for operation in lines] == [0.01, 0.02, 0.03, 0.04, 0.05]
    assert (fits["gemm"].gpu, fits["gemm"].dtype, fits["gemm"].points) == ("H200", "bf16", 36)
    # An all-to-all is fitted over the bytes that a rank sends to the others, an all-reduce over its buffer.
    assert fits["all_to_all"].largest == pytest.approx(planted.SIZES[-1] * 3 / 4)
    assert fits["all_reduce"].largest == planted.SIZES[-1]


def test_held_out_shapes_tell_the_error_of_what_is_in_between():
    (held_out,) = planted.device_profile().held_out
    # The shape lies on the grid here, so the prediction is the line itself: the errors are the planted ones.
    assert held_out.errors == pytest.approx([0.0, 0.25, 0.2], abs=1e-6)
    with pytest.raises(ValueError, match="2 predictions for 3"):
        type(held_out)(**held_out.model_dump() | {"predicted": held_out.predicted[:2]})


def test_the_file_comes_back_as_costs_that_price_what_was_measured(tmp_path):
    profile, path = planted.device_profile(), tmp_path / "profile.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    assert DeviceProfile.from_json(path.read_text(), "x") == profile
    cost = costs.Profiled(read_costs(path))
    for m, n, k, seconds in profile.measured.gemm[0].points:
        assert float(cost.gemm(CARD, m, int(n), int(k), "bf16")) == pytest.approx(seconds, rel=1e-9)
    sizes = np.array(planted.SIZES)
    sent = profile.measured.collective("all_to_all", 4)
    assert cost.all_to_all(CLUSTER, sizes) == pytest.approx([seconds for _, seconds in sent.points])
    assert cost.all_reduce(CLUSTER, sizes) == pytest.approx(planted.ALL_REDUCE.seconds(sizes))
    assert cost.memory_pass(CARD, sizes) == pytest.approx(planted.MEMORY.seconds(sizes))
    # Uneven sends run on the fitted network, and its uniform all-to-all is the measured line again.
    network = cost.network(CLUSTER)
    assert network.link_latency[0] == pytest.approx(planted.ALL_TO_ALL.alpha, rel=1e-6)
    assert network.link[0] == pytest.approx(1 / planted.ALL_TO_ALL.beta, rel=1e-6)
    assert costs.choice.from_dict(json.loads(json.dumps(costs.choice.to_dict(cost)))) == cost
    assert "calibrated in a test" in cost.source


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"devices": []}, "devices"),
        ({"measured": {}}, "measured → name"),
        ({"fits": [{"operation": "gem"}]}, "operation"),
        ({"speed": 3}, "speed"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(tmp_path, change, part):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(planted.device_profile().model_dump(mode="json") | change), encoding="utf-8")
    message = refusal(lambda: read_costs(path))
    assert message.startswith("profile.json: ") and part in message and "\n" not in message


# The grid of a calibration


@needs_tables
@pytest.mark.parametrize("kind", ["A100-80", "H100", "H200"])
def test_the_grid_of_a_calibration_is_dense_enough(kind):
    """The tables of real GPUs stand for the device: the sweep's sizes are learned, all others inside are predicted."""
    table = gemm_table(MACHINES[kind].folder, "bfloat16")
    axes = [
        [size for size in sizes if size in there]
        for sizes, there in zip((sweep.M, sweep.N, sweep.K), (table.m, table.n, table.k), strict=True)
    ]
    assert [len(axis) for axis in axes] == [len(sweep.M), len(sweep.N) - 1, len(sweep.K)]  # no table has n = 8
    places = [np.searchsorted(there, axis) for axis, there in zip(axes, (table.m, table.n, table.k), strict=True)]
    grid = GemmTable(*map(np.array, axes), table.seconds[np.ix_(*places)])
    points = [(grid.m[i], grid.n[j], grid.k[g], seconds) for (i, j, g), seconds in np.ndenumerate(grid.seconds)]
    assert GemmTable.of(points).seconds.tolist() == grid.seconds.tolist()
    inside, errors = table.m <= grid.m[-1], []
    for j, n in enumerate(table.n):
        for g, k in enumerate(table.k):
            if grid.n[0] <= n <= grid.n[-1] and grid.k[0] <= k <= grid.k[-1]:
                others = inside & ~(np.isin(table.m, grid.m) & (n in axes[1]) & (k in axes[2]))
                predicted = grid.over_rows(grid.of_shape(n, k), table.m[others])
                errors.append(np.abs(predicted / table.seconds[others, j, g] - 1))
    assert 0.01 < np.concatenate(errors).mean() < 0.1

"""What `calibrate` writes: lines recovered, errors stated, and times that come back from the file as they were measured."""

import json

import numpy as np
import pytest

from engine.catalogue import gpu
from engine.cluster import Cluster, Node
from engine.costs import AlphaBeta, Profiled, choice, combine, fit_profile
from engine.costs.base import Datasheet
from engine.costs.device_profile import DeviceProfile, fits_of
from engine.costs.gemm_table import GemmTable
from engine.costs.silicon import MACHINES, gemm_table
from engine.errors import InputError
from engine.formats import read_costs
from engine.launch.calibration import sweep
from tests.costs import device_profiles as planted
from tests.costs.silicon import needs_tables

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
    # An all-to-all is fitted over what a rank sends to the others, an all-reduce over its buffer.
    assert fits["all_to_all"].largest == pytest.approx(planted.SIZES[-1] * 3 / 4)
    assert fits["all_reduce"].largest == planted.SIZES[-1]


def test_a_line_through_points_beside_it_tells_its_error():
    times = planted.measured()
    rows = [(m, n, k, seconds * (1.2 if at % 2 else 0.8)) for at, (m, n, k, seconds) in enumerate(times.gemm[0].points)]
    beside = times.model_copy(update={"gemm": (times.gemm[0].model_copy(update={"points": tuple(rows)}),)})
    spreads = {("gemm", "H200", "bf16"): 0, ("memory", "H200"): 0, ("all_to_all",): 0, ("all_reduce",): 0}
    fit = fits_of(beside, [], spreads)[0]
    assert 0.15 < fit.line.error < 0.25


def test_held_out_shapes_tell_the_error_of_what_is_in_between():
    (held_out,) = planted.device_profile().held_out
    # The shape lies on the grid here, so what is predicted is the line itself: the errors are the planted ones.
    assert held_out.errors == pytest.approx([0.0, 0.25, 0.2], abs=1e-6)


def test_the_file_comes_back_as_costs_that_price_what_was_measured(tmp_path):
    profile, path = planted.device_profile(), tmp_path / "profile.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    assert DeviceProfile.from_json(path.read_text(), "x") == profile
    cost = Profiled(read_costs(path))
    for m, n, k, seconds in profile.measured.gemm[0].points:
        assert float(cost.gemm(CARD, m, int(n), int(k), "bf16")) == pytest.approx(seconds, rel=1e-9)
    sizes = np.array(planted.SIZES)
    sent = profile.measured.collective("all_to_all", 4)
    assert cost.all_to_all(CLUSTER, sizes) == pytest.approx([seconds for _, seconds in sent.points])
    assert cost.all_reduce(CLUSTER, sizes) == pytest.approx(planted.ALL_REDUCE.seconds(sizes))
    assert cost.memory_pass(CARD, sizes) == pytest.approx(planted.MEMORY.seconds(sizes))
    # Uneven sends run on the fitted network, whose uniform all-to-all is the measured line again.
    network = cost.network(CLUSTER)
    assert network.link_latency[0] == pytest.approx(planted.ALL_TO_ALL.alpha, rel=1e-6)
    assert network.link[0] == pytest.approx(1 / planted.ALL_TO_ALL.beta, rel=1e-6)
    assert choice.from_dict(json.loads(json.dumps(choice.to_dict(cost)))) == cost
    assert "calibrated in a test" in cost.source


def test_the_measured_times_are_an_alpha_beta_profile_as_well():
    profile = AlphaBeta(fit_profile(planted.measured()))
    assert float(profile.gemm(CARD, 100, 100, 100, "bf16")) == pytest.approx(float(planted.GEMM.seconds(1e6)), rel=1e-6)
    assert profile.network(CLUSTER).link_latency[0] == pytest.approx(planted.ALL_TO_ALL.alpha, rel=1e-6)


def test_another_number_of_gpus_takes_only_the_computation():
    eight = Cluster(name="eight", nodes=(Node(name="n", gpus=(CARD,) * 8),))
    measured = Profiled(planted.measured())
    assert "no all-to-all over 8 GPUs (it has 4)" in measured.lacks_network(eight)
    both = combine({"calibration": measured, "datasheet": Datasheet()}, eight)
    assert both.computation == measured and both.connection == Datasheet()


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
    with pytest.raises(InputError, match=part) as caught:
        read_costs(path)
    assert str(caught.value).startswith("profile.json: ") and "\n" not in str(caught.value)


def test_errors_belong_to_their_shapes():
    held_out = planted.device_profile().held_out[0].model_dump()
    with pytest.raises(ValueError, match="2 predictions for 3"):
        type(planted.device_profile().held_out[0])(**held_out | {"predicted": held_out["predicted"][:2]})


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
    assert (
        GemmTable.of(
            (m, n, k, grid.seconds[i, j, g])
            for i, m in enumerate(grid.m)
            for j, n in enumerate(grid.n)
            for g, k in enumerate(grid.k)
        ).seconds.tolist()
        == grid.seconds.tolist()
    )
    inside, errors = table.m <= grid.m[-1], []
    for j, n in enumerate(table.n):
        for g, k in enumerate(table.k):
            if grid.n[0] <= n <= grid.n[-1] and grid.k[0] <= k <= grid.k[-1]:
                others = inside & ~(np.isin(table.m, grid.m) & (n in axes[1]) & (k in axes[2]))
                predicted = grid.over_rows(grid.of_shape(n, k), table.m[others])
                errors.append(np.abs(predicted / table.seconds[others, j, g] - 1))
    assert 0.01 < np.concatenate(errors).mean() < 0.1

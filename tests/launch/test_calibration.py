"""`calibrate`: refusals, the sweep that fits its time, the measurements of ranks, and its end."""

import json
import math
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from engine import store
from engine.costs import Profiled
from engine.formats import read_costs
from engine.jobs import protocol
from engine.jobs.launches import table_of
from engine.launch.calibration import calibrate, sweep, sweep_rank
from engine.launch.calibration.calibrate import plan_sweep, read_measured
from engine.launch.calibration.sweep import Grid, Speed, Sweep, grid_for, grids, held_out_shapes
from engine.launch.places.devices import Devices
from engine.launch.running import local
from engine.result import never
from engine.systems.base import silent
from tests.cases.cli import CLUSTER, CommandLine
from tests.cases.refusals import refusal
from tests.strategies import cluster_of, make_gpu

HOST = Devices(gpus=(), memory=(), cores=2, host_memory=8 * 2.0**30)
CARDS = replace(HOST, gpus=("NVIDIA H200", "NVIDIA H200", "NVIDIA L40S"), memory=(1e11,) * 3)


@pytest.fixture
def engine(capsys, monkeypatch) -> CommandLine:
    """The command line on a machine without GPUs, in a hurry."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(calibrate, "QUICK", 1.0)
    return CommandLine(capsys)


# Requests.
def test_defaults_follow_the_devices():
    host, cards = plan_sweep(HOST), plan_sweep(CARDS)
    assert (host.ranks, host.backend, host.dtypes) == (2, "gloo", ("fp32",))
    assert (cards.ranks, cards.backend, cards.dtypes) == (3, "nccl", ("bf16", "fp32"))
    assert [plan_sweep(replace(HOST, cores=cores)).ranks for cores in (1, 3, 64)] == [2, 3, 4]
    quick = plan_sweep(HOST, quick=True)
    assert quick.seconds < host.seconds and quick.repeats < host.repeats
    assert plan_sweep(CARDS, 1, ["fp16", "fp16"]).dtypes == ("fp16",)


def test_what_cannot_be_measured_is_refused():
    for devices, asked, part in (
        *((HOST, {"ranks": ranks}, f"{ranks} ranks: choose between 1 and 64") for ranks in (0, -3, 65)),
        (CARDS, {"ranks": 4}, "between 1 and 3, one for each attached GPU (2 × NVIDIA H200, 1 × NVIDIA L40S)"),
        (CARDS, {"dtypes": ["fp8"]}, "fp8 cannot be measured; choose from bf16, fp16, fp32"),
    ):
        assert part in refusal(plan_sweep, devices, **asked)


def test_the_command_refuses_before_it_measures(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "run_processes", lambda *_: pytest.fail("it measured"))
    good = tmp_path / "profile.json"
    (tmp_path / "folder.json").mkdir()
    on_testbed = ("--on", "testbed", "--cluster", CLUSTER)
    for arguments, at, part in (
        (("--ranks", 0), good, "0 ranks"),
        ((), tmp_path / "profile.txt", "ends in .json"),
        ((), tmp_path / "folder.json", "it is a folder"),
        ((), tmp_path / "none" / "profile.json", "No such file or directory"),
        ((), Path(__file__) / "profile.json", "Not a directory"),
        (("--cluster", CLUSTER), good, "--cluster is for emulated links"),
        (("--scale", 2), good, "--scale is for emulated links"),
        (("--on", "testbed"), good, "needs the cluster"),
        ((*on_testbed, "--ranks", 9), good, "9 ranks: choose between 1 and 8, the GPUs of mixed-8"),
        ((*on_testbed, "--scale", 0), good, "scale must be a number above 0"),
    ):
        assert part in engine.refused("calibrate", *arguments, "-o", at)
    with pytest.raises(SystemExit) as caught:
        engine("calibrate")
    assert caught.value.code == 2 and list(tmp_path.glob("profile*")) == []
    asked = (calibrate.calibrate, plan_sweep(HOST), tmp_path / "run", never, silent)
    assert "no GPU type 'H900'" in refusal(*asked, "H900")
    with local.alone():
        assert "another launch or calibration is running" in refusal(*asked)
    assert not (tmp_path / "run").exists()


# Readings of the ranks.
def readings_of(*names: str) -> dict:
    """As rank 0 writes it."""
    gemms = [[m, n, k, 1e-9 * m * n * k, 0.1 * m] for m in (1, 2, 3) for n in (8, 64) for k in (8, 64)]
    memory = [[1e3, 1e-6, 0.0], [1e6, 1e-4, 0.2], [1e7, 1e-3, 0.3]]
    computed = {"gemm bf16": gemms, "held out bf16": [[2, 8, 64, 1.25e-9 * 2 * 8 * 64, 0.0]], "memory": memory}
    sent = [[1024.0, 1e-5, 0.5], [4096.0, 2e-5, 0.6], [16384.0, 8e-5, 0.7]]
    about = {"devices": list(names), "torch": "2.13", "cuda": None, "computed": dict.fromkeys(names, computed)}
    return about | dict.fromkeys(("all_to_all", "exchange", "all_reduce"), sent)


def test_devices_are_called_what_a_cluster_calls_them():
    sweep = plan_sweep(CARDS, dtypes=["bf16"])
    names = ("NVIDIA H200", "NVIDIA H200", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition")
    calibration = read_measured(readings_of(*names), sweep, "local")
    assert [table.gpu for table in calibration.measured.gemm] == ["H200", names[2][:40]]
    assert calibration.devices == names and calibration.measured.ranks_of("all_to_all") == [3]
    chosen = read_measured(readings_of(*names), sweep, "local", "L40S")
    assert [table.gpu for table in chosen.measured.gemm] == ["H200", "L40S"]
    host = read_measured(readings_of("CPU", "CPU"), plan_sweep(HOST, dtypes=["bf16"]), "local", "L40S")
    assert [table.gpu for table in host.measured.memory] == ["CPU"]


def test_what_the_ranks_found_becomes_times_fits_and_errors():
    calibration = read_measured(readings_of("CPU", "CPU"), plan_sweep(HOST, dtypes=["bf16"]), "the testbed of x")
    assert calibration.on == "the testbed of x" and "on the testbed of x, Gloo, PyTorch 2.13" in calibration.measured.origin
    assert calibration.versions == {"PyTorch": "2.13"}
    assert calibration.exchange[-1] == (16384.0, 8e-5)
    spread = {fit.operation: fit.spread for fit in calibration.fits}
    assert spread == {"gemm": 0.2, "memory": 0.2, "all_to_all": 0.6, "exchange": 0.6, "all_reduce": 0.6}
    assert calibration.held_out[0].errors == pytest.approx([0.2])
    operations = ["GEMM bf16 CPU", "memory CPU", "all-to-all", "all-reduce", "exchange with a peer"]
    assert [row["operation"] for row in table_of(calibration)] == operations
    # Ranks of one kind are merged by their medians.
    points = [[[8, 64, seconds, spread]] for seconds, spread in ((3.0, 0.1), (1.0, 0.4), (2.0, 0.2))]
    assert sweep_rank._merged(points) == [[8, 64, 2.0, 0.4]]


# One rank in this process
@pytest.fixture
def rank(one_rank) -> sweep_rank.SweepRank:
    """A rank that is alone."""
    sweep = Sweep(ranks=1, backend="gloo", dtypes=("fp32",), seconds=0.5, repeats=3, held_out=5)
    return sweep_rank.SweepRank(sweep, 0, torch.device("cpu"))


def test_a_rank_measures_a_whole_grid_and_shapes_beside_it(rank):
    readings = rank.measure()
    assert readings["devices"] == ["CPU"] and readings["torch"] == torch.__version__
    assert not set(readings) & {"all_to_all", "exchange"}
    calibration = read_measured(readings, rank.sweep, "local")
    points = calibration.measured.gemm[0].points
    grid = [(grid.m, grid.n, grid.k) for grid in grids()]
    assert tuple(tuple(sorted({int(point[axis]) for point in points})) for axis in range(3)) in grid
    assert len(calibration.held_out[0].points) == 5 and len(calibration.measured.memory[0].points) >= 3
    assert Profiled(calibration.measured)._gemm["CPU", "fp32"].table is not None
    assert all(seconds > 0 and math.isfinite(seconds) for *_, seconds in points)


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Goes on only while something works, so that no other work on this machine counts."""
    clock = SimpleNamespace(now=0.0, calls=0, monotonic=lambda: clock.now)

    def work(seconds: float) -> None:
        clock.now += seconds
        clock.calls += 1

    clock.work = work
    monkeypatch.setattr(sweep_rank, "time", clock)
    return clock


def test_seconds_are_those_of_one_repetition(rank, clock):
    assert rank.seconds_of([lambda: clock.work(1e-4)]) == [(pytest.approx(1e-4), pytest.approx(0, abs=1e-9))]
    assert clock.calls == 2 + 3 * 10, "what is short is repeated between two readings of the clock"
    clock.calls, clock.now, rank.deadline = 0, 1.0, 0.5
    rank.seconds_of([lambda: clock.work(2e-3)])
    assert clock.calls == 3, "out of time: a warm-up, a first look, and one reading"


def test_the_median_of_the_readings_counts_and_the_quartiles_are_told(rank, clock):
    readings = iter([9.0, 9.0, 1.0, 7.0, 2.0, 30.0, 4.0, 50.0])  # in turn; of each a warm-up and a first look
    rank.sweep = rank.sweep.model_copy(update={"repeats": 2})
    rank.deadline = math.inf
    medians = rank.seconds_of([lambda: clock.work(next(readings))] * 2)
    assert medians == [(pytest.approx(3.0), pytest.approx(1 / 3)), (pytest.approx(40.0), pytest.approx(0.25))]


def test_sizes_end_with_the_time_but_never_before_a_line_can_be_drawn(rank, clock):
    def prepared(size):
        return float(size), lambda: clock.work(size * 1e-5)

    sizes = [100, 400, 1600, 6400, 25600, 102400]
    points = rank._over_sizes("memory", "naps", sizes, prepared, 2.0, False)
    assert [point[:2] for point in points] == [[size, pytest.approx(size * 1e-5)] for size in sizes[:3]]
    rank.sweep = rank.sweep.model_copy(update={"seconds": 1e6})
    assert len(rank._over_sizes("memory", "naps", sizes, prepared, 2.0, False)) == 6
    rank.room = 2.0 * 25600
    assert len(rank._over_sizes("memory", "naps", sizes, prepared, 2.0, False)) == 5


def test_every_call_takes_other_weights():
    gemms = sweep_rank._Gemms(grids()[-1], torch.float32, torch.device("cpu"), 2**22, 0)
    work = gemms.work(8, 128, 128)
    first, second = work(), work()
    assert first.shape == (8, 128) and not torch.equal(first, second)
    rows, weights = gemms.rows[: 8 * 128].view(8, 128), gemms.weights[: 128 * 128].view(128, 128)
    assert torch.allclose(first, rows @ weights)


# Real ranks
def test_the_command_from_the_devices_to_prices(engine, tmp_path, warm_python):
    path = tmp_path / "profile.json"
    code, out, errors = engine("calibrate", "--ranks", 2, "--quick", "-o", path)
    assert code == 0, errors
    parts = ("2 × CPU", "GEMM fp32 CPU", "all-to-all", "exchange", "all-reduce", "held-out shapes", f"--cost {path}")
    assert all(part in out for part in parts)
    cost, card = Profiled(read_costs(path)), make_gpu().model_copy(update={"type": "CPU"})
    m, n, k, seconds = cost.measured.gemm[0].points[-1]
    assert float(cost.gemm(card, m, int(n), int(k), "fp32")) == pytest.approx(seconds, rel=1e-9)
    pair = cluster_of(card, card)
    for operation in ("all_to_all", "all_reduce"):
        sizes, times = np.array(cost.measured.collective(operation, 2).points).T
        predicted = getattr(cost, operation)(pair, sizes)
        assert len(sizes) >= 3 and predicted[-1] == pytest.approx(times[-1]) and (np.diff(predicted) >= 0).all()
    assert 0 < cost.network(pair).send[0] < math.inf
    assert list(store.data_folder().glob("run-*")) == [], "the run folder is gone"


def test_a_testbed_runs_every_rank_in_its_own_network(tmp_path, monkeypatch):
    def run_processes(commands, ranks, limit, folder, stop, report):
        seen.extend(commands)
        (folder / "measured.json").write_text(json.dumps(readings_of("CPU", "CPU")))

    seen, emulated = [], mock.MagicMock(ranks=2)
    emulated.name = "the testbed of x"
    emulated.inside = lambda rank, command: [f"in {rank}", *command]
    emulated.environment = lambda rank: {"RANK": str(rank)}
    monkeypatch.setattr(calibrate, "run_processes", run_processes)
    calibration = calibrate.calibrate(plan_sweep(HOST, dtypes=["bf16"]), tmp_path / "run", never, silent, testbed=emulated)
    own = [sys.executable, "-m", "engine.launch.calibration.sweep_rank", str(tmp_path / "run")]
    assert seen == [([f"in {rank}", *own], {"RANK": str(rank)}) for rank in range(2)]
    assert calibration.on == "the testbed of x"
    seen.clear()
    here = calibrate.calibrate(plan_sweep(HOST, dtypes=["bf16"]), tmp_path / "run", never, silent)
    assert here.on == "local" and "engine.launch.calibration.sweep_rank" in seen[0][0] and len(seen) == 1


def test_ranks_that_leave_nothing_whole_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "run_processes", lambda *_: (tmp_path / "run" / "measured.json").write_text('{"torn'))
    assert "measured.json cannot be read" in refusal(calibrate.calibrate, plan_sweep(HOST), tmp_path / "run", never, silent)


def test_a_job_says_what_it_measured(monkeypatch):
    from engine.jobs import launches
    from tests.costs import device_profiles as planted
    from tests.jobs.asking import in_json

    asked = []
    monkeypatch.setattr(launches, "attached", lambda: HOST)
    monkeypatch.setattr(launches, "calibrate", lambda *arguments: asked.append(arguments) or planted.device_profile())
    context = protocol.Context(store.data_folder())
    answer = in_json(launches.calibrate_devices)({"ranks": 3, "dtypes": ["bf16"], "quick": True, "type": "H200"}, context)
    ((sweep, folder, _, _, kind),) = asked
    assert (sweep.ranks, sweep.dtypes, sweep.seconds, kind) == (3, ("bf16",), calibrate.QUICK, "H200")
    assert folder.parent == context.folder
    answer = json.loads(json.dumps(answer, allow_nan=False))
    errors = {"mean": pytest.approx(0.15), "worst": pytest.approx(0.25)}
    assert answer["held_out"] == [{"gpu": "H200", "dtype": "bf16", "shapes": 3} | errors]
    assert [fit["operation"] for fit in answer["fits"]] == ["gemm", "memory", "all_to_all", "all_reduce", "exchange"]
    assert answer["fits"][0]["rate"] == pytest.approx(1e12)


# The sweep.
GPU = Speed(start_up=5e-6, multiply_add=2 / 600e12, bookkeeping=2e-3)
CPU = Speed(start_up=3e-6, multiply_add=2 / 50e9, bookkeeping=5e-3)


def pair_sweep(**changes) -> Sweep:
    settings = {"ranks": 2, "backend": "gloo", "dtypes": ("fp32",), "seconds": 30.0, "repeats": 7, "held_out": 8}
    return Sweep(**(settings | changes))


def test_the_parts_share_all_of_the_time_and_sizes_of_buffers_span_decades():
    pair, single = pair_sweep(), pair_sweep(ranks=1)
    assert sum(pair.allowance(part) for part in sweep.PARTS) == pytest.approx(30)
    assert sum(single.allowance(part) for part in sweep.PARTS if part not in sweep.COLLECTIVES) == pytest.approx(30)
    assert single.allowance("gemm") > pair.allowance("gemm")
    sizes = sweep.buffer_sizes()
    assert (sizes[0], sizes[-1]) == (sweep.SMALLEST, sweep.LARGEST)
    assert all(b == sweep.FACTOR * a for a, b in pairwise(sizes))


def test_a_fast_device_gets_every_size_and_a_slow_one_what_it_can_do_in_time():
    fast, slow, slowest = (grid_for(speed, 15, 7, 1e12) for speed in (GPU, CPU, Speed(1e-3, 1e-6, 1.0)))
    assert (fast.m, fast.n, fast.k) == (sweep.M, sweep.N, sweep.K)
    assert slow.seconds(CPU, 7) <= 15 < fast.seconds(CPU, 7)
    assert slow.m[-1] >= 128 and slow.n[-1] >= 1536 and slow.k[-1] >= 1536
    assert slowest == grids()[-1], "where nothing fits, the least that tells anything"
    assert grid_for(GPU, 1.0, 3, 1e12).seconds(GPU, 3) <= 1.0
    small = grid_for(GPU, 15, 7, 1e8)
    assert small.numbers <= 1e8 < fast.numbers, "what does not fit in memory is passed over"


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

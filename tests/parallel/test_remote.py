"""Points on a Dask cluster: the same answers as here, and no wrong or lost one when workers or the scheduler die."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import parallel
from engine.catalogue import cluster_presets
from engine.compare.sweep import sweep, trials_of
from engine.costs import Datasheet
from engine.errors import InputError
from engine.model import MoEModel
from engine.parallel import ADDRESS, in_order, remote
from engine.problem import make_problem
from engine.training import balanced_load, usual_step
from tests.cases.jobs import until
from tests.parallel import points

distributed = pytest.importorskip("distributed")

ROOT = Path(remote.__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator["distributed.LocalCluster"]:
    """Two workers of one thread each, which are started again when they die."""
    folder = tmp_path_factory.mktemp("dask")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", local_directory=str(folder)
    ) as cluster:
        yield cluster


@pytest.fixture
def on_cluster(cluster: "distributed.LocalCluster", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, cluster.scheduler_address)


def test_a_sweep_of_64_points_gives_the_same_numbers(cluster, monkeypatch):
    hardware = cluster_presets()["mixed-8"].cluster
    model = MoEModel.from_json((ROOT / "sample_traces" / "tiny-moe-alpha.json").read_bytes(), "model")
    model = model.model_copy(update={"layers": 2})  # the points shall be alike, whatever they cost
    step = usual_step(model, len(hardware.gpus))
    problem = make_problem(balanced_load(model), hardware, model, Datasheet(), step=step)
    trials = trials_of(problem, "micro_op", [1 + 0.5 * place for place in range(61)])
    assert len(trials) == 64
    monkeypatch.setattr(parallel, "PATIENCE", 1e6)
    here = list(sweep(problem, trials))
    monkeypatch.setenv(ADDRESS, cluster.scheduler_address)
    there = list(sweep(problem, trials))
    assert [point for point, _ in there] == [point for point, _ in here]
    assert [outcome.result.solution for _, outcome in there] == [outcome.result.solution for _, outcome in here]
    assert len(here) == 64


def test_points_are_done_by_all_workers_and_by_nobody_else_but_a_single_one_stays_here(on_cluster):
    assert list(in_order(points.square, ([3], 0.0), 1)) == [(0, (9, os.getpid()))]
    answers = list(in_order(points.square, (list(range(20)), 0.05), 20))
    assert [(index, square) for index, (square, _) in answers] == [(index, index**2) for index in range(20)]
    by = {process for _, (_, process) in answers}
    assert len(by) == 2 and os.getpid() not in by


@pytest.mark.clock
def test_asked_to_stop_points_at_work_hand_back_their_best(on_cluster, tmp_path):
    asked = []

    def stop() -> bool:
        if not asked and all((tmp_path / f"begun-{index}").exists() for index in (0, 1)):
            asked.append(time.monotonic())
        return bool(asked)

    answers = list(in_order(points.until_stopped, tmp_path, 20, stop))
    assert time.monotonic() - asked[0] < 2.0
    assert answers == [(0, "best of 0"), (1, "best of 1")]


def test_what_a_point_raises_is_raised_in_its_place(on_cluster):
    answers = in_order(points.refuse_third, 0.05, 6)
    assert next(answers) == (0, 0) and next(answers) == (1, 1)
    with pytest.raises(InputError, match="the third point"):
        list(answers)


def test_workers_with_other_libraries_are_refused(on_cluster, monkeypatch):
    monkeypatch.setattr(remote, "library_versions", lambda: {"numpy": "0.1"})
    said = r"has numpy .*, this machine has 0.1; the same answers need the same versions"
    with pytest.raises(InputError, match=said):
        list(in_order(points.square, ([1, 2], 0.0), 2))


def test_nothing_is_left_on_the_client(on_cluster):
    before = threading.active_count()
    list(in_order(points.square, (list(range(4)), 0.0), 4))
    until(lambda: threading.active_count() <= before, 3)


# Points that kill workers come last: on a busy machine a new worker can take long to start.


def test_a_killed_worker_costs_its_points_a_second_attempt(on_cluster, tmp_path):
    answers = list(in_order(points.die_once, tmp_path, 20))
    assert answers == [(index, index) for index in range(20)]
    assert (tmp_path / "died").exists()


def test_a_point_that_kills_every_worker_is_refused(on_cluster):
    kept = []
    with pytest.raises(InputError, match=r"lost the same points again and again.*\d of 6 points are done"):
        for index, _ in in_order(points.die_always, None, 6):
            kept.append(index)
    assert kept == sorted(kept) and 3 not in kept


# A cluster of its own, with a scheduler in a process that can be killed


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, subprocess.Popen, str]]:
    """The processes of a scheduler and its one worker, and its address."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    file = tmp_path / "scheduler.json"

    def start(*words: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "distributed.cli.dask_" + words[0], *words[1:]]
        with (tmp_path / "log.txt").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)

    process = start("scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    worker = start("worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-dashboard", "--no-nanny")
    until(lambda: file.exists() and file.read_text().strip(), 20)
    yield process, worker, json.loads(file.read_text())["address"]
    for each in (worker, process):
        each.kill()
        each.wait()


@pytest.mark.clock
def test_a_worker_that_hangs_and_a_scheduler_that_dies_half_way_cost_one_line_and_no_answer(scheduler, monkeypatch):
    process, worker, address = scheduler
    wait_for_worker(address)
    monkeypatch.setenv(ADDRESS, address)
    monkeypatch.setattr(remote, "CONNECTING", 1.0)
    worker.send_signal(signal.SIGSTOP)
    said = rf"the Dask cluster at {address} hangs: not all its workers answered within 1 s"
    with pytest.raises(InputError, match=said):
        list(in_order(points.square, ([1, 2], 0.0), 2))
    worker.send_signal(signal.SIGCONT)
    monkeypatch.setattr(remote, "CONNECTING", 3.0)
    kept = []
    begin = time.monotonic()
    with pytest.raises(InputError, match=rf"no Dask scheduler answers at {address}.* of 30 points are done") as caught:
        for index, (square, _) in in_order(points.square, (list(range(30)), 0.2), 30):
            assert square == index**2
            kept.append(index)
            if index == 4:
                process.send_signal(signal.SIGKILL)
    assert "\n" not in str(caught.value)
    assert kept[:5] == [0, 1, 2, 3, 4] and kept == list(range(len(kept))) and len(kept) < 12
    assert time.monotonic() - begin < 15


@pytest.mark.clock
def test_stop_works_while_the_scheduler_hangs(scheduler, tmp_path, monkeypatch):
    process, _, address = scheduler
    wait_for_worker(address)
    monkeypatch.setenv(ADDRESS, address)
    asked: list[float] = []

    def stop() -> bool:
        if not asked and (tmp_path / "begun-0").exists():
            process.send_signal(signal.SIGSTOP)
            asked.append(time.monotonic())
        return bool(asked)

    assert list(in_order(points.deaf, tmp_path, 3, stop)) == [] and time.monotonic() - asked[0] < 4


def wait_for_worker(address: str) -> None:
    with distributed.Client(address, set_as_default=False) as client:
        client.wait_for_workers(1, timeout=30)


def test_an_address_where_nobody_answers_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(remote, "CONNECTING", 0.5)
    for address in ("tcp://127.0.0.1:9", "nonsense://x"):
        monkeypatch.setenv(ADDRESS, address)
        with pytest.raises(InputError, match=f"no Dask scheduler answers at {address}"):
            list(in_order(points.square, ([1, 2], 0.0), 2))

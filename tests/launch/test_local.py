"""Launches on this machine: refusals beforehand, the measurements of real ranks, and the end of every launch."""

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine import store
from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.jobs import protocol, runner
from engine.jobs.runner import Job, State
from engine.launch.places.devices import Devices
from engine.launch.preparation import inference
from engine.launch.preparation.launch import Launch
from engine.launch.rank.instructions import REPORT
from engine.launch.running import local
from engine.launch.running.local import command_of, run_here
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem
from engine.result import never
from engine.systems.base import silent
from engine.timeline import Timeline
from engine.workload import ExpertLoad, RoutingTrace
from tests import warm
from tests.cases import launches
from tests.cases.jobs import until
from tests.cases.launch_plans import MODES
from tests.cases.processes import processes_of, ranks_of
from tests.cases.refusals import refusal
from tests.oracles.plans import check_plan

pytestmark = pytest.mark.usefixtures("warm_python")


# Before anything runs.
def test_prepare_says_what_it_checked():
    launch = launches.prepare("matched", 2, tokens=100, repeats=4)
    assert launch.ready and [check.name for check in launch.checks] == [*("Ranks", "Backend", "Memory", "Tokens", "Numbers")]
    text = {check.name: check.text for check in launch.checks}
    assert "4 GPUs" in text["Ranks"] and "2 ranks" in text["Ranks"]
    assert "Gloo" in text["Backend"] and "100" in text["Tokens"] and "4 timed passes" in text["Tokens"]
    assert "fp32" in text["Numbers"] and launch.instructions.model.dtype == "fp32"
    assert launch.workloads[0].tokens == 100 and launch.instructions.plans[0].placement.gpus == 2
    assert command_of(launch, Path("x y; rm"))[-1] == "x y; rm"


def test_four_ranks_by_default_and_as_many_tokens_as_the_budget_allows_and_never_more_than_there_are(monkeypatch):
    nine = launches.placement((0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,), ())
    for plan in (None, launches.plan_for(launches.recording(), "concurrent", nine)):
        assert launches.prepare(ranks=None, plan=plan).instructions.ranks == 4
    assert launches.prepare().workloads[0].tokens == 300 and launches.prepare(tokens=10**9).workloads[0].tokens == 300
    per_token = launches.LAYERS * launches.K * launches.MODEL.ffn_flops_per_token
    monkeypatch.setattr(inference, "FLOP_BUDGET", 50.5 * per_token)
    assert launches.prepare().workloads[0].tokens == 50 and launches.prepare(tokens=200).workloads[0].tokens == 200
    monkeypatch.setattr(inference, "FLOP_BUDGET", 0.0)
    assert launches.prepare(ranks=4).workloads[0].tokens == 4


def test_gpus_run_nccl_in_the_models_own_numbers():
    gpus = Devices(gpus=("H200",) * 4, memory=(2.0**37,) * 4, cores=16, host_memory=2.0**37)
    for dtype in ("bf16", "fp8"):
        launch = launches.prepare("matched", None, devices=gpus, model=launches.MODEL.model_copy(update={"dtype": dtype}))
        assert launch.ready and (launch.instructions.backend, launch.instructions.ranks) == ("nccl", 4)
        assert launch.instructions.model.dtype == "bf16"


def test_numbers_that_make_no_sense_are_refused():
    ranks = [({"ranks": ranks}, f"{ranks} ranks: choose between 1 and 4") for ranks in (0, -1, 5)]
    limits = [({"limit": limit}, "limit") for limit in (0.0, -1.0, float("nan"))]
    passes = [({"repeats": repeats}, "passes") for repeats in (0, 101)]
    for more, part in (*ranks, *limits, *passes, ({"tokens": 0}, "token")):
        assert part in refusal(launches.prepare, **more)


def test_recordings_of_other_sizes_are_refused():
    trace, tiny = launches.recording(), launches.MODEL
    deep, shallow = (tiny.model_copy(update={"layers": layers}) for layers in (4, 2))
    for workload, model, part in (
        (ExpertLoad("loads", np.ones((2, 8)), (0, 1)), tiny, "tiny does not fit the recording loads"),
        (trace, deep, "tiny does not fit the recording made up: the model has 4 MoE layers"),
        (RoutingTrace("short", trace.experts[:, :2], 8), shallow, "3 layers, but the recording short has 8 in 2"),
        (replace(trace, source_rank=np.full(300, 6, np.int32)), tiny, "source rank 6"),
    ):
        assert part in refusal(launches.prepare, trace=workload, plan=launches.plan_for(trace, "concurrent"), model=model)


def test_too_little_memory_fails_the_check_and_the_launch(tmp_path):
    launch = launches.prepare(devices=replace(launches.HOST, host_memory=1e6))
    (failed,) = [check for check in launch.checks if not check.passed]
    assert failed.name == "Memory" and "fewer" in failed.text and not launch.ready
    assert "pre-flight: memory" in refusal(run_here, launch, tmp_path / "run", never, silent)
    assert not (tmp_path / "run").exists()


def test_two_ranks_compute_what_one_process_computes_in_every_order(tmp_path):
    plans = tuple(launches.plan_for(launches.recording(), mode) for mode in MODES)
    launch = inference.prepare_inference(Launch(plans, launches.recording(), launches.MODEL, ranks=2, repeats=3), launches.HOST)
    reports: list[tuple[float, str]] = []
    whole = run_here(launch, tmp_path / "run", never, lambda done, message, *more: reports.append((done, message)))
    launches.hold_together(launch, whole)
    assert [run.plan.name for run in whole.runs] == list(MODES)
    home, (trace,) = launch.instructions.plans[0].placement.share.argmax(axis=2), launch.workloads
    rows = np.zeros((launches.LAYERS, 2, 2))
    for token, layer, choice in np.argwhere(trace.experts >= 0):
        rows[layer, trace.source_rank[token], home[layer, trace.experts[token, layer, choice]]] += 1
    for run in whole.runs:
        for layer in range(launches.LAYERS):
            remote = np.where(np.eye(2, dtype=bool), 0, rows[layer]) * launch.instructions.model.bytes_per_token
            for timeline in (run.measured, run.predicted):
                np.testing.assert_allclose(launches.sent(timeline, "dispatch", layer, 2), remote, rtol=1e-9)
                np.testing.assert_allclose(launches.sent(timeline, "combine", layer, 2), remote.T, rtol=1e-9)
    shares = [done for done, _ in reports]
    assert shares == sorted(shares) and shares[0] >= 0 and shares[-1] <= 1
    assert reports[0][1] == "measuring this machine"
    assert any(message.startswith("pass 3 of 3, concurrent, layer ") for _, message in reports)
    assert not processes_of(tmp_path)


def test_one_rank_has_no_network_and_a_launch_writes_into_its_folder_only(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    launch = launches.prepare("matched", 1, repeats=1)
    whole = run_here(launch, tmp_path / "run", never, silent)
    launches.hold_together(launch, whole)
    assert not list((tmp_path / "temporary").iterdir())
    assert whole.profile.network is None


@pytest.mark.parametrize("difference", [1e-3, float("nan"), float("inf")])
def test_an_output_that_differs_makes_the_run_invalid(tmp_path, monkeypatch, difference):
    def ranks_of_a_wrong_kernel(commands, ranks, limit, folder, stop, report) -> None:
        said = {"differences": [[difference, 1e-4]], "device": "CPU", "clock_error": 0.0}
        (folder / REPORT).write_text(json.dumps(said))

    monkeypatch.setattr(local, "run_processes", ranks_of_a_wrong_kernel)
    message = refusal(run_here, launches.prepare(), tmp_path / "run", never, silent)
    assert "differs from the unplanned computation" in message


# How a launch ends when it does not finish.


def end_of(
    folder: Path, begun: Callable[[list[str]], object], act: Callable[[], object], limit: float = 120.0
) -> tuple[str, float]:
    """The message with which a launch that would take minutes ends, and the seconds until nothing of it runs any more from when
    `act` is called: once `begun` is true of the messages so far. act: answers True to stop the launch"""
    trace, messages, acted = launches.recording(2000), [], []
    launch = launches.prepare(
        trace=trace, plan=launches.plan_for(trace, "matched", model=launches.BIG), model=launches.BIG, repeats=100, limit=limit
    )

    def stop() -> bool:
        if not acted and begun(messages):
            acted.append(time.monotonic())
            acted.append(act())
        return acted[1:] == [True]

    message = refusal(run_here, launch, folder, stop, lambda done, message, *more: messages.append(message))
    until(lambda: not processes_of(folder), 2)
    return message, time.monotonic() - acted[0]


@pytest.mark.parametrize("ranks", [pytest.param(0, marks=pytest.mark.everything, id="torchrun starts"), 2])
@pytest.mark.clock
def test_a_stop_ends_everything_within_two_seconds(tmp_path, ranks, monkeypatch):
    """That ranks at work are stopped too is seen of a launch that is a job, below."""
    monkeypatch.setenv("PYTHON_EXEC", warm.INTERPRETER)  # ranks that start cold do not notice for long that torchrun is gone
    message, seconds = end_of(
        tmp_path, lambda messages: processes_of(tmp_path) and len(ranks_of(tmp_path)) >= ranks, lambda: True
    )
    assert "stopped" in message and seconds < 2


@pytest.mark.clock
def test_the_time_limit_ends_the_launch(tmp_path):
    message, seconds = end_of(tmp_path, lambda messages: True, lambda: False, limit=1.0)
    assert "not finished after 1 s" in message and seconds < 5


@pytest.mark.clock
def test_the_death_of_one_rank_ends_the_launch_with_an_error(tmp_path):
    killed = []

    def kill() -> None:
        second = ranks_of(tmp_path)[1]
        killed.append(second.environ()["RANK"])
        second.kill()

    message, seconds = end_of(tmp_path, lambda messages: messages and messages[-1].startswith("warm-up"), kill)
    assert message.startswith(f"the launch failed: rank {killed[0]} was killed by signal 9 (SIGKILL") and seconds < 6


@pytest.mark.everything
@pytest.mark.clock
def test_ranks_do_not_outlive_a_torchrun_that_is_killed(tmp_path, cold_python):
    def kill() -> None:
        first, second = ranks_of(tmp_path)
        second.suspend()
        first.parent().kill()

    message, seconds = end_of(tmp_path, lambda messages: len(ranks_of(tmp_path)) == 2, kill)
    assert message.startswith("the launch failed: torchrun was killed by signal 9") and seconds < 7


# As jobs.
@pytest.fixture
def start_job(own_data_folder) -> Iterator[Callable[..., Job]]:
    """Starts jobs in the data folder; whatever still runs at the end of the test is killed."""
    started: list[Job] = []

    def start(kind: str, arguments: dict) -> Job:
        started.append(runner.start(kind, arguments, own_data_folder))
        return started[-1]

    yield start
    for job in started:
        runner.cancel(job, grace=0)
        assert runner.wait(job, 5).finished


def test_a_launch_job_is_done_and_its_result_can_be_read(start_job):
    job = start_job("launch", launches.launch_arguments(launches.MODEL, tokens=200, repeats=2))
    assert runner.wait(job, 60) is State.DONE, job.log_tail()
    (result,) = job.result["runs"]
    assert job.result["tokens"] == 200 and result["difference"] < 1e-5 and len(result["pass_seconds"]) == 2
    assert result["by_kind"]["kind"] == list(launches.STEPS)
    measured = Timeline.from_dict(result["measured"])
    assert measured.total == result["measured_seconds"] and measured.resources == ("rank 0", "rank 1")
    assert sum(result["by_kind"]["measured"]) + result["waiting_seconds"] == pytest.approx(measured.total)
    assert job.history[-1].done >= job.history[0].done and not processes_of(job.folder)


@pytest.mark.clock
def test_a_cancelled_launch_job_ends_within_two_seconds(start_job):
    job = start_job("launch", launches.launch_arguments(launches.BIG, repeats=100))
    until(lambda: job.progress and job.progress.message.startswith("warm-up"), 120)
    assert len(processes_of(job.folder)) >= 4
    asked = time.monotonic()
    runner.cancel(job)
    assert runner.wait(job, 2.0) is State.CANCELLED
    until(lambda: not processes_of(job.folder), asked + 2.0 - time.monotonic())
    assert job.error is None


@pytest.mark.clock
def test_a_launch_job_whose_worker_is_killed_has_failed_and_leaves_nobody(start_job):
    job = start_job("launch", launches.launch_arguments(launches.BIG, repeats=100))
    until(lambda: len(ranks_of(job.folder)) == 2, 120)
    ranks_of(job.folder)[0].suspend()
    os.kill(protocol.living_worker(job.folder).pid, signal.SIGKILL)
    assert runner.wait(job, 5.0) is State.FAILED
    assert job.error == "the worker was killed by signal 9"
    until(lambda: not processes_of(job.folder), 2)


@pytest.mark.clock
def test_an_optimise_job_that_is_cancelled_halfway_stops_within_two_seconds_and_keeps_its_best(start_job):
    layers, experts = 26, 64
    rng = np.random.default_rng(2)
    chosen = np.argsort(rng.random((4000, layers, experts)) ** np.linspace(0.5, 3, experts), axis=-1)[:, :, :6]
    trace = RoutingTrace("many", chosen.astype(np.int16), experts)
    model = MoEModel(name="many", layers=layers, experts=experts, experts_per_token=6, d_model=256, d_ff=512)
    cluster = cluster_presets()["mixed-8"].cluster
    systems = [{"name": "linear"}, {"name": "aurora", "options": {"time_limit": 1000.0}}]
    documents = {"model": model.model_dump(mode="json"), "cluster": cluster.model_dump(mode="json")}
    job = start_job("optimise", {"workload": store.save_workload(trace), **documents, "systems": systems})
    until(lambda: job.progress and "placing layer 2" in job.progress.message, 120)
    asked = time.monotonic()
    runner.cancel(job)
    assert runner.wait(job, 2.0) is State.CANCELLED
    assert time.monotonic() - asked < 2.0
    _, aurora = job.result["candidates"]
    assert aurora["status"] == "CANCELLED"
    for candidate in job.result["candidates"]:
        total = check_plan(Plan.from_dict(candidate["plan"], "candidate"), Problem(trace, cluster, model, Datasheet()))
        assert candidate["metrics"]["total"] == pytest.approx(total, rel=1e-6)
        assert candidate["metrics"]["bound"] <= candidate["metrics"]["total"] * (1 + 1e-9)
    assert job.error is None and not processes_of(job.folder)


def test_run_folders_of_killed_launches_go_at_the_next_start(own_data_folder):
    for name in ("run-killed", "run-running", "run-of-a-cluster"):
        (own_data_folder / name).mkdir(parents=True)
        (own_data_folder / name / "spec.json").touch()
    (own_data_folder / "run-killed" / local.IN_USE).touch()  # its process holds it no more
    with (own_data_folder / "run-running" / local.IN_USE).open("w") as use:
        fcntl.flock(use, fcntl.LOCK_EX)
        with local.temporary_folder() as mine, local.temporary_folder() as other:
            kept = {path.name for path in own_data_folder.glob("run-*")}
            assert kept == {"run-running", "run-of-a-cluster", mine.name, other.name} and mine != other
        assert not mine.exists() and not other.exists()

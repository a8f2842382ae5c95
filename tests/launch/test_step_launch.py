"""A training step as a launch: refusals, steps made smaller, and real ranks with the gradients of the reference."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.errors import InputError
from engine.launch.places.devices import Devices
from engine.launch.preparation import prepare
from engine.launch.rank.instructions import MACHINE_TIMES, REPORT
from engine.launch.results.comparison import compare
from engine.launch.results.run import read_run
from engine.launch.running import clusters
from engine.launch.running.local import run_here
from engine.problem import make_problem
from engine.result import never
from engine.systems.base import silent
from engine.training import balanced_load
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.cluster_launches import destination
from tests.cases.processes import processes_of
from tests.cases.steps import TOP_ONE_MODEL, TOP_ONE_STEP, plan_by, prepare_step, top_one_problem

pytestmark = pytest.mark.usefixtures("warm_python")


def test_lancet_and_pipemoe_in_one_launch_give_the_gradients_of_one_process(tmp_path):
    problem = top_one_problem()
    launch = prepare_step(*(plan_by(name, problem) for name in ("lancet", "pipemoe")), repeats=2)
    assert launch.ready and launch.instructions.step == TOP_ONE_STEP and launch.tokens == 2 * TOP_ONE_STEP.tokens
    whole = run_here(launch, tmp_path / "run", never, silent)
    assert whole.tokens == 64 and whole.profile.all_reduce is not None and not processes_of(tmp_path)
    for measured_plan in whole.runs:
        assert 0 <= measured_plan.difference.error <= 1e-4 and len(measured_plan.totals) == 2
        kinds = {"dense", "gate", "ffn", "aggregate", "dispatch", "combine", "dx", "dw", "all_reduce"}
        assert set(measured_plan.measured.events["kind"]) == set(measured_plan.predicted.events["kind"]) == kinds
        # The measured tasks are the simulated ones, on every rank.
        labels = set(measured_plan.predicted.labels)
        assert {label for label in measured_plan.measured.labels if label != "update"} >= labels - {"update"}
        laid = compare(measured_plan.predicted, measured_plan.measured)
        assert (laid.by_kind["measured"] > 0).all() and 0 <= laid.waiting < laid.measured
        total = laid.by_kind["measured"].sum()
        assert total == pytest.approx(laid.by_layer["measured"].sum()) and total > 0
    # The same files in the run folder of a cluster's job say the same.
    where = destination("slurm", tmp_path, gpus=0)
    clusters.write(replace(launch, destination=where), tmp_path / "cluster")
    for result in (REPORT, MACHINE_TIMES, "events-0.npz", "events-1.npz"):
        shutil.copy(tmp_path / "run" / result, tmp_path / "cluster")
    whole = read_run(launch, tmp_path / "run", where.devices.cores)
    for measured_plan, other in zip(whole.runs, clusters.collect(tmp_path / "cluster").runs, strict=True):
        assert measured_plan.totals == other.totals and measured_plan.predicted.total == other.predicted.total > 0


def test_what_a_cpu_cannot_do_in_seconds_is_left_out_and_said(monkeypatch):
    plan = plan_by("raf", top_one_problem())
    whole = prepare_step(plan)
    monkeypatch.setattr(prepare, "FLOP_BUDGET", 1.0)
    least = prepare_step(plan)
    # An expert's buffer keeps a row.
    assert (least.instructions.step.batch, least.instructions.step.sequence_length) == (1, 4)
    text = {check.name: check.text for check in least.checks}
    assert "1 × 4 tokens on each rank instead of 4 × 8" in text["Step"]
    assert all("instead" not in check.text for check in whole.checks)


def test_too_little_memory_fails_the_check():
    launch = prepare_step(plan_by("raf", top_one_problem()), devices=Devices((), (), 2, 1e5))
    (failed,) = [check for check in launch.checks if not check.passed]
    assert failed.name == "Memory" and "smaller step" in failed.text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"ranks": 3}, "between 1 and 2"),
        ({"repeats": 0}, "0 timed passes"),
        ({"limit": float("nan")}, "time limit"),
        ({"dtype": "fp8"}, "fp32 or bf16"),
        ({"step": TOP_ONE_STEP.model_copy(update={"heads": 5})}, "heads"),
        ({"step": TOP_ONE_STEP.model_copy(update={"routing": "recorded"})}, "no tokens to replay"),
        ({"workload": ExpertLoad("other", balanced_load(TOP_ONE_MODEL).load[:1], (1,))}, "other"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(more, says):
    with pytest.raises(InputError, match=says) as refused:
        prepare_step(plan_by("raf", top_one_problem()), **more)
    assert "\n" not in str(refused.value)


def test_plans_for_something_else_are_refused():
    plan = plan_by("raf", top_one_problem())
    imported = plan.model_copy(update={"provenance": plan.provenance.model_copy(update={"inputs": {"graph": "0" * 64}})})
    with pytest.raises(InputError, match="imported operators"):
        prepare_step(imported)
    inference = plan.model_copy(update={"priority": None, "pipeline": None, "overlap": None})
    with pytest.raises(InputError, match="for inference"):
        prepare_step(inference)


def test_recorded_routing_is_replayed(tmp_path):
    step = TOP_ONE_STEP.model_copy(update={"routing": "recorded"})
    experts = np.random.default_rng(3).integers(0, 4, (40, 2, 1)).astype(np.int16)
    trace = RoutingTrace("recorded", experts, 4)
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster.part([0, 8])
    problem = make_problem(trace, cluster, TOP_ONE_MODEL, Datasheet(), step=step)
    launch = prepare_step(plan_by("lancet", problem), step=step, workload=trace, repeats=1)
    (measured_plan,) = run_here(launch, tmp_path / "run", never, silent).runs
    assert 0 <= measured_plan.difference.error <= 1e-4

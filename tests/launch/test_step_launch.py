"""A training step as a launch: what is refused, what is left out of it, and real ranks whose gradients are the reference's."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.errors import InputError
from engine.launch.places.devices import Devices
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare_training
from engine.launch.rank.instructions import MACHINE_TIMES, REPORT
from engine.launch.results.comparison import compare
from engine.launch.results.run import read_run
from engine.launch.running import clusters
from engine.launch.running.local import run_here
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.result import never
from engine.systems import TRAINING, run
from engine.systems.base import silent
from engine.training import TrainingStep, balanced_load
from engine.workload import ExpertLoad, RoutingTrace
from tests.launch.launches_for_clusters import destination
from tests.launch.test_local import processes_of

pytestmark = [pytest.mark.usefixtures("warm_python"), pytest.mark.slow]

MODEL = MoEModel(
    name="tiny", layers=3, dense_layers=(0,), experts=4, experts_per_token=1, d_model=32, d_ff=64, ffn_matrices=2
)
STEP = TrainingStep(batch=4, sequence_length=8, heads=2, dense_d_ff=64, vocabulary=50)
HOST = Devices(gpus=(), memory=(), cores=2, host_memory=8 * 2.0**30)


def problem_for(step: TrainingStep = STEP, model: MoEModel = MODEL) -> Problem:
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster.part([0, 8])
    return make_problem(balanced_load(model), cluster, model, Datasheet(), step=step)


def plan_by(system: str, problem: Problem) -> Plan:
    return run(TRAINING[system], problem, {}, never, silent).result.solution


def prepare(*plans: Plan, step: TrainingStep = STEP, **more):
    workload = more.pop("workload", balanced_load(MODEL))
    devices = more.pop("devices", HOST)
    return prepare_training(Launch(plans, workload, MODEL, step=step, **more), devices)


def test_lancet_and_pipemoe_in_one_launch_give_the_gradients_of_one_process(tmp_path):
    problem = problem_for()
    launch = prepare(*(plan_by(name, problem) for name in ("lancet", "pipemoe")), repeats=2)
    assert launch.ready and launch.instructions.step == STEP and launch.tokens == 2 * STEP.tokens
    whole = run_here(launch, tmp_path / "run", never, silent)
    assert whole.tokens == 64 and whole.profile.all_reduce is not None and not processes_of(tmp_path)
    for measured_plan in whole.runs:
        assert 0 <= measured_plan.difference.error <= 1e-4 and len(measured_plan.totals) == 2
        kinds = {"dense", "gate", "ffn", "aggregate", "dispatch", "combine", "dx", "dw", "all_reduce"}
        assert set(measured_plan.measured.events["kind"]) == set(measured_plan.predicted.events["kind"]) == kinds
        # What was measured are the tasks that were simulated, on every rank.
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
    plan = plan_by("raf", problem_for())
    whole = prepare(plan)
    monkeypatch.setattr(prepare, "FLOP_BUDGET", 1.0)
    least = prepare(plan)
    # An expert's buffer keeps a row.
    assert (least.instructions.step.batch, least.instructions.step.sequence_length) == (1, 4)
    text = {check.name: check.text for check in least.checks}
    assert "1 × 4 tokens on each rank instead of 4 × 8" in text["Step"]
    assert all("instead" not in check.text for check in whole.checks)


def test_too_little_memory_fails_the_check():
    launch = prepare(plan_by("raf", problem_for()), devices=Devices((), (), 2, 1e5))
    (failed,) = [check for check in launch.checks if not check.passed]
    assert failed.name == "Memory" and "smaller step" in failed.text


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"ranks": 3}, "between 1 and 2"),
        ({"repeats": 0}, "0 timed passes"),
        ({"limit": float("nan")}, "time limit"),
        ({"dtype": "fp8"}, "fp32 or bf16"),
        ({"step": STEP.model_copy(update={"heads": 5})}, "heads"),
        ({"step": STEP.model_copy(update={"routing": "recorded"})}, "no tokens to replay"),
        ({"workload": ExpertLoad("other", balanced_load(MODEL).load[:1], (1,))}, "other"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(more, says):
    with pytest.raises(InputError, match=says) as refused:
        prepare(plan_by("raf", problem_for()), **more)
    assert "\n" not in str(refused.value)


def test_plans_for_something_else_are_refused():
    plan = plan_by("raf", problem_for())
    imported = plan.model_copy(
        update={"provenance": plan.provenance.model_copy(update={"inputs": {"graph": "0" * 64}})}
    )
    with pytest.raises(InputError, match="imported operators"):
        prepare(imported)
    inference = plan.model_copy(update={"priority": None, "pipeline": None, "overlap": None})
    with pytest.raises(InputError, match="for inference"):
        prepare(inference)


def test_recorded_routing_is_replayed(tmp_path):
    step = STEP.model_copy(update={"routing": "recorded"})
    experts = np.random.default_rng(3).integers(0, 4, (40, 2, 1)).astype(np.int16)
    trace = RoutingTrace("recorded", experts, 4)
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster.part([0, 8])
    problem = make_problem(trace, cluster, MODEL, Datasheet(), step=step)
    launch = prepare(plan_by("lancet", problem), step=step, workload=trace, repeats=1)
    (measured_plan,) = run_here(launch, tmp_path / "run", never, silent).runs
    assert 0 <= measured_plan.difference.error <= 1e-4

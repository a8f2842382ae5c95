"""Studies and verdicts as jobs: points while they run, the whole at the end, the points so far after a stop."""

import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine import store
from engine.catalogue import cluster_presets
from engine.compare.capacity import capacity, parts_of
from engine.compare.contention import contention_curve, ordered, pays_from
from engine.compare.evidence import Thresholds
from engine.compare.sensitivity import parameters_of, sensitivity
from engine.compare.verdict import Judgement
from engine.compare.what_if import Change, changed
from engine.costs import Datasheet
from engine.errors import InputError, StoppedError
from engine.jobs import judgements, protocol, runner, studies
from engine.jobs.kinds import read_answer
from engine.jobs.protocol import Context, replace_result
from engine.jobs.runner import MARK, Job, State
from engine.model import MoEModel
from engine.parallel.processes import processors
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.serving.sizes import TransformerSizes, usual_sizes
from engine.simulate import simulate
from engine.store.problems import as_json, problem_arguments, save_recordings
from engine.systems import SYSTEMS, run, usual_plan
from engine.training import balanced_load, usual_step
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.jobs import by_hand, until
from tests.cases.problems import small, step_problem
from tests.cases.samples import sample_problem
from tests.jobs.asking import FakeContext, in_json
from tests.jobs.handlers import LooseAnswer

two_processors = pytest.mark.skipif(processors() < 2, reason="one processor does all points in one process")


def recording(seed: int, layers: int = 4) -> str:
    """Digest of a kept recording in which every token follows one of two chains of experts."""
    rng = np.random.default_rng(seed)
    step = rng.permutation(8)
    walk = [rng.integers(0, 8, 1000)]
    for _ in range(layers - 1):
        walk.append(np.where(rng.random(1000) < 0.6, step[walk[-1]], rng.integers(0, 8, 1000)))
    trace = RoutingTrace(f"chains-{seed}", np.array(walk).T[:, :, None].astype(np.int16), 8)
    return store.save_workload(trace)


def affinity_of(workload: str, *others: str, **more: Any) -> dict[str, Any]:
    asked = {"workload": workload, "others": list(others), "gpus": 4, "first_choice": True, "time_limit": 0.1}
    return asked | more


@pytest.mark.clock
def test_a_stopped_study_keeps_its_points(start, warm_python) -> None:
    asked = affinity_of(recording(0), sizes=[*range(10, 490, 2)], seeds=20, time_limit=0.5)
    job = start("affinity", asked, store.data_folder(), "engine.jobs.worker")
    until(lambda: job.result and job.result["tokens"]["points"], timeout=30)
    begin = time.monotonic()
    runner.cancel(job, grace=5)
    assert runner.wait(job, 10) is State.CANCELLED
    assert time.monotonic() - begin < 2
    answer = read_answer(job)
    assert answer.tokens.points and not answer.tokens.complete and answer.others is None


def sweep_of(problem: Problem, kind: str, values, **settings: Any) -> dict[str, Any]:
    save_recordings(problem)
    return problem_arguments(problem) | {"sweep": {"kind": kind, "values": list(values), "settings": settings}}


def test_what_cannot_be_studied_or_swept_is_refused(tmp_path: Path) -> None:
    loads = store.save_workload(ExpertLoad("loads", np.ones((4, 8)), (0, 1, 2, 3)))
    for study, asked, said in (
        (studies.affinity_study, affinity_of(loads), "loads has no tokens"),
        (studies.affinity_study, affinity_of(recording(0), loads), "loads has no tokens"),
        (studies.affinity_study, affinity_of(recording(0), gpus=3), "over 3 GPUs"),
        (studies.sweep_study, sweep_of(step_problem(), "degree", [0]), "pipeline degrees: 0 is not between 1 and 16"),
    ):
        with pytest.raises(InputError, match=said):
            in_json(study)(asked, Context(tmp_path))


@pytest.fixture
def problem() -> Problem:
    sample = small()
    store.save_workload(sample.workload)
    return sample


def answered(study, problem: Problem, context=None, **more: Any) -> dict[str, Any]:
    return in_json(study)(problem_arguments(problem) | more, context or FakeContext())


def test_studies_return_what_their_functions_do(problem: Problem) -> None:
    plan = run(SYSTEMS["rcs"], problem, {}).result.solution
    found = answered(studies.sensitivity_study, problem, plan=as_json(plan), share=0.25)
    assert found["points"] == [asdict(point) for point in sensitivity(plan, problem, 0.25, parameters_of(problem))]
    assert found["of"] == len(found["points"]) and found["total"] == simulate(plan, problem).total
    found, plans = answered(studies.contention_study, problem, plan=as_json(plan)), ordered(plan, problem)
    points = list(contention_curve(problem, plans))
    assert found["points"] == [asdict(point) for point in points] and 0 <= found["most_saved"] < 1
    assert found["pays_from"] == pays_from(points, problem, plans) and found["of"] == len(points)
    part = next(iter(parts_of(problem.cluster).values()))
    asked = {"title": "four", "target": 1e-9, "sizes": [1, 2], "system": "linear", "options": {}}
    found = answered(studies.capacity_study, problem, part=[as_json(node) for node in part], **asked)
    assert found["points"] == [asdict(point) for point in capacity(problem, part, 1e-9, [1, 2], "linear")]


def test_a_stopped_imprecision_study_keeps_its_points(problem: Problem) -> None:
    asked = {"levels": [0, 0.5], "seeds": 20, "noise": "layers", "options": {"aurora": {"time_limit": 1.0}}}
    found = answered(studies.imprecision_study, problem, context := FakeContext(enough=5), **asked)
    assert [point["system"] for point in found["points"]] == ["aurora", "rga", "rcs", "sjf"]
    assert [len(kept["points"]) for kept in context.kept] == [0, 1, 2, 3, 4]


def test_a_plan_for_after_a_change_says_what_it_takes_now_and_then(problem: Problem) -> None:
    change = Change(network=0.25, tokens=4)
    asked = {"change": change.model_dump(mode="json"), "system": "aurora", "options": {"time_limit": 1.0}}
    result = answered(studies.replan, problem, parent="0" * 64, **asked)
    (candidate,) = result["candidates"]
    plan = Plan.from_dict(candidate["plan"], "plan")
    assert plan.id == candidate["point"]["plan_id"] and plan.parent == "0" * 64
    assert plan.name == "Aurora, network 0.25×, tokens 4×"
    assert plan.claim.objective == simulate(plan, problem).total
    assert candidate["point"]["seconds"] == simulate(plan, changed(problem, change)).total
    assert candidate["point"]["bound"] <= candidate["point"]["seconds"]
    assert Change.from_dict(result["change"], "change") == change


def sweep_of_half_a_minute() -> dict[str, Any]:
    model = MoEModel(
        name="tall", layers=48, experts=16, experts_per_token=1, d_model=128, d_ff=512, batch=96, sequence_length=128
    )
    hardware = cluster_presets()["mixed-8"].cluster
    step = usual_step(model, len(hardware.gpus))
    problem = make_problem(balanced_load(model), hardware, model, Datasheet(), step=step)
    return sweep_of(problem, "micro_op", [1.0 + 0.1 * place for place in range(60)])


@pytest.fixture(params=["points that rest", pytest.param("sweep", marks=pytest.mark.everything)])
def long_study(start, cold_python: None, request: pytest.FixtureRequest) -> Job:
    """A study of 60 points that is past its first seconds: processes of its own do the points."""
    if request.param == "sweep":
        job = start("sweep", sweep_of_half_a_minute(), store.data_folder(), "engine.jobs.worker")
    else:
        job = start("study", {"steps": 60, "pause": 0.3})
    # The worker, the tracker and the server of its processes, and those themselves.
    until(lambda: len(processes_of(job)) >= 5, timeout=30)
    until(lambda: len(points_of(job)) >= 3, timeout=30)
    return job


def points_of(job: Job) -> list[float]:
    result = job.result or {"done": []}
    return result["done"] if "done" in result else [row["point"]["value"] for row in result["candidates"]]


def processes_of(job: Job) -> list[psutil.Process]:
    mine = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(job.folder) and protocol.is_alive(process):
                mine.append(process)
        except psutil.Error:
            continue
    return mine


@pytest.mark.clock
@two_processors
def test_progress_moves_and_stop_ends_all_processes_in_two_seconds_and_keeps_the_points_so_far(long_study):
    seen = {report.done for report in long_study.history}
    until(lambda: len({report.done for report in long_study.history}) >= len(seen) + 1, timeout=20)
    done = [report.done for report in long_study.history]
    assert done == sorted(done) and long_study.progress.incumbent is not None
    begin = time.monotonic()
    runner.cancel(long_study)
    assert runner.wait(long_study, 5) is State.CANCELLED
    assert time.monotonic() - begin < 2.0
    until(lambda: not processes_of(long_study), timeout=1)
    points = points_of(long_study)
    assert 3 <= len(points) < 60 and points == sorted(points)
    assert long_study.log_tail().count("Traceback") == 0


@pytest.mark.everything
@two_processors
def test_a_killed_worker_takes_its_processes_along(long_study):
    os.kill(protocol.living_worker(long_study.folder).pid, signal.SIGKILL)
    assert runner.wait(long_study, 5) is State.FAILED
    until(lambda: not processes_of(long_study), timeout=3)


# Verdicts

verdict, redundancy_study = in_json(judgements.verdict), in_json(judgements.redundancy_study)


@pytest.fixture
def judged(own_data_folder: Path) -> Problem:
    problem = sample_problem("alpha-code", tokens=4000)
    save_recordings(problem)
    return problem


def verdict_arguments(problem: Problem, **more) -> dict:
    systems = {"plan": "round-robin", "deployed": "linear"}
    plans = {role: usual_plan(SYSTEMS[name], problem)[0].model_dump(mode="json") for role, name in systems.items()}
    settings = {"recordings": [problem.workload.digest], "thresholds": {"gain": 0.2}}
    return problem_arguments(problem) | plans | settings | more


def test_a_verdict_in_a_whole_step(judged: Problem, tmp_path: Path) -> None:
    sizes = usual_sizes(judged.model)
    step = {"phase": "decode", "sequences": 8, "context": 128, "output": 16}
    serving = {"step": step, "sizes": sizes.model_dump(mode="json", exclude_none=True), "config": None}
    h100 = problem_arguments(replace(judged, cluster=cluster_presets()["hgx-h100-8"].cluster))
    told = verdict(verdict_arguments(judged) | h100 | {"serving": serving}, Context(tmp_path))
    assert told["evidence"]["unit"] == "a whole decode step of 8 sequences per GPU"
    assert TransformerSizes.from_dict(serving["sizes"], "sizes") == sizes


def test_a_finished_verdict_is_decided_again_from_its_evidence_unless_an_older_version_made_it(
    judged: Problem, own_data_folder: Path
) -> None:
    job = by_hand(own_data_folder)
    with pytest.raises(InputError, match="wait for its verdict"):
        judgements.decide_again(job, Thresholds())
    (job.folder / protocol.PID).write_text('{"pid": 4194305, "start": 0.0}')  # of nobody
    context = Context(job.folder)
    context.finish(LooseAnswer(**verdict(verdict_arguments(judged), context)))
    before, strict = Judgement.from_dict(job.result, "verdict"), Thresholds(tokens_per_expert=1e9)
    assert before.thresholds == Thresholds(gain=0.2)
    judgements.decide_again(job, strict)
    after = Judgement.from_dict(job.result, "verdict")
    assert after == Judgement(evidence=before.evidence, thresholds=strict) and job.state is State.DONE
    assert after.verdict.verdict == "cannot-say" != before.verdict.verdict
    replace_result(job.folder, LooseAnswer(verdict="do-it"))
    with pytest.raises(InputError, match=f"job {job.id}: "):
        judgements.decide_again(job, Thresholds())
    assert job.result == {"verdict": "do-it"}


def test_thresholds_that_cannot_be_are_refused_and_what_is_stopped_advises_nothing(judged: Problem, tmp_path) -> None:
    context = Context(tmp_path)
    with pytest.raises(InputError, match="gain"):
        verdict(verdict_arguments(judged, thresholds={"gain": -1}), context)
    context.ask_to_stop()
    with pytest.raises(StoppedError):
        verdict(verdict_arguments(judged), context)
    result = redundancy_study(problem_arguments(judged) | {"recordings": [judged.workload.digest]}, context)
    assert result["knee"] is None and len(result["points"]) < result["of"]

"""Studies, scores of many plans and verdicts as jobs: points while they run, the whole at the end, the points so far after a
stop."""

import os
import signal
import time
from dataclasses import asdict, replace
from itertools import pairwise
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
from engine.compare.figures import metrics
from engine.compare.sensitivity import parameters_of, sensitivity
from engine.compare.verdict import Judgement
from engine.compare.what_if import Change, changed
from engine.costs import Datasheet
from engine.errors import InputError, StoppedError
from engine.jobs import judgements, protocol, runner, scores, studies
from engine.jobs.kinds import read_answer
from engine.jobs.protocol import Context, replace_result
from engine.jobs.runner import Job, State
from engine.jobs.workers import MARK
from engine.model import MoEModel
from engine.parallel.processes import processors
from engine.placement.transitions import transitions
from engine.plan import Plan, Travel
from engine.problem import Problem, make_problem
from engine.provenance import input_digests
from engine.serving.sizes import TransformerSizes, usual_serving, usual_sizes
from engine.simulate import simulate
from engine.simulate.scheduler import TwoPhaseOptions
from engine.simulate.two_phase import SCHEMES, two_phase
from engine.store.problems import as_json, problem_arguments, problem_from, save_recordings
from engine.systems import SYSTEMS, run, usual_plan
from engine.systems.pieces import to_placement
from engine.training import balanced_load, usual_step
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload
from tests.cases.jobs import by_hand, until
from tests.cases.problems import small, step_problem
from tests.cases.samples import EIGHT, chained, problem_of, sample, sample_model, sample_problem
from tests.jobs.asking import FakeContext, in_json, strict
from tests.jobs.handlers import LooseAnswer
from tests.oracles.placing import check_joint
from tests.oracles.plans import check_plan
from tests.strategies import cluster_of, make_gpu

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
    points = list(capacity(problem, part, 1e-9, [1, 2], "linear"))
    assert found["points"] == [asdict(replace(point, plan=None)) for point in points]
    assert [row["plan"]["placement"] for row in found["candidates"]] == [as_json(point.plan.placement) for point in points]


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


find_front, lina_study, score_matrix = map(in_json, (scores.find_front, scores.lina_study, scores.score_matrix))

FOUR = cluster_of(*[make_gpu()] * 4)


def arguments_of(problem: Problem, **more) -> dict:
    save_recordings(problem)
    return strict(problem_arguments(problem) | more)


def test_a_problem_survives_being_arguments_and_what_is_gone_is_said():
    alpha, beta = sample_problem("alpha-code", tokens=300), sample("beta-man", 200)
    in_use = run(SYSTEMS["eplb"], alpha, {"time_limit": 0.1}).result.solution.placement
    others = sample("alpha-man", 100), sample("alpha-prose", 100)
    problem = make_problem(alpha.workload, EIGHT, alpha.model, alpha.cost, (beta, sample_model("beta")), others, in_use)
    assert {"workload_b", "model_b", "workload_also_1", "in_use"} <= set(input_digests(problem))
    traffic = problem_of(TrafficMatrix("bytes", np.ones((2, 4, 4)), 8.0), FOUR)
    served = replace(alpha, serving_step=usual_serving(), travel=Travel(unit="gpu"))
    for case in (problem, alpha, traffic, served):
        assert input_digests(problem_from(arguments_of(case))) == input_digests(case)
    arguments = arguments_of(traffic)
    for missing in ({"workload": "0" * 64}, {"others": ["0" * 64]}):
        with pytest.raises(InputError, match="no longer in the data folder"):
            problem_from(arguments | missing)


# The front

FRONT = {"points": 3, "over": "worst", "max_moves": 0, "time_limit": 20.0}
THREE = cluster_of(*[make_gpu()] * 3)


def front_problem(*others: RoutingTrace) -> Problem:
    return problem_of(chained(0, 300, 4, 6, 0.6), THREE, others=others)


def figures(candidate: dict, problem: Problem) -> tuple[float, float]:
    """(share of hops kept, balancedness) by the validator, each on the recording that has the least of it."""
    row = Plan.from_dict(candidate["plan"], "plan").placement.gpu_of_expert
    checks = [
        check_joint(row, transitions(other.experts, other.num_experts), other.load, np.full(3, 2))
        for other in (problem.workload, *problem.others)
    ]
    return min(check.kept_share for check in checks), min(check.balancedness for check in checks)


@pytest.mark.parametrize("others", [(), (chained(1, 60, 4, 6, 0.6, "other"),)], ids=["alone", "robust"])
def test_no_point_of_the_front_beats_another_and_each_is_a_plan_kept_as_soon_as_it_is_there(others):
    problem, context = front_problem(*others), FakeContext()
    candidates = strict(find_front(arguments_of(problem, **FRONT), context))["candidates"]
    assert 2 <= len(candidates) <= 3
    ids = [[candidate["plan_id"] for candidate in kept["candidates"]] for kept in context.kept]
    assert 2 <= len(ids) <= 3 and [len(row) for row in ids] == list(range(1, len(ids) + 1))
    assert all(later[:-1] == earlier for earlier, later in pairwise(ids))
    assert set(ids[-1]) & {candidate["plan_id"] for candidate in candidates}
    assert context.said[-1] == (len(ids) / 3, f"{len(ids)} of at most 3 placements")
    points = [figures(candidate, problem) for candidate in candidates]
    for candidate, (kept, balance) in zip(candidates, points, strict=True):
        plan = Plan.from_dict(candidate["plan"], "plan")
        assert plan.id == candidate["plan_id"] and plan.provenance.inputs == input_digests(problem)
        assert (candidate["kept_share"], candidate["balancedness"]) == pytest.approx((kept, balance))
        assert candidate["metrics"]["total"] == pytest.approx(check_plan(plan, problem)) == plan.claim.objective
        assert candidate["moves"] == (plan.placement.gpu_of_expert != np.arange(6) // 2).sum()
        assert not any(a >= kept and b >= balance for a, b in points if (a, b) != (kept, balance))
    assert len({candidate["plan_id"] for candidate in candidates}) == len(set(points)) == len(candidates)
    shares = [candidate["kept_share"] for candidate in candidates]
    assert shares == sorted(shares, reverse=True)


def test_a_stopped_front_has_what_it_found():
    problem, context = front_problem(), FakeContext(enough=1)
    candidates = find_front(arguments_of(problem, **FRONT), context)["candidates"]
    assert len(context.kept) == 1 and candidates == context.kept[0]["candidates"]


def test_the_front_stays_near_the_placement_in_use():
    problem = front_problem()
    crowded = to_placement(np.tile([0, 0, 0, 0, 0, 1], (4, 1)), problem)  # three of six must leave in every layer
    replicated = run(SYSTEMS["eplb"], problem).result.solution.placement
    for now, most in ((crowded, 15), (replicated, 14), (run(SYSTEMS["random"], problem).result.solution.placement, 4)):
        near = replace(problem, in_use=now)
        candidates = find_front(arguments_of(near, **FRONT | {"max_moves": most}), FakeContext())["candidates"]
        for candidate in candidates:
            row = Plan.from_dict(candidate["plan"], "plan").placement.share > 0
            assert candidate["moves"] == (row & (now.share == 0)).sum() <= most
        assert any(candidate["moves"] for candidate in candidates)
    with pytest.raises(InputError, match=r"at least 12 moves away .* choose max_moves=12 or more"):
        find_front(arguments_of(replace(problem, in_use=crowded), **FRONT | {"max_moves": 11}), FakeContext())


# Plan on one, score on another


def matrix_arguments(system: str, options: dict, recordings: list[Workload], problem: Problem) -> dict:
    digests = [store.save_workload(recording) for recording in recordings]
    return arguments_of(problem, system=system, options=options, recordings=digests)


def test_every_plan_is_scored_on_every_recording():
    recordings = [sample(name, 500) for name in ("alpha-code", "alpha-man")]
    problem, context = sample_problem("alpha-code", tokens=500), FakeContext()
    arguments = matrix_arguments("eplb", {"algorithm": "eplb", "redundant": 2}, recordings, problem)
    scores = score_matrix(arguments, context)
    assert scores["names"] == ["alpha-code", "alpha-man"] and scores["system"] == "Replication (EPLB)"
    cases = [problem.with_workload(recording) for recording in recordings]
    for made_on, here in enumerate(cases):
        plan = run(SYSTEMS["eplb"], here, arguments["options"]).result.solution
        for scored_on, there in enumerate(cases):
            wanted = metrics(plan, there, simulate(plan, there))
            assert scores["seconds"][made_on][scored_on] == pytest.approx(check_plan(plan, there))
            assert scores["balancedness"][made_on][scored_on] == wanted.balancedness
            assert scores["kept_local"][made_on][scored_on] == wanted.kept_local
    assert np.array(scores["balancedness"]).argmax(axis=0).tolist() == [0, 1]
    filled = [[score is not None for row in kept["seconds"] for score in row] for kept in context.kept]
    # Of each plan its own recording first.
    assert filled == [[place in done for place in range(4)] for done in ((), (0,), (0, 1), (0, 1, 3), (0, 1, 2, 3))]
    assert context.kept[-1] == scores
    assert {(0.0, "Replication (EPLB) on alpha-code"), (0.5, "Replication (EPLB) on alpha-man")} < set(context.said)
    assert context.said == sorted(context.said, key=lambda of: of[0]), "with how far each plan is"


def test_a_stopped_matrix_has_the_scores_so_far_and_holes():
    recordings = [sample(name, 200) for name in ("alpha-code", "alpha-man")]
    problem = sample_problem("alpha-code", tokens=200)
    for enough, filled in ((0, 0), (1, 0), (2, 1), (3, 2), (4, 3)):
        scores = score_matrix(matrix_arguments("linear", {}, recordings, problem), FakeContext(enough=enough))
        for name in ("seconds", "balancedness", "kept_local", "overload"):
            assert sum(score is not None for row in scores[name] for score in row) == filled


def test_a_matrix_of_recordings_that_do_not_belong_together():
    problem = sample_problem("alpha-code", tokens=200)
    other = chained(0, 50, 4, 8, 0.5, "narrower")
    with pytest.raises(InputError, match="narrower"):
        score_matrix(matrix_arguments("linear", {}, [problem.workload, other], problem), FakeContext())
    loads = ExpertLoad("loads", np.ones((4, 16)), tuple(range(4)))
    with pytest.raises(InputError, match=r"loads has no.*; use a routing log"):
        score_matrix(matrix_arguments("exflow", {"time_limit": 0.1}, [problem.workload, loads], problem), FakeContext())


# Lina's scheduler

OPTIONS = {"top_k": 2, "batch_tokens": 50, "max_experts_per_device": 3}


def lina_problem(**more) -> Problem:
    trace = replace(chained(0, 400, 4, 8, 0.8, "open"), sequence=np.repeat(np.arange(20), 20).astype(np.int32))
    return problem_of(trace, FOUR, **more)


def test_the_scheduler_is_simulated_for_every_path_that_is_short_enough():
    problem, context = lina_problem(), FakeContext()
    arguments = arguments_of(problem, profile=None, lengths=[3, 1, 9, 4], options=OPTIONS)
    study = strict(lina_study(arguments, context))
    assert [lina_run["options"]["path_length"] for lina_run in study["runs"]] == [3, 1]
    assert study["profile"] == study["served"] == "open"
    profile, served = (
        RoutingTrace("open", problem.workload.experts[part], 8, problem.workload.sequence[part])
        for part in (slice(0, 200), slice(200, 400))
    )
    for found in study["runs"]:
        length = found["options"]["path_length"]
        wanted = two_phase(problem.with_workload(served), profile, TwoPhaseOptions(path_length=length, **OPTIONS))
        assert (found["options"]["top_k"], found["batches"], found["cost_source"]) == (2, 4, problem.cost_source)
        assert found["accuracy_of_layer"][:length] == [None] * length
        rest = found["accuracy_of_layer"][length:]
        assert len(rest) == 4 - length and found["accuracy"] == pytest.approx(np.mean(rest))
        assert found["accuracy"] == pytest.approx(1 - found["fine_tuning_rate"]) == wanted.accuracy("set")
        median = {scheme: np.median(seen.layer.sum(axis=1)) for scheme, seen in wanted.schemes.items()}
        assert found["ideal_seconds"] == pytest.approx(median["ideal"]) and list(found["figures"]) == list(SCHEMES)
        for scheme, values in found["figures"].items():
            assert values["median_inference"] == pytest.approx(median[scheme] / median["ideal"])
    assert [len(kept["runs"]) for kept in context.kept] == [1, 2] and context.kept[-1] == study
    assert context.said == [(0.0, "path length 3"), (0.5, "path length 1")]


def test_with_a_recording_to_learn_from_the_whole_open_one_is_served():
    profile = store.save_workload(chained(0, 100, 4, 8, 0.8, "before"))
    study = lina_study(arguments_of(lina_problem(), profile=profile, lengths=[1], options=OPTIONS), FakeContext())
    assert (study["profile"], study["served"], study["runs"][0]["batches"]) == ("before", "open", 8)


def test_a_stopped_study_has_the_runs_it_finished():
    arguments = arguments_of(lina_problem(), profile=None, lengths=[1, 2, 3], options=OPTIONS)
    for enough in (0, 1, 2):
        context = FakeContext(enough)
        study = lina_study(arguments, context)
        assert [lina_run["options"]["path_length"] for lina_run in study["runs"]] == [1, 2, 3][:enough]
        assert len(context.kept) == enough


def test_what_cannot_be_simulated_is_refused_by_name():
    loads, narrow = ExpertLoad("loads", np.ones((4, 8)), (1, 2, 3, 4)), chained(0, 100, 4, 4, 0.8, "narrow")
    common = {"profile": None, "lengths": [1], "options": OPTIONS}
    for problem, asked, said in (
        (problem_of(loads, FOUR), {}, r"loads has no tokens .* use a routing log"),
        (lina_problem(), {"profile": store.save_workload(loads)}, r"loads has no tokens .* learn from a routing log"),
        (lina_problem(), {"profile": store.save_workload(narrow)}, "narrow has 4 layers of 4 experts, open 4 of 8"),
        (lina_problem(), {"lengths": [4, 7]}, "open has 4 MoE layers: choose lengths below 4"),
        (lina_problem(), {"options": {"batch_tokens": 201}}, "fewer than the 201 of one batch; make batches smaller"),
    ):
        with pytest.raises(InputError, match=said):
            lina_study(arguments_of(problem, **common | asked), FakeContext())


# As a real job

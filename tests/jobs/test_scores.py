"""Jobs that score many plans: their answers, partial results and stops."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from engine import store
from engine.compare.figures import metrics
from engine.errors import InputError
from engine.jobs import scores
from engine.placement.transitions import transitions
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.provenance import input_digests
from engine.simulate import simulate
from engine.simulate.two_phase import SCHEMES, TwoPhaseOptions, two_phase
from engine.store.problems import problem_arguments, problem_from, save_recordings
from engine.systems import SYSTEMS, run
from engine.systems.pieces import to_placement
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload
from tests.cases.samples import EIGHT, chained, problem_of, sample, sample_model, sample_problem
from tests.jobs.asking import FakeContext, in_json, strict
from tests.oracles.placing import check_joint
from tests.oracles.plans import check_plan
from tests.strategies import cluster_of, make_gpu

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
    for case in (problem, alpha, traffic):
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
    assert context.said == [(0.0, "Replication (EPLB) on alpha-code"), (0.5, "Replication (EPLB) on alpha-man")]


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
        (lina_problem(), {"lengths": [4, 7]}, "4 layers are too few: choose a path length below 4"),
        (lina_problem(), {"options": {"batch_tokens": 201}}, "fewer than the 201 of one batch; make batches smaller"),
    ):
        with pytest.raises(InputError, match=said):
            lina_study(arguments_of(problem, **common | asked), FakeContext())


# As a real job

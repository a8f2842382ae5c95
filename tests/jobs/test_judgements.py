"""Verdicts and the advice on spare slots as jobs."""

from pathlib import Path

import numpy as np
import pytest

from engine import store
from engine.catalogue import cluster_presets
from engine.compare.evidence import Thresholds
from engine.compare.redundancy import RedundancyPoint
from engine.compare.verdict import Judgement, verdict_of
from engine.costs import Datasheet
from engine.errors import InputError, StoppedError
from engine.formats import read_model
from engine.jobs import judgements, protocol, runner
from engine.jobs.protocol import Context, replace_result
from engine.problem import Problem, make_problem
from engine.serving.sizes import TransformerSizes, usual_sizes
from engine.store.problems import problem_arguments, save_recordings
from engine.systems import SYSTEMS, usual_plan
from engine.workload import RoutingTrace
from tests.cases.jobs import by_hand
from tests.jobs.asking import in_json
from tests.jobs.handlers import LooseAnswer

verdict, redundancy_study = in_json(judgements.verdict), in_json(judgements.redundancy_study)

SAMPLES = Path(__file__).parents[2] / "sample_traces"


@pytest.fixture
def problem(own_data_folder: Path) -> Problem:
    """Two layers of the sample's model, in which two experts get most tokens."""
    model = read_model(SAMPLES / "tiny-moe-alpha.json")
    rng = np.random.default_rng(0)
    experts = rng.choice(16, (1024, len(model.moe_layers), 1), p=[0.3, 0.3, *[0.4 / 14] * 14]).astype(np.int16)
    problem = make_problem(RoutingTrace("lop-sided", experts, 16), cluster_presets()["mixed-8"].cluster, model, Datasheet())
    save_recordings(problem)
    return problem


def verdict_arguments(problem: Problem, **more) -> dict:
    plan, _ = usual_plan(SYSTEMS["round-robin"], problem)
    deployed, _ = usual_plan(SYSTEMS["linear"], problem)
    plans = {"plan": plan.model_dump(mode="json"), "deployed": deployed.model_dump(mode="json")}
    settings = {"recordings": [problem.workload.digest], "thresholds": {"gain": 0.2}}
    return problem_arguments(problem) | plans | settings | more


def test_a_verdict_is_that_of_the_engine(problem: Problem, tmp_path: Path) -> None:
    arguments = verdict_arguments(problem)
    told = Judgement.from_dict(verdict(arguments, Context(tmp_path)), "verdict").verdict
    plan, deployed = (usual_plan(SYSTEMS[name], problem)[0] for name in ("round-robin", "linear"))
    assert told == verdict_of(plan, problem, [problem.workload], deployed, Thresholds(gain=0.2))
    assert told.parts and {criterion.name: criterion.threshold for criterion in told.criteria}["gain"] == 0.2


def test_a_verdict_in_a_whole_step(problem: Problem, tmp_path: Path) -> None:
    sizes = usual_sizes(problem.model)
    step = {"phase": "decode", "sequences": 8, "context": 128, "output": 16}
    serving = {"step": step, "sizes": sizes.model_dump(mode="json", exclude_none=True), "config": None}
    h100 = problem_arguments(
        make_problem(problem.workload, cluster_presets()["hgx-h100-8"].cluster, problem.model, Datasheet())
    )
    told = verdict(verdict_arguments(problem) | h100 | {"serving": serving}, Context(tmp_path))
    assert told["evidence"]["unit"] == "a whole decode step of 8 sequences per GPU"
    assert TransformerSizes.from_dict(serving["sizes"], "sizes") == sizes


def test_a_finished_verdict_is_decided_again_from_its_evidence_unless_an_older_version_made_it(
    problem: Problem, own_data_folder: Path
) -> None:
    job = by_hand(own_data_folder)
    with pytest.raises(InputError, match="wait for its verdict"):
        judgements.decide_again(job, Thresholds())
    (job.folder / protocol.PID).write_text('{"pid": 4194305, "start": 0.0}')  # of nobody
    context = Context(job.folder)
    context.finish(LooseAnswer(**verdict(verdict_arguments(problem), context)))
    before = Judgement.from_dict(job.result, "verdict")
    assert before.thresholds == Thresholds(gain=0.2)
    strict = Thresholds(tokens_per_expert=1e9)
    judgements.decide_again(job, strict)
    after = Judgement.from_dict(runner.find(job.id, own_data_folder).result, "verdict")
    assert after == Judgement(evidence=before.evidence, thresholds=strict)
    assert after.verdict.verdict == "cannot-say" != before.verdict.verdict
    assert job.state is runner.State.DONE
    replace_result(job.folder, LooseAnswer(verdict="do-it"))
    with pytest.raises(InputError, match=f"job {job.id}: "):
        judgements.decide_again(job, Thresholds())
    assert job.result == {"verdict": "do-it"}


def test_thresholds_that_cannot_be_are_refused_and_what_is_stopped_advises_nothing(problem: Problem, tmp_path) -> None:
    context = Context(tmp_path)
    with pytest.raises(InputError, match="gain"):
        verdict(verdict_arguments(problem, thresholds={"gain": -1}), context)
    context.ask_to_stop()
    with pytest.raises(StoppedError):
        verdict(verdict_arguments(problem), context)
    result = redundancy_study(problem_arguments(problem) | {"recordings": [problem.workload.digest]}, context)
    assert result["knee"] is None and len(result["points"]) < result["of"]


def test_spare_slots_point_by_point(problem: Problem, tmp_path: Path) -> None:
    arguments = problem_arguments(problem) | {"recordings": [problem.workload.digest]}
    result = redundancy_study(arguments, Context(tmp_path))
    points = [RedundancyPoint(**point) for point in result["points"]]
    assert len(points) == result["of"] and points[0].slots == 16 and points[0].gain == 0
    assert all(point.slots % 8 == 0 for point in points) and result["knee"]["slots"] in [point.slots for point in points]
    assert result["held_out"] and result["planned_on"] != result["judged_on"][0]
    assert store.load_workload(problem.workload.digest).name == "lop-sided"

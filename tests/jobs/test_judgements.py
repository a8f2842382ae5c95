"""Verdicts as jobs, decided again by other thresholds; and what a stop leaves."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.catalogue import cluster_presets
from engine.compare.evidence import Thresholds
from engine.compare.verdict import Judgement
from engine.errors import InputError, StoppedError
from engine.jobs import judgements, protocol, runner
from engine.jobs.protocol import Context, replace_result
from engine.problem import Problem
from engine.serving.sizes import TransformerSizes, usual_sizes
from engine.store.problems import problem_arguments, save_recordings
from engine.systems import SYSTEMS, usual_plan
from tests.cases.jobs import by_hand
from tests.cases.samples import sample_problem
from tests.jobs.asking import in_json
from tests.jobs.handlers import LooseAnswer

verdict, redundancy_study = in_json(judgements.verdict), in_json(judgements.redundancy_study)


@pytest.fixture
def problem(own_data_folder: Path) -> Problem:
    problem = sample_problem("alpha-code", tokens=4000)
    save_recordings(problem)
    return problem


def verdict_arguments(problem: Problem, **more) -> dict:
    systems = {"plan": "round-robin", "deployed": "linear"}
    plans = {role: usual_plan(SYSTEMS[name], problem)[0].model_dump(mode="json") for role, name in systems.items()}
    settings = {"recordings": [problem.workload.digest], "thresholds": {"gain": 0.2}}
    return problem_arguments(problem) | plans | settings | more


def test_a_verdict_in_a_whole_step(problem: Problem, tmp_path: Path) -> None:
    sizes = usual_sizes(problem.model)
    step = {"phase": "decode", "sequences": 8, "context": 128, "output": 16}
    serving = {"step": step, "sizes": sizes.model_dump(mode="json", exclude_none=True), "config": None}
    h100 = problem_arguments(replace(problem, cluster=cluster_presets()["hgx-h100-8"].cluster))
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

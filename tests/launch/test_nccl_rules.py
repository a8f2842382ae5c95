"""The ranks' exchanges under NCCL's rules, which Gloo does not have: `nccl_rules` tells them."""

import json
import math
from dataclasses import replace

import pytest

from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.preparation.prepare import prepare
from engine.launch.results.run import Run
from engine.launch.running import local
from engine.plan import Pipeline, Priority
from engine.result import never
from engine.simulate.streams import POLICIES
from engine.systems.base import silent
from tests.cases.launch_plans import MODES, coherent
from tests.cases.launches import HOST, MODEL, OTHER, pair_of, plan_for, recording, recording_b
from tests.cases.steps import plan_by, prepare_step, top_one_problem

pytestmark = pytest.mark.usefixtures("warm_python")
VARIANTS = ("", "eager,one-queue", "late,two-machines")
RULES = "tests.launch.nccl_rules"


def run_under_rules(launch: PreparedLaunch, words: str, folder, monkeypatch) -> Run:
    """The launch over NCCL, as far as its ranks know."""
    monkeypatch.setenv("SWITCHYARD_NCCL", words)
    monkeypatch.setattr(local, "WORKER", RULES)
    instructions = launch.instructions.model_copy(update={"backend": "nccl"})
    return local.run_here(replace(launch, instructions=instructions), folder, never, silent)


@pytest.mark.parametrize("words", VARIANTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_order_of_one_model(tmp_path, monkeypatch, ranks, words):
    trace = recording(120)
    plans = [plan_for(trace, mode) for mode in MODES]
    plans += [coherent(plans[0]), coherent(plans[-1])]
    launch = prepare(Launch(tuple(plans), trace, MODEL, ranks=ranks, repeats=1), HOST)
    whole = run_under_rules(launch, words, tmp_path / "run", monkeypatch)
    for run in whole.runs:
        assert 0 <= run.difference.error <= 1e-5
    for file in (tmp_path / "run").glob("clock-*.json"):
        offset, error = json.loads(file.read_text())
        assert abs(offset) <= error < 0.1


@pytest.mark.parametrize("words", VARIANTS)
def test_two_models_in_every_order(tmp_path, monkeypatch, words):
    trace, trace_b = recording(120), recording_b()
    plans = tuple(pair_of(mode, mode, trace, trace_b) for mode in MODES if mode != "shared")
    asked = Launch(plans, trace, MODEL, second=(trace_b, OTHER), ranks=4, repeats=1)
    whole = run_under_rules(prepare(asked, HOST), words, tmp_path / "run", monkeypatch)
    assert len(whole.runs) == len(plans) and all(0 <= run.difference.error <= 1e-5 for run in whole.runs)


# Not late: one thread reads tensors that another one waits for, and a processor's threads have no streams to tell each other.
@pytest.mark.parametrize("words", ["", "eager,one-queue,uneven"])
def test_training_steps_of_every_policy(tmp_path, monkeypatch, words):
    plan = plan_by("lancet", top_one_problem())
    plans = [plan.model_copy(update={"name": policy, "priority": Priority(policy=policy, micro_op=3e3)}) for policy in POLICIES]
    degrees = Pipeline(forward=(2, 1), backward=(3, 2), order="dispatch-first")
    piped = plan_by("pipemoe", top_one_problem())
    plans.append(piped.model_copy(update={"name": "own degrees", "pipeline": degrees}))
    whole = run_under_rules(prepare_step(*plans, repeats=1), words, tmp_path / "run", monkeypatch)
    assert len(whole.runs) == len(plans) and all(0 <= run.difference.error <= 1e-4 for run in whole.runs)


# The rules themselves.


def test_what_breaks_the_rules_is_refused_or_shows(outcomes_of):
    words = {"SWITCHYARD_NCCL": "late,one-queue", "SWITCHYARD_NCCL_PATIENCE": "3"}
    for rank, outcome in enumerate(outcomes_of("launch.breaking_ranks", 2, **words)):
        assert outcome["mixed"] == "a batch of several communicators"
        assert outcome["alone"] == "breaking_ranks.py, <lambda>: a send outside a batch"
        assert all(map(math.isnan, outcome["by the host"])), "which does not wait for the stream"
        assert outcome["by a kernel"] == [1, 1, 1, 1]
        assert outcome["crossed"].startswith("nothing moved for 3 s; heads of the queues: "), "two orders in one queue"
        assert f"group {rank + 1}: " in outcome["crossed"]

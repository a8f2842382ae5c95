"""The worked example of CONTRIBUTING.md, `toy.py`: a short file, a system of the command line, and legal plans."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from engine.cli import main
from engine.goal import Goal
from engine.systems import FILES, SYSTEMS, registry, run
from tests.cases.examples import examples
from tests.cases.samples import SAMPLES
from tests.oracles.plans import check_plan
from tests.strategies import planned_or_skipped, problems
from tests.systems import toy

SOURCE = Path(toy.__file__)


def test_it_is_short_and_one_line_of_the_registry_makes_it_a_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert len(SOURCE.read_text(encoding="utf-8").splitlines()) < 30
    (system,) = toy.SYSTEMS
    monkeypatch.setitem(FILES, "toy", ("toy",))
    for table in (SYSTEMS, registry._OF_GOAL[Goal.INFERENCE]):
        monkeypatch.setitem(table, "toy", system)
    inputs = ["--workload", SAMPLES / "tiny-moe" / "alpha-code.npz", "--cluster", SAMPLES / "mixed-8.json"]
    inputs += ["--model", SAMPLES / "tiny-moe-alpha.json", "--json"]
    assert main(["plan", *map(str, inputs), "--system", "all", "--set", "time_limit=0.1"]) == 0
    assert {"toy", "aurora", "linear"} <= {row["system"] for row in json.loads(capsys.readouterr().out)["plans"]}
    assert main(["plan", *map(str, inputs), "--system", "toy", "--set", "slots=uneven"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["plans"]
    assert (row["system"], row["name"]) == ("toy", "Toy") and row["metrics"]["total"] > 0
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert ",toy," in "".join(capsys.readouterr().out.split()), "among the names that --system takes"


@settings(max_examples=examples(25, 4), deadline=None)
@given(problems())
def test_its_plans_are_legal(problem) -> None:
    (system,) = toy.SYSTEMS
    result = planned_or_skipped(lambda: run(system, problem)).result
    plan = result.solution
    assert check_plan(plan, problem) == pytest.approx(result.objective, rel=1e-9)
    assert result.bound <= result.objective and plan.placement.single
    gpus, experts = len(problem.cluster.gpus), problem.workload.num_experts
    assert np.all(plan.placement.slots <= -(-experts // gpus))

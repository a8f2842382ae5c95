"""The worked example of CONTRIBUTING.md, `toy.py`: one file and one line of the registry, and a system is everywhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from engine.cli import main
from engine.systems import FILES, SYSTEMS, run
from tests.cases.examples import examples
from tests.cases.samples import SAMPLES
from tests.oracles.plans import check_plan
from tests.strategies import planned_or_skipped, problems
from tests.systems import toy

ROOT = Path(__file__).parents[2]
SOURCE = Path(toy.__file__)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The findings of `studio_with_toy` in a copy of the studio with the toy's file and its line."""
    studio = tmp_path_factory.mktemp("studio")
    for folder in ("engine", "app", "pages", "sample_traces"):
        shutil.copytree(ROOT / folder, studio / folder)
    shutil.copy(SOURCE, studio / "engine" / "systems" / "toy.py")
    registry = studio / "engine" / "systems" / "__init__.py"
    text = registry.read_text(encoding="utf-8")
    after = '    "training.lancet": '
    assert text.count(after) == 1
    registry.write_text(text.replace(after, f'    "toy": ("toy",),\n{after}'), encoding="utf-8")
    environment = os.environ | {
        "SWITCHYARD_DATA": str(studio / "data"),
        "PYTHONPATH": os.pathsep.join([str(studio), str(ROOT)]),
    }
    asked = [sys.executable, "-m", "tests.systems.studio_with_toy"]
    done = subprocess.run(asked, cwd=studio, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_is_short_and_one_line_of_the_registry_makes_it_a_system(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert len(SOURCE.read_text(encoding="utf-8").splitlines()) < 30
    (system,) = toy.SYSTEMS
    monkeypatch.setitem(FILES, "toy", ("toy",))
    monkeypatch.setitem(SYSTEMS, "toy", system)
    inputs = ["--workload", SAMPLES / "tiny-moe" / "alpha-code.npz", "--cluster", SAMPLES / "mixed-8.json"]
    inputs += ["--model", SAMPLES / "tiny-moe-alpha.json", "--system", "toy", "--set", "slots=uneven", "--json"]
    assert main(["plan", *map(str, inputs)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["plans"]
    assert (row["system"], row["name"]) == ("toy", "Toy") and row["metrics"]["total"] > 0


@pytest.mark.everything
def test_the_command_line_has_it(answers: dict[str, Any]) -> None:
    line = answers["command line"]
    assert ",toy," in "".join(line["help"].split()), "among the names that --system takes"
    (row,) = line["toy"]["plans"]
    assert (row["system"], row["name"]) == ("toy", "Toy") and row["metrics"]["total"] > 0
    systems = [row["system"] for row in line["all"]["plans"]]
    assert "toy" in systems and {"aurora", "linear"} <= set(systems)


@pytest.mark.everything
def test_the_comparison_has_it(answers: dict[str, Any]) -> None:
    linear, toy_row = answers["command line"]["compare"]["plans"]
    assert (linear["file"], toy_row["file"]) == ("linear.json", "toy.json") and toy_row["moved_experts"] > 0
    assert toy_row["speedup"] == pytest.approx(linear["metrics"]["total"] / toy_row["metrics"]["total"])


@pytest.mark.everything
def test_optimise_has_it_with_its_options_and_its_plan_in_the_table(answers: dict[str, Any]) -> None:
    page = answers["page"]
    assert page["boxes"]["**Toy** · CONTRIBUTING.md"] is False, "nobody asked for it yet"
    assert [key.rpartition("-")[2] for key in page["options"]] == ["slots"]
    assert set(page["plans"]) == {"Toy", "Linear placement"} and page["plans"]["Linear placement"] == "deployed"


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

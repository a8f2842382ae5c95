"""Imports at the start: nothing heavy for --help, and otherwise only the modules that run. Counts modules, never seconds."""

import argparse
import json
import os
import subprocess
import sys
from importlib import import_module

import pytest

from engine.cli import arguments, commands, parser
from engine.compare.evidence import Thresholds
from engine.compare.imbalance import PRESETS, USUAL_STEPS
from engine.formats.placements import TARGETS
from engine.formats.placements.training_step import STEP_TARGETS
from engine.formats.writers import WRITERS
from engine.launch.calibration.calibrate import DTYPES
from engine.launch.places.destination import CPUS_PER_RANK, MEMORY_PER_RANK, SCHEDULERS
from engine.recording.server import API_KEY
from engine.recording.sglang import FOLDER_VARIABLE, USUAL_FOLDER
from engine.reproduce.papers import PAPERS
from engine.serving.aiconfigurator import OPERATORS
from engine.solve import KERNELS
from engine.systems import FILES
from tests import everything
from tests.cases.cli import INPUTS, RECORDING, ROOT

DEEPSEEK = ROOT.parent / "shared" / "data" / "deepseek-v2-lite-routing.npz"
HEAVY = {"torch", "scipy.optimize", "alembic", "streamlit", "aiconfigurator_core", "ortools", "numba", "networkx"}
ONE_AFTER_ANOTHER = """
import json
import sys

from engine.cli import main

for name, commands in json.loads(sys.argv[1]).items():
    if name == "studio":
        from app import warm_up

        warm_up.seen_by_another_process = lambda: None  # PyTorch is asked for devices there, and stays there
        warm_up.begin().join()
    for words in commands:
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        assert code == 0, words
    print(json.dumps([name, [*sys.modules]]), file=sys.stderr)
"""
"""Does more and more in one new process, and prints after every step which modules are there."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> dict[str, set[str]]:
    """The modules of a new process after every step, those of all steps before it included."""
    folder = tmp_path_factory.mktemp("start")
    recordings = [RECORDING, *([f"{DEEPSEEK}::intent"] if everything.WANTED and DEEPSEEK.exists() else [])]
    steps = {
        "help": [["--help"], *([name, "--help"] for name in every_command())],
        "inspect": [["inspect", recording] for recording in recordings],
        "convert": [["convert", recording, "-o", folder / "out.npz"] for recording in recordings],
        "plan": [["plan", *INPUTS, "--system", "linear", "-o", folder / "plan.json"]],
        "studio": [],
    }
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(steps, default=str)]
    environment = os.environ | {"SWITCHYARD_DATA": str(folder / "data")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith('["')]
    assert [name for name, _ in lines] == list(steps)
    return {name: set(modules) for name, modules in lines}


def every_command() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command by its name."""
    (every,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return every.choices


def options_of(name: str) -> dict[str, argparse.Action]:
    """The arguments of a command by their name in its options."""
    return {action.dest: action for action in every_command()[name]._actions}


@pytest.mark.parametrize(
    ("step", "never"),
    [
        ("help", HEAVY | {"numpy", "pydantic", "pandas", "pyarrow", "scipy"}),
        ("inspect", HEAVY | {"pandas", "scipy"}),
        ("convert", HEAVY),
        ("plan", {"torch", "alembic", "streamlit", "aiconfigurator_core"}),
        ("studio", {"torch", "torchx", "aiconfigurator_core"}),
    ],
)
def test_a_step_imports_nothing_that_it_does_not_need(imported, step, never) -> None:
    assert not imported[step] & never


def test_the_names_of_systems_are_those_in_their_files() -> None:
    systems = {file: import_module(f"engine.systems.{file}").SYSTEMS for file in FILES}
    assert {file: tuple(system.name for system in own) for file, own in systems.items()} == FILES


def test_choices_are_those_of_the_engine() -> None:
    assert tuple(commands.KERNELS) == tuple(KERNELS)
    assert tuple(commands.WRITERS) == tuple(WRITERS)
    assert tuple(commands.TARGETS) == tuple(TARGETS) and tuple(commands.STEP_TARGETS) == tuple(STEP_TARGETS)
    assert tuple(commands.PAPERS) == tuple(PAPERS)
    assert {name: preset.text for name, preset in PRESETS.items()} == commands.PRESETS
    assert options_of("serve")["operators"].choices == OPERATORS
    assert options_of("calibrate")["dtype"].choices == list(DTYPES)
    assert options_of("launch")["on"].choices == ["local", "testbed", *SCHEDULERS]
    fields = Thresholds.model_fields.items()
    assert {name: f"{field.description} ({field.default:g})" for name, field in fields} == commands.THRESHOLDS


def test_help_names_the_defaults_of_the_engine() -> None:
    assert f"default: {CPUS_PER_RANK} per rank" == arguments.CLUSTER["cpus_per_node"][2]
    assert f"default: {MEMORY_PER_RANK / 2**30:g} per rank" == arguments.CLUSTER["memory_per_node"][2]
    assert f"(default: {USUAL_STEPS})" in options_of("synthetic")["steps"].help
    assert f"{FOLDER_VARIABLE} (by default {USUAL_FOLDER})" in options_of("record")["from_folder"].help
    assert API_KEY in every_command()["record"].epilog

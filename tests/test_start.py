"""Imports at the start: nothing heavy for --help, and otherwise only the modules that run. Counts modules, never seconds."""

import argparse
import subprocess
import sys
from importlib import import_module

import pytest

from engine.cli import arguments, commands, parser
from engine.compare.evidence import Thresholds
from engine.compare.imbalance import PRESETS, USUAL_STEPS
from engine.formats.placements import TARGETS
from engine.formats.writers import WRITERS
from engine.launch.calibration.calibrate import DTYPES
from engine.launch.places.destination import CPUS_PER_RANK, MEMORY_PER_RANK, SCHEDULERS
from engine.recording.server import API_KEY
from engine.recording.sglang import FOLDER_VARIABLE, USUAL_FOLDER
from engine.serving.choice import OPERATORS
from engine.solve import KERNELS
from engine.systems import FILES
from tests.cases.cli import INPUTS, RECORDING, ROOT

DEEPSEEK = ROOT.parent / "shared" / "data" / "deepseek-v2-lite-routing.npz"
HEAVY = {"torch", "scipy.optimize", "alembic", "streamlit", "aiconfigurator_core", "ortools", "numba", "networkx"}
RUN = "from engine.cli import main; assert main(sys.argv[1:]) == 0"
HELP = """
for words in [[], *([name] for name in sys.argv[1:])]:
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0
"""


def imported(code: str, *words: object) -> set[str]:
    """The modules of a new process once it has run the code with these arguments."""
    command = f"import sys\n{code}\nprint('\\n' + ' '.join(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", command, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def every_command() -> dict[str, argparse.ArgumentParser]:
    """The parser of each command by its name."""
    (every,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return every.choices


def options_of(name: str) -> dict[str, argparse.Action]:
    """The arguments of a command by their name in its options."""
    return {action.dest: action for action in every_command()[name]._actions}


def test_help_of_every_command_imports_nothing_but_the_standard_library() -> None:
    modules = imported(f"from engine.cli import main{HELP}", *every_command())
    assert not modules & (HEAVY | {"numpy", "pydantic", "pandas", "pyarrow", "scipy"})


@pytest.mark.parametrize("recording", [RECORDING, f"{DEEPSEEK}::intent"], ids=["sample", "deepseek"])
def test_a_recording_is_inspected_and_converted_without_the_kernels(recording, tmp_path) -> None:
    if recording != RECORDING and not DEEPSEEK.exists():
        pytest.skip(f"{DEEPSEEK.name} is not here")
    assert not imported(RUN, "inspect", recording) & (HEAVY | {"pandas", "scipy"})
    assert not imported(RUN, "convert", recording, "-o", tmp_path / "out.npz") & HEAVY


def test_a_plan_is_made_without_what_launches_and_keeps(tmp_path) -> None:
    modules = imported(RUN, "plan", *INPUTS, "--system", "linear", "-o", tmp_path / "plan.json")
    assert not modules & {"torch", "alembic", "streamlit", "aiconfigurator_core"}


def test_the_studio_loads_no_torch() -> None:
    modules = imported("from app import warm_up; warm_up.begin().join()")
    assert not modules & {"torch", "torchx", "aiconfigurator_core"}


def test_the_names_of_systems_are_those_in_their_files() -> None:
    systems = {file: import_module(f"engine.systems.{file}").SYSTEMS for file in FILES}
    assert {file: tuple(system.name for system in own) for file, own in systems.items()} == FILES


def test_choices_are_those_of_the_engine() -> None:
    assert tuple(commands.KERNELS) == tuple(KERNELS)
    assert tuple(commands.WRITERS) == tuple(WRITERS)
    assert tuple(commands.TARGETS) == tuple(TARGETS)
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

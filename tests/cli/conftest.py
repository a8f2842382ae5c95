"""The command line, called in this process, and files that several commands need."""

import json
from pathlib import Path

import pytest

from tests.cases.cli import ALPHA, INPUTS, CommandLine


@pytest.fixture
def engine(capsys) -> CommandLine:
    """Calls commands and returns their exit codes and outputs."""
    return CommandLine(capsys)


@pytest.fixture
def saved(engine, tmp_path) -> Path:
    """A plan of the sample: two of sixteen experts on each of eight GPUs, in eight layers. The data folder has its inputs."""
    path = tmp_path / "linear.json"
    engine.json("plan", *INPUTS, "--system", "linear", "-o", path)
    return path


@pytest.fixture
def files(engine, tmp_path) -> dict[str, Path]:
    """Two plans for the shipped recording on eight H200, a step and the model's config."""
    paths = {name: tmp_path / f"{name}.json" for name in ("cluster", "linear", "eplb", "step", "config")}
    engine.text("catalogue", "H200", "-o", paths["cluster"])
    inputs = [*INPUTS[:2], "--cluster", paths["cluster"], *INPUTS[4:]]
    for system in ("linear", "eplb"):
        engine.text("plan", *inputs, "--system", system, "-o", paths[system])
    paths["step"].write_text(json.dumps({"phase": "decode", "sequences": 32, "context": 1000, "output": 200}))
    paths["config"].write_text(json.dumps(ALPHA))
    return paths

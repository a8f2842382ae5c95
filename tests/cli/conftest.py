"""The command line, called in this process, and files that several commands need, made once and copied."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest

from engine.cli import main
from tests.cases.cli import ALPHA, INPUTS, CommandLine

DATA = "data"
STEP = {"phase": "decode", "sequences": 32, "context": 1000, "output": 200}


@pytest.fixture
def engine(capsys) -> CommandLine:
    return CommandLine(capsys)


def run(folder: Path, *commands: list) -> None:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setenv("SWITCHYARD_DATA", str(folder / DATA))
        for words in commands:
            with contextlib.redirect_stderr(io.StringIO()) as errors:
                assert main([str(word) for word in words]) == 0, errors.getvalue()


def copied(folder: Path, into: Path, data: Path) -> None:
    shutil.copytree(folder / DATA, data)
    for file in folder.glob("*.json"):
        shutil.copy(file, into)


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(folder, ["plan", *INPUTS, "--system", "linear", "-o", folder / "linear.json"])
    return folder


@pytest.fixture
def saved(saved_once, tmp_path, own_data_folder) -> Path:
    """A plan of the sample: two of sixteen experts on each of eight GPUs, in eight layers. The data folder has its inputs."""
    copied(saved_once, tmp_path, own_data_folder)
    return tmp_path / "linear.json"


@pytest.fixture(scope="session")
def files_once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    inputs = [*INPUTS[:2], "--cluster", folder / "cluster.json", *INPUTS[4:]]
    plan = ["plan", *inputs, "--system", "linear", "-o", folder / "linear.json"]
    run(folder, ["catalogue", "H200", "-o", folder / "cluster.json"], plan)
    for name, content in (("step", STEP), ("config", ALPHA)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def files(files_once, tmp_path, own_data_folder) -> dict[str, Path]:
    copied(files_once, tmp_path, own_data_folder)
    return {name: tmp_path / f"{name}.json" for name in ("cluster", "linear", "step", "config")}

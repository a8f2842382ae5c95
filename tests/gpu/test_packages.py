"""Packages that a Python lacks for the check are named before anything fails, and carried wheels stand in for them."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.gpu import packages
from tests.gpu.packages import NEEDED, ROOT, main

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
TAG = HERE.replace(".", "")
OF_TORCH = ("filelock", "networkx", "torch")
"""PyTorch and the packages that come with it."""


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """The folder of wheels, empty, of a Python that has everything."""
    monkeypatch.setattr(packages, "WHEELS", tmp_path / "wheels")
    monkeypatch.setattr(packages, "UNPACKED", tmp_path / "unpacked")
    return tmp_path / "wheels"


def installed(monkeypatch, **others: str | None) -> None:
    """Let this Python have these versions besides the pinned ones, None: not at all."""
    pins = packages.pins()
    versions = pins | {name.replace("_", "-"): version for name, version in others.items()}
    monkeypatch.setattr(packages, "_installed", lambda name: versions[name] or "-1")


def wheel(folder: Path, name: str, tags: str = "py3-none-any") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-{tags}.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}/__init__.py", "")
    return path


def test_every_package_that_is_needed_is_pinned():
    assert {*NEEDED, *packages.ALSO} < set(packages.pins())


def test_what_is_missing_is_said_in_one_line_with_versions_and_what_to_do(wheels, monkeypatch, capsys):
    installed(monkeypatch, pydantic=None, psutil=None, torch=None)
    assert main([]) == 1
    printed = capsys.readouterr()
    pins = packages.pins()
    assert printed.out == "" and printed.err.count("\n") == 1
    lacking = ", ".join(f"{name} {pins[name]}" for name in ("torch", "psutil", "pydantic"))
    assert f"(Python {HERE}) lacks {lacking};" in printed.err
    assert f'make gpu-wheels GPU_PYTHON_VERSION={HERE} GPU_WHEELS="psutil pydantic"' in printed.err
    assert "PyTorch is the machine's own" in printed.err


def test_an_older_version_is_not_good_enough_and_a_later_one_is(wheels, monkeypatch, capsys):
    installed(monkeypatch, pandas="2.3.1", numpy="3.0.0rc1", scipy="1.9.0")
    assert packages.lacking() == ["pandas"]
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert main([]) == 1
    assert "is Python 3.10; Switchyard needs 3.11 or newer" in capsys.readouterr().err


def test_wheels_come_before_the_machines_own_packages_only_where_those_lack(wheels, monkeypatch, capsys):
    for name in ("pydantic", "psutil"):
        wheel(wheels / name, name)
    wheel(wheels / "pydantic", "pydantic_core", f"cp{TAG}-cp{TAG}-manylinux_2_17_x86_64")
    installed(monkeypatch, pydantic=None, pyarrow=None)
    assert main([]) == 0
    folders = capsys.readouterr().out.strip().split(":")
    assert {Path(folder).name.split("-")[0] for folder in folders} == {"pydantic", "pydantic_core"}
    assert all((Path(folder) / Path(folder).name.split("-")[0] / "__init__.py").exists() for folder in folders)
    assert main([]) == 0 and capsys.readouterr().out.strip().split(":") == folders, "unpacked once"


FITTING = ("py3-none-any", "py2.py3-none-any", f"cp{TAG}-cp{TAG}-manylinux2014_x86_64", "cp36-abi3-manylinux2014_x86_64")


@pytest.mark.parametrize("tags", [*FITTING, "cp39-cp39-manylinux2014_x86_64"])
def test_wheels_for_another_python_are_as_good_as_none(wheels, monkeypatch, tags):
    wheel(wheels / "pydantic", "pydantic")
    wheel(wheels / "pydantic", "pydantic_core", tags)
    installed(monkeypatch, pydantic=None)
    assert (main([]) == 0) == (tags in FITTING)


def test_what_lacks_is_fetched_without_what_the_machine_may_have_itself(wheels, monkeypatch, capsys):
    installed(monkeypatch, pandas=None)
    asked = []

    def pip(command, check):
        asked.append(command)
        for name in ("pandas", "numpy", "python_dateutil"):
            wheel(wheels / "pandas", name)

    monkeypatch.setattr(subprocess, "run", pip)
    wheel(wheels / "pandas", "of_another_time")
    assert main(["fetch"]) == 0
    ((*_, wanted),) = asked
    assert wanted == f"pandas=={packages.pins()['pandas']}" and f"--python-version={HERE}" in asked[0]
    assert not any("://" in word for word in asked[0]), "where from is for pip's own settings to say"
    assert {path.name.split("-")[0] for path in (wheels / "pandas").iterdir()} == {"pandas", "python_dateutil"}
    assert "pandas; 0.0 MiB" in capsys.readouterr().out
    assert main(["fetch", "--python", "3.99", "pydantic", "ortools"]) == 0
    assert [command[-1].split("==")[0] for command in asked[1:]] == ["pydantic", "ortools"]
    assert "--python-version=3.99" in asked[1]


def test_a_package_that_nobody_needs_is_refused_and_one_that_pip_does_not_find_ends_it(wheels, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main(["fetch", "streamlit"])
    assert "streamlit is not needed" in capsys.readouterr().err

    def pip(command, check):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", pip)
    assert main(["fetch", "pydantic"]) == 1


RANKS = "engine.launch.worker, engine.launch.step.run, engine.launch.calibration.sweep_rank, tests.gpu.check"


def test_ranks_and_the_check_import_nothing_else_of_what_the_studio_requires():
    """PyTorch brings some packages along; those missing from the list of needed ones cannot be imported here."""
    known = packages_distributions()
    there = {name.lower() for name in (*NEEDED, *OF_TORCH)}
    others = {name.lower() for name in packages.pins()} - there
    blocked = sorted(top for top, owners in known.items() if others & {owner.lower() for owner in owners})
    assert {"ortools", "pyarrow", "yaml", "sqlalchemy", "streamlit", "safetensors"} <= set(blocked)
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import {RANKS}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_list_of_what_is_missing_is_printed_by_a_python_that_has_nothing():
    """`-S` leaves out all that was ever installed."""
    command = [sys.executable, "-S", "-E", "-m", "tests.gpu.packages"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr
    missing = [name for name in NEEDED if f"{name} {packages.pins()[name]}" in done.stderr]
    assert missing or done.stdout.strip(), "unless wheels were fetched"


def test_make_takes_the_machines_python_and_sets_nothing_up():
    command = ["make", "-n", "gpu", "GPU_PYTHON=/some/python", "GPU_JSON=/some/gpu.json"]
    environment = os.environ | {"MAKEFLAGS": ""}
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=True).stdout
    assert "/some/python -m tests.gpu.check --json=/some/gpu.json" in shown
    assert "pip" not in shown and ".venv" not in shown

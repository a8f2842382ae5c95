"""Switchyard installed by pip: into an environment of its own with the dependencies that the tests have, used from another
folder."""

import ast
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine import program
from engine.plan import Plan
from switchyard import command
from tests.cases.cli import ROOT

PARTS = ("app", "engine", "pages", "sample_traces")
ALONE = ("pyproject.toml", "setup.py", "requirements.txt", "requirements-dask.txt", "requirements-models.txt", "README.md")
OPTIONAL = {"distributed", "tokenizers", "torchx", "transformers"}
"""Packages that are asked for when they are needed: of the extras `dask` and `models`, and one that is installed without
dependencies."""


def lines_of(requirements: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / requirements).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def pip(python: str | Path, *arguments: str | Path) -> None:
    """Run pip without any package index."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-index")
    subprocess.run([python, "-m", "pip", arguments[0], *quiet, *arguments[1:]], check=True, timeout=300)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of the tree as it is, built by the packages that are installed."""
    folder = tmp_path_factory.mktemp("wheel")
    for part in (*PARTS, "switchyard"):
        shutil.copytree(ROOT / part, folder / "tree" / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ALONE:
        shutil.copy(ROOT / name, folder / "tree")
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "tree")
    (built,) = folder.glob("switchyard-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder of the programs of an environment with it. pip has found every dependency in the version that it asks for."""
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip(home / "bin" / "python", "install", wheel)
    return home / "bin"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """Another folder, and a person's data folder that is not that of the tests. Kernels are interpreted, not compiled."""
    for name in ("PYTHONPATH", "SWITCHYARD_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


@pytest.fixture
def answer(installed, elsewhere) -> Callable[..., str]:
    """Runs a program of the environment in the other folder and returns what it prints."""

    def answer(name: str, *arguments: str | Path) -> str:
        done = subprocess.run([installed / name, *arguments], cwd=elsewhere, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return answer


@contextlib.contextmanager
def serving(installed: Path, folder: Path) -> Iterator[subprocess.Popen]:
    """The studio, once it answers; ended at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder.parent / "studio.log"
    with log.open("wb") as output:
        studio_command = [installed / "switchyard", "studio", "--port", str(port), "--sample"]
        studio = subprocess.Popen(studio_command, cwd=folder, stdout=output, stderr=output)
    try:
        deadline, health = time.monotonic() + 120, None
        while health is None:
            assert time.monotonic() < deadline and studio.poll() is None, log.read_text()
            try:
                health = urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=1).read()
            except OSError:
                time.sleep(0.1)
        assert health == b"ok"
        yield studio
    finally:
        studio.terminate()
        studio.wait(60)


def lend_kernels(root: Path) -> None:
    """Give an installed engine the machine code of the checkout, which numba takes for a source of the same size and time."""
    for code in (ROOT / "engine").rglob("*.nb[ic]"):
        folder = code.parent.relative_to(ROOT)
        (root / folder).mkdir(exist_ok=True)
        shutil.copy2(code, root / folder)
        for source in (ROOT / folder.parent).glob("*.py"):
            shutil.copystat(source, root / folder.parent / source.name)
    (root / command.COMPILED.relative_to(command.ROOT)).touch()


def root_of(answer: Callable[..., str]) -> Path:
    return Path(answer("python", "-c", "import switchyard; print(switchyard.ROOT)").strip())


def sample_options(root: Path) -> list[str | Path]:
    samples = root / "sample_traces"
    inputs = {"--workload": "traffic-8.csv", "--cluster": "mixed-8.json", "--model": "tiny-moe-alpha.json"}
    return [part for name, file in inputs.items() for part in (name, samples / file)]


def test_a_wheel_has_all_files_in_one_package_and_the_dependencies_of_the_requirements(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if ".dist-info/" not in name]
        (about,) = (name for name in opened.namelist() if name.endswith("/METADATA"))
        told = Parser().parsestr(opened.read(about).decode())
    assert {name.partition("/")[0] for name in names} == {"switchyard"}
    ours = {file for part in PARTS for file in (ROOT / part).rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    there = {name.removeprefix("switchyard/") for name in names}
    assert {str(file.relative_to(ROOT)) for file in ours} <= there
    wanted = {str(Requirement(line)) for line in lines_of("requirements.txt")}
    extra = {
        str(Requirement(f'{line}; extra == "{name}"'))
        for name in ("dask", "models")
        for line in lines_of(f"requirements-{name}.txt")
    }
    assert {str(Requirement(line)) for line in told.get_all("Requires-Dist")} == wanted | extra
    assert len(wanted) > 20 and len(extra) == 2


def test_everything_that_is_imported_comes_with_the_dependencies():
    imported: dict[str, str] = {}
    for file in (file for part in (*PARTS, "switchyard") for file in (ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0]: str(file.relative_to(ROOT)) for name in names}
    there, ahead = set(), [Requirement(line) for line in lines_of("requirements.txt")]
    while ahead:
        wanted = ahead.pop()
        name = canonicalize_name(wanted.name)
        if name in there or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        there.add(name)
        ahead += [Requirement(line) for line in metadata.requires(name) or ()]
    of_module = metadata.packages_distributions()
    foreign = set(imported) - set(sys.stdlib_module_names) - {*PARTS, "switchyard"} - OPTIONAL
    missing = {name for name in foreign if not {canonicalize_name(package) for package in of_module.get(name, ())} & there}
    assert not missing, {name: imported[name] for name in missing}
    assert {"numpy", "streamlit", "torch"} <= foreign


def test_the_command_says_its_own_name_and_knows_all_commands_and_the_studio(answer):
    told = answer("switchyard", "--help")
    assert told.startswith("usage: switchyard ") and "python -m engine" not in told
    assert {"plan", "simulate", "launch", "record"} <= set(told.split()) and "switchyard studio opens the studio" in told
    assert "--port" in answer("switchyard", "studio", "--help")


def test_a_plan_is_made_in_another_folder_and_data_goes_to_the_persons_own(answer, elsewhere):
    root = root_of(answer)
    answer("switchyard", "plan", *sample_options(root), "--system", "linear", "-o", "plan.json")
    plan = Plan.from_json((elsewhere / "plan.json").read_text(), "plan.json")
    assert plan.placement.gpus == 8 and [file.name for file in elsewhere.iterdir()] == ["plan.json"]
    assert (elsewhere.parent / "data" / "switchyard" / "workloads").is_dir() and not (root / ".switchyard").exists()


def test_a_script_imports_the_engine_after_switchyard_and_keeps_its_own_modules(answer, elsewhere):
    (elsewhere / "app.py").write_text("mine = True\n")
    (elsewhere / "script.py").write_text("import switchyard, app, engine.workload; print(app.mine, engine.workload.__file__)\n")
    mine, file = answer("python", "script.py").split()
    assert mine == "True" and Path(file).is_relative_to(root_of(answer))


def test_the_studio_starts_answers_and_stops(installed, elsewhere, answer):
    compiled = root_of(answer) / command.COMPILED.relative_to(command.ROOT)
    compiled.parent.mkdir(exist_ok=True)
    compiled.touch()
    with serving(installed, elsewhere) as studio:
        studio.terminate()
        assert studio.wait(60) == 0
    compiled.unlink()


def test_kernels_are_compiled_before_the_first_studio_and_after_an_upgrade(tmp_path, monkeypatch, capfd):
    (tmp_path / "kernels.py").write_text("print('kernels')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(command, "COMPILED", compiled := tmp_path / "simulate" / "__pycache__" / ".compiled")
    assert command.is_compiled(), "a folder that is not there cannot be written to"
    compiled.parent.parent.mkdir()
    for module, works in (("no_such_module", False), ("kernels", True)):
        monkeypatch.setattr(command, "KERNELS", module)
        assert not command.is_compiled() and command.compile_kernels() and command.is_compiled() == works
        told = capfd.readouterr()
        assert told.err.startswith("compiling the kernels, this once") and ("kernels" in told.out) == works
    os.utime(compiled, (0, 0))
    assert not command.is_compiled()


def test_who_ends_the_studio_while_kernels_are_compiled_ends_that_too(tmp_path, monkeypatch):
    (tmp_path / "waiting.py").write_text("import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(600)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(command, "KERNELS", "waiting")
    monkeypatch.setattr(command, "is_compiled", lambda: False)
    began, before = time.monotonic(), signal.getsignal(signal.SIGTERM)
    assert command.studio([]) == 130 and time.monotonic() - began < 30
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.everything
def test_the_installed_studio_plans_in_a_job_and_the_command_launches(answer, elsewhere, monkeypatch):
    root = root_of(answer)
    code = f"""
        import sys
        sys.path[:0] = [{str(root)!r}]
        sys.path.append({str(ROOT)!r})
        import app
        from tests.cases import pages
        pages.MAIN = {str(root / "app" / "main.py")!r}
        page = pages.open_sample(pages.run(pages.studio()))
        pages.tick(pages.visit(page, "optimise"), "Linear")
        pages.run_the_job(page)
        assert app.__file__.startswith({str(root)!r})
        print(page.dataframe[0].value["Plan"].tolist())
    """
    script = elsewhere.parent / "drive.py"
    script.write_text("\n".join(line.strip() for line in code.splitlines()))
    monkeypatch.delenv("NUMBA_DISABLE_JIT")
    lend_kernels(root)
    assert "Linear placement" in answer("python", script)
    answer("switchyard", "plan", *sample_options(root), "--system", "linear", "-o", "plan.json")
    assert "differs from the unplanned computation by" in answer("switchyard", "launch", "plan.json", "--ranks", "2")


@pytest.mark.parametrize("name", ["switchyard", "checkout"])
def test_a_checkout_is_told_from_an_installed_program(tmp_path, monkeypatch, name):
    root = tmp_path / name
    root.mkdir()
    assert not program.is_installed(root) and program.command(root) == "python -m engine"
    assert program.usual_data_folder(root) == root / ".switchyard" and "requirements-no-deps" in program.how_to_get_torchx(root)
    assert program.how_to_get_models(root).endswith("-r requirements-models.txt")
    (root / "command.py").touch()
    assert program.is_installed(root) == (name == "switchyard")
    if name == "switchyard":
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setattr(Path, "home", lambda: tmp_path)
        monkeypatch.setenv("XDG_DATA_HOME", "relative")
        assert program.usual_data_folder(root) == tmp_path / ".local" / "share" / "switchyard"
        monkeypatch.setattr(sys, "platform", "darwin")
        assert program.usual_data_folder(root) == tmp_path / "Library" / "Application Support" / "switchyard"
        (pin,) = re.findall(r"^torchx==\S+$", (ROOT / "requirements-no-deps.txt").read_text(), re.MULTILINE)
        assert program.how_to_get_torchx(root).endswith(f"pip install --no-deps {pin}")
        assert program.how_to_get_models(root).endswith(f"pip install {lines_of('requirements-models.txt')[0]}")
        assert f"pip install --no-deps {pin} " in (ROOT / "docs" / "operating.md").read_text()
    assert program.as_typed("python -m engine plan x") == "python -m engine plan x"

"""The documentation is true: its commands run, its links lead somewhere, its examples work."""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from app import sidebar
from app.visitor import glossary
from engine import formats
from engine.catalogue import cluster_presets
from engine.cli import main
from engine.errors import InputError
from engine.formats.known import FORMATS
from engine.workload import RoutingTrace
from tests import everything

ROOT = Path(__file__).parent.parent
FIRST = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "sample_traces/README.md")
PAGES = [*(ROOT / name for name in FIRST), *sorted(ROOT.glob("docs/**/*.md"))]
PICTURES = ROOT / "docs" / "pictures"
MOST_PICTURE_BYTES = 150_000

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"--[a-z][a-z-]*")

ELSEWHERE = (
    *("docker ", "dask ", ".venv/bin/python -m pytest ", "SWITCHYARD_FUZZ=", "pip install ", "switchyard studio "),
    "torchrun ",
)
"""Commands that no test can run and none of ours answers, or that other tests run: taken as they are. `switchyard` is run by
`tests/test_installed.py`, `torchrun` by `tests/runtime/test_script.py`."""
ASKED_ONLY = (
    "python -m engine launch plan.json --on testbed",
    "python -m engine launch plan.json --on slurm --shared /shared/switchyard",
    "python -m engine status /shared/switchyard/RUN",
    "python -m engine cancel /shared/switchyard/RUN",
    "python -m engine collect /shared/switchyard/RUN",
    "python -m engine calibrate ",
    "python -m engine record ",
    "python -m engine restore ",
    "python -m engine plan --cost profile.json --workload recording.npz",
    "python -m engine plan --workload recording.npz --model /models/olmoe/config.json",
    "python -m engine launch plan.json linear --model /models/olmoe",
    "python -m engine plan --dask tcp://10.0.0.5:8786",
)
"""Commands of ours that need root, a cluster, a server, a quiet machine, an empty data folder or a person's own files: their
options must exist."""

SAMPLE_AND_MODEL = "sample_traces/tiny-moe/alpha-code.npz --model sample_traces/tiny-moe-alpha.json"
BETA_ON_MIXED = (
    "sample_traces/tiny-moe/beta-code.npz --cluster sample_traces/mixed-8.json --model sample_traces/tiny-moe-beta.json"
)
REPEATED = (
    "python -m engine trust",
    "python -m engine redundancy ",
    "python -m engine verdict plan.json --",
    f"python -m engine plan --workload {SAMPLE_AND_MODEL} --workload-b ",
    f"python -m engine plan --workload {BETA_ON_MIXED} --travel gpu --system best ",
)
"""Commands that take long and whose answers tests/studies/test_trust.py, tests/systems/test_best.py and tests/golden hold: only
`make everything` runs them here too, and else their options must exist."""
IN_PROCESSES = (
    "python -m engine inspect sample_traces/tiny-moe/alpha-code.npz",
    "python -m engine compare deployed.json",
    "python -m engine detect",
    "python -m engine clean",
    "python -m engine health",
    "python -m engine launch plan.json --ranks 2",
)
"""Commands that bash runs as a person would, besides all with a redirection; the others are `main` with their arguments."""
PIPED = re.compile(r"echo '([^']*)' \| (python -m engine [^|>]*)")

pytestmark = pytest.mark.usefixtures("warm_python")


def commands_of(page: Path) -> list[str]:
    """Every command of a page, one a line of its `sh` blocks (a backslash joins lines), without its comment."""
    blocks = [text for kind, text in FENCED.findall(page.read_text()) if kind == "sh"]
    lines = [line for text in blocks for line in re.sub(r"\\\n\s*", "", text).splitlines()]
    return [command for line in lines if (command := line.split("  #")[0].strip())]


def anchors_of(page: Path) -> set[str]:
    """The targets of links into a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def options_of(*words: str) -> frozenset[str]:
    """The options that the --help of `python WORDS` names."""
    with contextlib.redirect_stdout(io.StringIO()) as asked, pytest.raises(SystemExit):
        main([*words[2:], "--help"])
    return frozenset(OPTION.findall(asked.getvalue()))


def run(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The exit code of a command in a folder, and its standard error.

    command: `python -m engine ...`, `echo '...' | python -m engine ...`, or anything that bash runs.
    """
    piped = PIPED.fullmatch(command)
    words = shlex.split(piped[2] if piped else command)
    if command.startswith(IN_PROCESSES) or words[0] != "python" or {"|", ">"} & set(words):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
        shell = ["bash", "-o", "pipefail", "-c", command]
        done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{piped[1]}\n" if piped else ""))
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return main(words[3:]), said.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one folder, so that the files of one command serve the next."""
    shutil.copytree(ROOT / "sample_traces", tmp_path / "sample_traces")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    for command in commands_of(page):
        if command.startswith(ELSEWHERE):
            continue
        words = shlex.split(command)
        if words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), command
        elif command.startswith("python -m tests."):
            assert importlib.util.find_spec(words[2]), command
        elif command.startswith(ASKED_ONLY if everything.WANTED else ASKED_ONLY + REPEATED):
            missing = set(filter(OPTION.fullmatch, words)) - options_of(*words[1:4])
            assert not missing, f"{command}: there is no {', '.join(missing)}"
        else:
            assert command.startswith(("python -m engine ", "echo ", "mkdir ")), f"{command}: say how it is tested"
            code, errors = run(command, tmp_path, monkeypatch)
            assert code == 0, f"{command}\n{errors[-2000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_hides_from_the_test(page: Path) -> None:
    """A command stands in a block that says it is one, not in a block of another kind or an indented one."""
    text = page.read_text()
    others = [content for kind, content in FENCED.findall(text) if kind != "sh"]
    hidden = re.compile(r"^(    )?(python -m|make|docker) ", re.MULTILINE)
    assert not [command for content in others for command in hidden.findall(content)]
    assert not re.findall(r"^    (?:python|make|docker) .*", FENCED.sub("", text), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if path.startswith("https://"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}"


def test_every_picture_is_shown_and_small() -> None:
    shown = {Path(link).name for page in PAGES for link in LINK.findall(page.read_text()) if link.endswith(".png")}
    assert {picture.name for picture in PICTURES.iterdir()} == shown
    assert all(picture.stat().st_size < MOST_PICTURE_BYTES for picture in PICTURES.iterdir())


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        reached.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(page.read_text())]
        ahead += {(page.parent / link).resolve() for link in links if link.endswith(".md")} - reached
    assert set(PAGES) <= reached


# The worked examples of CONTRIBUTING.md. Its system is `tests/systems/toy.py`, which has tests of its own.


@pytest.fixture(scope="module")
def examples() -> dict[str, str]:
    return dict(
        re.findall(
            r"^`([\w/.]+\.py)`:\n\n```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE
        )
    )


def test_the_system_is_the_tested_one(examples: dict[str, str]) -> None:
    assert examples["tests/systems/toy.py"] == (ROOT / "tests" / "systems" / "toy.py").read_text()


def test_the_format_reads_good_files_and_refuses_others(
    examples: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: dict = {}
    exec(examples["engine/formats/jsonl.py"], module)
    monkeypatch.setattr("engine.formats.recognition.FORMATS", (*module["FORMATS"], *FORMATS))
    file = tmp_path / "log.jsonl"
    file.write_text('{"experts": [[3, 7], [0, 2]]}\n{"experts": [[1, 2], [5, 4]]}\n')
    trace = formats.read_workload(file)
    assert isinstance(trace, RoutingTrace) and trace.experts.shape == (2, 2, 2) and trace.num_experts == 8
    for second_line, fault in (('{"e": 1}', "log.jsonl, line 2: needs"), ('{"experts": [[1, 2]]}', "as many experts")):
        file.write_text(f'{{"experts": [[1]]}}\n{second_line}\n')
        with pytest.raises(InputError, match=fault):
            formats.read_workload(file)


def test_the_cost_source_times_an_expert(examples: dict[str, str]) -> None:
    module: dict = {"__name__": "peak"}
    exec(examples["engine/costs/peak.py"], module)
    cost, cluster = module["Peak"](), cluster_presets()["mixed-8"].cluster
    gpu = cluster.gpus[0]
    assert cost.gemm(gpu, np.array([0.0, 100.0]), 64, 32, "bf16") == pytest.approx([0, 2 * 100 * 64 * 32 / gpu.flops("bf16")])
    assert cost.memory_pass(gpu, np.array([1e9])) == pytest.approx([1e9 / gpu.memory_bandwidth])
    assert "peak rates" in cost.source and cost.lacks_computation(cluster) is None


def test_the_page_shows_the_sample(examples: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a copy of the shell with the page and its entry in a section."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(glossary.PAGES, "Room", ("slot",))
    for folder in ("app", "pages"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "pages" / "room.py").write_text(examples["pages/room.py"])
    room = sidebar.Entry("Room", "room", ":material/grid_on:")
    monkeypatch.setitem(sidebar.SECTIONS, "Understand", (*sidebar.SECTIONS["Understand"], room))
    main = tmp_path / "app" / "main.py"
    monkeypatch.setattr(sys, "argv", [str(main), "--sample"])
    app = AppTest.from_file(str(main), default_timeout=60).run()
    app.switch_page("../pages/room.py").run()
    assert not app.exception, app.exception
    (table,) = app.dataframe
    assert table.value["Room for"].ge(table.value["Experts of a layer, at most"]).all()

"""One answer to one question: one baseline, one standing, and a frozen question and answer for every kind of job."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.jobs import kinds
from engine.jobs.protocol import REQUEST, RESULT, Request
from engine.jobs.runner import Job

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("engine", "app", "pages") for path in (ROOT / folder).rglob("*.py")]
READS_JSON = "protocol.py"
"""The file of engine/jobs that reads the folder's JSON, which no model has checked yet."""


def nodes_about(name: str) -> Iterator[tuple[str, ast.AST]]:
    """Each file that has the name in its text, with every node of its tree."""
    for path in FILES:
        if name in (text := path.read_text()):
            for node in ast.walk(ast.parse(text)):
                yield path.relative_to(ROOT).as_posix(), node


def definitions_of(name: str) -> list[str]:
    """The files that define a function of this name."""
    return [file for file, node in nodes_about(name) if isinstance(node, ast.FunctionDef) and node.name == name]


def calls_of(name: str) -> list[str]:
    """The files with a call of a name, one entry a call."""
    return [
        file
        for file, node in nodes_about(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def imports_of(name: str) -> list[tuple[str, str | None]]:
    """The files that import a name, each with the module from which it does."""
    return [
        (file, node.module)
        for file, node in nodes_about(name)
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names)
    ]


def test_there_is_one_baseline() -> None:
    assert definitions_of("baseline_of") == ["engine/compare/baseline.py"]
    # Which system stands for it is asked there, and by the page that plans it first.
    assert set(calls_of("baseline_for")) == {"engine/compare/baseline.py", "app/optimise/deployed.py"}
    assert set(calls_of("usual_plan")) == {"engine/compare/baseline.py"}


def test_there_is_one_standing() -> None:
    module = "engine/compare/standing.py"
    callers = calls_of("Standing")
    assert callers.count(module) == 1
    # A launch on a cluster has a `Standing` of its own.
    assert not {(file, "engine.compare.standing") for file in callers} & {*imports_of("Standing")}


@pytest.mark.parametrize("kind", kinds.HANDLERS)
def test_every_kind_of_job_has_a_question_and_an_answer(kind: str) -> None:
    handler = kinds.handler_of(kind)
    for model, base in ((kinds.ask_type(handler), kinds.Ask), (kinds.answer_type(handler), kinds.Answer)):
        assert issubclass(model, base) and model.model_config["frozen"] and model is not base
        assert model.__module__ == handler.__module__
        assert all("dict[str, typing.Any]" not in str(field.annotation) for field in model.model_fields.values())


def test_jobs_hold_no_untyped_dictionaries() -> None:
    for path in (ROOT / "engine" / "jobs").glob("*.py"):
        if path.name != READS_JSON:
            assert "Any]" not in path.read_text(), path.name


def test_an_answer_of_another_kind_is_refused_in_a_line(tmp_path: Path) -> None:
    job = Job("20260102T030405000000-0123abcd", tmp_path)
    (tmp_path / REQUEST).write_text(Request(kind="sensitivity", arguments={}, created=1.0).to_json())
    assert kinds.read_answer(job) is None
    (tmp_path / RESULT).write_text('{"points": []}')
    with pytest.raises(InputError, match=r"result.json is damaged \(cost_source: Field required .*\); run the job again"):
        kinds.read_answer(job)

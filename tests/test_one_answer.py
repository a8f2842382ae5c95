"""One answer to one question: one baseline, one standing, and a frozen question and answer for every kind of job."""

import re
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


def files_with(pattern: str) -> list[str]:
    """The files in which a pattern is found, one entry a place."""
    return [path.relative_to(ROOT).as_posix() for path in FILES for _ in re.findall(pattern, path.read_text(), re.MULTILINE)]


def calls_of(name: str) -> list[str]:
    return files_with(rf"(?<![\w.`])(?<!def )(?<!class ){name}\(")


def test_there_is_one_baseline() -> None:
    assert files_with(r"\bdef baseline_of\(") == ["engine/compare/baseline.py"]
    # Which system stands for it is asked there, and by the page that plans it first.
    assert set(calls_of("baseline_for")) == {"engine/compare/baseline.py", "app/optimise/deployed.py"}
    assert set(calls_of("usual_plan")) == {"engine/compare/baseline.py"}


def test_there_is_one_standing() -> None:
    module = "engine/compare/standing.py"
    callers = calls_of("Standing")
    assert callers.count(module) == 1
    # A launch on a cluster has a `Standing` of its own.
    importers = files_with(r"from engine\.compare\.standing import (?:\([^)]*|[^(\n]*)\bStanding\b")
    assert importers and not {*callers} & {*importers}


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

"""A studio that cannot work says so, on the command line too."""

import json
from pathlib import Path

import pytest

from engine.cli import main
from engine.store.database import Database, database
from engine.upkeep import health
from tests.store.test_team import plan_of
from tests.upkeep.conftest import Folder, save


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main([*arguments])
    return code, capsys.readouterr().out


def test_a_studio_that_is_well(own_data_folder: Path, capsys) -> None:
    code, said = asked(capsys, "health")
    assert code == 0 and said.startswith("well: ") and said.count("\n") == 1 and "free of" in said
    assert list(own_data_folder.iterdir()) == [], "asking makes nothing"


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(health, "free", lambda folder: (10_000_000, 10**12))
    code, said = asked(capsys, "health")
    assert code == 1 and "its disk is full, 10 MB free of 1 TB" in said and said.count("\n") == 1


def test_a_folder_that_cannot_be_written(own_data_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    own_data_folder.write_text("a file")
    code, said = asked(capsys, "health", "--json")
    (folder, base) = json.loads(said)["checks"]
    assert code == 1 and not folder["well"] and "cannot be made" in folder["said"] and not base["well"]


def test_a_lost_database_and_one_that_is_there(db: Database, url: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("DATABASE_URL", url)
    assert asked(capsys, "health")[0] == 0
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:hunter2@127.0.0.1:1/x")
    code, said = asked(capsys, "health")
    assert code == 1 and "does not answer" in said and "hunter2" not in said


def test_the_commands_of_an_operator(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    save(database(), plan_of())
    old = folder.recording(0, 100)
    folder.session("an-old-session", 100)
    code, said = asked(capsys, "clean", "--dry-run")
    assert code == 0 and old in said and "would go" in said and "an-old-session" not in said
    code, said = asked(capsys, "clean", "--json")
    assert code == 0 and {going["kind"] for going in json.loads(said)["going"]} == {"recordings", "sessions"}
    assert "an-old-session" not in said and folder.names() == set()
    code, said = asked(capsys, "backup", str(tmp_path / "b.zip"))
    assert code == 0 and "workspace 1" in said
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path / "fresh"))
    code, said = asked(capsys, "restore", str(tmp_path / "b.zip"))
    assert code == 0 and "restored" in said
    assert main(["restore", str(tmp_path / "b.zip")]) == 2 and "not empty" in capsys.readouterr().err

"""Backups that can be restored, and the health that a studio reports."""

import json
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import select

from engine import store
from engine.cli import main
from engine.errors import InputError
from engine.jobs import runner
from engine.store import tables, team
from engine.store.database import Database, database
from engine.upkeep import backup as restoring
from engine.upkeep import health
from engine.upkeep.backup import DATA, MANIFEST, backup, restore
from tests.cases.teams import plan_of
from tests.upkeep.conftest import Folder, save

OTHER = {"sqlite": "postgresql", "postgresql": "sqlite"}
Members = dict[str, bytes]
JOB = DATA + "jobs/20250102T030405000001-0123abcd/"


def rows_of(db: Database) -> dict[str, list[dict]]:
    with db.reading() as connection:
        return {
            table.name: [dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()]
            for table in tables.metadata.sorted_tables
        }


@pytest.fixture
def filled(folder: Folder, db: Database) -> Folder:
    recording = folder.recording(0, 100)
    job = folder.job(1, 50, workload=recording)
    (folder.path / "jobs" / job / "pid").write_text('{"pid": 1}')
    (folder.path / "jobs" / job / "run").mkdir()
    (folder.path / "jobs" / job / "run" / "rank 0.log").write_text("späť")
    folder.session("a-session-in-use", 1, plan_jobs=[job])
    (folder.path / "timelines").mkdir()
    (folder.path / "timelines" / f"{'e' * 64}.npz").write_bytes(b"can be simulated again")
    (folder.path / "reading-abc").mkdir()
    (folder.path / "reading-abc" / "upload").write_bytes(b"half")
    save(db, plan_of(), workload=recording)
    team.note_run(db, f"{job}-0", plan_of(seed=1), "local", "Ana", 10.0, None, 0.1 + 0.2, {"passes": [0.1]})
    return folder


@pytest.mark.parametrize("across", [False, pytest.param(True, marks=pytest.mark.everything)], ids=["same", "other"])
def test_a_backup_comes_back_as_it_was(filled, db, url, across, request, tmp_path, monkeypatch) -> None:
    file = tmp_path / "backup.zip"
    made = backup(db, filled.path, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "addresses of sessions are in it"
    kind = db.address.split("+")[0].split(":")[0]
    fresh = empty_database(OTHER[kind] if across else kind, request, tmp_path)
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path / "fresh"))
    assert restore(fresh, store.data_folder(), file) == made
    there = Database(fresh)
    assert rows_of(there) == rows_of(db) and made.rows["decision"] == 1 and made.rows["run"] == 1
    names = {path.relative_to(tmp_path / "fresh").as_posix() for path in (tmp_path / "fresh").rglob("*") if path.is_file()}
    lost = {name for name in filled.names() if name.startswith(("timelines", "reading")) or name.endswith("/pid")}
    assert len(lost) == 3 and names == filled.names() - lost
    for name in names:
        old, new = filled.path / name, tmp_path / "fresh" / name
        assert stat.S_IMODE(new.stat().st_mode) == 0o600 and stat.S_IMODE(new.parent.stat().st_mode) == 0o700, name
        assert old.read_bytes() == new.read_bytes() and abs(old.stat().st_mtime - new.stat().st_mtime) < 2.1, name
    (job,) = runner.jobs(store.data_folder())
    assert job.state is runner.State.DONE
    later = save(there, plan_of(seed=9))
    assert later.number > max(row["number"] for row in rows_of(db)["saved_plan"]), "numbers go on"
    there.close()


def empty_database(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'restored.db'}"
    server, name = request.getfixturevalue("postgres"), f"restored_{os.getpid()}_{abs(hash(str(tmp_path))) % 10**9}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return server.replace("/postgres?", f"/{name}?")


def test_a_backup_sees_one_state_and_only_an_empty_place_is_restored_into(
    filled: Folder, db, url, tmp_path: Path, monkeypatch
) -> None:
    with db.snapshot() as connection:
        team.add_workspace(db, "meanwhile", "Ben")  # it holds nobody up
        assert [row.name for row in connection.execute(select(tables.workspace))] == ["späť"]
    file = tmp_path / "backup.zip"
    backup(db, filled.path, file)
    with pytest.raises(InputError, match="not empty"):
        restore(f"sqlite:///{tmp_path / 'another.db'}", filled.path, file)
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path / "fresh"))
    before = rows_of(db)
    with pytest.raises(InputError, match="database is not empty"):
        restore(url, store.data_folder(), file)
    assert rows_of(db) == before and list((tmp_path / "fresh").iterdir()) == []


def changed(file: Path, change: Callable[[Members], Members]) -> Path:
    with zipfile.ZipFile(file) as archive:
        members = change({name: archive.read(name) for name in archive.namelist()})
    hostile = file.with_name("hostile.zip")
    with zipfile.ZipFile(hostile, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return hostile


def edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Members], Members]:
    return lambda members: members | {name: change(members.get(name, b""))}


def without(part: str) -> Callable[[Members], Members]:
    return lambda members: {name: content for name, content in members.items() if part not in name}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWITCHYARD_DATA", str(here / "data"))
        folder = Folder(store.data_folder())
        folder.session("a-session-in-use", 1)
        db = Database(f"sqlite:///{here / 'team.db'}")
        save(db, plan_of())
        backup(db, folder.path, here / "backup.zip")
        db.close()
    return here / "backup.zip"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(
            (edited(hostile, lambda _: b"x"), "has a member")
            for hostile in (
                *("../outside", DATA + "../../outside", JOB + "../../../outside", JOB + "a\\..\\b", "/etc/passwd"),
                *(DATA + "sessions/.ssh/authorized_keys", DATA + "workloads/" + "d" * 64 + ".pkl", JOB + "pid"),
            )
        ),
        (without(MANIFEST), "no manifest.json"),
        (without("review"), "no rows at all"),
        (edited(MANIFEST, lambda text: b"{"), "not valid JSON"),
        (edited(MANIFEST, lambda text: text.replace(b'"format":1', b'"format":2')), "format 2"),
        (edited(MANIFEST, lambda text: text.replace(b'"0004"', b'"9999"')), "newer Switchyard"),
        (edited(MANIFEST, lambda text: b" " * 2**21 + text), "too long"),
        (edited("database/review.jsonl", lambda text: text * 2), "rows that do not fit"),
        (edited("database/comment.jsonl", lambda text: b""), "0 rows where the manifest counts 1"),
        (edited("database/comment.jsonl", lambda text: b'{"number": 1}\n'), "none of this table"),
        (edited("database/comment.jsonl", lambda text: text[:-9]), "damaged"),
    ],
)
def test_what_is_no_backup_is_refused_in_a_line_and_leaves_nothing(good, change, says, tmp_path, own_data_folder) -> None:
    hostile = changed(good, change)
    with pytest.raises(InputError, match=says) as refused:
        restore(f"sqlite:///{tmp_path / 'team.db'}", store.data_folder(), hostile)
    assert "\n" not in str(refused.value)
    assert list(own_data_folder.iterdir()) == [] and not (tmp_path / "outside").exists()
    db = Database(f"sqlite:///{tmp_path / 'team.db'}")
    assert not any(rows_of(db).values())
    db.close()


def test_a_link_in_a_backup_is_refused(good: Path, tmp_path: Path) -> None:
    hostile = changed(good, lambda members: members)
    link = zipfile.ZipInfo(DATA + "sessions/another-session.json")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(hostile, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(InputError, match="has a member"):
        restore(f"sqlite:///{tmp_path / 'team.db'}", store.data_folder(), hostile)


def test_a_backup_larger_than_the_disk_is_refused_before_anything_is_written(good, tmp_path, monkeypatch) -> None:
    (tmp_path / "backup.zip").write_bytes(b"PK nonsense")
    with pytest.raises(InputError, match="damaged"):
        restore(f"sqlite:///{tmp_path / 'team.db'}", store.data_folder(), tmp_path / "backup.zip")
    monkeypatch.setattr(restoring, "free", lambda folder: (1000, 2000))
    with pytest.raises(InputError, match="the disk has 1,000 free"):
        restore(f"sqlite:///{tmp_path / 'team.db'}", store.data_folder(), good)
    assert not (tmp_path / "team.db").exists()


def test_a_backup_that_cannot_be_written_leaves_the_one_before(filled: Folder, db: Database, tmp_path, monkeypatch) -> None:
    file = tmp_path / "backup.zip"
    file.write_text("the one before")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.upkeep.backup._write_file", full)
    with pytest.raises(InputError, match="No space left"):
        backup(db, filled.path, file)
    assert file.read_text() == "the one before" and len(list(tmp_path.glob(".backup*"))) == 0


def test_infinite_numbers_do_not_keep_a_backup_from_postgresql(good: Path, tmp_path: Path) -> None:
    odd = changed(good, edited("database/saved_plan.jsonl", lambda text: text.replace(b"0.25", b"Infinity")))
    db_url = f"sqlite:///{tmp_path / 'team.db'}"
    restore(db_url, store.data_folder(), odd)
    db = Database(db_url)
    (row,) = rows_of(db)["saved_plan"]
    db.close()
    assert json.loads(json.dumps(row["figures"])) == {"total": None}


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main([*arguments])
    return code, capsys.readouterr().out


def test_a_studio_that_is_well_with_a_full_disk_and_without_a_folder(own_data_folder: Path, monkeypatch, capsys) -> None:
    code, said = asked(capsys, "health")
    assert code == 0 and said.startswith("well: ") and said.count("\n") == 1 and "free of" in said
    assert list(own_data_folder.iterdir()) == [], "asking makes nothing"
    monkeypatch.setattr(health, "free", lambda folder: (10_000_000, 10**12))
    code, said = asked(capsys, "health")
    assert code == 1 and "its disk is full, 10 MB free of 1 TB" in said and said.count("\n") == 1
    own_data_folder.rmdir()
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

"""Files that are deleted: none that is referred to or in use, and no more than was said."""

import os

import pytest

from engine import store
from engine.compare.figures import Migration
from engine.errors import InputError
from engine.jobs import protocol, queue
from engine.store import team
from engine.store.database import database
from engine.upkeep import retention
from engine.upkeep.health import use_by_kind
from engine.upkeep.retention import Cleaning, Policy, clean
from tests.cases.teams import plan_of
from tests.upkeep.conftest import NOW, Folder, age, save

OLD, NEW = 100, 1
LIKE_A_DIGEST = "d" * 64


def cleaned(folder: Folder, policy: Policy | None = None, remove: bool = True) -> Cleaning:
    return clean(database(), folder.path, policy or Policy(), NOW, remove)


def gone(folder: Folder, cleaning: Cleaning) -> set[str]:
    return {going.path.relative_to(folder.path).as_posix() for going in cleaning.going}


def test_what_nobody_has_used_for_long_goes_and_what_is_referred_to_stays(folder: Folder) -> None:
    unused, of_session, of_job, of_plan, of_old_session, new = (
        folder.recording(seed, NEW if seed == 5 else OLD) for seed in range(6)
    )
    kept_job, old_job = folder.job(1, OLD, workload=of_job), folder.job(2, OLD, workload=unused)
    folder.session("a-session-in-use", NEW, workloads={of_session: "x"}, plan_jobs=[kept_job])
    folder.session("an-old-session", OLD, workloads={of_old_session: "x"}, plan_jobs=[old_job])
    save(database(), plan_of(), workload=of_plan)
    before = folder.names()
    foretold = cleaned(folder, remove=False)
    assert folder.names() == before, "a dry run removes nothing"
    done = cleaned(folder)
    expected = {f"workloads/{unused}.npz", f"workloads/{of_old_session}.npz", f"jobs/{old_job}"}
    assert gone(folder, done) == gone(folder, foretold) == {"sessions/an-old-session.json", *expected}
    assert done.stays == foretold.stays and done.days == 90
    for stays in (of_session, of_job, of_plan, new):
        assert store.load_workload(stays).digest == stays
    assert folder.names() == {name for name in before if not name.startswith(tuple(gone(folder, done)))}
    assert cleaned(folder).going == (), "there is nothing left to do"


def test_what_a_review_shows_stays(folder: Folder) -> None:
    db = database()
    saved = save(db, plan_of())
    recordings = [folder.recording(seed, OLD) for seed in range(3)]
    verdict = folder.job(1, OLD, kind="verdict", plan_id=saved.plan, recordings=recordings[:1])
    launch = folder.job(2, OLD, kind="launch", workload=recordings[1])
    team.note_run(db, f"{launch}-0", plan_of(), "local", "Ana", 1.0, 1.0, 1.0, {})
    other = folder.job(3, OLD, kind="verdict", plan_id=plan_of(seed=1).id, recordings=recordings[2:])
    assert gone(folder, cleaned(folder)) == {f"jobs/{other}", f"workloads/{recordings[2]}.npz"}
    assert (folder.path / "jobs" / verdict).is_dir()


def test_what_runs_or_waits_stays(folder: Folder) -> None:
    runs, waits, ended = (folder.job(number, OLD, done=number == 3) for number in range(1, 4))
    worker = folder.path / "jobs" / runs
    protocol.write_pid(worker, os.getpid())
    age(worker / "pid", OLD)
    queue.join(folder.path / "jobs" / waits)
    assert gone(folder, cleaned(folder)) == {f"jobs/{ended}"}


def test_what_a_killed_process_left_goes_after_two_days(folder: Folder) -> None:
    for days in (1, 3):
        (folder.path / f"reading-{days}" / "0").mkdir(parents=True)
        left = folder.path / f"reading-{days}" / "0" / "upload.npz"
        left.write_bytes(b"x" * 100)
        (folder.path / "workloads").mkdir(exist_ok=True)
        draft = folder.path / "workloads" / f"{LIKE_A_DIGEST}.{days}.partial"
        draft.touch()
        for path in (left, left.parent, left.parent.parent, draft):
            age(path, days)
    assert gone(folder, cleaned(folder)) == {"reading-3", f"workloads/{LIKE_A_DIGEST}.3.partial"}


def test_a_folder_that_is_too_large_shortens_the_days(folder: Folder) -> None:
    ages = (80, 40, 20, 10, 2, 0.5)
    by_age = {days: folder.recording(seed, days) for seed, days in enumerate(ages)}
    one = (folder.path / "workloads" / f"{by_age[80]}.npz").stat().st_size
    database()
    rest = sum(path.stat().st_size for path in folder.path.glob("switchyard.db*"))
    tight = cleaned(folder, Policy(90, rest + 3.5 * one), remove=False)
    assert tight.days == 11 and len(tight.going) == 3
    least = cleaned(folder, Policy(90, 0))
    assert least.days == 1 and folder.names() == {f"workloads/{by_age[0.5]}.npz"}


def test_what_is_used_at_the_last_moment_stays(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person saves a recording again while it is about to be removed, and opens an old session."""
    digest = folder.recording(0, OLD)
    folder.session("an-old-session", OLD, workloads={digest: "x"})
    other = folder.recording(1, OLD)
    remove, looked = retention._remove, []

    def someone_comes_first(going: retention.Going) -> bool:
        looked.append(going.path.name)
        if going.path.stem == "an-old-session":
            assert store.load_session("an-old-session")
        if going.path.stem == other:
            folder.recording(1, -1 / 24)
        return remove(going)

    monkeypatch.setattr(retention, "_remove", someone_comes_first)
    assert cleaned(folder).going == () and looked == ["an-old-session.json", f"{other}.npz"]
    assert store.load_workload(digest) and store.load_workload(other) and store.load_session("an-old-session")
    # A session that is opened counts as used, and other tabs are not told each time.
    path = folder.session("an-old-session", OLD)
    assert store.load_session("an-old-session") and path.stat().st_mtime >= NOW
    written = store.session_written("an-old-session")
    assert store.load_session("an-old-session") and store.session_written("an-old-session") == written


def test_what_was_simulated_goes_when_no_page_has_shown_it_for_long(folder: Folder) -> None:
    shown, not_shown = (Migration(number, 0.0, 0.0, 0.0, 0.0) for number in (1, 2))
    names = []
    for figures in (shown, not_shown):
        before = folder.names()
        store.save_figures(figures, str(figures.copies))
        (name,) = folder.names() - before
        names.append(name)
        age(folder.path / name, OLD)
    assert {use.kind: use.files for use in use_by_kind(folder.path)}["figures"] == 2
    assert store.figures(Migration, pytest.fail, "1") == shown
    assert gone(folder, cleaned(folder)) == {names[1]}


def test_nothing_goes_when_the_team_cannot_be_asked(folder: Folder, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    db = database()
    digest = folder.recording(0, OLD)
    folder.path.rename(tmp_path / "away")  # with the database in it
    folder.path.mkdir()
    (folder.path / "switchyard.db").write_bytes(b"no database" * 100)
    (tmp_path / "away" / "workloads").rename(folder.path / "workloads")
    db.close()
    with pytest.raises(InputError, match="does not answer"):
        cleaned(folder)
    assert store.has_workload(digest)


def test_the_policy_is_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for days, room, found in (
        ("", "", Policy(90, None)),
        ("7", "", Policy(7, None)),
        ("30", "50GB", Policy(30, 50e9)),
        ("", "1.5 TB", Policy(90, 1.5e12)),
    ):
        monkeypatch.setenv(retention.DAYS, days)
        monkeypatch.setenv(retention.ROOM, room)
        assert retention.policy() == found
    for name, value in ((retention.DAYS, "0"), (retention.DAYS, "soon"), (retention.ROOM, "50"), (retention.ROOM, "x")):
        with monkeypatch.context() as patch, pytest.raises(InputError, match=f"{name} is '{value}'"):
            patch.setenv(name, value)
            retention.policy()

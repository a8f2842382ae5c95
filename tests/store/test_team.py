"""Workspaces, plans and reviews of a team: nothing said changes, concurrent writers lose nothing, and lists show it all."""

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from engine.errors import InputError
from engine.store import database, tables, team
from engine.store.database import Database, LostError
from engine.store.team_approval import Place, place_of
from engine.store.team_list import News, last_look, listed_plans, newest, news_of, note_look
from tests.cases.teams import plan_of

SUMMARY = team.Summary("two nodes", "prose", 0.5, 0.75, "Linear placement")
ANA, BEN = ("ana@example.org", "Ana"), ("Ben", "Ben")


@pytest.fixture
def room(db: Database) -> str:
    return team.add_workspace(db, "Q4", "Ana").id


@pytest.fixture
def saved(db: Database, room: str) -> team.SavedPlan:
    return team.save_plan(db, room, plan_of(), "Ana")


@pytest.fixture
def review(db: Database, saved: team.SavedPlan) -> team.Review:
    return team.open_review(db, saved.number, "Ship it?", "Ana")


def test_the_tables_are_what_the_migrations_make(db):
    with db.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []


def test_a_plan_comes_back_as_it_was_and_later_opens_see_it(db, url):
    room = team.add_workspace(db, " Capacity\n 2027 ", "Ana")
    assert room.name == "Capacity 2027"
    inputs = {"workload": {"digest": "d" * 64, "name": "späť"}}
    saved = team.save_plan(db, room.id, plan_of(), "Ana", "why <b>not</b>", inputs, {"total": 0.25})
    again = Database(url)
    assert team.load_plan(again, saved.plan) == plan_of() and team.workspaces(again) == [room]
    seen = team.find_saved(again, saved.number)
    assert seen == saved and (seen.inputs, seen.figures, seen.note) == (inputs, {"total": 0.25}, "why <b>not</b>")
    again.close()


def test_a_plan_saved_twice_stays_as_it_was_first_saved(db):
    ours, other = (team.add_workspace(db, name, "Ana").id for name in ("one", "other"))
    first = team.save_plan(db, ours, plan_of("first name"), "Ana", "first")
    assert team.save_plan(db, ours, plan_of("second name"), "Ben", "second") == first  # the name is not of the content
    elsewhere = team.save_plan(db, other, plan_of("second name"), "Ben")
    assert elsewhere.plan == first.plan and elsewhere.name == "second name"
    assert [len(listed_plans(db, room)) for room in (ours, other)] == [1, 1]


def test_plans_are_found_by_what_is_written_of_them_and_a_percent_sign_is_a_percent_sign(db, saved):
    sharp = team.save_plan(db, saved.workspace, plan_of("100% Sharp_one", 1), "Çelik", "for the\nboard", summary=SUMMARY)
    parts = ("sharp", "BOARD", "elik", sharp.plan[:9], "TWO", "pros", "%", "_", "nobody")
    numbers = {part: [saved_plan.number for saved_plan in listed_plans(db, saved.workspace, part)] for part in parts}
    assert list(numbers.values()) == [[sharp.number]] * 8 + [[]]
    assert [saved_plan.number for saved_plan in listed_plans(db, saved.workspace)] == [sharp.number, saved.number]


def test_a_review_keeps_everything_that_was_said_in_order(db, saved, review):
    assert review.state == "open" and review.saved == saved
    said = [("Ben", "too slow"), ("Ana", "<script>alert(1)</script>"), ("Ben", "fine\n\nthen")]
    for by, what in said:
        team.add_comment(db, review.id, what, by)
    states, decided = [], [("rejected", "latency"), ("reopened", ""), ("approved", "")]
    for verdict, reason in decided:
        team.decide(db, review.id, verdict, reason, "Çelik")
        states.append(team.find_review(db, review.id).state)
    assert states == ["rejected", "open", "approved"]
    seen = team.find_review(db, review.id)
    assert [(comment.by, comment.text) for comment in seen.comments] == said
    assert [(decision.verdict, decision.reason) for decision in seen.decisions] == decided
    assert {decision.by for decision in seen.decisions} == {"Çelik"}
    assert [decision.at for decision in seen.decisions] == sorted(decision.at for decision in seen.decisions)
    second = team.open_review(db, saved.number, "And now?", "Ben")
    assert [review.id for review in team.reviews_of(db, saved.number)] == [second.id, review.id]


def test_a_comment_keeps_what_it_points_to(db, review):
    places = [Place("layer", 3), Place("hops", 0), Place("gpu", 319), Place("chart", chart="load"), None]
    for place in places:
        team.add_comment(db, review.id, "there", "Ben", place)
    assert [comment.place for comment in team.find_review(db, review.id).comments] == places
    assert [place_of(str(place)) for place in places[:-1]] == places[:-1]


@pytest.mark.parametrize("text", ["", "layer", "layer:-1", "layer:03", "layer:٣", "gpu:1\n", "chart:", "chart:cat", "plan:1"])
def test_what_is_no_place_is_refused(text):
    with pytest.raises(InputError, match="is no layer, GPU or chart"):
        place_of(text)


def test_who_decides_on_what_has_changed_meanwhile_is_told(db, review):
    team.decide(db, review.id, "rejected", "too slow", "Ben", seen=0)
    with pytest.raises(InputError, match="Ben has just rejected this"):
        team.decide(db, review.id, "approved", "", "Ana", seen=0)
    team.decide(db, review.id, "approved", "", "Ana", seen=1)
    assert [decision.verdict for decision in team.find_review(db, review.id).decisions] == ["rejected", "approved"]


def test_two_who_decide_at_once_on_the_same_state_do_not_both_succeed(db, url, review):
    refusals = []

    def decide(own: Database, who: int) -> None:
        try:
            team.decide(own, review.id, "approved", "", f"judge {who}", seen=0)
        except InputError as error:
            refusals.append(str(error))

    at_once(4, url, decide)
    assert len(team.find_review(db, review.id).decisions) == 1 and len(refusals) == 3


def test_every_save_of_a_plan_is_found_and_the_pulse_beats_when_anything_is_added_but_comments(db, saved):
    elsewhere = team.add_workspace(db, "Q5", "Ben")
    beats = [team.pulse(db)]
    again = team.save_plan(db, elsewhere.id, plan_of(), "Ben")
    beats.append(team.pulse(db))
    assert team.saves_of(db, [saved.plan, "0" * 64]) == [again, saved] and team.saves_of(db, []) == []
    assert team.find_saved(db, again.number) == again
    review = team.open_review(db, again.number, "Ship it?", "Ben")
    beats.append(team.pulse(db))
    assert team.reviews_of(db, again.number) == [review] and team.reviews_of(db, saved.number) == []
    team.add_comment(db, review.id, "hm", "Ana")
    assert team.pulse(db) == beats[-1]
    team.decide(db, review.id, "approved", "", "Ana")
    beats.append(team.pulse(db))
    team.keep_plan(db, plan_of(seed=9, parent=saved.plan))
    assert team.load_plan(db, plan_of(seed=9, parent=saved.plan).id).parent == saved.plan
    team.note_run(db, "job-1", plan_of(), "testbed", "Ana", 10.0, 1.5, 1.4, {})
    beats.append(team.pulse(db))
    assert len(set(beats)) == len(beats)


def test_runs_are_kept_once(db):
    plan, other = plan_of(), plan_of(seed=1)
    team.note_run(db, "job-1", plan, "testbed", "Ana", 10.0, 1.5, 1.4, {"tokens": 3})
    team.note_run(db, "job-1", plan, "testbed", "Ana", 10.0, 9.0, 9.0, {})
    team.note_run(db, "job-2", other, "local", "Ben", 20.0, None, None, {})
    assert [run.id for run in team.runs(db)] == ["job-2", "job-1"]
    (kept,) = team.runs(db, plan.id)
    assert (kept.predicted, kept.measured, kept.report, kept.at) == (1.5, 1.4, {"tokens": 3}, 10.0)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda db, saved: team.add_workspace(db, "  ", "Ana"), "name of the workspace"),
        (lambda db, saved: team.add_workspace(db, "a\x1bb", "Ana"), "name of the workspace"),
        (lambda db, saved: team.add_workspace(db, "x" * 121, "Ana"), "1 to 120"),
        (lambda db, saved: team.add_workspace(db, "x", ""), "name of you"),
        (lambda db, saved: team.save_plan(db, "nowhere", plan_of(), "Ana"), "workspace is not in the database"),
        (lambda db, saved: team.load_plan(db, "0" * 64), "no saved plan"),
        (lambda db, saved: team.find_saved(db, saved.number + 7), "saved plan is not"),
        (lambda db, saved: team.save_plan(db, saved.workspace, plan_of("a\x1bb", 9), "Ana"), "name of the plan"),
        (lambda db, saved: team.find_review(db, "x'; drop table review; --"), "no review"),
        (lambda db, saved: team.open_review(db, saved.number + 7, "why", "Ana"), "saved plan is not"),
        (lambda db, saved: team.open_review(db, saved.number, " \n", "Ana"), "question is empty"),
        (lambda db, saved: team.add_comment(db, "nowhere", "x", "Ana"), "review is not"),
        (lambda db, saved: team.add_comment(db, "nowhere", "x\x00y", "Ana"), "NUL"),
        (lambda db, saved: team.add_comment(db, "nowhere", "x" * 20_001, "Ana"), "20,001 characters"),
        (lambda db, saved: team.decide(db, "nowhere", "rejected", "", "Ana"), "give a reason before rejecting"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_line_and_leaves_nothing(db, saved, do, says):
    with pytest.raises(InputError, match=says) as refused:
        do(db, saved)
    assert "\n" not in str(refused.value)
    assert len(team.workspaces(db)) == 1 and team.runs(db) == [] and team.reviews_of(db, saved.number) == []
    assert [saved_plan.number for saved_plan in listed_plans(db, saved.workspace)] == [saved.number]


def at_once(count: int, url: str, work: Callable[[Database, int], None]) -> None:
    """Do work(…, 0), work(…, 1) … side by side, each with a database of its own, and raise their errors."""

    def do(who: int) -> None:
        own = Database(url)
        work(own, who)
        own.close()

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(do, range(count)))


def test_four_who_write_at_once_lose_nothing(db, url, saved, review):
    def write_much(own: Database, who: int) -> None:
        for index in range(12):
            team.save_plan(own, saved.workspace, plan_of(f"{who}", 1 + 1000 * who + index), f"writer {who}")
            team.add_comment(own, review.id, f"{who} {index}", f"writer {who}")

    at_once(4, url, write_much)
    assert len(listed_plans(db, saved.workspace)) == 1 + 48
    texts = [comment.text for comment in team.find_review(db, review.id).comments]
    assert len(texts) == 48
    for who in range(4):  # of each in the order in which they said it
        assert [said for said in texts if said.startswith(f"{who} ")] == [f"{who} {index}" for index in range(12)]


def test_many_who_open_a_new_database_at_once_all_find_it_made(url):
    at_once(5, url, lambda own, _: None)
    db = Database(url)
    assert team.workspaces(db) == []
    db.close()


def test_a_transaction_that_fails_leaves_nothing_and_a_database_of_a_newer_version_is_left_alone(db, url):
    with pytest.raises(RuntimeError), db.writing() as connection:
        connection.execute(text("insert into workspace (id, name, by, at) values ('a', 'a', 'a', 1)"))
        raise RuntimeError
    assert team.workspaces(db) == []
    with db.writing() as connection:
        connection.execute(text("update alembic_version set version_num = '9999'"))
    with pytest.raises(InputError, match="newer Switchyard"):
        Database(url)


def test_the_data_folder_has_the_database_and_one_writer_does_not_block_readers(own_data_folder, monkeypatch):
    monkeypatch.delenv("DATABASE_URL", raising=False)
    db = database.database()
    assert db is database.database() and (own_data_folder / "switchyard.db").is_file()
    team.add_workspace(db, "seen", "Ana")
    with db.writing() as connection:
        connection.execute(text("insert into workspace (id, name, by, at) values ('a', 'unseen', 'a', 1)"))
        assert [workspace.name for workspace in team.workspaces(db)] == ["seen"]
    assert sqlite3.connect(own_data_folder / "switchyard.db").execute("pragma journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("mysql://root@localhost/x", "SQLite or PostgreSQL"),
        ("nonsense", "not the address"),
        ("postgresql://me:hunter2@127.0.0.1:1/x", "does not answer"),
        ("sqlite:////nowhere/at/all.db", "does not answer"),
    ],
)
def test_an_address_that_leads_nowhere(address, says, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", address)
    with pytest.raises(InputError, match=says) as refused:
        database.database()
    assert "hunter2" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path):
    db = Database(f"sqlite:///{tmp_path / 'small.db'}")
    room = team.add_workspace(db, "small", "Ana").id
    with db.reading() as connection:  # of the only connection: as a disk with room for a few more pages would do
        connection.exec_driver_sql("pragma max_page_count=30")
    with pytest.raises(InputError, match="full"):
        for seed in range(200):
            team.save_plan(db, room, plan_of(seed=seed), "Ana", "x" * 5000)
    assert len(listed_plans(db, room)) > 0
    db.close()


@pytest.mark.everything
def test_a_connection_that_is_cut_off_is_said_in_a_line_and_the_next_one_works(postgres: str) -> None:
    db, other = Database(postgres), Database(postgres)
    with pytest.raises(LostError, match="does not answer") as refused, db.reading() as connection:
        process = connection.scalar(text("select pg_backend_pid()"))
        with other.writing() as killer:
            killer.execute(text("select pg_terminate_backend(:process, 5000)"), {"process": process})
        connection.scalar(text("select 1"))
    assert "\n" not in str(refused.value) and team.workspaces(db) == []
    db.close()
    other.close()


def test_a_plan_is_listed_with_its_summary_and_the_state_of_its_newest_review(db, room):
    first = team.save_plan(db, room, plan_of("first"), "Ana", "why", {"workload": "w"}, {}, SUMMARY)
    second = team.save_plan(db, room, plan_of("second", 1), "Ben")
    old, new = (team.open_review(db, first.number, question, "Ana").id for question in ("then?", "now?"))
    team.decide(db, old, "rejected", "no", "Ben")
    team.add_comment(db, old, "hm", "Ben")
    for verdict in ("approved", "reopened", "approved"):
        team.decide(db, new, verdict, "", "Ben")
    elsewhere = team.save_plan(db, team.add_workspace(db, "other", "Ana").id, plan_of(), "Ana")
    team.add_comment(db, team.open_review(db, elsewhere.number, "there?", "Ana").id, "there", "Ben")
    listed = {plan.name: plan for plan in listed_plans(db, room)}
    assert list(listed) == ["second", "first"]
    assert listed["first"].summary == SUMMARY and listed["first"].summary.gain == 1.5
    assert (listed["first"].review, listed["first"].state, listed["first"].comments) == (new, "approved", 0)
    assert (listed["second"].summary, listed["second"].review, listed["second"].state) == (team.UNKNOWN, None, None)
    assert listed["second"].summary.gain is None and listed["second"].number == second.number
    team.decide(db, new, "reopened", "", "Ben")
    team.add_comment(db, new, "hm", "Ben")
    assert [(plan.state, plan.comments) for plan in listed_plans(db, room, "first")] == [("open", 1)]


def test_a_list_takes_as_many_queries_as_for_one_plan_and_reads_nothing_large(db, room):
    queries: list[str] = []
    sa.event.listen(db._engine, "before_cursor_execute", lambda *about: queries.append(about[2]))
    asked = []
    for seed in range(5):
        saved = team.save_plan(db, room, plan_of(seed=seed), "Ana", summary=SUMMARY)
        review = team.open_review(db, saved.number, "?", "Ana").id
        for comment in ("a", "b"):
            team.add_comment(db, review, comment, "Ben")
        queries.clear()
        assert len(listed_plans(db, room)) == 1 + seed
        asked.append(len(queries))
    assert len(set(asked)) == 1
    assert any("saved_plan.note" in query for query in queries)
    assert not any(name in query for query in queries for name in (".inputs", ".figures", ".body"))


def test_plans_of_the_first_version_are_summed_up_from_what_was_kept_with_them(url):
    db = Database(url, "0001")
    inputs = {"workload": "d" * 64, "names": {"d" * 64: "prose"}, "cluster": {"name": "two nodes"}}
    figures = {"metrics": {"total": 0.25}}
    with db.writing() as connection:
        metadata = sa.MetaData()
        metadata.reflect(connection)
        who = {"by": "Ana", "at": 1.0}
        insert = {name: sa.insert(metadata.tables[name]) for name in ("workspace", "plan", "saved_plan")}
        connection.execute(insert["workspace"].values(id="w", name="w", **who))
        for number, (kept, said) in enumerate([(inputs, figures), ({}, {})]):
            plan = plan_of(seed=number)
            connection.execute(insert["plan"].values(id=plan.id, body=plan.to_json()))
            row = {"workspace": "w", "plan": plan.id, "name": "old", "note": "", "inputs": kept, "figures": said}
            connection.execute(insert["saved_plan"].values(**row, **who, number=1 + number))
    db.close()
    db = Database(url)
    listed = listed_plans(db, "w")
    assert [plan.summary for plan in listed] == [team.UNKNOWN, team.Summary("two nodes", "prose", 0.25)]
    assert team.find_saved(db, 1).inputs == inputs and listed[1].summary.gain is None
    db.close()


def news_for(db, review: team.Review, reader: tuple[str, str]) -> News:
    (listed,) = listed_plans(db, review.saved.workspace, reader=reader)
    now = team.find_review(db, review.id)
    assert listed.news == news_of(now, reader[1], last_look(db, reader[0], review.id))
    return listed.news


def look(db, review: team.Review, reader: tuple[str, str]) -> None:
    note_look(db, reader[0], review.id, newest(team.find_review(db, review.id)))


def test_what_others_add_is_new_until_one_has_looked(db, review):
    assert news_for(db, review, ANA) == News() and news_for(db, review, BEN) == News(unseen=True)
    look(db, review, ANA)
    look(db, review, BEN)
    assert not news_for(db, review, ANA) and not news_for(db, review, BEN)
    for comment in ("a", "b"):
        team.add_comment(db, review.id, comment, "Ben")
    team.decide(db, review.id, "rejected", "no", "Ana")
    team.note_thresholds(db, review.saved.plan, {"gain": 0.05}, {"gain": 0.15}, "Ben")
    assert news_for(db, review, ANA) == News(comments=2, thresholds=1)
    assert news_for(db, review, BEN) == News(decisions=1)
    look(db, review, ANA)
    assert not news_for(db, review, ANA) and news_for(db, review, BEN) == News(decisions=1)
    assert listed_plans(db, review.saved.workspace)[0].news == News()


def test_thresholds_are_kept_with_every_review_of_the_plan(db, review):
    elsewhere = team.save_plan(db, team.add_workspace(db, "Q5", "Ben").id, plan_of(), "Ben")
    other = team.save_plan(db, review.saved.workspace, plan_of(seed=1), "Ben")
    reviews = [review, *(team.open_review(db, saved.number, "?", "Ben") for saved in (elsewhere, other))]
    beat = team.pulse(db)
    team.note_thresholds(db, review.saved.plan, {"gain": 0.05}, {"gain": 0.15}, "Ben")
    changes = [team.find_review(db, review.id).thresholds for review in reviews]
    assert [len(change) for change in changes] == [1, 1, 0] and team.pulse(db) != beat
    assert (changes[0][0].before, changes[0][0].after, changes[0][0].by) == ({"gain": 0.05}, {"gain": 0.15}, "Ben")

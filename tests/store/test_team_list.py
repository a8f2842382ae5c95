"""The list of a workspace's plans: what each gains, how its newest review stands, at the price of a list."""

import time

import pytest
import sqlalchemy as sa

from engine.store import team
from engine.store.database import Database
from engine.store.team_list import listed_plans
from tests.store.test_team import plan_of

SUMMARY = team.Summary("two nodes", "prose", 0.5, 0.75, "Linear placement")


@pytest.fixture
def room(db: Database) -> str:
    return team.add_workspace(db, "Q4", "Ana").id


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


def test_plans_are_found_by_cluster_and_recording_too(db, room):
    saved = team.save_plan(db, room, plan_of(), "Ana", summary=SUMMARY)
    team.save_plan(db, room, plan_of(seed=1), "Ana")
    for part in ("TWO", "pros"):
        assert [plan.number for plan in listed_plans(db, room, part)] == [saved.number]


@pytest.mark.clock
def test_hundreds_of_plans_of_a_large_model_are_listed_at_once(db, room):
    inputs = {"in_use": {"experts_of_gpu": [[list(range(64))] * 8] * 61}}
    for seed in range(300):
        saved = team.save_plan(db, room, plan_of(seed=seed), "Ana", "", inputs, {}, SUMMARY)
        review = team.open_review(db, saved.number, "?", "Ana").id
        for text in ("a", "b"):
            team.add_comment(db, review, text, "Ben")
    begun = time.perf_counter()
    assert len(listed_plans(db, room)) == 300
    assert time.perf_counter() - begun < 0.25


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

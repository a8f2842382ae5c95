"""What is new to a person is what others added since they looked, whoever they are and however often they look."""

import pytest

from engine.store import team
from engine.store.team_list import News, last_look, listed_plans, newest, news_of, note_look
from tests.store.test_team import plan_of

ANA, BEN = ("ana@example.org", "Ana"), ("Ben", "Ben")


@pytest.fixture
def review(db) -> team.Review:
    saved = team.save_plan(db, team.add_workspace(db, "Q4", "Ana").id, plan_of(), "Ana")
    return team.open_review(db, saved.number, "Ship it?", "Ana")


def news_for(db, review: team.Review, reader: tuple[str, str]) -> News:
    """As the list has it, which has to be what the review itself says."""
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
    for text in ("a", "b"):
        team.add_comment(db, review.id, text, "Ben")
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

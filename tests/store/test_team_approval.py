"""Approval of one's own plans: told by logins, and refused by the store if the operator forbids it."""

import pytest

from engine.errors import InputError
from engine.store import team
from engine.store.team_approval import SETTING, Signature, whose
from engine.store.team_list import listed_plans
from tests.cases.teams import plan_of

ANA, BEN, CARA = "ana@example.org", "ben@example.org", "cara@example.org"


@pytest.fixture(autouse=True)
def no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)


def review_of(db, saver: str | None, asker: str | None) -> team.Review:
    room = team.add_workspace(db, "Q4", "Ana").id
    saved = team.save_plan(db, room, plan_of(), "A name", login=saver)
    return team.open_review(db, saved.number, "Ship it?", "A name", asker)


@pytest.mark.parametrize(
    ("behind", "approver", "approval"),
    [
        ((ANA, ANA), BEN, "by somebody else"),
        ((ANA, BEN), CARA, "by somebody else"),
        ((ANA, ANA), ANA, "self-approved"),
        ((ANA, BEN), BEN, "self-approved"),
        ((ANA, BEN), ANA, "self-approved"),
        ((None, ANA), ANA, "self-approved"),
        ((ANA, ANA), None, "unverified: no login"),
        ((None, ANA), BEN, "unverified: no login"),
        ((ANA, None), BEN, "unverified: no login"),
        ((None, None), None, "unverified: no login"),
    ],
)
def test_approvals_are_told_by_logins(db, behind, approver, approval, monkeypatch):
    """And nothing but somebody else's is kept where it is forbidden."""
    signed = [Signature("A name", login) for login in behind]
    assert whose("approved", signed, Signature("Another name", approver)) == approval
    review = review_of(db, *behind)
    team.decide(db, review.id, "approved", "", "Another name", login=approver)
    (listed,) = listed_plans(db, review.saved.workspace)
    assert listed.whose == approval
    decided = team.find_review(db, review.id)
    assert (decided.behind, decided.decisions[0].login, decided.whose_last) == (behind, approver, approval)
    team.decide(db, review.id, "reopened", "", "Another name", login=approver)
    assert listed_plans(db, review.saved.workspace)[0].whose is None
    monkeypatch.setenv(SETTING, "forbidden")
    if approval == "by somebody else":
        team.decide(db, review.id, "approved", "", "Another name", login=approver)
        assert team.find_review(db, review.id).state == "approved"
        return
    with pytest.raises(InputError) as refused:
        team.decide(db, review.id, "approved", "", "Another name", login=approver)
    assert "\n" not in str(refused.value) and team.find_review(db, review.id).state == "open"
    team.decide(db, review.id, "rejected", "no", "Another name", login=approver)
    assert listed_plans(db, review.saved.workspace)[0].whose == approval.replace("approved", "rejected")


@pytest.mark.parametrize(
    ("behind", "decider", "typed"),
    [
        ([("Ana", None), ("Ana", None)], ("Ana", None), True),
        ([("Ana", None), ("Ben", None)], ("ben", None), True),
        ([("Ben", BEN), ("Ana", None)], ("Ana", None), True),
        ([("Ana", None), ("Ana", None)], ("Ben", None), False),
        ([("Ana", ANA), ("Ana", ANA)], ("Ana", None), False),  # somebody typed a name that a login vouches for
        ([("Ana", None), ("Ana", None)], ("Ana", ANA), False),
    ],
)
@pytest.mark.parametrize("verdict", ["approved", "rejected"])
def test_who_types_the_name_of_who_asked_is_marked(behind, decider, typed, verdict):
    marked = whose(verdict, [Signature(*writer) for writer in behind], Signature(*decider))
    assert marked == (f"self-{verdict} (name typed, no login)" if typed else "unverified: no login")


@pytest.mark.parametrize(
    ("setting", "approver", "behind", "says"),
    [
        ("forbidden", None, (ANA, ANA), "log in first"),
        ("forbidden", ANA, (ANA, BEN), "ask somebody else"),
        ("forbidden", BEN, (ANA, None), "in another workspace"),
        ("no", BEN, (ANA, ANA), "give allowed or forbidden: until then nobody may approve"),
    ],
)
def test_a_refusal_says_what_to_do(db, setting, approver, behind, says, monkeypatch):
    review = review_of(db, *behind)
    monkeypatch.setenv(SETTING, setting)
    with pytest.raises(InputError, match=says):
        team.decide(db, review.id, "approved", "", "A name", login=approver)
    monkeypatch.setenv(SETTING, "allowed")
    team.decide(db, review.id, "approved", "", "A name", login=approver)

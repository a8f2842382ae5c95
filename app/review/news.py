"""News of a review: the entries of others since a person last looked, at its top, until they act, dismiss it or come again."""

import time
from contextlib import suppress
from dataclasses import replace

import streamlit as st

from app import failing, state, widgets
from app.review import store
from app.tables import plain
from app.visitor import people
from engine.errors import InputError
from engine.store import team, team_list
from engine.store.team import Decision, Review
from engine.store.team_list import News

EVERY = 5
"""Seconds between two looks for the entries of others."""
TAKEN_IN = 10.0
"""Seconds for which new entries have to be shown to the person who opens a review to count as seen."""
RECENT = 24 * 3600.0
"""Seconds for which an entry's time is so many minutes or hours ago; later it is a date."""


def in_words(news: News) -> str:
    """`2 comments, 1 decision, thresholds`; `not seen yet` of a review that a person never saw."""
    if news.unseen:
        return "not seen yet"
    counts = ((news.comments, "comment"), (news.decisions, "decision"))
    parts = [f"{number} {noun}{'' if number == 1 else 's'}" for number, noun in counts if number]
    return ", ".join([*parts, *(["thresholds"] if news.thresholds else [])])


def show(review: Review | None, anchor: str) -> None:
    """Name the new entries, also those that come while the page stays open: a page that redraws itself was not looked at.

    anchor: place of the discussion on the page
    """
    person = people.reader()
    if review is None or person is None:
        return
    who, name = person

    @failing.fragment(run_every=EVERY)
    def line() -> None:
        try:
            now = team.find_review(store.db(), review.id)
        except InputError:  # the discussion says so
            return
        visit = _visit(who, name, now)
        if not (news := team_list.news_of(now, name, visit.before)):
            return
        # Every decision with its person, as decisions overrule each other.
        decisions = [_decided(entry) for entry in now.decisions if entry.at > visit.before and entry.by != name]
        told = " · ".join(filter(None, [*decisions, in_words(replace(news, decisions=0))]))
        with st.container(horizontal=True, vertical_alignment="center", gap="xsmall", key="news"):
            st.markdown(f":material/fiber_new: **New since you last looked**: [{told}](#{anchor})", width="content")
            st.button("Dismiss", icon=":material/done:", type="tertiary", on_click=saw, args=(review.id,))

    line()


def saw(review: str) -> None:
    """Count all entries that were drawn as seen by a person who acts on a review or dismisses its news."""
    person = people.reader()
    visit = state.visit.visit_to(person[0], review) if person else None
    if visit is not None:
        state.visit.review_visit = _noted(replace(visit, before=visit.shown, opened=visit.shown))


def _visit(who: str, name: str, now: Review) -> state.ReviewVisit:
    """The visit to a review as it is now drawn.

    Entries from before the visit count as seen once they were shown for a while; later ones do not, as nobody may sit at the
    page.
    """
    newest, visit = team_list.newest(now), state.visit.visit_to(who, now.id)
    if visit is None:
        looked = team_list.last_look(store.db(), who, now.id)
        visit = state.ReviewVisit(who, now.id, newest if looked is None else looked, newest, newest, time.time(), False)
    visit = replace(visit, shown=newest)
    if not visit.noted:
        nothing_new = not team_list.news_of(now, name, visit.before)
        if nothing_new or time.time() - visit.since >= TAKEN_IN:
            visit = _noted(visit)
    state.visit.review_visit = visit
    return visit


def _noted(visit: state.ReviewVisit) -> state.ReviewVisit:
    """Keep that all earlier entries have been seen. If that cannot be kept they stay new, which needs no message of its own."""
    with suppress(InputError):
        team_list.note_look(store.db(), visit.who, visit.review, visit.opened)
        return replace(visit, noted=True)
    return visit


def _decided(decision: Decision) -> str:
    """`Ana approved it 2 min ago`"""
    age = time.time() - decision.at
    if age < 60:
        when = "just now"
    elif age < RECENT:
        when = f"{age / 60:.0f} min ago" if age < 3600 else f"{age / 3600:.0f} h ago"
    else:
        when = f"on {widgets.describe_time(decision.at)[:10]}"
    return f"{plain(decision.by)} {decision.verdict} it {when}"

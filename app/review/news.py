"""What changed since a person last looked at a review: in words, at its top, and until when they have seen it."""

from contextlib import suppress

import streamlit as st

from app import state, widgets
from app.review import store
from app.visitor import people
from engine.errors import InputError
from engine.store import team_looks
from engine.store.team import Review
from engine.store.team_looks import News


def in_words(news: News) -> str:
    """`2 comments, 1 decision, thresholds`; of a review that a person never saw `not seen yet`."""
    if news.unseen:
        return "not seen yet"
    counts = (_count(news.comments, "comment"), _count(news.decisions, "decision"))
    return ", ".join(part for part in (*counts, "thresholds" if news.thresholds else "") if part)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}" if number else ""


def show(review: Review | None, anchor: str) -> None:
    """Say what is new since the last visit, for as long as this one lasts. anchor: where on the page it is."""
    person = people.reader()
    if review is None or person is None:
        return
    who, name = person
    if state.visit(who, review.id) is None:
        state.keep_visit(who, review.id, team_looks.last_look(store.db(), who, review.id), 0.0)
    note(review)
    before, _ = state.visit(who, review.id)
    news = team_looks.news_of(review, name, before)
    if news and not news.unseen:
        since = widgets.describe_time(before)
        st.markdown(
            f":material/fiber_new: **New since you last looked**: [{in_words(news)}](#{anchor})",
            width="content",
            help=f"You looked on {since}.",
        )


def note(review: Review) -> None:
    """Keep that this person has seen all of a review as it is now. Where that cannot be kept it stays new to them, which needs
    no words of its own."""
    person, newest = people.reader(), team_looks.newest(review)
    visit = state.visit(person[0], review.id) if person else None
    if visit is None or visit[1] >= newest:
        return
    with suppress(InputError):
        team_looks.note_look(store.db(), person[0], review.id, newest)
        state.keep_visit(person[0], review.id, visit[0], newest)

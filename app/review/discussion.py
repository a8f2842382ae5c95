"""The discussion of a plan: comments and decisions, oldest first, and the forms to add to them."""

import time
from collections.abc import Callable
from functools import partial

import streamlit as st

from app import components, failing, state, widgets
from app.review import news, place, store, thresholds
from app.review.plan_list import ICONS, NO_REVIEW, QUESTION, STATES, WHOSE, WHOSE_ICONS, attempt, typed
from app.review.store import link_to
from app.tables import plain, sentence
from app.visitor import people
from engine.errors import InputError
from engine.problem import Problem
from engine.store import team
from engine.store.team import Comment, Decision, Review, SavedPlan, ThresholdChange, Verdict
from engine.store.team_approval import Place, why_not

EVERY = 3
"""Seconds between two looks for the entries of others."""
ANCHOR = "discussion"
"""Anchor of its heading in the page's address."""
ROOM = 74
"""Pixels of a field for a few lines, which a person can pull larger."""
DID = {"approved": "**approved** it", "rejected": "**rejected** it", "reopened": "**reopened** it"}
DID_ICON = {
    "approved": ":green[:material/check_circle:]",
    "rejected": ":red[:material/cancel:]",
    "reopened": ":blue[:material/pending:]",
}
BUTTONS = {
    "approved": ("Approve", ":material/check_circle:"),
    "rejected": ("Reject", ":material/cancel:"),
    "reopened": ("Reopen", ":material/undo:"),
}


def badge(review: Review | None) -> None:
    """The last decision, and a mark if it is somebody else's."""
    now = NO_REVIEW if review is None else review.state
    st.badge(now, icon=ICONS[now], color=STATES[now])
    if whose := review and review.whose_last:
        st.badge(whose, icon=WHOSE_ICONS[WHOSE[whose]], color=WHOSE[whose])


def standing(saved: SavedPlan, review: Review | None) -> None:
    """The last decision in few words, with its person and, on hover, its time: who decided, else who asked, else who saved the
    plan.

    A decision that it overruled is named too.
    """
    now = NO_REVIEW if review is None else review.state
    whose = review and review.whose_last
    did, last = ("asked", review) if review is not None else ("saved", saved)
    if review is not None and review.decisions:
        last = review.decisions[-1]
        did = last.verdict
    if whose is None or WHOSE[whose] == "green":
        st.badge(now, icon=ICONS[now], color=STATES[now])
    else:
        label = whose.partition(" (")[0] if whose.startswith("self-") else f"{now}, unverified"
        # A rejection is always red; an approval counts for more if somebody else gave it.
        colour = STATES[now] if now == "rejected" else WHOSE[whose]
        st.badge(label, icon=WHOSE_ICONS[WHOSE[whose]], color=colour, help=whose)
    before = review and review.overruled
    against = f"; {plain(before.by)} had {before.verdict} it" if before else ""
    # The time only on hover: with it the line takes two rows of a window of 1024.
    st.caption(f"{did} by {plain(last.by)}{against}", width="content", help=widgets.describe_time(last.at))


def way(review: Review | None) -> None:
    """A link down to the discussion and its forms, which names the next thing to do there."""
    what = "Ask for a decision" if review is None else "Decide" if review.state == "open" else "Discuss"
    st.markdown(f":material/forum: [{what}](#{ANCHOR})", width="content")


def show(saved: SavedPlan, review: Review | None, problem: Problem | None) -> None:
    """Show the discussion with its forms; without a review, the form that begins one.

    problem: the one that the plan was saved for; None if its inputs are not here
    """
    if state.visit.take("return_to_discussion"):
        components.scroll_here_once(time.time_ns() // 1_000_000)
    st.subheader("Discussion", anchor=ANCHOR)
    if review is None:
        st.caption("This plan is saved; nobody has asked for a decision.")
        refused = people.why_not("plan")
        with st.form(f"ask-{saved.number}"):
            question = typed(st.text_input, "Question to the team", f"ask-{saved.number}", QUESTION)
            submitted = st.form_submit_button(
                "Ask for a decision", icon=":material/how_to_vote:", disabled=bool(refused), help=refused
            )
        if submitted:
            attempt(lambda: store.ask(saved, question))
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        badge(review)
        st.text(review.question)
        st.caption(f"asked by {plain(review.by)}, {widgets.describe_time(review.at)}", width="content")
    _history(review, problem)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        _comment(review, problem)
    with right:
        _decide(review)


def merged(review: Review) -> list[Comment | Decision | ThresholdChange]:
    """All entries of a review, oldest first."""
    return sorted((*review.comments, *review.decisions, *review.thresholds), key=lambda entry: entry.at)


def _history(review: Review, problem: Problem | None) -> None:
    @failing.fragment(run_every=EVERY)
    def newest() -> None:
        try:
            now = team.find_review(store.db(), review.id)
        except InputError as error:
            st.error(sentence(str(error)), icon=":material/error:")
            return
        if len(now.decisions) != len(review.decisions) or len(now.thresholds) != len(review.thresholds):
            st.rerun()  # other parts of the page show the state and the verdict too
        if not merged(now):
            return
        with st.container(border=True):
            for number, entry in enumerate(merged(now)):
                _entry(entry, now, problem, f"{now.id}-{number}")

    newest()


def _entry(entry: Comment | Decision | ThresholdChange, review: Review, problem: Problem | None, key: str) -> None:
    left, right = st.columns([2, 7], gap="small")
    with left:
        st.markdown(f"**{plain(entry.by)}**  \n:small[{widgets.describe_time(entry.at)}]")
    with right:
        if isinstance(entry, Comment):
            st.text(entry.text)
            if entry.place is not None:
                _way_to(entry.place, review, problem, key)
            return
        if isinstance(entry, ThresholdChange):
            st.markdown(f":material/tune: changed the **thresholds**: {thresholds.changes(entry.before, entry.after)}")
            return
        whose = review.whose(entry)
        st.markdown(f"{DID_ICON[entry.verdict]} {DID[entry.verdict]}" + (f" · {whose}" if whose else ""))
        if entry.reason:
            st.text(entry.reason)


def _way_to(where: Place, review: Review, problem: Problem | None, key: str) -> None:
    """The place that a comment points to: a way there, and a link that leads anybody there."""
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button(plain(place.title(where, problem)), icon=place.ICON, key=f"place-{key}"):
            if fault := place.go(review.saved, where):
                st.error(plain(fault), icon=":material/error:")
            else:
                st.rerun()
        with st.popover("Link", icon=":material/link:", key=f"place-link-{key}"):
            st.code(link_to(review.saved, review.id, where), language=None, wrap_lines=True)


def _comment(review: Review, problem: Problem | None) -> None:
    refused, form = people.why_not("plan"), f"comment-{review.id}"
    about = f"{form}-about"

    def send(text: str) -> None:
        store.comment(review, text, st.session_state.get(about))
        news.saw(review.id)
        st.session_state[about] = None

    with st.form(form):
        placeholder = "Seen by everybody who opens this plan"
        typed(st.text_area, "Your comment", form, placeholder=placeholder, height=ROOM, max_chars=team.LONGEST_TEXT)
        with st.container(horizontal=True, vertical_alignment="bottom"):
            if possible := place.places(problem):
                st.selectbox(
                    "About",
                    possible,
                    None,
                    format_func=lambda where: place.title(where, problem),
                    key=about,
                    placeholder="Whole plan (or a layer, GPU or chart)",
                    label_visibility="collapsed",
                )
            st.form_submit_button(
                "Comment", icon=":material/send:", disabled=bool(refused), help=refused, on_click=_send, args=(form, send)
            )
        _say_refusal(form)


def _decide(review: Review) -> None:
    form, may_not = f"decide-{review.id}", people.why_not("plan")

    def send(verdict: Verdict, reason: str) -> None:
        store.decide(review, verdict, reason)
        news.saw(review.id)

    with st.form(form):
        why = "needed to reject" if review.state == "open" else None
        typed(st.text_area, "Reason", form, placeholder=why, height=ROOM, max_chars=team.LONGEST_TEXT)
        with st.container(horizontal=True):
            for verdict in ("approved", "rejected") if review.state == "open" else ("reopened",):
                label, icon = BUTTONS[verdict]
                refused = may_not
                if verdict == "approved" and not refused and (reason := why_not(review.behind, people.login())):
                    refused = f"{reason[0].upper()}{reason[1:]}."
                st.form_submit_button(
                    label,
                    icon=icon,
                    disabled=bool(refused),
                    help=refused,
                    on_click=_send,
                    type="primary" if verdict == "approved" else "secondary",
                    args=(form, partial(send, verdict)),
                )
        _say_refusal(form)


def _send(form: str, write: Callable[[str], None]) -> None:
    """Write the text of a form's field, as the page was when it was sent.

    By now somebody else may have changed the page so that the button is gone. A text that could not be written stays in the
    field.
    """
    field = f"{state.TYPED}{form}"
    try:
        write(st.session_state[field])
    except InputError as error:
        state.visit.refused = (form, str(error))
    else:
        st.session_state[field] = ""


def _say_refusal(form: str) -> None:
    if reason := state.visit.take_refusal(form):
        st.error(sentence(reason), icon=":material/error:")

"""The team's workspaces, the form that saves the open plan in one, and which saved plan is looked at."""

from collections.abc import Callable
from typing import Any

import streamlit as st

from app import cached, failing, state
from app.review import store
from app.text import plain, sentence
from app.visitor import people
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.store import team, team_corrections
from engine.store.team import Review, SavedPlan
from engine.workload import digest_of

QUESTION = "Shall we run this?"
VIEW = "review-view"
"""The key of the choice between the plans and a comparison of two."""
EVERY = 4
"""Seconds after which what others did is looked for."""


def workspace_names() -> dict[str, str]:
    """All workspaces by id."""
    return {workspace.id: workspace.name for workspace in team.workspaces(store.db())}


def chosen_workspace(names: dict[str, str]) -> str | None:
    """The one to look at; None while there is none."""
    return state.workspace() if state.workspace() in names else next(iter(names), None)


def choose_workspace(names: dict[str, str], chosen: str) -> None:
    """The choice of another workspace."""
    key = f"workspaces-{digest_of(*names, chosen)[:16]}"
    st.selectbox(
        "Workspace",
        list(names),
        list(names).index(chosen),
        format_func=names.get,
        key=key,
        width=240,
        label_visibility="collapsed",
        on_change=lambda: _switch(st.session_state[key]),
    )


def _switch(workspace: str) -> None:
    state.choose_workspace(workspace)
    state.look_at(None)


def new_workspace() -> None:
    """The button and form for another workspace."""
    refused = people.why_not("plan")
    # Another key is another popover, which is closed: so it closes once its form has been written.
    with (
        st.popover(
            "New workspace",
            icon=":material/create_new_folder:",
            disabled=bool(refused),
            help=refused,
            key=f"new-workspace-{state.written()}",
        ),
        st.form(f"workspace-{state.written()}", border=False),
    ):
        name = typed(
            st.text_input,
            "Name of the workspace",
            f"workspace-{state.written()}",
            max_chars=120,
            placeholder="Cluster for autumn",
        )
        if st.form_submit_button("Create", icon=":material/check:"):
            attempt(lambda: store.add_workspace(name))


def save_open_plan(workspace: str) -> None:
    """The button that saves the open plan, disabled with the reason where it cannot."""
    plan = cached.open_plan()
    if plan is not None and (there := store.saved_in(workspace, plan)) is not None:
        st.button(
            "Saved here already",
            icon=":material/bookmark_added:",
            disabled=True,
            help=f"by {plain(there.by)}, as {plain(there.name)}",
        )
        return
    problem, reason = _open_problem(plan)
    reason = people.why_not("plan") or reason
    key = f"{workspace}-{plan.id if plan else ''}-{state.written()}"
    with st.popover(
        "Save the open plan",
        icon=":material/bookmark_add:",
        type="primary",
        disabled=bool(reason),
        help=reason,
        key=f"save-{key}",
    ):
        if reason:
            return
        if says := other_inputs(plan, problem):
            st.warning(plain(says), icon=":material/warning:")
        with st.form(f"saving-{key}", border=False):
            name = typed(st.text_input, "Name of the plan", f"{key}-name", plan.name, max_chars=120)
            note = typed(
                st.text_area,
                "Note",
                f"{key}-note",
                placeholder="What is special about it, and why now",
                height=90,
                max_chars=team.LONGEST_TEXT,
            )
            question = typed(
                st.text_input,
                "Question to the team",
                f"{key}-question",
                QUESTION,
                help="requests a decision; leave it empty to just save",
            )
            if st.form_submit_button("Save", icon=":material/check:"):
                attempt(lambda: _save(workspace, plan, problem, name, note, question))


def _save(workspace: str, plan: Plan, problem: Problem, name: str, note: str, question: str) -> None:
    store.save(workspace, plan, problem, name, note, question)
    look_at_plans()  # at what was saved


def corrections(saved: SavedPlan) -> None:
    """The form in which whoever saved a plan corrects its name and note; nothing for others."""
    if people.why_not("plan") or not team_corrections.is_saver(saved, people.who().name, people.login()):
        return
    key = f"correct-{saved.number}-{state.written()}"
    with st.popover("Correct", icon=":material/edit:", key=key), st.form(f"{key}-form", border=False):
        name = typed(st.text_input, "Name", f"{key}-name", saved.name, max_chars=120)
        note = typed(st.text_area, "Note", f"{key}-note", saved.note, height=90, max_chars=team.LONGEST_TEXT)
        st.caption("What it was stays in the discussion.")
        if st.form_submit_button("Change", icon=":material/check:"):
            attempt(lambda: store.correct(saved, name, note))


def look_at_plans() -> None:
    """Leave a comparison."""
    if state.choice(VIEW, "Plans") != "Plans":
        state.keep_choice(VIEW, "Plans")


def leave_brief(view: str = "Plans") -> None:
    """Let another view take its place, with its choice of views as it is then."""
    # A brief is shown without that choice, so that the browser would bring back what it last had there.
    state.forget_choices(VIEW)
    state.keep_choice(VIEW, view)


def other_inputs(plan: Plan, problem: Problem) -> str:
    """A sentence on what a plan was made for and what is open instead; empty where it is the same."""
    if not (made_for := cached.made_for(plan, problem)):
        return ""
    opened = [getattr(problem, role).name for role in made_for]
    before, now = ", ".join(made_for.values()), ", ".join(opened)
    return f"Made for {before}; saved and simulated on {now}, which {'are' if opened[1:] else 'is'} open."


def _open_problem(plan: Plan | None) -> tuple[Problem | None, str]:
    """What is open, or why the open plan cannot be saved with it."""
    if plan is None:
        return None, "Open a plan first."
    try:
        problem = cached.problem()
        if problem is None:
            return None, "Open a workload, a cluster and a model first."
        cached.check_plan(plan, problem)
        cached.metrics(plan, problem)
    except InputError as error:
        return None, str(error)
    return problem, ""


def typed(kind: Callable[..., str], label: str, key: str, default: str = "", **more: Any) -> str:
    """A text field whose text stays while the page cannot be drawn. kind: `st.text_input` or `st.text_area`."""
    st.session_state.setdefault(f"{state.TYPED}{key}", default)
    return kind(label, key=f"{state.TYPED}{key}", **more)


def attempt(write: Callable[[], object]) -> None:
    """Write to the team's database and draw the page again, or say why it cannot be."""
    try:
        write()
    except InputError as error:
        st.error(sentence(str(error)), icon=":material/error:")
    else:
        state.count_written()
        st.rerun()


def looked_at(workspace: str) -> tuple[SavedPlan, Review | None] | None:
    """The plan that is looked at and its review: the one that was asked for, else the newest."""
    number, review_id = state.reviewed() or (None, None)
    if number is None:
        return None
    saved = team.find_saved(store.db(), number)
    if saved.workspace != workspace:
        return None
    reviews = team.reviews_of(store.db(), number)
    newest = reviews[0] if reviews else None
    return saved, next((review for review in reviews if review.id == review_id), newest)


def watch() -> None:
    """Draw the page again when somebody saves, asks, decides or finishes a launch."""
    drawn = team.pulse(store.db())

    @failing.fragment(run_every=EVERY)
    def beat() -> None:
        try:
            now = team.pulse(store.db())
        except InputError:  # said by what needs it
            return
        if now != drawn:
            st.rerun()

    beat()

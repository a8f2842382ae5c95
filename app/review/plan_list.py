"""The saved plans of a workspace: gain, place and review of each; searched, filtered, sorted.

Also the team's workspaces, the form that saves the open plan in one, and the choice of the plan on the page.
"""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import pandas as pd
import streamlit as st

from app import cached, failing, kept, state, tables, widgets
from app.review import news, store
from app.tables import plain, sentence
from app.visitor import people
from engine import units
from engine.compare.standing import COVERS, is_loss
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.store import team, team_list
from engine.store.team import Review, SavedPlan
from engine.store.team_approval import Whose
from engine.store.team_list import ListedPlan
from engine.workload import digest_of

QUESTION = "Shall we run this?"
FIRST = "Plans"
"""Name of the workspace that the first saved plan begins."""
VIEW = "review-view"
"""Key of the choice between the plans and a comparison of two."""
EVERY = 4
"""Seconds between two looks for the entries of others."""


def workspace_names() -> dict[str, str]:
    """All workspaces by id."""
    return {workspace.id: workspace.name for workspace in team.workspaces(store.db())}


def chosen_workspace(names: dict[str, str]) -> str | None:
    """The workspace to look at; None while there is none."""
    return state.session.workspace if state.session.workspace in names else next(iter(names), None)


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
    state.update(workspace=workspace)
    state.visit.look_at(None)


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
            key=f"new-workspace-{state.visit.written}",
        ),
        st.form(f"workspace-{state.visit.written}", border=False),
    ):
        name = typed(
            st.text_input,
            "Name of the workspace",
            f"workspace-{state.visit.written}",
            max_chars=120,
            placeholder="Cluster for autumn",
        )
        if st.form_submit_button("Create", icon=":material/check:"):
            attempt(lambda: store.add_workspace(name))


def save_open_plan(workspace: str | None) -> None:
    """The button that saves the open plan, disabled with the reason if it cannot. workspace: None: there is none yet"""
    plan = cached.open_plan()
    if plan is not None and workspace is not None and (there := store.saved_in(workspace, plan)) is not None:
        help = f"by {plain(there.by)}, as {plain(there.name)}"
        st.button("Saved here already", icon=":material/bookmark_added:", disabled=True, help=help)
        return
    problem, reason = _open_problem(plan)
    reason = people.why_not("plan") or reason
    key = f"{workspace or ''}-{plan.id if plan else ''}-{state.visit.written}"
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
            placeholder = "What is special about it, and why now"
            note = typed(st.text_area, "Note", f"{key}-note", placeholder=placeholder, height=90, max_chars=team.LONGEST_TEXT)
            question = typed(
                st.text_input,
                "Question to the team",
                f"{key}-question",
                QUESTION,
                help="requests a decision; leave it empty to just save",
            )
            if st.form_submit_button("Save", icon=":material/check:"):
                attempt(lambda: _save(workspace, plan, problem, name, note, question))


def _save(workspace: str | None, plan: Plan, problem: Problem, name: str, note: str, question: str) -> None:
    if workspace is None:  # somebody may have been faster
        workspace = chosen_workspace(workspace_names()) or store.add_workspace(FIRST).id
    store.save(workspace, plan, problem, name, note, question)
    look_at_plans()  # to the saved plan


def corrections(saved: SavedPlan) -> None:
    """The form in which the person who saved a plan corrects its name and note; nothing for others."""
    if people.why_not("plan") or not team_list.is_saver(saved, people.who().name, people.login()):
        return
    key = f"correct-{saved.number}-{state.visit.written}"
    with st.popover("Correct", icon=":material/edit:", key=key), st.form(f"{key}-form", border=False):
        name = typed(st.text_input, "Name", f"{key}-name", saved.name, max_chars=120)
        note = typed(st.text_area, "Note", f"{key}-note", saved.note, height=90, max_chars=team.LONGEST_TEXT)
        st.caption("What it was stays in the discussion.")
        if st.form_submit_button("Change", icon=":material/check:"):
            attempt(lambda: store.correct(saved, name, note))


def look_at_plans() -> None:
    """Leave a comparison."""
    if state.session.choices.get(VIEW, "Plans") != "Plans":
        state.keep_choice(VIEW, "Plans")


def leave_brief(view: str = "Plans") -> None:
    """Let another view take the brief's place, with its choice of views as it is then."""
    # A brief is shown without that choice, so the browser would bring back its last value there.
    state.forget_choices(VIEW)
    state.keep_choice(VIEW, view)


def other_inputs(plan: Plan, problem: Problem) -> str:
    """A sentence on the inputs of a plan and the open ones; empty if they are the same."""
    if not (made_for := cached.made_for(plan, problem)):
        return ""
    opened = [getattr(problem, role).name for role in made_for]
    before, now = ", ".join(made_for.values()), ", ".join(opened)
    return f"Made for {before}; saved and simulated on {now}, which {'are' if opened[1:] else 'is'} open."


def _open_problem(plan: Plan | None) -> tuple[Problem | None, str]:
    """The open problem, or why the open plan cannot be saved with it."""
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
    """A text field that keeps its text while the page cannot be drawn. kind: `st.text_input` or `st.text_area`."""
    st.session_state.setdefault(f"{state.TYPED}{key}", default)
    return kind(label, key=f"{state.TYPED}{key}", **more)


def attempt(write: Callable[[], object]) -> None:
    """Write to the team's database and draw the page again, or say why that failed."""
    with failing.saying(sentence):
        write()
        state.visit.written += 1
        st.rerun()


def looked_at(workspace: str) -> tuple[SavedPlan, Review | None] | None:
    """The plan on the page and its review: the review that was asked for, else the newest."""
    number, review_id = state.visit.reviewed or (None, None)
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
        except InputError:  # the panel that needs it says so
            return
        if now != drawn:
            st.rerun()

    beat()


NO_REVIEW = "no review"
STATES = {"open": "blue", "approved": "green", "rejected": "red", NO_REVIEW: "gray"}
ICONS = {
    "open": ":material/pending:",
    "approved": ":material/check_circle:",
    "rejected": ":material/cancel:",
    NO_REVIEW: ":material/remove:",
}
WHOSE = {
    name: "green" if name == "by somebody else" else "orange" if name.startswith("self-") else "gray"
    for name in get_args(Whose)
}
WHOSE_ICONS = {"green": ":material/group:", "orange": ":material/person_alert:", "gray": ":material/no_accounts:"}
"""Icons by the colour of `WHOSE`."""


def show(workspace: str) -> None:
    """The plans with their states; a selected row is shown."""
    plans = team_list.listed_plans(store.db(), workspace, reader=people.reader())
    if not plans:
        how = "Press Save the open plan" if cached.open_plan() else "Open a plan in the sidebar, then save it"
        st.info(f"Nothing is saved here yet. {how}, at the top right.", icon=":material/info:")
        return
    _list(plans, workspace)
    st.caption("Select a row to see what the plan does, what was said about it, and to decide.")


def fold(names: dict[str, str], workspace: str) -> None:
    """The list behind a button that says how many there are, with the choice of another workspace. names: workspaces by id."""
    plans = team_list.listed_plans(store.db(), workspace, reader=people.reader())
    news = sum(bool(plan.news) for plan in plans)
    # Another key is another popover, which is closed: so it closes once another plan is on the page.
    with (
        st.popover(
            f"Plans · {len(plans)}" + (f" · {news} new" if news else ""), icon=":material/list:", key=f"plans-{_looked_at()}"
        ),
        st.container(width=tables.IN_POPOVER),
    ):
        choose_workspace(names, workspace)
        _list(plans, workspace)
        st.button("Show the list alone", icon=":material/list:", on_click=_leave)


def _looked_at() -> int | None:
    """The number of the saved plan on the page."""
    return (state.visit.reviewed or (None, None))[0]


def _leave() -> None:
    leave_brief()
    state.visit.look_at(None)


def _list(plans: list[ListedPlan], workspace: str) -> None:
    if listed := _filtered(plans, workspace):
        _table(listed)
    else:
        st.caption("No saved plan fits this search and these filters.")


def _filtered(plans: list[ListedPlan], workspace: str) -> list[ListedPlan]:
    """The plans that a person wants to see; a property that all plans share is not asked for."""
    with st.container(horizontal=True, vertical_alignment="center"):
        text = kept.text_input(
            "Search",
            key="review-search",
            placeholder="Name, note, author or ID",
            width=200,
            icon=":material/search:",
            label_visibility="collapsed",
        )
        counts = {name: sum(_state(plan) == name for plan in plans) for name in STATES}
        states = kept.pills(
            "State",
            list(STATES),
            label_visibility="collapsed",
            key="review-states",
            format_func=lambda name: f"{ICONS[name]} {name} · {counts[name]}",
        )
        clusters = _any_of("cluster", plans, workspace, lambda plan: plan.summary.cluster)
        recordings = _any_of("recording", plans, workspace, lambda plan: plan.summary.recording)
    if text.strip():
        plans = team_list.listed_plans(store.db(), workspace, text, people.reader())
    return [
        plan
        for plan in plans
        if (not states or _state(plan) in states)
        and (not clusters or plan.summary.cluster in clusters)
        and (not recordings or plan.summary.recording in recordings)
    ]


def _any_of(what: str, plans: Sequence[ListedPlan], workspace: str, name: Callable[[ListedPlan], str | None]) -> list[str]:
    """Those of the names that a person chose; none: every one."""
    names = sorted({name(plan) for plan in plans} - {None})
    if len(names) < 2:
        return []
    return kept.multiselect(
        what.capitalize(),
        names,
        placeholder=f"Any {what}",
        label_visibility="collapsed",
        key=f"review-{what}-{workspace}",
        width=176,
    )


def _state(plan: ListedPlan) -> str:
    return plan.state or NO_REVIEW


def _table(listed: list[ListedPlan]) -> None:
    numbers = [plan.number for plan in listed]
    table = as_table(listed, _looked_at())
    column = st.column_config
    tables.choose_row(
        table,
        numbers,
        state.visit.look_at,
        f"saved-{_looked_at()}",  # so that the row of the plan on the page can be selected again
        height=tables.low(len(listed)),
        alt="Saved plans, newest first",
        shown={"Gain": gain_in_list},
        losses={"Gain": [is_loss(gain) for gain in table["Gain"]]},
        column_config={
            "": column.TextColumn(width=30),
            "State": column.MultiselectColumn(options=list(STATES), color=list(STATES.values()), width=110),
            "Decided": column.MultiselectColumn(
                options=list(WHOSE),
                color=list(WHOSE.values()),
                help="if somebody else decided than the person who saved the plan or asked: by their logins, and by "
                "typed names where nobody is logged in",
            ),
            "Plan": column.TextColumn(width="medium"),
            "New": column.TextColumn(help="entries of others since you last looked at the review"),
            "Gain": column.NumberColumn(
                "Gain when saved",
                help="over what was deployed then, on held-out recordings where some were open; the plan's page has the gain "
                "by all that is known now",
            ),
            "Covers": column.TextColumn(help="the part of the work that the time is of"),
            **{
                name: column.NumberColumn(name.replace("(simulated)", "when saved"), format="%.3g")
                for name in table.columns
                if name.startswith("Time")
            },
        },
    )


def gain_in_list(gain: float) -> str:
    """`+38.0 %`."""
    return units.signed(gain - 1)


def as_table(listed: Sequence[ListedPlan], looked_at: int | None) -> pd.DataFrame:
    """One row for each saved plan, figures as numbers, which can be sorted. looked_at: number of the plan on the page."""
    seconds = [plan.summary.seconds for plan in listed]
    factor, unit = units.scale_of(min((total for total in seconds if total), default=1.0), units.TIME)
    columns = {
        "": ["▸" if plan.number == looked_at else "" for plan in listed],
        "State": [[_state(plan)] for plan in listed],
        "Plan": [plan.name for plan in listed],
        "Gain": pd.Series([plan.summary.gain for plan in listed], dtype=float),
        "Compared with": [plan.summary.deployed or tables.MISSING for plan in listed],
        f"Time, {unit} (simulated)": pd.Series(seconds, dtype=float) / factor,
        "Covers": [COVERS.get(plan.summary.span, tables.MISSING) for plan in listed],
        "Cluster": [plan.summary.cluster or tables.MISSING for plan in listed],
        "Recording": [plan.summary.recording or tables.MISSING for plan in listed],
        "Note": [" ".join(plan.note.split()) for plan in listed],
        "Comments": [plan.comments for plan in listed],
        "Saved by": [plan.by for plan in listed],
        "When": [widgets.describe_time(plan.at) for plan in listed],
        "ID": [plan.plan[:8] for plan in listed],
    }
    table = pd.DataFrame(columns)
    if any(plan.news for plan in listed):
        table.insert(1, "New", [news.in_words(plan.news) for plan in listed])
    if any(plan.whose for plan in listed):
        whose = [[plan.whose] if plan.whose else [] for plan in listed]
        table.insert(table.columns.get_loc("State") + 1, "Decided", whose)
    return table

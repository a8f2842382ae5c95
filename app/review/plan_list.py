"""The list of a workspace's saved plans: what each gains and where, and how its review stands; searched, filtered, sorted."""

from collections.abc import Callable, Sequence
from typing import get_args

import pandas as pd
import streamlit as st

from app import cached, kept, state, tables, widgets
from app.review import news, saved, store
from app.visitor import people
from engine import units
from engine.simulate.standing import is_loss
from engine.store import team_list
from engine.store.team_approval import Whose
from engine.store.team_list import ListedPlan

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
"""By the colour of `WHOSE`."""


def show(workspace: str) -> None:
    """The plans with their states; a selected row is looked at."""
    plans = team_list.listed_plans(store.db(), workspace, reader=people.reader())
    if not plans:
        how = "Press Save the open plan" if cached.open_plan() else "Open a plan in the sidebar, then save it"
        st.info(f"Nothing is saved here yet. {how}, at the top right.", icon=":material/info:")
        return
    _list(plans, workspace)
    st.caption("Select a row to see what the plan does, what was said about it, and to decide.")


def fold(names: dict[str, str], workspace: str) -> None:
    """The same behind a button that says how many there are, with the choice of another workspace. names: of these, by id."""
    plans = team_list.listed_plans(store.db(), workspace, reader=people.reader())
    news = sum(bool(plan.news) for plan in plans)
    # Another key is another popover, which is closed: so it closes once another plan is looked at.
    with (
        st.popover(
            f"Plans · {len(plans)}" + (f" · {news} new" if news else ""),
            icon=":material/list:",
            key=f"plans-{_looked_at()}",
        ),
        st.container(width=tables.IN_POPOVER),
    ):
        saved.choose_workspace(names, workspace)
        _list(plans, workspace)
        st.button("Show the list alone", icon=":material/list:", on_click=_leave)


def _looked_at() -> int | None:
    """The number of the saved plan that is looked at."""
    return (state.reviewed() or (None, None))[0]


def _leave() -> None:
    saved.leave_brief()
    state.look_at(None)


def _list(plans: list[ListedPlan], workspace: str) -> None:
    if listed := _filtered(plans, workspace):
        _table(listed)
    else:
        st.caption("No saved plan fits this search and these filters.")


def _filtered(plans: list[ListedPlan], workspace: str) -> list[ListedPlan]:
    """The plans that a person wants to see; what all plans have in common is not asked for."""
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


def _any_of(
    what: str, plans: Sequence[ListedPlan], workspace: str, name: Callable[[ListedPlan], str | None]
) -> list[str]:
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
        state.look_at,
        f"saved-{_looked_at()}",  # where a plan is looked at, its row can be selected again
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
                help="whether whoever decided is somebody else than who saved the plan or asked: by their logins, and by "
                "typed names where nobody is logged in",
            ),
            "Plan": column.TextColumn(width="medium"),
            "New": column.TextColumn(help="what others have added since you last looked at the review"),
            "Gain": column.NumberColumn(
                help="how many times as fast as what was deployed when it was saved, simulated"
            ),
            **{name: column.NumberColumn(format="%.3g") for name in table.columns if name.startswith("Time")},
        },
    )


def gain_in_list(gain: float) -> str:
    """`1.38×`, `0.737× as fast`."""
    return units.ratio(gain) + (" as fast" if is_loss(gain) else "")


def as_table(listed: Sequence[ListedPlan], looked_at: int | None) -> pd.DataFrame:
    """One row a saved plan, figures as numbers, which can be sorted. looked_at: its number."""
    seconds = [plan.summary.seconds for plan in listed]
    factor, unit = units.scale_of(min((total for total in seconds if total), default=1.0), units.TIME)
    table = pd.DataFrame(
        {
            "": ["▸" if plan.number == looked_at else "" for plan in listed],
            "State": [[_state(plan)] for plan in listed],
            "Plan": [plan.name for plan in listed],
            "Gain": pd.Series([plan.summary.gain for plan in listed], dtype=float),
            "Compared with": [plan.summary.deployed or tables.MISSING for plan in listed],
            f"Time, {unit} (simulated)": pd.Series(seconds, dtype=float) / factor,
            "Cluster": [plan.summary.cluster or tables.MISSING for plan in listed],
            "Recording": [plan.summary.recording or tables.MISSING for plan in listed],
            "Note": [" ".join(plan.note.split()) for plan in listed],
            "Comments": [plan.comments for plan in listed],
            "Saved by": [plan.by for plan in listed],
            "When": [widgets.describe_time(plan.at) for plan in listed],
            "ID": [plan.plan[:8] for plan in listed],
        }
    )
    if any(plan.news for plan in listed):
        table.insert(1, "New", [news.in_words(plan.news) for plan in listed])
    if any(plan.whose for plan in listed):
        whose = [[plan.whose] if plan.whose else [] for plan in listed]
        table.insert(table.columns.get_loc("State") + 1, "Decided", whose)
    return table

"""The choice of the open plan among all of the session, even of a hundred; names for them, and their removal."""

import math

import streamlit as st

from app import cached, kept, state
from app.tables import plain

KEY, SORT = "choose-plan", "choose-plan-sort"
SORTS = ("Newest first", "Fastest first", "By name")


def choose() -> None:
    """The plans to search and choose from, and the actions on the open one."""
    candidates = cached.candidates()
    if not candidates:
        st.caption("No plan yet.")
    else:
        _choose_among(candidates)
    if state.session.plan in candidates:
        _change(candidates[state.session.plan])
    if removed := state.session.removed_plans:
        id, last = list(removed.items())[-1]
        st.button(
            f"Bring back {plain(last.name)}",
            icon=":material/undo:",
            key=f"restore-plan-{id}",
            on_click=_restore,
            args=(id,),
            help=f"{len(removed)} removed; this one last." if len(removed) > 1 else None,
        )


def _choose_among(candidates: dict[str, cached.Candidate]) -> None:
    order = SORTS[0]
    if len(candidates) > 2:
        order = kept.segments("Sort plans", SORTS, default=SORTS[0], required=True, key=SORT, label_visibility="collapsed")
    labels = {
        id: f"{candidate.plan.name} (deployed now)" if id == state.session.in_use else candidate.plan.name
        for id, candidate in candidates.items()
    }
    st.session_state[KEY] = state.session.plan if state.session.plan in candidates else None
    st.selectbox(
        f"Open plan, of {len(candidates)}" if len(candidates) > 1 else "Open plan",
        ids_in(order, candidates),
        None,
        labels.__getitem__,
        key=KEY,
        on_change=_open,
        placeholder="Type to search",
        filter_mode="contains",
    )


def ids_in(order: str, candidates: dict[str, cached.Candidate]) -> list[str]:
    """Ids of the plans in one of SORTS; the fastest by their optimisers' simulated times, those without a claim last."""
    if order == "By name":
        return sorted(candidates, key=lambda id: candidates[id].plan.name.casefold())
    if order == "Fastest first":
        claims = {id: candidate.plan.claim for id, candidate in candidates.items()}
        return sorted(candidates, key=lambda id: claims[id].objective if claims[id] else math.inf)
    return list(candidates)


def _open() -> None:
    """Open the chosen plan. A list left with Escape has chosen nothing, and closes no plan."""
    if st.session_state[KEY] is not None:
        state.update(plan=st.session_state[KEY])


def _change(candidate: cached.Candidate) -> None:
    """A name for the open plan, and its removal."""
    id, name = candidate.plan.id, candidate.plan.name
    key = f"name-plan-{id}-{name}"
    help = "In this session. Empty: what the plan is called by itself."
    st.text_input("Name", name, max_chars=120, key=key, on_change=lambda: state.name_plan(id, st.session_state[key]), help=help)
    deployed = id == state.session.in_use
    st.button(
        "Remove from the list",
        icon=":material/delete:",
        key=f"remove-plan-{id}",
        disabled=deployed,
        help="It counts as deployed now: choose another one on the Optimise page first."
        if deployed
        else "It can be brought back.",
        on_click=state.remove_plan,
        args=(id, name),
    )


def _restore(id: str) -> None:
    state.restore_plan(id)
    if state.session.plan is None:
        state.update(plan=id)

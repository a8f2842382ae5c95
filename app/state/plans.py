"""What the session has found and run: its jobs and launches, the plans that it knows, and which is open or deployed."""

import streamlit as st

from app.state.address import change
from app.state.session import RemovedPlan
from engine import store
from engine.plan import Plan

MOST_EARLIER = 8
"""Studies that the session knows beside the newest of each kind: as many as may still run or wait."""


def plan_jobs() -> list[str]:
    """Ids of the optimisation jobs of this session, newest first."""
    return st.session_state.plan_jobs


def add_plan_job(id: str) -> None:
    change(plan_jobs=[id, *(known for known in plan_jobs() if known != id)])


def study_job(kind: str) -> str | None:
    """Id of the newest study of a kind (front, affinity, lina)."""
    return st.session_state.study_jobs.get(kind)


def study_jobs() -> list[str]:
    """Ids of the newest study of every kind, and of those that were started shortly before."""
    return [*st.session_state.study_jobs.values(), *st.session_state.earlier_studies]


def set_study_job(kind: str, id: str) -> None:
    """Count a study as the newest of its kind; the one before it may still run."""
    newest, earlier = st.session_state.study_jobs, st.session_state.earlier_studies
    if newest.get(kind) not in (id, None):
        earlier = [newest[kind], *(known for known in earlier if known not in (id, newest[kind]))][:MOST_EARLIER]
    change(study_jobs={**newest, kind: id}, earlier_studies=earlier)


def launch_jobs() -> list[str]:
    """Ids of the launches of this session, newest first."""
    return st.session_state.launch_jobs


def add_launch_job(id: str) -> None:
    change(launch_jobs=[id, *launch_jobs()])


def plan_id() -> str | None:
    """Id of the open plan."""
    return st.session_state.plan


def open_plan(id: str | None) -> None:
    if id != plan_id():
        change(plan=id)


def plan_names() -> dict[str, str]:
    """Names that a person gave to plans, by id."""
    return st.session_state.plan_names


def name_plan(id: str, name: str) -> None:
    """Give a plan a name; an empty one: let it be called by what it is again."""
    others = {plan: known for plan, known in plan_names().items() if plan != id}
    name = " ".join(name.split())[:120]
    change(plan_names={**others, id: name} if name else others)


def removed_plans() -> dict[str, RemovedPlan]:
    """Plans that were removed from the list, by id, the last one last. What found them is still there."""
    return st.session_state.removed_plans


def remove_plan(id: str, name: str) -> None:
    """Take a plan, called `name`, from the list; the open one is closed."""
    removed = RemovedPlan(name=name, job=max(plan_jobs(), default=""))
    change(removed_plans={**_without(removed_plans(), id), id: removed}, plan=None if plan_id() == id else plan_id())


def restore_plan(id: str) -> None:
    """Bring a removed plan back to the list."""
    change(removed_plans=_without(removed_plans(), id))


def _without(plans: dict[str, RemovedPlan], id: str) -> dict[str, RemovedPlan]:
    return {plan: removed for plan, removed in plans.items() if plan != id}


def in_use() -> str | None:
    """Id of the plan that is deployed now; None: experts in contiguous blocks."""
    return st.session_state.in_use


def set_in_use(id: str | None) -> None:
    if id != in_use():
        change(in_use=id)


def taken() -> dict[str, str]:
    """Ids of the plans that were opened from sweeps, each with that of the job that found it, newest first."""
    return st.session_state.taken


def take_plan(id: str, job: str) -> None:
    """Count a plan that a sweep found to the candidates of the session."""
    change(taken={id: job, **taken()}, removed_plans=_without(removed_plans(), id))


def saved() -> dict[str, int | None]:
    """Ids of the team's plans that were opened in this session, each with its number in the team's database (None: it is
    in no workspace), newest first."""
    return st.session_state.saved


def add_saved(id: str, number: int | None) -> None:
    """Count a plan of the team to the candidates of the session."""
    if saved().get(id, -1) != number:
        others = {plan: known for plan, known in saved().items() if plan != id}
        change(saved={id: number, **others}, removed_plans=_without(removed_plans(), id))


def imported() -> dict[str, str]:
    """Ids of the plans that were read from files, each with the digest of its document, newest first."""
    return st.session_state.imported


def add_imported(plan: Plan) -> None:
    """Keep a plan that came in a file, and count it to the candidates of the session."""
    known = {plan.id: store.save_document(plan), **imported()}
    change(imported=known, removed_plans=_without(removed_plans(), plan.id))

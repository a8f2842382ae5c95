"""The even projection of a plan that an engine refuses, offered with its price."""

import streamlit as st

from app import cached
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.formats.placements.export import PROJECT
from engine.plan import Plan
from engine.problem import Problem
from engine.studies.even import EvenProjection, project_evenly


def offer(plan: Plan, problem: Problem, refusal: str, key: str) -> Plan | None:
    """The projected plan where a refusal can be mended so and a person has asked for it."""
    if PROJECT not in refusal:
        return None
    asked = st.toggle(
        "Project it to an even plan",
        key=f"{key}-export-even-{plan.id[:16]}",
        help="The nearest plan with as many slots on every GPU in every layer and no expert twice on a GPU: another plan, "
        "whose price is shown.",
    )
    if not asked:
        return None
    try:
        projection = _projection(plan, problem)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return None
    _price(projection)
    return projection.plan


def _price(projection: EvenProjection) -> None:
    before, after = projection.before, projection.after
    with st.container(horizontal=True, gap="medium"):
        st.metric(
            "Time, simulated",
            units.seconds(after.total),
            f"{units.seconds(before.total)} before" + _change(before.total, after.total),
            delta_color="off",
            delta_arrow="off",
            help="of a pass, before and after, with all sends at once as engines send them",
        )
        st.metric(
            "Balancedness",
            f"{after.balancedness:.3f}",
            f"{before.balancedness:.3f} before",
            delta_color="off",
            delta_arrow="off",
            help="mean over layers of mean / largest load of the GPUs; 1 is even",
        )
        st.metric(
            "Slots on every GPU",
            str(projection.slots),
            f"{projection.added:,} copies new, {projection.dropped:,} given up",
            delta_color="off",
            delta_arrow="off",
            help="of a layer; copies of experts over all layers",
        )


def _change(before: float, after: float) -> str:
    return f" ({after / before - 1:+.1%})".replace("%", " %") if before else ""


def _projection(plan: Plan, problem: Problem) -> EvenProjection:
    answer = _kept(plan.name, plan.id, cached.key_of(problem), plan, problem)
    if isinstance(answer, str):
        raise InputError(answer)
    return answer


@st.cache_resource(max_entries=16, show_spinner="Projecting the plan and simulating both")
def _kept(name: str, id: str, key: tuple[str, ...], _plan: Plan, _problem: Problem) -> EvenProjection | str:
    """Why there is none is kept too: it would be asked for at every run."""
    try:
        return project_evenly(_plan, _problem)
    except InputError as error:
        return str(error)

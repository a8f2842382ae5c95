"""The study of contention on the What-if page: from where on ordering sends pays."""

from typing import Any

import streamlit as st

from app import widgets
from app.charts import what_if_contention as charts
from app.text import plain
from app.what_if import jobs
from app.what_if.live import plan_to_study
from engine import units
from engine.errors import InputError
from engine.problem import Problem
from engine.studies.contention import ContentionPoint


def contention(problem: Problem) -> None:
    """A plan's placement with all sends at once and with its sends in order, over the range of the slider."""
    st.caption(
        "At what contention ordering starts to pay: the plan's placement with all sends at once, and with orders in which few "
        "or none meet at a port."
    )
    try:
        plan, _ = plan_to_study(problem)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    wanted = {"plan": plan.model_dump(mode="json", exclude_none=True)}
    if st.button(
        "Run the contention study", icon=":material/play_arrow:", type="primary", disabled=jobs.running("contention")
    ):
        jobs.run("contention", problem, wanted)

    def show(result: dict[str, Any], complete: bool) -> None:
        points = [ContentionPoint.from_dict(point) for point in result["points"]]
        if points:
            widgets.chart(charts.contention(points, result["pays_from"], complete), "what-if-pays")
            st.caption(f"{plain(result['plan'])}. {_saved(problem, result)} Costs: {plain(result['cost_source'])}.")
            jobs.download(points, "contention")

    jobs.watch("contention", problem, wanted, show, "Nothing run yet. On the sample it takes a few seconds.")


def _saved(problem: Problem, result: dict[str, Any]) -> str:
    """What orders can save as things are, at the most."""
    now = "As things are" if problem.network.contended else "With ports that keep their full rate, as now,"
    return f"{now} no order of this placement can save more than {units.share(result['most_saved'])} of all at once (bound)."

"""The What-if page's drift of traffic: how a plan ages over recordings in order of time, and which policy of moving is best."""

import pandas as pd
import streamlit as st

from app import kept, studies, widgets
from app.charts import what_if_studies as charts
from app.tables import plain, sentence
from app.what_if.live import run_button, timed_step
from engine import units
from engine.compare.drift import FEWEST_WINDOWS, MOST_WINDOWS, PASSES
from engine.goal import Goal
from engine.jobs.judgements import DriftAnswer
from engine.problem import Problem
from engine.systems import systems_for
from engine.workload import TrafficMatrix

RECORDINGS, PARTS = "Recordings, as chosen", "Parts of the open one"
USUAL_PARTS = 12


def drift(problem: Problem) -> None:
    """Choose the windows and the system, and show every policy's times as they are found."""
    st.caption(
        "Windows in order of time: at each a policy may move to a plan made of the windows before, and pays for it: never, "
        "every so many windows, when slower than a new plan by a share, or when the last window would have paid for it."
    )
    if problem.goal is not Goal.INFERENCE:
        st.info("Drift is studied for one model: close the second one.", icon=":material/info:")
        return
    names, systems = widgets.fitting_recordings(problem), systems_for(problem)
    faults, step = list[str](), timed_step(problem)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        several = len(names) >= FEWEST_WINDOWS
        ways = [RECORDINGS, PARTS] if several else [PARTS]
        way = kept.selectbox("Windows are", ways, width=220, key="drift-ways")
        if way == RECORDINGS:
            chosen = kept.multiselect("In order of time", names, list(names), names.get, width=420, key="drift-windows")
            parts = None
        else:
            chosen = [problem.workload.digest]
            parts = kept.limited(faults, "Windows", FEWEST_WINDOWS, MOST_WINDOWS, USUAL_PARTS, width=110, key="drift-parts")
        system = kept.selectbox("System", list(systems), 0, lambda name: systems[name].title, width=210, key="drift-system")
        limit = kept.limited(faults, "Time per plan, s", 0.1, 600.0, 2.0, width=140, key="drift-limit")
        help = "of a window, between two moves; SGLang balances anew after 1,000"
        passes = kept.limited(faults, "Steps" if step else "Passes", 1, 10**9, PASSES, width=130, key="drift-passes", help=help)
        ready = not isinstance(problem.workload, TrafficMatrix) and (parts is not None or len(chosen) >= FEWEST_WINDOWS)
        if run_button("Find the best policy", "drift", ready and not faults):
            options = {"time_limit": limit} if "time_limit" in systems[system].options.model_fields else {}
            asked = {"recordings": chosen, "parts": parts, "system": system, "options": options, "passes": passes}
            studies.start_and_rerun("drift", problem, asked | step)
    for fault in faults:
        st.error(sentence(fault), icon=":material/error:")
    studies.watch_for_problem(
        "drift", problem, {"serving": step.get("serving")}, _show, "Nothing run yet. Every window gets up to five plans."
    )


def _show(answer: DriftAnswer, complete: bool) -> None:
    found = answer.drift
    if found is None:
        return
    widgets.chart(charts.drifting(found), "what-if-drift")
    st.markdown(plain(found.in_words))
    widgets.caption_with_costs(
        f"{plain(found.system)}; first deployed: {plain(found.deployed)}; times are of "
        f"{plain(found.unit)}. The limit, {units.seconds(found.limit)}, knows every "
        "window beforehand and moves for nothing; it bounds schedules of these plans, not of others.",
        found.cost_source,
    )
    columns = ("name", "rule", "value", "forecast", "total")
    table = pd.DataFrame([{name: getattr(row, name) for name in columns} | {"moves": len(row.moves)} for row in found.policies])
    studies.download_table(table, "drift")

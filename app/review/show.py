"""The page of one saved plan: decision, description, gain, cost, risk, bound, charts, runs, discussion."""

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cached, export, kept, state, tables, verdict_line, widgets
from app.charts import review as charts
from app.review import discussion, news, place, report, store, verdict
from app.review.brief import (
    Brief,
    bound_in_words,
    cost_in_words,
    headline,
    launches_in_words,
    named_pair,
    parts_of,
    risk_in_words,
)
from app.review.compare import draw_timelines
from app.review.plan_list import corrections, leave_brief
from app.review.report import Dossier
from app.review.store import link_to
from app.tables import plain
from engine import units
from engine.compare.figures import proof_of_plan
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Plan
from engine.problem import Problem
from engine.result import NOT_BOUNDED, not_bounded
from engine.store import team
from engine.store.team import Review, Run, SavedPlan
from engine.systems import SYSTEMS, TRAINING
from engine.workload import digest_of

PLACES = {"local": "one machine", "testbed": "testbed", "slurm": "Slurm", "kubernetes": "Kubernetes"}


def show(saved: SavedPlan, review: Review | None) -> None:
    """The brief; if its inputs are not here, the figures noted when it was saved, and the discussion."""
    plan = store.plan_of(saved)
    state.write_link(saved.plan, review.id if review else "", place.here())
    brief, fault = None, ""
    try:
        brief = store.brief(saved)
    except InputError as error:
        fault = str(error)
    runs = team.runs(store.db(), saved.plan)
    with st.container(gap="xsmall"):
        _head(saved, review, brief, runs)
        news.show(review, discussion.ANCHOR)
        line = st.container()
    if brief is None:
        st.warning(
            f"It cannot be simulated here: {plain(fault)}. Below stands what was noted when it was saved.",
            icon=":material/warning:",
        )
        if saved.note:
            st.text(saved.note)
        _noted(saved)
    else:
        _brief(saved, brief, line, runs)
        export.show(brief.own.plan, brief.problem, "review")
    _runs(runs)
    discussion.show(saved, review, brief.problem if brief else None)
    _family(saved)
    optimiser = plan.provenance.optimiser
    system = (TRAINING if plan.goal is Goal.TRAINING else SYSTEMS).get(optimiser)  # some names stand for one of either
    made = f"made by {plain(system.title if system else optimiser)}, seed {plan.provenance.seed}"
    saving = f"saved by {plain(saved.by)}, {widgets.describe_time(saved.at)}"
    with st.container(horizontal=True, vertical_alignment="center", gap="xsmall"):
        st.caption(f"Plan `{plan.id[:12]}`, {made}; {saving}", width="content")
        corrections(saved)


def _brief(saved: SavedPlan, brief: Brief, line: DeltaGenerator, runs: list[Run]) -> None:
    """The figures in one line, which stands above; where the time goes; the verdict and what is known, side by side; and what
    takes room, folded."""
    serving = store.serving_of(saved, brief.problem)
    with line:
        verdict_line.show(brief.standing, verdict_line.how_timed(brief.own.plan, brief.problem, serving))
    _parts(brief, serving)
    if saved.note:
        st.text(saved.note)
    st.markdown(f"**What it does.** {plain(' '.join(brief.words))}")
    left, right = st.columns(2, gap="large")
    with left:
        verdict.show(brief, serving)
    with right:
        st.subheader("What we know", anchor=False)
        known = (
            f"Proof: {proof_of_plan(brief.own.plan, brief.own.figures).sentence}",
            f"Cost: {cost_in_words(brief)}",
            f"Risk: {risk_in_words(brief)}",
            f"Measured: {launches_in_words(runs)}",
        )
        st.markdown("\n".join(f"- {plain(sentence)}" for sentence in known))
        widgets.caption_with_costs("Simulated.", brief.own.timeline.cost_source)
    _charts(brief, serving)


def _parts(brief: Brief, serving: cached.Serving | None) -> None:
    """The chart of the decision: the parts of the plan's and of the baseline's time."""
    names = list(named_pair(brief))
    if serving is None:
        scored = (brief.own, brief.baseline)
        spent, times = [parts_of(each) for each in scored], [each.figures.total for each in scored]
    else:
        served = [each.figures for each in store.served_pair(brief, serving)]
        spent, times = [each.parts for each in served], [each.seconds for each in served]
    if not all(spent):  # a recording of nothing but padding takes no time
        return
    pair, totals = (dict(zip(names, values, strict=True)) for values in (spent, times))
    of = digest_of(brief.own.plan.id, brief.baseline.plan.id, *cached.key_of(brief.problem), str(times))
    dark = st.context.theme.type == "dark"
    widgets.chart(lambda: charts.parts(pair, totals, headline(brief), dark), f"review-parts-{of[:16]}", of)


def _charts(brief: Brief, serving: cached.Serving | None) -> None:
    """The large charts, drawn once they are unfolded; unfolded where a comment points to one of them."""
    label, icon, key = "Timelines, bounds and the load of every GPU", ":material/view_timeline:", "review-charts"
    place_of_comment, turn = state.visit.pointed
    if place_of_comment is not None and place.chart_of(place_of_comment) in ("timelines", "load"):
        box = st.expander(label, True, icon=icon, key=f"{key}-{turn}", on_change="rerun")
    else:
        box = kept.expander(label, icon=icon, key=key)
    if not box.open:
        return
    with box:
        place.mark("timelines")
        pair = dict(zip(named_pair(brief), (brief.own.plan, brief.baseline.plan), strict=True))
        draw_timelines(pair, [brief.own.plan.name], brief.problem, "review", serving, headline(brief))
        own, problem, plan = brief.own.figures, brief.problem, brief.own.plan
        st.markdown("\n".join(f"- {plain(sentence)}" for sentence in bound_in_words(brief)))
        if serving is not None:
            st.caption("Of the MoE layers:")
        with st.container(horizontal=True, gap="medium"):
            st.metric("GPU utilisation", units.share(own.utilisation), help="compute time / total, mean over GPUs")
            tables.metric(own.balance)
        marked = place.mark("load", problem)
        gpu = marked.number if marked is not None and marked.kind == "gpu" else None
        drawn_as = f"review-placement-{digest_of(plan.id)[:16]}-{gpu}"
        if (even := _evenly_loaded(plan, problem)) is not None and gpu is None:
            st.markdown(f":material/balance: **{plain(even)}**")
        else:
            widgets.chart(lambda: charts.placement(plan, problem, gpu), drawn_as, digest_of(*cached.key_of(problem)))


@st.cache_resource(max_entries=64, show_spinner=False, hash_funcs=cached.BY_CONTENT)
def _evenly_loaded(plan: Plan, problem: Problem) -> str | None:
    return charts.evenly_loaded(charts.relative_load(plan, problem)[0])


def _head(saved: SavedPlan, review: Review | None, brief: Brief | None, runs: list[Run]) -> None:
    """One line with the plan's name, its decision and the actions on it."""
    with st.container(horizontal=True, vertical_alignment="center", gap="xsmall"):
        st.subheader(plain(saved.name), anchor=False, width="content")
        discussion.standing(saved, review)
        discussion.way(review)
        if saved.plan not in state.session.saved or state.session.plan != saved.plan:
            help = "with everything that it was made from, for Timeline, What-if and Launch"
            if st.button("Open in this session", icon=":material/route:", help=help):
                if fault := store.open_in_session(saved):
                    st.error(plain(fault), icon=":material/error:")
                else:
                    st.rerun()
        st.button("Compare", icon=":material/compare:", on_click=leave_brief, args=("Compare",))
        if brief is not None:
            _report(saved, review, brief, runs)
        with st.popover("Link", icon=":material/link:", key="link"):
            st.code(link_to(saved, review.id if review else None), language=None, wrap_lines=True)


def _report(saved: SavedPlan, review: Review | None, brief: Brief, runs: list[Run]) -> None:
    """The report, made when it is asked for, not when the button is pressed.

    Streamlit forgets the file after the next two runs of any session, which on a page that looks for news may be before the
    browser has fetched it.
    """
    with st.popover("Report", icon=":material/description:", on_change="rerun", key="report") as asked:
        if not asked.open:
            return
        st.caption("Everything on this page in one HTML file that opens offline.")
        judged = verdict.last(brief.own.plan) or (None, None)
        serving = store.serving_of(saved, brief.problem)
        timed = () if serving is None else tuple(each.whole(brief.problem.model) for each in store.served_pair(brief, serving))
        dossier = Dossier(saved, review, brief, tuple(runs), *judged, timed)
        widgets.download("Download the report", report.html(dossier), report.file_name(dossier.saved), type="primary")


def _noted(saved: SavedPlan) -> None:
    """The simulated figures from when the plan was saved."""
    figures = saved.figures.get("metrics") or {}
    with st.container(horizontal=True, gap="medium"):
        for label, name, text in (
            ("Time, simulated", "total", units.seconds),
            ("Bound", "order_bound", units.seconds),
            ("GPU utilisation", "utilisation", units.share),
            ("Balancedness", "balancedness", units.digits),
        ):
            if name == "order_bound" and figures.get("unbounded"):
                st.metric(label, NOT_BOUNDED, help=not_bounded(figures["unbounded"]))
            elif figures.get(name) is not None:
                st.metric(label, text(figures[name]))
        tables.noted(figures)


def _runs(runs: list[Run]) -> None:
    if not runs:  # as what is known says
        return
    st.subheader("Measured", anchor=False)
    tables.show(runs_as_text(runs), hide_index=True, alt="Launches of this plan")


def runs_as_text(runs: list[Run]) -> pd.DataFrame:
    """One row for each run."""
    columns = {
        "When": [widgets.describe_time(run.at) for run in runs],
        "Where": [PLACES.get(run.place, run.place) for run in runs],
        "Predicted there": [units.seconds(run.predicted) if run.predicted is not None else tables.MISSING for run in runs],
        "Measured": [units.seconds(run.measured) if run.measured is not None else tables.MISSING for run in runs],
        "Ratio": [
            units.ratio(run.measured / run.predicted) if run.measured and run.predicted else tables.MISSING for run in runs
        ],
        "Ranks": [str(run.report.get("ranks") or tables.MISSING) for run in runs],
        "Tokens": [f"{run.report['tokens']:,}" if run.report.get("tokens") else tables.MISSING for run in runs],
        "Device": [str(run.report.get("device") or tables.MISSING) for run in runs],
        "Launched by": [run.by for run in runs],
    }
    return pd.DataFrame(columns)


def _family(saved: SavedPlan) -> None:
    """The plan that this one was derived from, and those derived from it, as buttons that open them."""
    kin = [("Derived from", [saved.parent] if saved.parent else []), ("Derived plans", team.children(store.db(), saved.plan))]
    for label, ids in kin:
        saves = {saved_plan.plan: saved_plan for saved_plan in team.saves_of(store.db(), ids)}
        if not ids:
            continue
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"**{label}**")
            for id in ids:
                if id not in saves:
                    st.caption(f"{id[:12]}, which nobody has saved")
                elif st.button(f"{plain(saves[id].name)} · {id[:8]}", key=f"kin-{label}-{id}"):
                    state.update(workspace=saves[id].workspace)
                    state.visit.look_at(saves[id].number)
                    st.rerun()

"""The page of one saved plan: decision, description, gain, cost, risk, bound, charts, runs, discussion."""

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cached, export, state, tables, verdict_line, widgets
from app.charts import review as charts
from app.review import discussion, news, place, report, store, verdict
from app.review.brief import Brief, bound_in_words, cost_in_words, headline, launches_in_words, named_pair, risk_in_words
from app.review.compare import draw_timelines
from app.review.plan_list import corrections, leave_brief
from app.review.report import Dossier
from app.review.store import link_to
from app.tables import plain
from engine import units
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
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
        _note(saved)
        _noted(saved)
    else:
        _brief(saved, brief, line, runs)
        export.show(brief.own.plan, brief.problem, "review")
    _runs(runs)
    discussion.show(saved, review, brief.problem if brief else None)
    _family(saved)
    optimiser = plan.provenance.optimiser
    system = {**SYSTEMS, **TRAINING}.get(optimiser)
    st.caption(f"Plan `{plan.id[:12]}`, made by {plain(system.title if system else optimiser)}, seed {plan.provenance.seed}")


def _brief(saved: SavedPlan, brief: Brief, line: DeltaGenerator, runs: list[Run]) -> None:
    """The figures in one line, which stands above, then in a chart, then in words."""
    place.mark("timelines")
    pair = dict(zip(named_pair(brief), (brief.own.plan, brief.baseline.plan), strict=True))
    serving = store.serving_of(saved, brief.problem)
    draw_timelines(pair, [brief.own.plan.name], brief.problem, "review", serving, headline(brief))
    _note(saved)
    left, right = st.columns(2, gap="large")
    with left:
        st.markdown("**What it does**\n" + "\n".join(f"- {plain(sentence)}" for sentence in brief.words))
        own = brief.own.figures
        if brief.standing.span in ("token", "prompt"):
            st.caption("Of the MoE layers:")
        with st.container(horizontal=True, gap="medium"):
            st.metric("GPU utilisation", units.share(own.utilisation), help="compute time / total, mean over GPUs")
            tables.metric(own.balance)
    with right:
        st.markdown(
            "\n".join(
                [
                    "**What we know about it**",
                    *(f"- {plain(sentence)}" for sentence in bound_in_words(brief)),
                    f"- Cost: {plain(cost_in_words(brief))}",
                    f"- Risk: {plain(risk_in_words(brief))}",
                    f"- Measured: {plain(launches_in_words(runs))}",
                ]
            )
        )
        widgets.caption_with_costs("Simulated.", brief.own.timeline.cost_source)
    with line:
        verdict_line.show(brief.standing, verdict_line.how_timed(brief.own.plan, brief.problem, serving))
    verdict.show(brief, serving)
    problem, plan = brief.problem, brief.own.plan
    marked = place.mark("load", problem)
    gpu = marked.number if marked is not None and marked.kind == "gpu" else None
    key = f"review-placement-{digest_of(plan.id)[:16]}-{gpu}"
    if (even := _evenly_loaded(plan, problem)) is not None and gpu is None:
        st.markdown(f":material/balance: **{plain(even)}**")
    else:
        widgets.chart(lambda: charts.placement(plan, problem, gpu), key, digest_of(*cached.key_of(problem)))


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


def _note(saved: SavedPlan) -> None:
    """The note of the person who saved it."""
    with st.container(gap="xxsmall"):
        if saved.note:
            st.text(saved.note)
        with st.container(horizontal=True, vertical_alignment="center", gap="xsmall"):
            st.caption(f"saved by {plain(saved.by)}, {widgets.describe_time(saved.at)}", width="content")
            corrections(saved)


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
            if figures.get(name) is not None:
                st.metric(label, text(figures[name]))
        tables.noted(figures)


def _runs(runs: list[Run]) -> None:
    if not runs:
        st.caption("No launch of this plan has been measured yet.")
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

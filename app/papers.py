"""The Papers page: figures and tables of the papers as our engine has them, and their settings to open."""

from collections.abc import Sequence
from typing import Any

import streamlit as st

from app import cached, failing, kept, state, studies, tables, widgets
from app.charts import papers as charts
from app.optimise import answer
from app.tables import plain
from engine.costs import choice
from engine.jobs.papers import ReproduceAnswer
from engine.problem import Problem
from engine.reproduce.exhibits import Claim, Entry, Exhibit, Opening, in_words
from engine.reproduce.papers import PAPERS

KIND = "reproduce"
MARKS = {"reproduced": "✓ reproduced", "partly": "≈ partly", "not": "✗ not"}
"""The verdicts as the table has them."""
SHOWN, HEIGHT = 8, 420
"""Claims that are shown without scrolling, and pixels of a table with more."""
FEW = 3
"""Claims with reasons that are shown at once."""


def show() -> None:
    """Choose a paper and one of its figures or tables, compute it and see it."""
    titles = {name: paper.title for name, paper in PAPERS.items()}
    name = kept.segments("Paper", list(titles), titles.__getitem__, default=next(iter(titles)), key="paper")
    paper = PAPERS[name]
    numbers = [entry.number for entry in paper.entries]
    number = kept.segments("Figure or table", numbers, default=numbers[0], key=f"paper-number-{name}")
    entry = next(entry for entry in paper.entries if entry.number == number)
    own, whole = f"{KIND}-{name}-{number}", f"{KIND}-{name}"
    with st.container(horizontal=True, vertical_alignment="center"):
        running = studies.is_running(own) or studies.is_running(whole)
        if st.button(f"Compute {number}", icon=":material/play_arrow:", type="primary", disabled=running):
            _compute(own, {"paper": name, "figure": number})
        if st.button(f"All of {paper.title}", icon=":material/playlist_play:", disabled=running):
            _compute(whole, {"paper": name})
        st.caption(plain(f"{number}, {entry.section} of {paper.title} ({paper.source}): {entry.title}"))
    _watch([whole, own], entry)
    if entry.openings:
        _openings(entry.openings)


def _compute(key: str, arguments: dict[str, Any]) -> None:
    with failing.saying():
        state.set_study_job(key, widgets.start_job(KIND, arguments).id)
        st.rerun()


def _watch(keys: Sequence[str], entry: Entry) -> None:
    """The newest result that has the figure, and the job that is on its way to it."""
    jobs = sorted((job for key in keys if (job := studies.newest(key)) is not None), key=lambda job: job.started)

    @failing.fragment(run_every=1 if any(not job.state.finished for job in jobs) else None)
    def follow() -> None:
        pending = [job for job in jobs if not job.state.finished]
        for job in pending:
            widgets.job_row(job)
        if pending and all(job.state.finished for job in pending):
            st.rerun()
        found = None
        for job in jobs:
            with failing.saying():
                result: ReproduceAnswer | None = cached.result_of(job)
                ready = {each.number: each.exhibit for each in (result.exhibits if result else ())}
                found = ready.get(entry.number, found)
        if found is not None:
            _exhibit(entry, found)
        elif not pending:
            st.info("Not computed yet. Most figures take seconds, all of a paper up to three minutes.", icon=":material/info:")

    follow()


def _exhibit(entry: Entry, exhibit: Exhibit) -> None:
    claims = exhibit.claims
    counts = {mark: sum(MARKS[claim.verdict] == mark for claim in claims) for mark in MARKS.values()}
    said = ", ".join(f"{count} {mark[2:]}" for mark, count in counts.items() if count)
    title = f"{entry.number}, {entry.title}: of {len(claims)} published number{'s' if len(claims) > 1 else ''} {said}"
    if exhibit.chart is not None and exhibit.rows:
        dark = st.context.theme.type == "dark"
        widgets.chart(charts.exhibit(title, exhibit.rows, exhibit.chart, dark), f"paper-{entry.number}")
    else:
        st.markdown(f"**{plain(title)}**")
    if exhibit.note:
        st.caption(plain(exhibit.note))
    tables.show_wrapped(
        {
            "Quantity": [plain(claim.quantity) for claim in claims],
            "The paper": [in_words(claim.published) for claim in claims],
            "Ours": [in_words(claim.ours, tables.MISSING) for claim in claims],
            "Verdict": [MARKS[claim.verdict] for claim in claims],
        },
        height="content" if len(claims) <= SHOWN else HEIGHT,
    )
    _reasons(claims)


def _reasons(claims: Sequence[Claim]) -> None:
    """The reasons, open where they are few."""
    with st.expander("Why they differ", icon=":material/help:", expanded=len(claims) <= FEW):
        for reason in dict.fromkeys(claim.why for claim in claims):
            about = [claim.quantity for claim in claims if claim.why == reason]
            st.markdown(f"**{plain(about[0])}**{' and more' if len(about) > 1 else ''}: {plain(reason)}")


def _openings(openings: Sequence[Opening]) -> None:
    """A button for each setting: it opens the inputs and plans for them."""
    st.subheader("Open a setting", anchor=False)
    st.caption("Opens its cluster, model and recording or step in place of yours, and plans for it.")
    with st.container(horizontal=True, gap="small"):
        for place, opening in enumerate(openings):
            if st.button(opening.title, icon=":material/open_in_new:", key=f"paper-open-{place}"):
                with failing.saying(), st.spinner("Opening"):
                    _open(opening)
                    st.switch_page("../pages/optimise.py")


def _open(opening: Opening) -> None:
    problem = opening.problem()
    systems = [{"name": opening.system, "options": dict(opening.options)}]
    job = widgets.start_job_on(problem, "optimise", {"systems": systems})
    _open_inputs(problem)
    answer.wait_for(job.id)
    state.visit.notice = f"opened {opening.title}"


def _open_inputs(problem: Problem) -> None:
    second = problem.second
    if second is not None:
        state.add_recording(second.workload, second.model)
    for other in problem.others:
        state.add_recording(other, problem.model)
    state.add_recording(problem.workload, problem.model)
    state.change(workload=problem.workload.digest)
    state.open_cluster(problem.cluster)
    state.change(model=problem.model, others=[other.digest for other in problem.others], travel=problem.travel, in_use=None)
    state.change(second=second.workload.digest if second is not None else None)
    state.open_step(problem.step)
    state.open_serving(None)
    state.open_graph(problem.graph)
    state.update(cost=choice.to_dict(problem.cost))

"""The lower half of the What-if page: studies that run as jobs, with charts that fill in as points arrive."""

import re
from collections.abc import Sequence

import streamlit as st

from app import cached, failing, kept, state, studies, widgets
from app.charts import what_if_studies
from app.tables import plain, sentence
from app.what_if.drift import drift
from app.what_if.live import contention, others_of, plan_to_study, run_button, sliders_of, timed_step
from app.what_if.sweeps import synthetic_panel
from engine import units
from engine.compare.imprecision import (
    LEVELS,
    MOST_SEEDS,
    NOISES,
    PAPER_LOSS,
    ImprecisionPoint,
    check_levels,
    contenders_of,
    gains,
)
from engine.compare.sensitivity import ANEW, USUAL_VALUES, system_for
from engine.errors import InputError
from engine.jobs.studies import CurveAnswer, ImprecisionAnswer, SensitivityAnswer
from engine.problem import Problem
from engine.systems import systems_for

KINDS = {
    "curve": ":material/show_chart: Sweep",
    "sensitivity": ":material/tornado: Sensitivity",
    "contention": ":material/call_merge: Contention",
    "imprecision": ":material/blur_on: Traffic noise",
    "drift": ":material/history: Drift",
    "synthetic": ":material/casino: Synthetic workload",
}


def panel(problem: Problem) -> None:
    """Choose a study of inference."""
    # After a reload the newest study is the one to look at; ids of jobs sort by time.
    newest = max(KINDS, key=lambda kind: state.session.study_jobs.get(kind) or "")
    kind = kept.segments("Study", KINDS, KINDS.get, default=newest, key="what-if-study", label_visibility="collapsed")
    if kind == "synthetic":
        synthetic_panel()
    else:
        shown = {"curve": curve, "sensitivity": sensitivity, "contention": contention, "imprecision": imprecision}
        with failing.saying():
            (shown | {"drift": drift})[kind](problem)


def curve(problem: Problem) -> None:
    """One slider over its whole range. Raises InputError as `plan_to_study`."""
    st.caption("One slider over its whole range: the plan and a baseline as they are, and plans made for each value.")
    plan, _ = plan_to_study(problem)
    others = others_of(problem, plan)
    step = timed_step(problem)
    sliders = {slider.field: slider for slider in sliders_of(problem, cached.open_serving(problem))}
    with st.container(horizontal=True, vertical_alignment="bottom"):
        field = kept.selectbox(
            "Change",
            [*sliders, "noise"],
            width=220,
            key="what-if-field",
            format_func=lambda field: sliders[field].label if field in sliders else "Traffic noise",
        )
        beside = kept.selectbox(
            "Compare with",
            others,
            width=260,
            key="what-if-curve-beside",
            format_func=lambda id: others[id].name,
            disabled=not others,
        )
        name, options = system_for(problem, plan)
        anew = kept.checkbox(f"Replan at every value with {plain(systems_for(problem)[name].title)}", True, key="what-if-anew")
        plans = [plan, *([others[beside]] if beside else [])]
        if run_button("Run the sweep", "curve"):
            values = sliders[field].values if field in sliders else USUAL_VALUES["noise"]
            arguments = {
                "plans": [plan.model_dump(mode="json", exclude_none=True) for plan in plans],
                "field": field,
                "values": list(values),
                "system": name if anew else None,
                "options": options,
            }
            studies.start_and_rerun("curve", problem, arguments | step)

    wanted = {"serving": step.get("serving")}
    studies.watch_for_problem("curve", problem, wanted, _show_curve, "No sweep yet. Without replanning it takes far less time.")


def _show_curve(answer: CurveAnswer, complete: bool) -> None:
    points = answer.points
    if points:
        figure = what_if_studies.curve(points, answer.field, answer.series, complete, _tag(answer), answer.phase)
        widgets.chart(figure, "what-if-curve")
        anew = answer.phase is not None and any(point.series == ANEW for point in points)
        planned = " Plans made anew are made for the MoE layers." if anew else ""
        widgets.caption_with_costs(_how(answer) + planned, answer.cost_source)
        studies.download(points, "curve")


def _tag(answer: CurveAnswer | SensitivityAnswer) -> str:
    return "simulated" if answer.simulated else "bound"


def _how(answer: CurveAnswer | SensitivityAnswer | ImprecisionAnswer) -> str:
    """The method by which a study came to its times."""
    if answer.phase is not None:
        return "The whole step is simulated, attention and all."
    if isinstance(answer, ImprecisionAnswer) or answer.simulated:
        return "Simulated."
    return "Not simulated: every all-to-all at the time of its busiest port."


def sensitivity(problem: Problem) -> None:
    """The parameters that the plan's time depends on, as a tornado. Raises InputError as `plan_to_study`."""
    st.caption(
        "What the plan's time depends on: one quantity at a time is lowered and raised by a share, with the plan unchanged."
    )
    plan, _ = plan_to_study(problem)
    if plan is None:
        st.caption("Open a plan first.")
        return
    faults, step = list[str](), timed_step(problem)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        percent = kept.limited(faults, "By, %", 1, 90, 25, width=110, key="what-if-share")
        wanted = {"plan": plan.model_dump(mode="json", exclude_none=True)}
        if run_button("Run the sensitivity study", "sensitivity", not faults):
            studies.start_and_rerun("sensitivity", problem, wanted | step | {"share": percent / 100})
        wanted |= {"serving": step.get("serving")}
    for fault in faults:
        st.error(sentence(fault), icon=":material/error:")

    def show(answer: SensitivityAnswer, complete: bool) -> None:
        points = answer.points
        if points:
            scope = (_tag(answer), answer.phase, answer.rate)
            widgets.chart(what_if_studies.tornado(points, answer.total, answer.share, complete, *scope), "what-if-tornado")
            widgets.caption_with_costs(f"{plain(answer.plan)}. {_how(answer)}", answer.cost_source)
            studies.download(points, "sensitivity")

    studies.watch_for_problem("sensitivity", problem, wanted, show, "Nothing run yet. On the sample it takes a few seconds.")


def imprecision(problem: Problem) -> None:
    """Aurora's Q4: plans made from traffic with noise."""
    st.caption(
        "Aurora's Q4 (§8.2): plans are made on the traffic as recorded and timed on a mixture of it with noise. Noise is what "
        "other layers of this recording do, or the layer's own traffic with its experts shuffled."
    )
    several, faults, step = problem.workload.layers > 1, list[str](), timed_step(problem)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        text = kept.text_input("Noise, %", ", ".join(f"{100 * level:g}" for level in LEVELS), width=230, key="what-if-levels")
        seeds = kept.limited(faults, "Draws per noise level", 1, MOST_SEEDS, 3, width=130, key="what-if-seeds")
        noise = kept.selectbox(
            "Noise is", list(NOISES)[0 if several else 1 :], format_func=NOISES.get, width=330, key="what-if-noise-kind"
        )
        limit = kept.limited(
            faults, "Time per plan, s", 0.1, 600.0, 5.0, width=140, key="what-if-limit", help="time limit of Aurora's placement"
        )
        try:
            levels = levels_of(text)
        except InputError as error:
            levels = None
            faults.append(str(error))
        if run_button("Run the imprecision study", "imprecision", not faults):
            studies.start_and_rerun(
                "imprecision",
                problem,
                {"levels": levels, "seeds": seeds, "noise": noise, "options": {"aurora": {"time_limit": limit}}} | step,
            )
    for fault in faults:
        st.error(sentence(fault), icon=":material/error:")

    def show(answer: ImprecisionAnswer, complete: bool) -> None:
        points = answer.points
        if not points:
            return
        titles = {name: contender.title for name, contender in contenders_of(problem).items()}
        drawn = f"{answer.seeds} draw{'s' if answer.seeds > 1 else ''}"
        left, right = st.columns(2, gap="medium")
        with left:
            widgets.chart(what_if_studies.imprecise_times(points, titles, complete, answer.phase), "what-if-imprecise")
        with right:
            widgets.chart(what_if_studies.speed_ups(points, titles), "what-if-speed-ups")
        widgets.caption_with_costs(
            f"{_how(answer)} Noise: {plain(NOISES[answer.noise])}. Bands go from the least to the most of "
            f"{drawn}, lines through the median. {_gain_in_words(points, titles)}".strip(),
            answer.cost_source,
        )
        studies.download(points, "imprecision")

    studies.watch_for_problem(
        "imprecision",
        problem,
        {"serving": step.get("serving")},
        show,
        "Nothing run yet. On the sample it takes about a minute.",
    )


def _gain_in_words(points: Sequence[ImprecisionPoint], titles: dict[str, str]) -> str:
    """Aurora's gain without noise and with the most, compared with the loss in the paper."""
    if (gained := gains(points)) is None:
        return ""
    baseline, first, last = gained
    start, end = (units.signed(gain - 1) for gain in (first, last))
    change = f"{'loses' if last <= first else 'wins'} {units.share(abs(1 - last / first))}"
    return (
        f"Over {plain(titles[baseline])} Aurora gains {start} at first and {end} at the most noise: "
        f"it {change} (the paper's at most {units.share(PAPER_LOSS)}, on its traces and GPUs). "
    )


def levels_of(text: str) -> list[float]:
    """Shares from percentages that a person typed, apart by commas or spaces. Raises InputError for anything else."""
    try:
        levels = [float(part) / 100 for part in re.split(r"[,;\s%]+", text.strip()) if part]
    except ValueError:
        raise InputError(f"noise: '{text[:40]}' is no list of percentages; write for example 0, 25, 50, 75") from None
    return check_levels(levels, 1)

"""Plans in whole serving steps on the Optimise page, kept between runs by the digests of all that they depend on."""

import contextlib
from dataclasses import dataclass
from math import isnan
from typing import Any

import pandas as pd
import streamlit as st

from app import cached, state, tables, verdict_line, widgets
from app.cached import Serving, served, serving_of
from app.charts import serving as charts
from app.optimise import answer, serving_form
from app.optimise.table import DEPLOYED, HELD_OUT, alike, also, columns_in_sight, mark, scope_of
from app.tables import plain
from engine import units
from engine.compare.evidence import Balanced
from engine.compare.wording import balance_in_words
from engine.costs import choice
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.result import NOT_BOUNDED, relative_gap
from engine.serving.figures import ServingFigures
from engine.serving.step import ServingStep
from engine.training import balanced_load

TIMES = {"decode": "Time per token", "prefill": "Time to first token"}


@dataclass(frozen=True)
class Row:
    """A plan of the session in the step."""

    plan: Plan
    figures: ServingFigures


@dataclass(frozen=True)
class Comparison:
    """Plans that can be served, the baseline on top, then fastest first. held_out: gain of each there, nan where it has none;
    scope: see `scope_of`; refused: reasons of the others, by name;
    balanced: seconds of the baseline with balanced routing."""

    serving: Serving
    rows: list[Row]
    baseline: Row
    held_out: list[float]
    scope: str
    refused: dict[str, str]
    balanced: float

    @property
    def shown(self) -> Row:
        """The open plan, else the fastest, else the baseline."""
        opened = [row for row in self.rows if row.plan.id == state.session.plan]
        return next(iter(opened), min(self.rows, key=lambda row: row.figures.seconds, default=self.baseline))

    def is_deployed(self, row: Row) -> bool:
        return row.plan.id == self.baseline.plan.id


def compare(problem: Problem, serving: Serving) -> Comparison:
    """Every plan of these inputs. Raises InputError if not even the baseline can be served."""
    plan = cached.baseline(problem).plan
    baseline = Row(plan, served(plan, problem, serving).figures)
    rows, refused = [], {}
    for _, candidate in widgets.comparable(problem):
        try:
            rows.append(Row(candidate.plan, served(candidate.plan, problem, serving).figures))
        except InputError as error:
            refused[candidate.plan.name] = str(error)
    rows.sort(key=lambda row: (row.plan.id != plan.id, row.figures.seconds))
    even = served(plan, problem.with_workload(balanced_load(problem.model)), serving).figures
    plans = [row.plan for row in rows]
    gains, scope = cached.gains_held_out(plans, plan, problem, serving), scope_of(plans, plan, problem)
    return Comparison(serving, rows, baseline, gains, scope, refused, even.seconds)


def verdict(row: Row, comparison: Comparison, problem: Problem, narrow: bool = False) -> None:
    """The verdict line of a plan. narrow: as for `verdict_line.show`."""
    ceiling = Balanced.of(comparison.balanced, comparison.baseline.figures.seconds, row.figures.seconds)
    sources = verdict_line.how_timed(row.plan, problem, comparison.serving)
    standing = cached.standing(row.plan, problem, comparison.serving, comparison.baseline.plan)
    verdict_line.show(standing, f"{sources}. {balance_in_words(ceiling)}", narrow)


def memory(row: Row) -> None:
    """Memory of a plan in the step, and a warning if it does not fit."""
    step, memory = row.figures.step, row.figures.memory
    dealt = f", by their speed {plain(row.figures.dealt_in_words)}" if row.figures.dealt else ""
    st.caption(
        f"{plain(row.plan.name)}, {plain(step_in_words(step))}{dealt}. The fullest GPU holds {units.size(memory.total)}, "
        f"{units.share(memory.total / memory.room)} of the {units.size(memory.room)} that it has room for: "
        f"{memory.in_words}. A tenth of every GPU is kept for activations, buffers and the runtime."
    )
    if not memory.fits:
        most = memory.most_sequences(step)
        advice = "Not even one sequence does: add GPUs or take larger ones."
        if most:
            advice = f"At most {most:,} sequences per GPU{', in the mean,' * bool(row.figures.dealt)} do."
        st.warning(
            f"It does not fit: {units.size(memory.total)} on a GPU with room for {units.size(memory.room)}. {advice} The "
            "times hold as if it did.",
            icon=":material/memory:",
        )


def step_in_words(step: ServingStep) -> str:
    """`decode of 64 sequences per GPU, 2,000 tokens in, 1,000 out`."""
    if step.phase == "prefill":
        words = f"prefill of {step.sequences:,} prompts per GPU, {step.context:,} tokens each"
    else:
        words = f"decode of {step.sequences:,} sequences per GPU, {step.context:,} tokens in, {step.output:,} out"
    return words + (", two batches" if step.overlap == "two-batch" else "")


def show(comparison: Comparison) -> None:
    """The table; selecting a row opens its plan."""
    text, ids = as_text(comparison), [comparison.rows[first].plan.id for first, *_ in _groups(comparison)]
    tables.choose_row(text, ids, lambda id: state.update(plan=id), "served", column_config=columns_in_sight(text))
    for name, reason in comparison.refused.items():
        st.caption(f"{plain(name)} is not in the table: {plain(reason)}.")


def _groups(comparison: Comparison) -> list[list[int]]:
    """Places of plans with the same times, see `table.alike`."""
    rows = comparison.rows
    own = [row.plan.id == state.session.plan or comparison.is_deployed(row) for row in rows]
    return alike([(row.figures.seconds, row.figures.bound or 0.0) for row in rows], own)


def as_text(comparison: Comparison) -> pd.DataFrame:
    """The figures as text with units, the open plan and the deployed one marked; plans of the same times are in one row."""
    groups = _groups(comparison)
    rows = [comparison.rows[first] for first, *_ in groups]
    figures = [row.figures for row in rows]
    factor, unit = units.scale_of(max(served.seconds for served in figures), units.TIME)
    memory, memory_unit = units.scale_of(figures[0].memory.room, units.SIZE)
    rooms = sorted({served.memory.room / memory for served in figures})
    room = " or ".join(dict.fromkeys(map(units.digits, rooms)))
    step, gain = figures[0].step, f"Gain over {comparison.baseline.plan.name}"
    gains = [comparison.held_out[first] for first, *_ in groups]
    written = [tables.MISSING if isnan(value) else units.signed(value - 1) for value in gains]
    held_out = {} if all(map(isnan, gains)) else {f"{gain}{HELD_OUT}": written}
    columns = {
        "": [mark(row.plan.id == state.session.plan) for row in rows],
        "Plan": [row.plan.name for row in rows],
        f"{TIMES[step.phase]}, {unit} (simulated)": [units.digits(served.seconds / factor) for served in figures],
        f"{gain}{comparison.scope}": [
            DEPLOYED if comparison.is_deployed(row) else units.signed(row.figures.gain_over(comparison.baseline.figures))
            for row in rows
        ],
        **held_out,
        **also([row.plan.name for row in comparison.rows], groups),
        "Tokens/s/GPU": [units.digits(served.tokens_per_second) for served in figures],
        f"Bound, {unit}": [
            tables.MISSING if served.bound is None else units.digits(served.bound / factor) for served in figures
        ],
        "Above the bound": [
            NOT_BOUNDED if served.bound is None else units.share(relative_gap(served.seconds, served.bound))
            for served in figures
        ],
        f"Fullest GPU, of {room} {memory_unit}": [units.digits(served.memory.total / memory) for served in figures],
        "Room for sequences": [f"{served.memory.most_sequences(step):,}" for served in figures],
    }
    return pd.DataFrame(columns)


def parts(comparison: Comparison) -> None:
    """Parts of the shown plan's time and of the baseline's."""
    shown, baseline = comparison.shown, comparison.baseline
    plans = {shown.plan.name: shown.figures}
    if shown.plan.id != baseline.plan.id:
        name = baseline.plan.name if baseline.plan.name not in plans else f"{baseline.plan.name} (deployed now)"
        plans[name] = baseline.figures
    widgets.chart(charts.parts(plans, st.context.theme.type == "dark"), "serving-parts")


def needed_serving(problem: Problem) -> Serving:
    """The open step, ready to be served; if it cannot be, say so, offer steps that can, and stop."""
    try:
        serving = serving_of(problem)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        st.caption("A whole step cannot be timed for this model; the other goals plan its MoE layers as ever.")
        st.stop()
    serving_form.say(state.session.model, serving.beside)
    return serving


def say_how_planned(problem: Problem) -> None:
    """Say which goal systems plan for here."""
    st.caption(
        f"Systems plan the experts for {plain(problem.workload.name)}, as for inference; every plan is then simulated in the "
        "whole step, with that routing at the tokens of the step."
    )


def say_sources(serving: Serving, figures: ServingFigures) -> None:
    """The source of every time of the step."""
    operators, moe_layers = map(plain, figures.sources)
    note = f" ({plain(serving.notes[0])})" if serving.notes else ""
    sizes = f"; sizes: {plain(serving.beside.origin)}" if serving.beside.config else ""
    experts = plain(choice.how_far_off(choice.from_dict(state.session.cost)))
    text = f"Attention, norms, dense layers and head: {operators}{note}{sizes}. MoE layers: {experts}."
    st.caption(text, help=f"MoE layers: {moe_layers}.")


def fastest(plans: list[Plan], problem: Problem, serving: Serving) -> str | None:
    """Id of the plan with the shortest step; None if none of them can be served."""
    seconds = {}
    for plan in plans:
        with contextlib.suppress(InputError):
            seconds[plan.id] = served(plan, problem, serving).figures.seconds
    return min(seconds, key=seconds.get) if seconds else None


def results(problem: Problem, serving: Serving, judged: answer.Judged) -> None:
    """The answer, the parts of the open plan's time, and a table of all plans; without a plan, the baseline."""
    try:
        comparison = compare(problem, serving)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        st.stop()
    running = any(not job.state.finished for job in cached.jobs(state.session.plan_jobs))
    if not comparison.rows and not running:
        st.caption("No plan for these inputs yet: this is what is deployed. Press Plan it for better ones.")
    if cached.routing_is_assumed():
        other = cached.workload()
        why = "" if other is None else f" {plain(other.name)} is a recording of another model."
        st.caption(
            f":material/balance: Balanced routing is assumed, under which placements hardly differ.{why} Open a recording of "
            "this model to see how much a plan wins."
        )
    shown = comparison.shown
    if shown.plan.id == state.session.plan:
        now = comparison.baseline.plan
        answer.show(shown.plan, cached.standing(shown.plan, problem, comparison.serving, now), judged)
    verdict(shown, comparison, problem)
    parts(comparison)
    if comparison.rows:
        st.caption("Whole steps: what is deployed, then the fastest first. Select a row to open its plan.")
        show(comparison)
    memory(shown)
    say_sources(serving, shown.figures)
    if state.session.plan in [row.plan.id for row in comparison.rows]:
        st.page_link("../pages/timeline.py", label="See why on the timeline", icon=":material/view_timeline:")


def arguments(problem: Problem) -> dict[str, Any]:
    """`serving` of a job, if a step is the goal and can be timed; else nothing."""
    serving = cached.open_serving(problem)
    return {} if serving is None else {"serving": serving.arguments}

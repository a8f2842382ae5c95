"""Plans in a whole serving step beside each other, and what the open one comes to."""

from dataclasses import dataclass

import pandas as pd
import streamlit as st

from app import state, tables, widgets
from app.charts import serving as charts
from app.serving.figures import IN_USE, Serving, deployed, served
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.serving.figures import ServingFigures
from engine.serving.step import ServingStep
from engine.workload import digest_of

TIMES = {"decode": "A token", "prefill": "First token"}


@dataclass(frozen=True)
class Row:
    """A plan of the session in the step."""

    plan: Plan
    figures: ServingFigures


@dataclass(frozen=True)
class Comparison:
    """Plans that can be served, fastest first, and what they are held against. refused: why others cannot be, by name."""

    rows: list[Row]
    baseline: Row
    against: str
    refused: dict[str, str]

    @property
    def shown(self) -> Row:
        """The open plan, else the fastest, else the baseline."""
        opened = [row for row in self.rows if row.plan.id == state.plan_id()]
        return (opened or self.rows or [self.baseline])[0]


def compare(problem: Problem, serving: Serving) -> Comparison:
    """Every plan of these inputs. Raises InputError where not even the baseline can be served."""
    plan, against = deployed(problem)
    baseline = Row(plan, served(plan, problem, serving).figures)
    rows, refused = [], {}
    for _, candidate in widgets.comparable(problem):
        try:
            rows.append(Row(candidate.plan, served(candidate.plan, problem, serving).figures))
        except InputError as error:
            refused[candidate.plan.name] = str(error)
    return Comparison(sorted(rows, key=lambda row: row.figures.seconds), baseline, against, refused)


def verdict(row: Row, comparison: Comparison) -> None:
    """The figures of a plan, big."""
    figures = row.figures
    step, memory = figures.step, figures.memory
    decode = step.phase == "decode"
    st.markdown(f"**{plain(row.plan.name)}** · {plain(step_in_words(step))}")
    with st.container(horizontal=True):
        st.metric(
            f"Gain over {comparison.against}",
            f"{100 * figures.gain_over(comparison.baseline.figures):+.1f} %",
            border=True,
            help=f"more tokens a second in the whole step than {comparison.baseline.plan.name}",
        )
        st.metric(
            "A token, simulated" if decode else "First token, simulated",
            units.seconds(figures.seconds),
            border=True,
            help=f"MoE layers: {figures.sources[1]}; the rest: {figures.sources[0]}",
        )
        st.metric(
            "Tokens/s a GPU",
            units.digits(figures.tokens_per_second),
            border=True,
            help="generated ones" if decode else "those of the prompts",
        )
        st.metric(
            "Above the bound",
            units.share(_gap(figures)),
            border=True,
            help=f"no order of sends brings this placement below {units.seconds(figures.bound)}",
        )
        st.metric(
            "Memory of the fullest GPU",
            units.share(memory.total / memory.room),
            border=True,
            help=f"{units.size(memory.total)} of {units.size(memory.room)}: {units.size(memory.experts)} experts, "
            f"{units.size(memory.others)} other weights, {units.size(memory.kv)} keys and values; a tenth of the GPU is "
            "kept for activations, buffers and the runtime",
        )
    if not memory.fits:
        st.warning(
            f"It does not fit: {units.size(memory.total)} on a GPU with room for {units.size(memory.room)}. "
            f"{_most(memory.most_sequences(step))} The times hold as if it did.",
            icon=":material/memory:",
        )


def step_in_words(step: ServingStep) -> str:
    """`decode of 64 sequences a GPU, 2,000 tokens in, 1,000 out`."""
    if step.phase == "prefill":
        words = f"prefill of {step.sequences:,} prompts a GPU, {step.context:,} tokens each"
    else:
        words = f"decode of {step.sequences:,} sequences a GPU, {step.context:,} tokens in, {step.output:,} out"
    return words + (", two batches" if step.overlap == "two-batch" else "")


def _most(sequences: int) -> str:
    if not sequences:
        return "Not even one sequence does: add GPUs or take larger ones."
    return f"At most {sequences:,} sequences a GPU do."


def _gap(figures: ServingFigures) -> float:
    return max(0.0, figures.seconds / figures.bound - 1)


def show(comparison: Comparison) -> None:
    """The table; selecting a row opens its plan."""
    ids = [row.plan.id for row in comparison.rows]
    key = f"served-{digest_of(*ids)[:16]}"

    def open_selected() -> None:
        if selected := st.session_state[key].selection.rows:
            state.open_plan(ids[selected[0]])

    tables.show(as_text(comparison), key=key, hide_index=True, on_select=open_selected, selection_mode="single-row")
    for name, reason in comparison.refused.items():
        st.caption(f"{plain(name)} is not in the table: {plain(reason)}.")


def as_text(comparison: Comparison) -> pd.DataFrame:
    """The figures as text with units, the open plan marked; after the plans the baseline, pinned last where it is none of
    them."""
    rows = list(comparison.rows)
    if all(row.plan.id != comparison.baseline.plan.id for row in rows) and comparison.against == IN_USE:
        rows.append(comparison.baseline)
    figures = [row.figures for row in rows]
    factor, unit = units.scale_of(max(served.seconds for served in figures), units.TIME)
    memory, memory_unit = units.scale_of(figures[0].memory.room, units.SIZE)
    room = figures[0].memory.room / memory
    step = figures[0].step
    return pd.DataFrame(
        {
            "": ["▸" if row.plan.id == state.plan_id() else "" for row in rows],
            "Plan": [row.plan.name for row in rows],
            f"{TIMES[step.phase]}, {unit} (simulated)": [units.digits(served.seconds / factor) for served in figures],
            "Tokens/s/GPU": [units.digits(served.tokens_per_second) for served in figures],
            f"Gain over {comparison.against}": [
                f"{100 * served.gain_over(comparison.baseline.figures):+.1f} %" for served in figures
            ],
            f"Bound, {unit}": [units.digits(served.bound / factor) for served in figures],
            "Above the bound": [units.share(_gap(served)) for served in figures],
            f"Fullest GPU, of {units.digits(room)} {memory_unit}": [
                units.digits(served.memory.total / memory) for served in figures
            ],
            "Room for sequences": [f"{served.memory.most_sequences(step):,}" for served in figures],
        }
    )


def parts(comparison: Comparison) -> None:
    """Where the time of the shown plan goes, beside the baseline's."""
    shown, baseline = comparison.shown, comparison.baseline
    plans = {shown.plan.name: shown.figures}
    if shown.plan.id != baseline.plan.id:
        name = baseline.plan.name if baseline.plan.name not in plans else f"{baseline.plan.name} ({comparison.against})"
        plans[name] = baseline.figures
    widgets.chart(charts.parts(plans, st.context.theme.type == "dark"), "serving-parts")

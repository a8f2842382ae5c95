"""Plans in a whole serving step beside each other, and what the open one comes to."""

from dataclasses import dataclass

import pandas as pd
import streamlit as st

from app import cached, state, tables, verdict_line, widgets
from app.charts import serving as charts
from app.optimise.table import DEPLOYED, columns_in_sight, mark
from app.serving.figures import Serving, served
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.result import relative_gap
from engine.serving.figures import ServingFigures
from engine.serving.step import ServingStep
from engine.simulate.standing import Standing

TIMES = {"decode": "Time per token", "prefill": "Time to first token"}


@dataclass(frozen=True)
class Row:
    """A plan of the session in the step."""

    plan: Plan
    figures: ServingFigures


@dataclass(frozen=True)
class Comparison:
    """Plans that can be served, fastest first but for what is deployed, which is on top, and what they are held against.
    refused: why others cannot be, by name."""

    rows: list[Row]
    baseline: Row
    refused: dict[str, str]

    @property
    def shown(self) -> Row:
        """The open plan, else the fastest, else the baseline."""
        opened = [row for row in self.rows if row.plan.id == state.plan_id()]
        return next(iter(opened), min(self.rows, key=lambda row: row.figures.seconds, default=self.baseline))

    def is_deployed(self, row: Row) -> bool:
        return row.plan.id == self.baseline.plan.id


def compare(problem: Problem, serving: Serving) -> Comparison:
    """Every plan of these inputs. Raises InputError where not even the baseline can be served."""
    plan = cached.deployed(problem).plan
    baseline = Row(plan, served(plan, problem, serving).figures)
    rows, refused = [], {}
    for _, candidate in widgets.comparable(problem):
        try:
            rows.append(Row(candidate.plan, served(candidate.plan, problem, serving).figures))
        except InputError as error:
            refused[candidate.plan.name] = str(error)
    rows.sort(key=lambda row: (row.plan.id != plan.id, row.figures.seconds))
    return Comparison(rows, baseline, refused)


def verdict(row: Row, comparison: Comparison, problem: Problem, narrow: bool = False) -> None:
    """How a plan stands. narrow: as for `verdict_line.show`."""
    verdict_line.show(
        standing(row, comparison, problem),
        f"MoE layers: {row.figures.sources[1]}; the rest: {row.figures.sources[0]}",
        narrow,
    )


def memory(row: Row) -> None:
    """What the step of a plan is, and whether it fits the memory."""
    step, memory = row.figures.step, row.figures.memory
    st.caption(
        f"{plain(row.plan.name)}, {plain(step_in_words(step))}. The fullest GPU holds {units.size(memory.total)}, "
        f"{units.share(memory.total / memory.room)} of the {units.size(memory.room)} that it has room for: "
        f"{units.size(memory.experts)} experts, {units.size(memory.others)} other weights, {units.size(memory.kv)} keys and "
        "values. A tenth of every GPU is kept for activations, buffers and the runtime."
    )
    if not memory.fits:
        st.warning(
            f"It does not fit: {units.size(memory.total)} on a GPU with room for {units.size(memory.room)}. "
            f"{_most(memory.most_sequences(step))} The times hold as if it did.",
            icon=":material/memory:",
        )


def standing(row: Row, comparison: Comparison, problem: Problem) -> Standing:
    """How a plan stands in the step. Of other recordings nothing is known: a step has the tokens that it has."""
    figures, baseline = row.figures, comparison.baseline
    return Standing(
        plan=row.plan.name,
        deployed=baseline.plan.name,
        is_deployed=comparison.is_deployed(row),
        span="token" if figures.step.phase == "decode" else "prompt",
        seconds=figures.seconds,
        deployed_seconds=baseline.figures.seconds,
        tokens_per_second=figures.tokens_per_second,
        bound=figures.bound,
        bound_covers=f"No order of sends brings this placement below {units.seconds(figures.bound)}.",
        move=cached.migration(row.plan, problem, (baseline.figures.seconds, figures.seconds)),
    )


def step_in_words(step: ServingStep) -> str:
    """`decode of 64 sequences per GPU, 2,000 tokens in, 1,000 out`."""
    if step.phase == "prefill":
        words = f"prefill of {step.sequences:,} prompts per GPU, {step.context:,} tokens each"
    else:
        words = f"decode of {step.sequences:,} sequences per GPU, {step.context:,} tokens in, {step.output:,} out"
    return words + (", two batches" if step.overlap == "two-batch" else "")


def _most(sequences: int) -> str:
    if not sequences:
        return "Not even one sequence does: add GPUs or take larger ones."
    return f"At most {sequences:,} sequences per GPU do."


def show(comparison: Comparison) -> None:
    """The table; selecting a row opens its plan."""
    text, ids = as_text(comparison), [row.plan.id for row in comparison.rows]
    tables.choose_row(text, ids, state.open_plan, "served", column_config=columns_in_sight(text))
    for name, reason in comparison.refused.items():
        st.caption(f"{plain(name)} is not in the table: {plain(reason)}.")


def as_text(comparison: Comparison) -> pd.DataFrame:
    """The figures as text with units, the open plan and what is deployed marked."""
    rows = comparison.rows
    figures = [row.figures for row in rows]
    factor, unit = units.scale_of(max(served.seconds for served in figures), units.TIME)
    memory, memory_unit = units.scale_of(figures[0].memory.room, units.SIZE)
    room = figures[0].memory.room / memory
    step = figures[0].step
    return pd.DataFrame(
        {
            "": [mark(row.plan.id == state.plan_id()) for row in rows],
            "Plan": [row.plan.name for row in rows],
            f"{TIMES[step.phase]}, {unit} (simulated)": [units.digits(served.seconds / factor) for served in figures],
            f"Gain over {comparison.baseline.plan.name}": [
                DEPLOYED
                if comparison.is_deployed(row)
                else f"{100 * row.figures.gain_over(comparison.baseline.figures):+.1f} %"
                for row in rows
            ],
            "Tokens/s/GPU": [units.digits(served.tokens_per_second) for served in figures],
            f"Bound, {unit}": [units.digits(served.bound / factor) for served in figures],
            "Above the bound": [units.share(relative_gap(served.seconds, served.bound)) for served in figures],
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
        name = baseline.plan.name if baseline.plan.name not in plans else f"{baseline.plan.name} (deployed now)"
        plans[name] = baseline.figures
    widgets.chart(charts.parts(plans, st.context.theme.type == "dark"), "serving-parts")

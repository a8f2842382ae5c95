"""The table of the session's candidate plans: figures, proofs, and the cost of a move to each."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import cached, kept, state, tables, verdict_line, widgets
from app.charts import ranked as charts
from app.charts import step as step_charts
from app.charts import waterfall as waterfall_charts
from app.optimise import answer, deployed, goal
from app.tables import plain
from engine import units
from engine.compare.figures import proof_of_plan, speedup
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.result import NOT_BOUNDED
from engine.store.problems import problem_arguments
from engine.systems.lina import SCHEDULED

MARK, PLAN, TIME, GAIN = 36, 300, 84, 84
"""Pixels of columns, which a window of 1024 shows without scrolling."""
ALSO = "Same times, also"
ALIKE = 1e-6
"""Relative difference of times that are the same."""
SCOPES = {", in sample": "In sample", ", on the open recording": "Gain here", ", held out": "Held out"}
"""Ends of the names of columns of gains, with their titles."""
IN_SAMPLE, HERE, HELD_OUT = SCOPES
DEPLOYED = "deployed"
"""Replaces the gain of the deployed plan."""


def rows(problem: Problem) -> pd.DataFrame:
    """Figures of every candidate that fits, the deployed one on top, then fastest first; empty when there is none."""
    candidates = list(widgets.comparable(problem))
    entries, now = [], _baseline(problem) if candidates else None
    for id, candidate in candidates:
        try:
            figures = cached.metrics(candidate.plan, problem)
        except InputError:
            continue  # follows tokens, but the open recording has none
        proof = proof_of_plan(candidate.plan, figures)
        move = now and cached.migration(candidate.plan, now.plan, problem)
        parts = figures.decomposition or {}
        entry = {
            "id": id,
            "open": id == state.session.plan,
            "Plan": candidate.plan.name,
            "Time": figures.total,
            "Gap": math.nan if figures.order_gap is None else figures.order_gap,
            "Bound": math.nan if figures.order_bound is None else figures.order_bound,
            "Any placement": math.nan if proof.gap is None else proof.gap,
            "Exposed": parts.get("communication", math.nan),
            "Overlap": figures.overlap,
            "System": candidate.plan.provenance.optimiser,
            "Balancedness": figures.balancedness,
            "Overload": figures.balance.factors,
            "Kept local": figures.kept_local,
            "Rows": math.nan if candidate.plan.travel is None else figures.rows,
            "Utilisation": figures.utilisation,
            "Experts": figures.memory,
            "Found in": candidate.runtime,
            "Proof": proof.in_words,
            "proof": proof.sentence,
            "notes": candidate.notes,
            "Scheduled": candidate.notes.get(SCHEDULED, {}).get("value", math.nan),
            "Copies": move.copies if move else math.nan,
            "Bytes": move.bytes if move else math.nan,
            "Move": move.seconds if move else math.nan,
            "Steps": move.steps if move else math.nan,
        }
        entries.append(entry)
    if not entries:
        return pd.DataFrame()
    table = pd.DataFrame(entries)
    table["deployed"] = False if now is None else table["id"] == now.plan.id
    time_now = now and cached.metrics(now.plan, problem).total
    table["Gain"] = math.nan if now is None else [speedup(time_now, time) for time in table["Time"]]
    plans = [candidate.plan for id, candidate in candidates if id in set(table["id"])]
    table["Held out"] = math.nan if now is None else cached.gains_held_out(plans, now.plan, problem, None)
    table["scope"] = scope_of(plans, now and now.plan, problem)
    table["against"] = "" if now is None else "what is deployed" if now.chosen else now.plan.name.split(" (")[0]
    return table.sort_values(["deployed", "Time"], ascending=[False, True], ignore_index=True)


def scope_of(plans: Sequence[Plan], now: Plan | None, problem: Problem) -> str:
    """The end of the name of a column with the gains of plans over `now` on the open recording, which not all may be made from;
    empty where routing is assumed."""
    if problem.step is not None and problem.step.routing != "recorded":
        return ""
    others = (plan for plan in plans if now is None or plan.id != now.id)
    return HERE if any("workload" in cached.made_for(plan, problem) for plan in others) else IN_SAMPLE


def alike(times: Sequence[tuple[float, ...]], own: Sequence[bool]) -> list[list[int]]:
    """Places of rows with the same times, one list for each row to show, the shown one first.

    own: True for a row that is always shown, as of the open plan
    """
    groups: list[list[int]] = []
    for place, these in enumerate(times):
        same = next((group for group in groups if np.allclose(times[group[0]], these, ALIKE, 0, equal_nan=True)), None)
        if same is None or (own[place] and own[same[0]]):
            groups.append([place])
        elif own[place]:
            same.insert(0, place)
        else:
            same.append(place)
    return groups


def also(names: Sequence[str], groups: Sequence[Sequence[int]]) -> dict[str, list[str]]:
    """A column with the names of the rows that are not shown; none if all are."""
    texts = [", ".join(names[place] for place in others) for _, *others in groups]
    return {ALSO: texts} if any(texts) else {}


def folded(table: pd.DataFrame) -> pd.DataFrame:
    """The table with one row for all plans of the same times; the others are named in it."""
    times = list(table[["Time", "Bound", "Exposed"]].astype(float).itertuples(index=False, name=None))
    groups = alike(times, (table["open"] | table["deployed"]).tolist())
    shown = table.iloc[[first for first, *_ in groups]]
    return shown.assign(**also(table["Plan"].tolist(), groups)).reset_index(drop=True)


def _baseline(problem: Problem) -> cached.Baseline | None:
    """The baseline; None if it cannot be simulated, as contiguous blocks that do not fit the memory."""
    try:
        now = cached.baseline(problem)
        cached.metrics(now.plan, problem)
    except InputError:
        return None
    return now


def show(table: pd.DataFrame) -> None:
    """The table; selecting a row opens its plan.

    A selection is a row number, so a table with other rows is another widget, and it counts when it is made, not on every run.
    """
    text = as_text(table) if table["Exposed"].isna().all() else as_text_of_steps(table)
    configured = columns_in_sight(text) | {
        tables.COLUMN: st.column_config.TextColumn(help=tables.COLUMN_HELP),
        "Above the bound": st.column_config.TextColumn(
            help="The bound: no order of this placement's sends is faster; for a training step, no schedule. Not bounded: "
            "measured exchanges have no order to choose"
        ),
        "Above any placement's bound": st.column_config.TextColumn(
            help="The bound: no placement without replicas and with as many slots per GPU is faster, as the plan's "
            "optimiser claims for these inputs; not rechecked here"
        ),
        "Proof": st.column_config.TextColumn(
            help="Choices that no other can better, in simulated time. For the order of sends this is proven here, for "
            "every plan; for the placement it is its optimiser's claim"
        ),
    }
    tables.choose_row(text, table["id"].tolist(), lambda id: state.update(plan=id), "candidates", column_config=configured)


def columns_in_sight(text: pd.DataFrame) -> dict[str, Any]:
    """Widths of the first columns: mark, plan, time and, if known, gain, which a window of 1024 shows without scrolling.

    The last two have short titles, with the full ones in their tips.
    """
    time = text.columns[2]
    unit = time.removesuffix(" (simulated)").rpartition(", ")[2]
    widths = {
        "": st.column_config.TextColumn(width=MARK, pinned=True),
        "Plan": st.column_config.TextColumn(width=PLAN, pinned=True),
        time: st.column_config.TextColumn(f"Time, {unit}", width=TIME, help=plain(time)),
    }
    gains = text.columns[text.columns.str.startswith("Gain over ")]
    for gain in gains:
        scope = next((title for end, title in SCOPES.items() if gain.endswith(end)), "Gain")
        widths[gain] = st.column_config.TextColumn(scope, width=GAIN, pinned=True, help=plain(gain))
    return widths


def as_text(table: pd.DataFrame) -> pd.DataFrame:
    """The figures as text with units, the open plan marked."""
    factor, unit = units.scale_of(float(table["Time"].max()), units.TIME)
    memory, memory_unit = units.scale_of(float(table["Experts"].max()), units.SIZE)
    over_any = {"Above any placement's bound": table["Any placement"].map(units.share, na_action="ignore")}
    text = {
        "": table["open"].map(mark),
        "Plan": table["Plan"],
        f"Time, {unit} (simulated)": (table["Time"] / factor).map(units.digits),
        **_against(table),
        **{name: table[name] for name in table.columns.intersection([ALSO])},
        f"Bound, {unit}": (table["Bound"] / factor).map(units.digits, na_action="ignore"),
        "Above the bound": table["Gap"].map(lambda gap: NOT_BOUNDED if math.isnan(gap) else units.share(gap)),
        **({} if table["Any placement"].isna().all() else over_any),  # none if no optimiser claims such a bound
        "Proof": table["Proof"],
        "Balancedness": table["Balancedness"].map(units.digits),
        tables.COLUMN: table["Overload"].map(tables.balance_cell),
        "Kept local": table["Kept local"].map(units.share),
        **({"Rows per token": table["Rows"].map(units.digits)} if table["Rows"].notna().any() else {}),
        "Utilisation": table["Utilisation"].map(units.share),
        f"Experts per GPU, {memory_unit}": (table["Experts"] / memory).map(units.digits),
    }
    if table["Scheduled"].notna().any():
        text["With its scheduler, against contiguous blocks"] = table["Scheduled"].map(units.ratio, na_action="ignore")
    if table["Copies"].notna().any():
        text["Copies to move"] = [
            f"{copies:,.0f} · {units.size(size)} · {units.seconds(move)}"
            for copies, size, move in zip(table["Copies"], table["Bytes"], table["Move"], strict=True)
        ]
        text["Pays after"] = table["Steps"].map(_steps, na_action="ignore")
    return pd.DataFrame(text | {"Found in": table["Found in"].map(units.seconds, na_action="ignore")})


def as_text_of_steps(table: pd.DataFrame) -> pd.DataFrame:
    """The figures of plans for a training step as text with units, the open plan marked."""
    factor, unit = units.scale_of(float(table["Time"].max()), units.TIME)
    memory, memory_unit = units.scale_of(float(table["Experts"].max()), units.SIZE)
    times = {
        "": table["open"].map(mark),
        "Plan": table["Plan"],
        f"Time, {unit} (simulated)": (table["Time"] / factor).map(units.digits),
        **_against(table),
        **{name: table[name] for name in table.columns.intersection([ALSO])},
    }
    exposed = [
        f"{units.digits(communication / factor)} · {units.share(communication / (total or 1))}"
        for communication, total in zip(table["Exposed"], table["Time"], strict=True)
    ]
    columns = times | {
        f"Bound, {unit}": (table["Bound"] / factor).map(units.digits),
        "Above the bound": table["Gap"].map(units.share),
        f"Exposed communication, {unit}": exposed,
        "Overlap": table["Overlap"].map(units.share),
        "Utilisation": table["Utilisation"].map(units.share),
        f"Memory per GPU, {memory_unit}": (table["Experts"] / memory).map(units.digits),
        "Proof": table["Proof"],
        "Found in": table["Found in"].map(units.seconds, na_action="ignore"),
    }
    return pd.DataFrame(columns)


def mark(is_open: bool) -> str:
    """The mark of a plan in a table; the deployed one is named in its gain's place."""
    return "▸" * is_open


def _against(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Gain over the baseline as a column, and where something is held out the gain there; none if it cannot be simulated."""
    if table["Gain"].isna().any():
        return {}
    name, gains = f"Gain over {table['against'].iloc[0]}", (table["Gain"] - 1).map(units.signed)
    columns = {f"{name}{table['scope'].iloc[0]}": gains.where(~table["deployed"], DEPLOYED)}
    if table["Held out"].notna().any():
        columns[f"{name}{HELD_OUT}"] = (table["Held out"] - 1).map(units.signed, na_action="ignore")
    return columns


def decomposition(table: pd.DataFrame, problem: Problem) -> None:
    """The chart of the plans' overlap of communication and computation."""
    plans, table = cached.candidates(), table.sort_values("Time")
    baseline = next(iter(table["Plan"][table["deployed"]]), None)
    figures = {name: cached.metrics(plans[id].plan, problem) for name, id in zip(table["Plan"], table["id"], strict=True)}
    figure = step_charts.decomposition(figures, baseline, st.context.theme.type == "dark")
    widgets.chart(figure, "decomposition")


def _steps(steps: float) -> str:
    if math.isinf(steps):
        return "never"
    return "at once" if steps <= 0 else f"{math.ceil(steps):,} pass{'es' * (steps > 1)}"


def notes(row: pd.Series, made_for: dict[str, str]) -> None:
    """The optimiser's notes on the open plan. made_for: see `cached.made_for`."""
    lines = [f"**{plain(row['Plan'])}** · plan `{row['id'][:12]}`"]
    lines.append(f"- {plain(row['proof'])}")
    lines.append(f"- {tables.COLUMN}: {tables.balance_sentence(row['Overload'])}")
    if row["notes"] and made_for:
        lines.append(f"- What its optimiser noted, all of it for {plain(', '.join(made_for.values()))}:")
    lines += [f"- {plain(about)}: {plain(units.quantity(**note))}" for about, note in row["notes"].items()]
    st.markdown("\n".join(lines))


def _knobs(problem: Problem, aim: str) -> bool:
    """The chart of the knobs that the newest job for what is open has turned; False without one. aim: of `goal`"""
    absent = dict.fromkeys(("second", "in_use", "step", "graph", "travel"))
    about, dark = absent | problem_arguments(problem), st.context.theme.type == "dark"
    for job in cached.jobs(state.session.plan_jobs):
        if {name: job.request.arguments.get(name) for name in about} != about:
            continue
        with suppress(InputError):  # a damaged result; the panel of the job says so
            if turned := cached.answer_of(job).waterfall:
                widgets.chart(waterfall_charts.waterfall(turned, dark, not job.state.finished), "waterfall")
                text = "Turned one after another from what is deployed, each on top of those before it; simulated."
                if aim == goal.ONE:
                    text += (
                        " The floor is for plain sends and tokens that go home. For unequal slots or copies set Experts per "
                        "GPU and Spare slots of Best of all in the choices next to Plan it."
                    )
                st.caption(text)
                return True
    return False


def show_candidates(problem: Problem, aim: str, judged: answer.Judged) -> None:
    """The answer, its charts, the table, the notes on the open plan, and the way on. aim: of `goal`."""
    table = rows(problem)
    running = any(not job.state.finished for job in cached.jobs(state.session.plan_jobs))
    if table.empty:
        if not running:  # else its row says how far a job is
            st.info("No plan for these inputs yet: press Plan it.", icon=":material/info:")
        if aim == goal.ONE:
            deployed.show(problem)
        return
    table = folded(table)
    shown = table[table["id"] == state.session.plan]
    if len(shown):
        plan = cached.open_plan()
        with suppress(InputError):  # the verdict line too needs a baseline
            answer.show(plan, cached.open_standing(plan, problem), judged)
        verdict_line.show_plan(plan, problem)
        verdict_line.say_made_for(plan, problem)
    has_knobs = _knobs(problem, aim)
    if aim == goal.STEP:
        decomposition(table, problem)
    else:
        now, opened = (next(iter(table.index[table[which]]), None) for which in ("deployed", "open"))
        columns = (table[name].astype(float).tolist() for name in ("Time", "Bound"))
        dark = st.context.theme.type == "dark"
        figure = charts.ranked(table["Plan"].tolist(), *columns, now, opened, dark, running, table["scope"].iloc[0])
        with kept.expander("All plans in a chart", key="optimise-ranked") if has_knobs else st.container():
            widgets.chart(figure, "plans-ranked")
    on = "Simulated" if aim == goal.STEP else "Simulated on the open workload"
    st.caption(f"{on}: what is deployed, then the fastest first. Select a row to open its plan.")
    show(table)
    if aim == goal.STEP:
        st.caption(
            "Exposed communication: the network is busy and nothing computes. Memory: weights, gradients and momentum on "
            "the fullest GPU, without activations."
        )
    with st.container(horizontal=True):
        st.page_link("../pages/timeline.py", label="See why on the timeline", icon=":material/view_timeline:")
        if aim == goal.ONE:
            st.page_link("../pages/review.py", label="Save it and judge whether it is worth it", icon=":material/gavel:")
    with st.container(horizontal=True, vertical_alignment="top"):
        if len(shown):
            with kept.expander("Notes of its optimiser", key="optimise-notes"):
                notes(shown.iloc[0], cached.made_for(cached.open_plan(), problem))
        if aim == goal.ONE:
            with kept.expander("What is deployed today", key="optimise-deployed"):
                deployed.show(problem)

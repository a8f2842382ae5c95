"""Comparison of two plans: figures, experts that sit elsewhere, and both timelines on one axis."""

from collections import Counter
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from app import cached, kept, state, tables, widgets
from app.charts import review as charts
from app.charts.gantt import MOST_LANES, fold, folds
from app.optimise.table import scope_of
from app.review import store
from app.tables import COLUMN, plain
from engine import units
from engine.compare.figures import Metrics, speedup
from engine.compare.standing import is_loss
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Plan, Travel
from engine.problem import Problem
from engine.result import NOT_BOUNDED
from engine.serving.figures import ServingFigures
from engine.store import team, team_list
from engine.store.team import SavedPlan
from engine.store.team_list import ListedPlan
from engine.timeline import Balance
from engine.workload import digest_of

SESSION, SAVED = "this session", "saved"
AGAINST = "Second against first"
TIME = "Time (simulated)"


def show(workspace: str) -> None:
    """Show the choice of two plans of the workspace and of the session, and their comparison on the first one's inputs."""
    saved = {f"saved-{listed.number}": listed for listed in team_list.listed_plans(store.db(), workspace)}
    saved_ids = {listed.plan for listed in saved.values()}
    plans: dict[str, ListedPlan | Plan] = {**saved}
    plans |= {f"session-{id}": candidate.plan for id, candidate in cached.candidates().items() if id not in saved_ids}
    if len(plans) < 2:
        st.info("There is nothing to compare yet: save a second plan, or make one.", icon=":material/info:")
        return
    left, right, names = *st.columns(2), _names(plans)
    number, _ = state.visit.reviewed or (None, None)
    looked_at = list(plans).index(f"saved-{number}") if f"saved-{number}" in plans else 0
    with left:
        first = kept.selectbox("Plan", list(plans), looked_at, names.__getitem__, key=f"compare-a-{workspace}")
    # Plans made from the same recording come first: others may be for another cluster and model.
    own = _recording(plans[first])
    rest = sorted((id for id in plans if id != first), key=lambda id: _recording(plans[id]) != own)
    with right:
        second = kept.selectbox("Compare with", rest, 0, names.__getitem__, key=f"compare-b-{workspace}")
    try:
        _compare(_read(plans[first]), _read(plans[second]))
    except InputError as error:
        st.error(
            f"They cannot be compared here: {plain(str(error))}. Choose plans for the same cluster and model.",
            icon=":material/error:",
        )


def _read(plan: ListedPlan | Plan) -> SavedPlan | Plan:
    """A plan with everything that was saved with it."""
    return plan if isinstance(plan, Plan) else team.find_saved(store.db(), plan.number)


def _names(plans: dict[str, ListedPlan | Plan]) -> dict[str, str]:
    """Names of the plans in the choice: name and workspace, and the id where that does not tell them apart."""
    names = {
        key: f"{plan.name} · {SESSION if isinstance(plan, Plan) else f'{SAVED} by {plan.by}'}" for key, plan in plans.items()
    }
    often = Counter(names.values())
    ids = {key: plan.id if isinstance(plan, Plan) else plan.plan for key, plan in plans.items()}
    return {key: f"{name} · {ids[key][:8]}" if often[name] > 1 else name for key, name in names.items()}


def _recording(plan: ListedPlan | Plan) -> str | None:
    """The name of a plan's recording."""
    if isinstance(plan, ListedPlan):
        return plan.summary.recording
    return state.session.workloads.get(plan.provenance.inputs.get("workload", ""))


def _plan(plan: SavedPlan | Plan) -> Plan:
    return plan if isinstance(plan, Plan) else store.plan_of(plan)


def _problem(plan: SavedPlan | Plan) -> Problem:
    """The problem that a plan was saved for; for a plan of the session, the open one."""
    if isinstance(plan, SavedPlan):
        return store.problem_of(plan)
    if (problem := cached.problem()) is None:
        raise InputError("open a workload, a cluster and a model first")
    return problem


def _compare(first: SavedPlan | Plan, second: SavedPlan | Plan) -> None:
    problem = _problem(first)
    plans = [_plan(first), _plan(second)]
    for plan in plans:
        cached.check_plan(plan, problem)
    alike = plans[0].name == plans[1].name
    names = [f"{plan.name} {plan.id[:8]}" if alike else plan.name for plan in plans]
    figures = [cached.metrics(plan, problem) for plan in plans]
    serving = store.serving_of(first, problem) if isinstance(first, SavedPlan) else cached.open_serving(problem)
    served = None if serving is None else [cached.served(plan, problem, serving).figures for plan in plans]
    scope = scope_of(plans, None, problem)
    draw_timelines(dict(zip(names, plans, strict=True)), names, problem, "compare", serving, scope=scope)
    widgets.caption_with_costs(
        f"Both simulated on {plain(problem.workload.name)}, {plain(problem.cluster.name)}, {plain(problem.model.name)}, "
        f"as the first one was {'saved' if isinstance(first, SavedPlan) else 'made'}."
        f"{_travels(plans, names)}",
        problem.cost_source,
    )
    table = as_text(names, figures, served)
    slower = is_loss(speedup(*(each.total for each in figures) if served is None else (each.seconds for each in served)))
    losses = {AGAINST: [slower and label == TIME for label in table[""]]}
    tables.show(table, losses=losses, hide_index=True, height="content", alt="Figures of both plans")
    _placements(plans, (names[0], names[1]))


def draw_timelines(
    plans: dict[str, Plan],
    bounded: Sequence[str],
    problem: Problem,
    place: str,
    serving: cached.Serving | None = None,
    title: str = "",
    scope: str = "",
) -> None:
    """Timelines of plans on one axis, above the choice of their layers.

    plans: by the names that they have here
    bounded: names of those with a line for their bound in these layers, of passes
    place: on the Review page, part of the keys of its widgets
    serving: the step that is drawn; None: the pass or training step
    title: empty: the times of the plans
    scope: of their gain, as `, in sample`
    """
    if serving is None:
        shown = {name: cached.simulate(plan, problem) for name, plan in plans.items()}
    else:
        shown = {name: cached.served(plan, problem, serving).whole(problem.model) for name, plan in plans.items()}
        bounded = ()
    if serving is None and problem.goal is not Goal.TRAINING and len(problem.cluster.gpus) > MOST_LANES:  # as on the Timeline
        by_node = next(iter(folds(problem.cluster).values()))
        shown = {name: fold(timeline, *by_node) for name, timeline in shown.items()}
    layers, bounds, last = None, None, problem.workload.layers - 1
    chart = st.container()
    if problem.goal is not Goal.TRAINING:
        layers = (0, min(last, 1))
        if last > 0:
            layers = charts.drawable(shown, *kept.slider("MoE layers", 0, last, layers, key=f"{place}-layers-{last}"))
        of_each = {name: cached.bound(plans[name], problem, *layers) for name in bounded}
        bounds = {name: bound for name, bound in of_each.items() if bound is not None}
    of_step = () if serving is None else (serving.step.digest, serving.source.source)
    key, dark = (
        digest_of(*(plan.id for plan in plans.values()), str(layers), title, *of_step)[:16],
        st.context.theme.type == "dark",
    )
    of = digest_of(*plans, "bounds", *bounded, *cached.key_of(problem))
    with chart:
        widgets.gantt(lambda: charts.timelines(shown, layers, bounds, dark, title, scope), f"{place}-gantt-{key}", of)


def as_text(names: list[str], figures: list[Metrics], served: list[ServingFigures] | None = None) -> pd.DataFrame:
    """One row for each figure: both plans, and the second against the first.

    served: of the serving step that is the goal; the other figures are then of its MoE layers as inference
    """
    times = [each.total for each in figures] if served is None else [each.seconds for each in served]
    bounds = [each.order_bound for each in figures] if served is None else [each.bound for each in served]
    gain = units.signed(times[0] / times[1] - 1) if times[1] else tables.MISSING
    rows = [[TIME, *map(units.seconds, times), gain]]
    if served is not None:
        rates = [each.tokens_per_second for each in served]
        rows.append(["Tokens/s per GPU", *map(units.digits, rates), units.ratio(rates[1] / rates[0])])
    known = None not in bounds and bounds[0]
    said = [NOT_BOUNDED if bound is None else units.seconds(bound) for bound in bounds]
    rows.append(["Bound of its placement", *said, units.ratio(bounds[1] / bounds[0]) if known else tables.MISSING])
    for label, name, write in (
        *((("Above that bound", "order_gap", _percent),) if served is None else ()),
        ("Exposed communication", "exposed_communication", units.seconds),
        ("Overlap", "overlap", _percent),
        ("GPU utilisation", "utilisation", _percent),
        ("Balancedness", "balancedness", "{:.3f}".format),
        ("Kept local", "kept_local", _percent),
        ("Rows per token", "rows", units.digits),
        ("Fullest GPU", "memory", units.size),
    ):
        ours, theirs = (getattr(figure, name) for figure in figures)
        if ours is None or theirs is None:  # of a training step, or without a bound
            continue
        against = units.ratio(theirs / ours) if ours else tables.MISSING
        if write is _percent:
            against = _points(ours, theirs)
        rows.append([label, write(ours), write(theirs), against])
        if name == "balancedness":
            rows += _overload([figure.balance for figure in figures])
    return pd.DataFrame(rows, columns=["", names[0], names[1], AGAINST])


def _percent(value: float) -> str:
    """A share in per cent, with the decimals of the difference of two."""
    return f"{100 * value:.1f} %"


def _points(ours: float, theirs: float) -> str:
    """The difference of two shares as they are written, in percentage points."""
    return f"{round(100 * theirs, 1) - round(100 * ours, 1) + 0.0:+.1f} points"


def _overload(pair: list[Balance]) -> list[list[str]]:
    """Rows of the overload factors of both plans: the mean over layers, and of their sum."""
    ours, theirs = (balance.factors for balance in pair)
    over = list(pair[0].percentiles)
    texts = [" · ".join(units.digits(factors[name]) for name in over) for factors in (ours, theirs)]
    against = " · ".join(units.digits(theirs[name] / ours[name]) for name in over)
    return [
        [COLUMN, units.ratio(ours["mean"]), units.ratio(theirs["mean"]), units.ratio(theirs["mean"] / ours["mean"])],
        [f"Overload {' · '.join(over)}", *(f"{text}×" for text in texts), f"{against}×"],
    ]


def _placements(plans: list[Plan], names: tuple[str, str]) -> None:
    pair = [plan.placement for plan in plans]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        if all(plan.goal is Goal.TWO_MODELS for plan in plans):
            which = kept.segments(
                "Of", ["First model", "Second model"], default="First model", required=True, key="compare-model"
            )
            if which == "Second model":
                pair = [plan.placement_b for plan in plans]
        layer = kept.selectbox(
            "Layer",
            [None, *range(pair[0].layers)],
            format_func=lambda layer: "all layers, mean" if layer is None else str(layer),
            key=f"compare-layer-{pair[0].layers}",
            width=200,
        )
    key = digest_of(*(placement.digest for placement in pair), str(layer))[:16]
    widgets.chart(charts.difference(*pair, names, layer), f"difference-{key}")
    st.caption(f"Green: {plain(names[1])} serves more of the expert's tokens on that GPU; orange: less.")


def _travels(plans: Sequence[Plan], names: Sequence[str]) -> str:
    """The travel of either plan's tokens, unless it is the plain way."""
    if all(plan.travel is None for plan in plans):
        return ""
    said = (f"{plain(name)} {(plan.travel or Travel()).in_words}" for plan, name in zip(plans, names, strict=True))
    return f" Tokens travel: {'; '.join(said)}."

"""Sweeps of one parameter of a training plan on the What-if page, and its generator of synthetic routing logs."""

import re
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
import streamlit as st

from app import failing, kept, state, studies, tables, widgets
from app.charts import sweep as charts
from app.tables import plain, sentence
from engine import units
from engine.compare.imbalance import MOST_STEPS, PRESETS, USUAL_STEPS, ImbalanceRecipe, load_of_steps
from engine.compare.sweep import (
    NAMES,
    ORDERS,
    USUAL_PARTS,
    Kind,
    SweepPoint,
    best_of,
    check_values,
    trials_of,
    usual_settings,
    usual_values,
)
from engine.compare.synthetic import MOST_SKEW, Recipe, planted_placement
from engine.errors import InputError
from engine.jobs import runner
from engine.jobs.studies import SweepAnswer
from engine.model import MoEModel
from engine.placement.baselines import linear_assignment
from engine.placement.transitions import kept as kept_local
from engine.placement.transitions import transitions
from engine.problem import Problem
from engine.store.problems import problem_arguments
from engine.systems.pieces import spread_evenly
from engine.systems.training.baselines import BucketOptions
from engine.systems.training.lancet import LancetOptions
from engine.systems.training.lina import LinaOptions
from engine.timeline import Balance, over_layers
from engine.workload import RoutingTrace

KINDS: dict[Kind, tuple[str, str]] = {
    "micro_op": (
        ":material/grid_view: Micro-op size",
        "Lina cuts all-to-alls and all-reduces into micro-ops, so that an all-to-all never waits long for the network. Small "
        "ones wait less, but each has a start-up time (Lina §7.2.2). The references cut nothing. With packing, the experts on "
        "a GPU are chosen anew for every size, which makes the line jump.",
    ),
    "degree": (
        ":material/splitscreen: Pipeline degree",
        "Every MoE layer in so many parts, forward and backward alike. More "
        "parts overlap more, but each has a start-up time (PipeMoE, Figures 3 and 4).",
    ),
    "range": (
        ":material/content_cut: Partition range",
        "How many operators around an all-to-all Lancet may cut together in the forward pass. Longer ranges hide more, but "
        "small parts compute less efficiently (Lancet, Figure 6). 0: nothing is cut; 4: only dispatch, experts and combine.",
    ),
}
FIELDS = {"micro_op": "Micro-op sizes, MB", "degree": "Degrees", "range": "Maximum operators per range"}
SPLIT = (11, 9)
PARTS = (2, 3, 4, 6, 8, 12, 16)


def panel(problem: Problem) -> None:
    """Choose a sweep, run it, and show its points."""
    titles = {kind: title for kind, (title, _) in KINDS.items()}
    kind = kept.segments("Sweep", titles, titles.get, default="micro_op", key="sweep-kind", label_visibility="collapsed")
    st.caption(KINDS[kind][1])
    wanted = _wanted(kind, problem)
    job = studies.newest(_key(kind))
    running = job is not None and not job.state.finished
    if st.button("Run the sweep", icon=":material/play_arrow:", type="primary", disabled=wanted is None or running):
        with failing.saying():
            state.set_study_job(_key(kind), widgets.start_job_on(problem, "sweep", {"sweep": wanted}).id)
            st.rerun()
    then = {} if job is None else job.request.arguments
    if job is not None and {name: then[name] for name in then if name != "sweep"} != problem_arguments(problem):
        st.info(
            "The last sweep is for another training step, model, cluster or cost source: run it again for what is open.",
            icon=":material/info:",
        )
        return
    studies.watch(
        _key(kind), lambda result: _show(kind, job, result), "No sweep yet: press Run the sweep. It takes a few seconds."
    )


def values_of(text: str, kind: Kind) -> list[float]:
    """The values that a person typed: numbers apart by commas or spaces, `1-16` for whole numbers from … to, ascending. Raises
    InputError for anything else, and for values that cannot be swept."""
    values: list[float] = []
    for part in re.split(r"[,;\s]+", text.strip()):
        stretch = re.fullmatch(r"(\d{1,6})[-–…](\d{1,6})", part)
        try:
            if stretch:
                low, high = map(int, stretch.groups())
                if not 0 <= high - low <= 1000:
                    raise InputError(f"{NAMES[kind]}: {part} goes from {low} to {high}; give an ascending, shorter stretch")
                values += range(low, high + 1)
            elif part:
                values.append(float(part))
        except ValueError:
            raise InputError(f"{NAMES[kind]}: '{part}' is not a number; write for example 10, 20, 30") from None
    return check_values(kind, values)


def _key(kind: Kind) -> str:
    """Key under which the session keeps the newest sweep of a kind."""
    return f"sweep-{kind}"


def _usual(kind: Kind, problem: Problem) -> str:
    return "1-16" if kind == "degree" else ", ".join(map(str, usual_values(kind, problem)))


def _wanted(kind: Kind, problem: Problem) -> dict[str, Any] | None:
    """Values and settings as a sweep takes them; None, after saying why, if they cannot be."""
    settings: dict[str, Any] = {}
    help = "numbers with commas between them; 1-16 stands for the whole numbers from 1 to 16"
    text = kept.text_input(
        FIELDS[kind], _usual(kind, problem), key=f"sweep-values-{kind}-{problem.model.digest[:8]}", help=help
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        if kind == "micro_op":
            # The size alone is swept unless a person wants the packing to follow it.
            settings = {
                "packing": kept.option_input("sweep", LinaOptions, "packing", default=usual_settings(kind)["packing"]),
                "pipelining": kept.option_input("sweep", LinaOptions, "pipelining"),
            }
        elif kind == "degree":
            settings = {
                "orders": kept.multiselect(
                    "Order on the network", list(ORDERS), list(ORDERS), format_func=ORDERS.get, width=330, key="sweep-orders"
                )
            }
        else:
            settings = {
                "parts": sorted(kept.multiselect("Maximum parts per range", PARTS, USUAL_PARTS, width=240, key="sweep-parts"))
            }
            names = ("weight_gradients", "irregular")
            settings |= {name: kept.option_input("sweep", LancetOptions, name) for name in names}
        settings["bucket_mb"] = kept.option_input("sweep", BucketOptions, "bucket_mb")
    try:
        wanted = {"kind": kind, "values": values_of(text, kind), "settings": settings}
        if not settings.get("orders", True) or not settings.get("parts", True):
            raise InputError("choose at least one " + ("order on the network" if kind == "degree" else "number of parts"))
        trials_of(problem, kind, wanted["values"], settings)
    except InputError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return None
    return wanted


def _show(kind: Kind, job: runner.Job, answer: SweepAnswer) -> None:
    """Both charts, the table, and a way to open any of the plans."""
    points = [row.point for row in answer.candidates]
    series = charts.series_of(points)
    if not series:
        return
    above, aside = st.columns(SPLIT, gap="medium")
    with above:
        titles = {what: title.capitalize() for what, title in charts.WHATS.items()}
        what = kept.segments(
            "Time", titles, titles.get, default="total", key=f"sweep-what-{kind}", label_visibility="collapsed"
        )
    shown = series[0]
    if len(series) > 1:
        with aside:
            best = best_of(points, what).series
            shown = kept.segments(
                "Spent on, of", series, default=best, key=f"sweep-series-{job.id}", label_visibility="collapsed"
            )
    left, right = st.columns(SPLIT, gap="medium")
    with left:
        widgets.chart(charts.times(points, kind, what, len(points) == answer.of), f"sweep-{kind}")
    with right:
        widgets.chart(charts.decomposition(points, kind, shown), f"sweep-parts-{kind}")
    text = "Simulated. The bound is proven for every schedule of a point's placement."
    widgets.caption_with_costs(text, answer.cost_source)
    _table(kind, job, points, what)


def _table(kind: Kind, job: runner.Job, points: list[SweepPoint], what: charts.What) -> None:
    """The points by series and value, the references last; the selected one, or the best, can be opened."""
    best = best_of(points, what)
    key = f"sweep-table-{job.id}"  # points only ever join at the end, so that a row stays the same point
    picked = st.session_state.get(key, {}).get("selection", {}).get("rows", [])
    chosen = points[picked[0]] if picked else best
    tables.show(as_text(kind, points), key=key, hide_index=True, on_select="rerun", selection_mode="single-row")
    with st.container(horizontal=True, vertical_alignment="center"):
        opened = chosen.plan_id == state.session.plan
        if st.button("Open this plan", icon=":material/route:", key=f"sweep-open-{kind}", disabled=opened):
            state.take_plan(chosen.plan_id, job.id)
            state.update(plan=chosen.plan_id)
            st.rerun()
        named = chosen.series if chosen.value is None else f"{charts.label(kind, chosen.value)}, {chosen.series}"
        how = "" if picked else ", the best; select a row for another"
        st.caption(f"{'Open now' if opened else 'This plan'}: {plain(named)}{how}.")

        def as_csv() -> str:
            rows = [asdict(point) for point in points]
            return tables.as_csv(pd.DataFrame([row | row.pop("decomposition") for row in rows]))

        widgets.download("Points as CSV", as_csv, f"sweep-{kind}-{job.id}.csv", key=f"sweep-csv-{kind}")


def as_text(kind: Kind, points: list[SweepPoint]) -> pd.DataFrame:
    """The figures as text with units, one row for each point."""
    factor, unit = units.scale_of(max(point.total for point in points), units.TIME)

    def column(value) -> list[str]:
        return [units.digits(value(point) / factor) for point in points]

    text = {
        FIELDS[kind]: ["reference" if point.value is None else f"{point.value:g}" for point in points],
        "Series": [point.series for point in points],
        f"Step, {unit}": column(lambda point: point.total),
        f"Forward pass, {unit}": column(lambda point: point.forward),
        "Above the bound": [units.share(point.total / point.bound - 1) for point in points],
        f"Exposed communication, {unit}": column(lambda point: point.decomposition["communication"]),
        f"Overlapped, {unit}": column(lambda point: point.decomposition["overlapped"]),
    }
    if kind == "micro_op":
        text["Experts on a GPU"] = [str(point.experts_per_gpu) for point in points]
        text["All-reduces"] = [f"{point.pieces:,}" for point in points]
        text[f"Longest all-reduce, {unit}"] = column(lambda point: point.longest)
    return pd.DataFrame(text)


TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PREVIEW = 40_000_000
"""Tokens × layers × experts that a preview draws at most, well under half a second."""


POWER_LAW = "power law"
"""The form's own recipe, in the list of presets."""


@failing.fragment
def synthetic_panel() -> None:
    """The choice of a recipe, its result for the open model, and a button that opens it. Needs a model and a cluster, no
    recording."""
    model, gpus = state.session.model, len(state.session.cluster.gpus)
    sizes = f"{len(model.moe_layers)} MoE layers, {model.experts} experts, {model.experts_per_token} per token"
    st.caption(f"A synthetic routing log, drawn and not recorded, for {plain(model.name)}: {sizes}.")
    left, right = st.columns([3, 7], gap="medium")
    with left:
        try:
            recipe = _recipe()
            help = "Adds the synthetic log to the session's recordings and opens it."
            if st.button("Open it", icon=":material/database:", type="primary", width="stretch", help=help):
                trace = recipe.draw(model)
                state.open_workload(trace)
                state.remember_model(trace.digest, model)
                state.visit.notice = f"opened {trace.name}: it was not recorded"
                st.rerun()
            few = max(256, PREVIEW // (len(model.moe_layers) * model.experts))
            shown = _drawn(model.digest, replace(recipe, tokens=min(recipe.tokens, few)), model)
        except InputError as error:
            st.error(plain(str(error)), icon=":material/error:")
            return
    with right:
        _show_synthetic(shown, gpus, recipe)


def _recipe() -> Recipe | ImbalanceRecipe:
    """The recipe in the form."""
    titles = {kind: preset.name.replace("_", " ") for kind, preset in PRESETS.items()}
    titles = {POWER_LAW: "Power law and affinity"} | titles
    help = "a power law with affinity, or one of the imbalance workloads W0 to W7 of NVIDIA/Megatron-LM pull request #7488"
    kind = kept.selectbox("Recipe", list(titles), format_func=titles.get, key="synthetic-recipe", help=help)
    if kind == POWER_LAW:
        st.caption(
            "Popularity falls with rank by a power law; a token goes on to the experts that follow its own with the "
            "probability called affinity."
        )
    else:
        st.caption(f"Isolates {PRESETS[kind].isolates}: {PRESETS[kind].text}. Layers are drawn one by one.")
    tokens = kept.select_slider("Tokens", TOKENS, 16384, lambda tokens: f"{tokens:,}", key="synthetic-tokens")
    if kind == POWER_LAW:
        help = "exponent of the power law; 0: all experts alike, about 1: Zipf's law"
        skew = kept.slider("Skew", 0.0, MOST_SKEW, 1.0, step=0.1, key="synthetic-skew", help=help)
        help = "0 %: layers are independent; 100 %: the first layer decides all others"
        affinity = kept.slider("Affinity", 0, 100, 50, step=5, format="%d %%", key="synthetic-affinity", help=help)
        return Recipe(tokens, skew, affinity / 100, _seed())
    steps, faults = USUAL_STEPS, list[str]()
    if PRESETS[kind].by_step:
        help = (
            "equal parts of the tokens, in order; in twelve of them a hotspot of a quarter of the experts goes once "
            "round, with three bursts"
        )
        steps = kept.limited(faults, "Steps", 1, MOST_STEPS, USUAL_STEPS, key="synthetic-steps", help=help)
        for fault in faults:
            st.error(sentence(f"{fault}; {USUAL_STEPS} are drawn"), icon=":material/error:")
    return ImbalanceRecipe(kind, tokens, int(steps), _seed())


def _seed() -> int:
    faults: list[str] = []
    seed = kept.limited(faults, "Seed", 0, 2**31 - 1, 0, key="synthetic-seed")
    for fault in faults:
        st.error(sentence(f"{fault}; 0 is drawn"), icon=":material/error:")
    return int(seed)


@st.cache_resource(max_entries=16, show_spinner="Drawing tokens")
def _drawn(digest: str, recipe: Recipe | ImbalanceRecipe, _model: MoEModel) -> RoutingTrace:
    return recipe.draw(_model)


def _show_synthetic(trace: RoutingTrace, gpus: int, recipe: Recipe | ImbalanceRecipe) -> None:
    """The trace's popularity, the unevenness of its steps, and the share of hops that stay on their GPU."""
    layers, experts = trace.layers, trace.num_experts
    load = trace.load
    skew = Balance.of(load).factors
    with st.container(horizontal=True, gap="medium"):
        help = f"busiest expert / mean expert of a layer; over layers {over_layers(skew)}"
        st.metric("Worst skew", units.ratio(skew["max"]), help=help)
        if isinstance(recipe, ImbalanceRecipe):
            _show_steps(trace, recipe)
        elif layers > 1:
            hops = transitions(trace.experts, experts, first_choice=True)
            even = spread_evenly(np.full(gpus, -(-experts // gpus)), experts)
            blocks = kept_local([linear_assignment(experts, even)] * layers, hops)
            planted = kept_local(planted_placement(layers, experts, gpus, recipe.seed), hops)
            st.metric(
                "Kept on the GPU, in blocks",
                units.share(blocks),
                help="share of hops between first choices that stay when experts lie in contiguous blocks",
            )
            st.metric(
                "Kept, with followers together",
                units.share(planted),
                help="the same when experts that follow each other share a GPU: the placement that was hidden in it, "
                "which an affinity optimiser should find",
            )
    if isinstance(recipe, ImbalanceRecipe) and recipe.preset.by_step:
        widgets.chart(charts.steps(load_of_steps(trace, recipe.steps).sum(axis=1)), "synthetic-by-step")
    widgets.chart(charts.popularity(load, ranked=isinstance(recipe, Recipe)), "synthetic-popularity")
    drawn = "" if trace.tokens == recipe.tokens else f" Preview of {trace.tokens:,} tokens."
    whiskers = "; whiskers: the spread between layers" if experts <= charts.MOST_WHISKERS else ""
    st.caption(f"Synthetic, on {gpus} GPUs. Dotted: the mean{whiskers}.{drawn}")


def _show_steps(trace: RoutingTrace, recipe: ImbalanceRecipe) -> None:
    """The skew of single steps, if they differ: the sum of all steps may be even."""
    if not recipe.preset.by_step:
        return
    of_step = [Balance.of(load).mean for load in load_of_steps(trace, recipe.steps)]
    st.metric(
        "Skew of a step",
        f"{units.ratio(min(of_step))} – {units.ratio(max(of_step))}",
        help="busiest expert / mean expert on average over layers, in the most and the least even step; the lower chart "
        "sums all steps up",
    )

"""The What-if page's generator of synthetic routing logs."""

from dataclasses import replace

import numpy as np
import streamlit as st

from app import failing, kept, state, widgets
from app.charts import what_if_synthetic as charts
from app.text import plain
from engine import units
from engine.balance import Balance, over_layers
from engine.errors import InputError
from engine.model import MoEModel
from engine.placement.baselines import linear_assignment
from engine.placement.transitions import kept as kept_local
from engine.placement.transitions import transitions
from engine.studies.imbalance import MOST_STEPS, PRESETS, USUAL_STEPS, ImbalanceRecipe, load_of_steps
from engine.studies.synthetic import MOST_SKEW, Recipe, planted_placement
from engine.systems.pieces import spread_evenly
from engine.workload import RoutingTrace

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PREVIEW = 40_000_000
"""Tokens × layers × experts that a preview draws at most, well under half a second."""


POWER_LAW = "power law"
"""The form's own recipe, beside the presets."""


@failing.fragment
def panel() -> None:
    """The choice of a recipe, what it makes for the open model, and a button that opens it. Needs a model and a cluster, no
    recording."""
    model, gpus = state.model(), len(state.cluster().gpus)
    sizes = f"{len(model.moe_layers)} MoE layers, {model.experts} experts, {model.experts_per_token} per token"
    st.caption(f"A synthetic routing log, drawn and not recorded, for {plain(model.name)}: {sizes}.")
    left, right = st.columns([3, 7], gap="medium")
    with left:
        try:
            recipe = _recipe()
            if st.button(
                "Open it",
                icon=":material/database:",
                type="primary",
                width="stretch",
                help="Adds the synthetic log to the session's recordings and opens it.",
            ):
                trace = recipe.draw(model)
                state.open_workload(trace)
                state.remember_model(trace.digest, model)
                state.notice(f"opened {trace.name}: it was not recorded")
                st.rerun()
            shown = _preview(model, recipe)
        except InputError as error:
            st.error(plain(str(error)), icon=":material/error:")
            return
    with right:
        _show(shown, gpus, recipe)


def _recipe() -> Recipe | ImbalanceRecipe:
    """What the form asks for."""
    kind = kept.selectbox(
        "Recipe",
        [POWER_LAW, *PRESETS],
        format_func=_title,
        key="synthetic-recipe",
        help="a power law with affinity, or one of the imbalance workloads W0 to W7 of NVIDIA/Megatron-LM pull request #7488",
    )
    if kind == POWER_LAW:
        st.caption(
            "Popularity falls with rank by a power law; a token goes on to the experts that follow its own with the "
            "probability called affinity."
        )
    else:
        st.caption(f"Isolates {PRESETS[kind].isolates}: {PRESETS[kind].text}. Layers are drawn one by one.")
    tokens = kept.select_slider("Tokens", TOKENS, 16384, lambda tokens: f"{tokens:,}", key="synthetic-tokens")
    if kind == POWER_LAW:
        skew = kept.slider(
            "Skew",
            0.0,
            MOST_SKEW,
            1.0,
            step=0.1,
            key="synthetic-skew",
            help="exponent of the power law; 0: all experts alike, about 1: Zipf's law",
        )
        affinity = kept.slider(
            "Affinity",
            0,
            100,
            50,
            step=5,
            format="%d %%",
            key="synthetic-affinity",
            help="0 %: layers are independent; 100 %: the first layer decides all others",
        )
        return Recipe(tokens, skew, affinity / 100, _seed())
    steps = USUAL_STEPS
    if PRESETS[kind].by_step:
        steps = kept.number_input(
            "Steps",
            1,
            MOST_STEPS,
            USUAL_STEPS,
            key="synthetic-steps",
            help="into which the tokens are divided, one after another; in twelve a hotspot of a quarter of the experts "
            "goes once round, and three bursts come",
        )
    return ImbalanceRecipe(kind, tokens, int(steps), _seed())


def _seed() -> int:
    return int(kept.number_input("Seed", 0, 2**31 - 1, 0, key="synthetic-seed"))


def _title(kind: str) -> str:
    """`W1 hot expert set`."""
    return "Power law and affinity" if kind == POWER_LAW else PRESETS[kind].name.replace("_", " ")


def _preview(model: MoEModel, recipe: Recipe | ImbalanceRecipe) -> RoutingTrace:
    few = max(256, PREVIEW // (len(model.moe_layers) * model.experts))
    return _drawn(model.digest, replace(recipe, tokens=min(recipe.tokens, few)), model)


@st.cache_resource(max_entries=16, show_spinner="Drawing tokens")
def _drawn(digest: str, recipe: Recipe | ImbalanceRecipe, _model: MoEModel) -> RoutingTrace:
    return recipe.draw(_model)


def _show(trace: RoutingTrace, gpus: int, recipe: Recipe | ImbalanceRecipe) -> None:
    """Its popularity, how uneven its steps are, and how many hops stay on their GPU."""
    layers, experts = trace.layers, trace.num_experts
    load = trace.load
    skew = Balance.of(load).factors
    with st.container(horizontal=True, gap="medium"):
        st.metric(
            "Worst skew",
            units.ratio(skew["max"]),
            help=f"busiest expert / mean expert of a layer; over layers {over_layers(skew)}",
        )
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
    """The skew of single steps, where they differ: the sum of all steps may be even."""
    if not recipe.preset.by_step:
        return
    of_step = [Balance.of(load).mean for load in load_of_steps(trace, recipe.steps)]
    st.metric(
        "Skew of a step",
        f"{units.ratio(min(of_step))} – {units.ratio(max(of_step))}",
        help="busiest expert / mean expert on average over layers, in the most and the least even step; the lower chart "
        "sums all steps up",
    )

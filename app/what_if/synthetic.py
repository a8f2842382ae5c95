"""The What-if page's generator of synthetic routing logs."""

import numpy as np
import streamlit as st

from app import state, widgets
from app.charts import what_if_studies as charts
from app.text import plain
from engine import units
from engine.errors import InputError
from engine.model import MoEModel
from engine.placement.baselines import linear_assignment
from engine.placement.transitions import kept, transitions
from engine.studies.synthetic import MOST_SKEW, Recipe, planted_placement, synthetic
from engine.systems.pieces import spread_evenly
from engine.workload import RoutingTrace

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PREVIEW = 40_000_000
"""Tokens × layers × experts that a preview draws at most, well under half a second."""


@st.fragment
def panel() -> None:
    """Sliders, what they make for the open model, and a button that opens it. Needs a model and a cluster, no recording."""
    model, gpus = state.model(), len(state.cluster().gpus)
    sizes = f"{len(model.moe_layers)} MoE layers, {model.experts} experts, {model.experts_per_token} a token"
    st.caption(
        f"A routing log that nobody recorded, for {plain(model.name)}: {sizes}. Popularity falls with rank by a power "
        "law; a token goes on to the experts that follow its own with the probability called affinity."
    )
    left, right = st.columns([3, 10], gap="large")
    with left:
        tokens = st.select_slider("Tokens", TOKENS, 16384, lambda tokens: f"{tokens:,}", key="synthetic-tokens")
        skew = st.slider(
            "Skew",
            0.0,
            MOST_SKEW,
            1.0,
            0.1,
            key="synthetic-skew",
            help="exponent of the power law; 0: all experts alike, about 1: Zipf's law",
        )
        affinity = st.slider(
            "Affinity",
            0,
            100,
            50,
            5,
            "%d %%",
            key="synthetic-affinity",
            help="0 %: layers are independent; 100 %: the first layer decides all others",
        )
        seed = st.number_input("Seed", 0, 2**31 - 1, 0, key="synthetic-seed")
        try:
            recipe = Recipe(tokens, skew, affinity / 100, int(seed))
            if st.button(
                "Open it",
                icon=":material/database:",
                type="primary",
                width="stretch",
                help="Adds the synthetic log to the session's recordings and opens it.",
            ):
                trace = synthetic(model, recipe)
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


def _preview(model: MoEModel, recipe: Recipe) -> RoutingTrace:
    few = max(256, PREVIEW // (len(model.moe_layers) * model.experts))
    return _drawn(model.digest, Recipe(min(recipe.tokens, few), recipe.skew, recipe.affinity, recipe.seed), model)


@st.cache_resource(max_entries=16, show_spinner="Drawing tokens")
def _drawn(digest: str, recipe: Recipe, _model: MoEModel) -> RoutingTrace:
    return synthetic(_model, recipe)


def _show(trace: RoutingTrace, gpus: int, recipe: Recipe) -> None:
    """Its popularity, and how many hops stay on their GPU."""
    layers, experts = trace.layers, trace.num_experts
    load = trace.load
    worst = float((load.max(axis=1) / load.mean(axis=1)).max())
    with st.container(horizontal=True, gap="large"):
        st.metric("Worst skew", units.ratio(worst), help="busiest expert / mean expert of a layer")
        if layers > 1:
            hops = transitions(trace.experts, experts, first_choice=True)
            even = spread_evenly(np.full(gpus, -(-experts // gpus)), experts)
            blocks = kept([linear_assignment(experts, even)] * layers, hops)
            planted = kept(planted_placement(layers, experts, gpus, recipe.seed), hops)
            st.metric(
                "Kept on the GPU, blocks",
                units.share(blocks),
                help="share of hops between first choices that stay when experts lie in contiguous blocks",
            )
            st.metric(
                "Kept, followers together",
                units.share(planted),
                help="the same when experts that follow each other share a GPU: the placement that was hidden in it, "
                "which an affinity optimiser should find",
            )
    widgets.chart(charts.popularity(load), "synthetic-popularity")
    drawn = "" if trace.tokens == recipe.tokens else f" Preview of {trace.tokens:,} tokens."
    whiskers = "; whiskers: the spread between layers" if experts <= charts.MOST_WHISKERS else ""
    st.caption(f"Synthetic, on {gpus} GPUs. Dotted: the mean{whiskers}.{drawn}")

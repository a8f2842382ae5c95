"""How tokens travel to their experts and back, under the plans that are made next."""

from typing import get_args

import streamlit as st

from app import state, widgets
from engine.plan import Travel
from engine.plan.travel import Dtype, Replicas
from engine.problem import Problem

UNITS = {"copies": "One row per token copy", "gpu": "One row per GPU", "node": "One row per node"}
HELP = (
    "What an engine sends for a token. One row per token copy: each (token, expert) pair, as the papers have it and DeepEP's "
    "low-latency kernels do. One row per GPU: once to each GPU with one of its experts (NCCL paths). One row per node: once "
    "over the fabric to each node, and from there over the node's links (DeepEP's normal kernels). With the last two, experts "
    "that fire together belong together."
)


REPLICAS = {"in turn": None, "fewest": "fewest"}
REPLICAS_HELP = (
    "Where an expert has copies. In turn: each serves as many tokens as the others. Fewest: each token goes to the copies that "
    "touch fewest GPUs or nodes, which the engine has to be able to do."
)


def _replicas(now: Travel) -> Replicas | None:
    ways = list(REPLICAS)
    way = st.selectbox(
        "Copies of an expert",
        ways,
        list(REPLICAS.values()).index(now.replicas),
        width=160,
        key="travel-replicas",
        help=REPLICAS_HELP,
    )
    return REPLICAS[way]


def choose(problem: Problem) -> None:
    """Controls of what `problem.travel` is."""
    now = state.travel() or Travel()
    unit = widgets.segments(
        "How tokens travel", list(UNITS), UNITS.__getitem__, default=now.unit, help=HELP, key="travel-unit"
    )
    formats: dict[str, Dtype | None] = {}
    own = f"same as the model ({problem.model.dtype})"
    for way, title in (("dispatch", "Dispatch format"), ("combine", "Combine format")):
        options = [own, *get_args(Dtype)]
        dtype = st.selectbox(
            title,
            options,
            options.index(getattr(now, way) or own),
            width=240,
            key=f"travel-{way}",
            help="DeepSeek's engines send fp8 out, with a scale for every 128 numbers, and bf16 back.",
        )
        formats[way] = None if dtype == own else dtype
    if problem.model.dtype == "fp8" and formats["combine"] is None:
        st.caption(":material/info: DeepSeek's engines combine in bf16, twice as many bytes as counted here.")
    unit = unit or now.unit
    replicas = None if unit == "copies" else _replicas(now)
    chosen = Travel(unit=unit, replicas=replicas, **formats)
    if chosen != now:
        state.set_travel(None if chosen == Travel() else chosen)
        st.rerun()
    if problem.estimates_rows(chosen):
        st.caption(
            "This recording has no tokens: how many rows there are is an estimate, as if tokens chose their experts by "
            "popularity alone. Experts of real tokens fire together, which saves rows."
        )

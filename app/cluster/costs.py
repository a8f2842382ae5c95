"""Where times come from: which source computes, which connects, and whether it can for what is open."""

import json

import streamlit as st

from app import drop_zone, state
from app.text import plain
from engine.cluster import Cluster
from engine.costs import choice
from engine.errors import InputError
from engine.model import MoEModel
from engine.workload import digest_of

DATASHEET, SILICON, DEEPEP = "Datasheet", "Measured tables (aiconfigurator)", "DeepEP's exchanges (aiconfigurator)"
TABLES = ("datasheet", "silicon", "deepep")
"""Sources that come from no file."""
PARTS = {"Computation": "GEMMs and passes over memory", "Network": "all-to-alls and all-reduces"}


def _label(cost: dict) -> str:
    return f"{choice.name_in_file(cost)} (file)"


def choose(cluster: Cluster, model: MoEModel | None) -> None:
    """Inputs for both parts. A source that cannot answer is refused with its reason, and the last valid one stays."""
    now = state.cost()
    parts = (now["computation"], now["network"]) if now["source"] == "combined" else (now, now)
    sources = {DATASHEET: state.DATASHEET, SILICON: {"source": "silicon"}}
    sources |= {_label(cost): cost for cost in state.cost_sources().values()}
    for part in parts:  # a file that this session knows only from what is in use
        if part["source"] not in TABLES and part not in sources.values():
            sources[_label(part)] = part
    of_part = {"Computation": sources, "Network": sources | {DEEPEP: {"source": "deepep"}}}
    chosen_sources: list[dict] = []
    round = digest_of(json.dumps([now, *sources]))[:12]  # a source opened elsewhere makes new inputs
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for (title, covers), part in zip(PARTS.items(), parts, strict=True):
            at = next(
                (
                    place
                    for place, source in enumerate(of_part[title].values())
                    if source["source"] == part["source"] and (source == part or part["source"] in TABLES)
                ),
                0,
            )
            chosen = st.selectbox(
                title,
                list(of_part[title]),
                at,
                width=340,
                help=f"Source of the times of {covers}.",
                key=f"cost-{title}-{round}",
            )
            chosen_sources.append(of_part[title][chosen])
    drop_zone.show(
        "cost-file",
        "Measured times or a profile",
        "A profile or measured times as JSON, a CSV table (operation, gpu, dtype, m, n, k, bytes, ranks, seconds), what "
        "nccl-tests prints, or a trace of the PyTorch profiler (.json, .json.gz).",
    )
    computation, network = chosen_sources
    combined = {"source": "combined", "computation": computation, "network": network}
    _use(computation if computation == network else combined, now, cluster, model)
    try:
        st.caption(f"In use: {plain(choice.from_dict(state.cost()).source)}; {plain(cluster.reached_in_words)}.")
    except InputError as error:
        st.caption(plain(str(error)))


def _use(costs: dict, now: dict, cluster: Cluster, model: MoEModel | None) -> None:
    """Open the chosen costs, or say why they are refused. now: those in use"""
    try:
        cost = choice.from_dict(costs)
        reason = choice.why_not(cost, cluster, model)
    except InputError as error:
        reason = str(error)
    if reason is not None:
        if costs == now:
            st.error(f"The costs in use cannot time this cluster and model: {plain(reason)}.", icon=":material/error:")
            st.button(
                "Use the datasheet costs",
                icon=":material/menu_book:",
                on_click=state.open_cost,
                args=(state.DATASHEET,),
            )
        else:
            st.error(f"Refused: {plain(reason)}. Still in use: {plain(choice.short(now))}.", icon=":material/error:")
    elif costs != now:
        state.open_cost(costs)
        st.rerun()

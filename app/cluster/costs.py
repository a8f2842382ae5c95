"""Where times come from: which source computes, which connects, and whether it can for what is open."""

import json

import streamlit as st

from app import state, uploads
from app.text import plain
from engine import formats
from engine.cluster import Cluster
from engine.costs import AlphaBeta, CostProfile, Profiled, choice
from engine.errors import InputError
from engine.model import MoEModel
from engine.workload import digest_of

DATASHEET, SILICON = "Datasheet", "Measured tables (aiconfigurator)"
FILES = ["json", "gz", "csv", "txt", "log", "out"]
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
        if part["source"] not in ("datasheet", "silicon") and part not in sources.values():
            sources[_label(part)] = part
    chosen_sources: list[dict] = []
    round = digest_of(json.dumps([now, *sources]))[:12]  # a source opened elsewhere makes new inputs
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for (title, covers), part in zip(PARTS.items(), parts, strict=True):
            at = next(
                (
                    place
                    for place, source in enumerate(sources.values())
                    if source["source"] == part["source"]
                    and (source == part or part["source"] in ("datasheet", "silicon"))
                ),
                0,
            )
            chosen = st.selectbox(
                title,
                list(sources),
                at,
                width=340,
                help=f"Source of the times of {covers}.",
                key=f"cost-{title}-{round}",
            )
            chosen_sources.append(sources[chosen])
    _upload()
    costs = (
        chosen_sources[0]
        if chosen_sources[0] == chosen_sources[1]
        else {"source": "combined", "computation": chosen_sources[0], "network": chosen_sources[1]}
    )
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
            st.error(f"Refused: {plain(reason)}. In use stays: {plain(choice.short(now))}.", icon=":material/error:")
    elif costs != now:
        state.open_cost(costs)
        st.rerun()
    try:
        st.caption(f"In use: {plain(choice.from_dict(state.cost()).source)}")
    except InputError as error:
        st.caption(plain(str(error)))


def _upload() -> None:
    file = st.file_uploader(
        "Measured times or a profile",
        type=FILES,
        key="cost-file",
        help="A profile or measured times as JSON, a CSV table (operation, gpu, dtype, m, n, k, bytes, ranks, seconds), what "
        "nccl-tests prints (.txt, .log, .out), or a trace of the PyTorch profiler (.json, .json.gz).",
    )
    if file and state.first_time(file.file_id):
        try:
            with uploads.as_file(file.name, file.getvalue()) as path:
                profile = formats.read_costs(path)
        except InputError as error:
            state.complain(file.file_id, str(error))
        else:
            cost = AlphaBeta(profile) if isinstance(profile, CostProfile) else Profiled(profile)
            state.add_cost_source(profile.name, choice.to_dict(cost))
            state.notice(f"read {profile.name}: choose it for computation or for the network")
            st.rerun()
    for complaint in state.complaints([file.file_id] if file else []):
        st.error(plain(complaint), icon=":material/error:")

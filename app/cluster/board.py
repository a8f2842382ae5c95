"""The drawing board on a page, the gallery of the catalogue's clusters, and clusters from files or off this machine.

Edits of the board become the open cluster; the open plan can be laid over it.
"""

import numpy as np
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import cached, kept, opening, samples, state, widgets
from app.charts.cluster import svg
from app.components.cluster_canvas import Bottleneck, OnGpu, Overlay, cluster_canvas, edit_of
from app.tables import plain
from engine import catalogue, units
from engine.cluster import Cluster
from engine.costs import choice
from engine.errors import InputError
from engine.goal import Goal
from engine.launch.places.devices import cluster_of
from engine.plan import Placement, Plan
from engine.problem import Problem
from engine.simulate.work import Load

KEY = "cluster-canvas"
ALL_LAYERS = "all"


def board(cluster: Cluster | None, below: DeltaGenerator) -> None:
    """The board for the open cluster, or an empty one to draw on. below: place of the toggle of the overlay"""
    overlay = _overlay(cluster, below)
    answered, complaint = state.visit.drawn
    cluster_canvas(cluster, answered, complaint is not None, state.visit.sessions_shown, overlay, KEY, _take)
    if complaint:
        st.error(f"{plain(complaint)} The last valid cluster stays open.", icon=":material/error:")


def _take() -> None:
    """Before a run: open the cluster of an edit on the board, or refuse it with a reason."""
    edit = edit_of(KEY)
    if edit is None or edit.serial <= state.visit.drawn[0]:
        return
    complaint = None
    try:
        state.open_cluster(None if edit.cluster is None else Cluster.from_dict(edit.cluster, "the drawing"))
    except InputError as error:
        complaint = f"{error}."
    state.visit.drawn = (edit.serial, complaint)


def _overlay(cluster: Cluster | None, below: DeltaGenerator) -> Overlay | None:
    """The overlay that a person wants on the drawing, with its controls; None: nothing."""
    plan = cached.open_plan()
    if cluster is None or plan is None:
        return None
    try:
        problem = cached.problem()
        if problem is None:
            return None
        reason = widgets.why_not(plan, problem) or choice.why_not(problem.cost, problem.cluster, problem.model)
    except InputError as error:
        reason = str(error)
    if reason:
        st.caption(f"The open plan cannot be laid over this drawing: {plain(reason)}.")
        return None
    with below:
        shows_plan = kept.toggle(
            "Overlay the open plan", key="overlay", help="experts and tokens of every GPU, and the port that is busy longest"
        )
    if not shows_plan:
        return None
    layers = [ALL_LAYERS, *plan.placement.model_layers]
    chosen = kept.select_slider("MoE layer", layers, ALL_LAYERS, key="overlay-layer", width=300)
    layer = None if chosen == ALL_LAYERS else layers.index(chosen) - 1
    overlay = overlay_of(plan, problem, layer)
    st.caption(f"Bars: each GPU's tokens, relative to the busiest GPU. {_finding(overlay, layer)}", help=problem.cost_source)
    return overlay


def _finding(overlay: Overlay, layer: int | None) -> str:
    if overlay.bottleneck is None:
        return "Nothing is sent between GPUs."
    seconds, covers = units.seconds(overlay.bottleneck.seconds), "all layers" if layer is None else "this layer"
    return f"Orange: {overlay.bottleneck.text}, {seconds} for dispatch and combine of {covers} (simulated, without latency)."


def overlay_of(plan: Plan, problem: Problem, layer: int | None = None) -> Overlay:
    """Experts and tokens of one MoE layer on every GPU, and the port to the fabric or to the node's links that needs longest.

    layer: place of the MoE layer; None: all With two models both count.
    """
    parts = [(problem, plan.placement)]
    if problem.goal is Goal.TWO_MODELS and plan.goal is Goal.TWO_MODELS:
        parts.append((problem.second, plan.placement_b))
    chosen = slice(None) if layer is None else slice(layer, layer + 1)
    loads = [Load(model_problem, placement, plan.travel) for model_problem, placement in parts]
    served = sum(load.served[chosen].sum(axis=(0, 1)) for load in loads)
    traffic = sum(load.traffic[chosen].sum(axis=0) for load in loads)
    tokens = served / served.sum() if served.sum() else served
    gpus = []
    layers = list(enumerate(plan.placement.model_layers))
    for gpu, part in enumerate(tokens):
        by_layer = {name: " + ".join(_ids(placement, gpu, at) for _, placement in parts) for at, name in layers}
        text = " + ".join(_short(placement, gpu, layer) for _, placement in parts)
        gpus.append(
            OnGpu(
                text=text,
                tokens=units.share(float(part)),
                label=f"{text}, {units.share(float(part))} of the tokens",
                share=float(part / tokens.max()) if tokens.max() else 0.0,
                layers=tuple(f"layer {name}: {experts}" for name, experts in by_layer.items()),
            )
        )
    return Overlay(tuple(gpus), _bottleneck(traffic, problem))


def _short(placement: Placement, gpu: int, layer: int | None) -> str:
    """`2 experts` of a GPU, a layer on average; in one layer their numbers: `E 3 7`."""
    if layer is not None:
        return "E " + _ids(placement, gpu, layer)
    count = float(placement.slots[:, gpu].mean())
    return f"{count:.3g} expert{'' if count == 1 else 's'}"


def _ids(placement: Placement, gpu: int, layer: int) -> str:
    return " ".join(map(str, sorted(placement.experts_of_gpu[layer][gpu]))) or "none"


def _bottleneck(traffic: np.ndarray, problem: Problem) -> Bottleneck | None:
    """The port that needs longest for the bytes of a dispatch and of the combine that brings the same back.

    traffic: float64[src, dst] bytes of the dispatch
    """
    network = problem.network
    src, dst = np.nonzero(np.where(np.eye(len(traffic), dtype=bool), 0.0, traffic))
    if not len(src):
        return None
    moved = np.zeros(4 * network.gpus)
    for here, there in ((src, dst), (dst, src)):
        for port in network.ports(here, there):
            moved += np.bincount(port, traffic[src, dst], 4 * network.gpus)
    seconds = np.divide(moved, network.capacity, out=np.zeros_like(moved), where=moved > 0)
    kind, rank = divmod(int(seconds.argmax()), network.gpus)
    fabric, sends = kind < 2, kind % 2 == 0
    where = "to the fabric" if fabric else "to its node's links"
    text = f"GPU {rank}'s port {where} is busy longest, {'sending' if sends else 'receiving'}"
    return Bottleneck(rank, fabric, sends, float(seconds.max()), text)


CARD = 196
"""Pixels of a card's width."""


def gallery() -> None:
    """A card for each preset, which opens it."""
    with st.container(horizontal=True, gap="small"):
        for name, preset in samples.clusters().items():
            with st.container(border=True, width=CARD, gap="xsmall"):
                st.image(_picture(name), alt=in_words(preset.cluster))
                st.button(
                    plain(name),
                    key=f"preset-{name}",
                    help=f"{plain(preset.description)} ({plain(preset.source)})",
                    width="stretch",
                    on_click=state.open_cluster,
                    args=(preset.cluster,),
                )
                st.caption(plain(in_words(preset.cluster)))


def in_words(cluster: Cluster) -> str:
    """`32 H100 in 4 nodes`; with more than two types `8 GPUs of 4 types in 4 nodes`."""
    types = [gpu.type for gpu in cluster.gpus]
    counts = [f"{types.count(kind)} {kind}" for kind in dict.fromkeys(types)]
    what = " + ".join(counts) if len(counts) <= 2 else f"{len(types)} GPUs of {len(counts)} types"
    nodes = len(cluster.nodes)
    return f"{what} in {nodes} node{'s' * (nodes > 1)}"


@st.cache_data(show_spinner=False)
def _picture(name: str) -> str:
    return svg(samples.clusters()[name].cluster)


def import_panel() -> None:
    """A drop zone, and a search for GPUs; the cluster that either found and its assumptions stay below it."""
    kind = st.selectbox(
        "GPU type, where the driver or a file does not name it",
        list(catalogue.fastest_first(catalogue.gpu_types())),
        index=None,
        placeholder="as detected",
    )
    opening.show(
        "cluster-file",
        "A cluster file, nvidia-smi topo -m, or pairwise nccl-tests output",
        "`nvidia-smi -L > topo.txt; nvidia-smi topo -m >> topo.txt` also names the GPUs. Logs of `sendrecv_perf` between two "
        "GPUs each, dropped together, are drawn as the cluster that fits them best.",
        kind,
    )
    detect = st.button("Detect attached GPUs", icon=":material/memory:", help="looks at the machine that the studio runs on")
    if detect:
        _detect(kind)


def _detect(kind: str | None) -> None:
    devices = cached.attached()
    try:
        drawn = cluster_of(devices.machine, kind)
    except InputError as error:
        notes = "".join(f" ({plain(note)})" for note in devices.notes)
        st.warning(f"{plain(devices.summary)}: {plain(str(error))}{notes}", icon=":material/info:")
        return
    st.markdown(plain(devices.summary))
    gpus = f"{len(drawn.cluster.gpus)} GPU{'s' if len(drawn.cluster.gpus) > 1 else ''}"
    st.success(f"{plain(drawn.cluster.name)}: {gpus}. {plain('; '.join(drawn.notes))}.", icon=":material/memory:")
    st.button("Open these GPUs", icon=":material/folder_open:", on_click=_open_imported, args=(drawn.cluster,))


def _open_imported(cluster: Cluster) -> None:
    """Before the page is drawn, so that all of it shows the new cluster."""
    state.open_cluster(cluster)
    state.visit.notice = f"opened the cluster {cluster.name}"

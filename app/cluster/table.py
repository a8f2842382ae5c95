"""The cluster as an editable table, one row per GPU; its totals; and the offer of NVLink to nodes that lack it.

Cells with the datasheet's value are left empty, so that changing a GPU's type changes its numbers.
"""

import numpy as np
import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import state, widgets
from app.charts import cluster as charts
from app.tables import plain
from engine import units
from engine.catalogue import cluster_presets
from engine.catalogue.packaged import every_gpu_type, nodes_without_links, usual_links, with_usual_links
from engine.cluster import Cluster, Gpu, Node
from engine.errors import InputError
from engine.model import MoEModel
from engine.problem import MEMORY_SHARE

_GBIT, _GIB, _TERA, _GIGA = 1e9 / 8, 2.0**30, 1e12, 1e9

# column -> (field of Gpu, unit, title); an empty cell means the catalogue's value for the type
_NUMBERS = {
    "send": ("send_bandwidth", _GBIT, "Send, Gb/s"),
    "receive": ("receive_bandwidth", _GBIT, "Receive, Gb/s"),
    "memory": ("memory", _GIB, "Memory, GiB"),
    "memory_bandwidth": ("memory_bandwidth", _GIGA, "Memory bandwidth, GB/s"),
    "flops_fp16": ("flops_fp16", _TERA, "16-bit, TFLOP/s"),
    "flops_fp32": ("flops_fp32", _TERA, "32-bit, TFLOP/s"),
    "flops_fp8": ("flops_fp8", _TERA, "8-bit, TFLOP/s"),
}
_ALWAYS_SHOWN = ("send", "receive")
MOST_ROWS, HEIGHT = 8, 345
"""Rows in sight at once, and pixels of a table of so many: the last row is cut, which shows that more follow."""


def show(cluster: Cluster) -> None:
    """The table with the latency per send; an edit becomes the open cluster, or is refused with its reason."""
    said = "Empty cells use the datasheet value. GPUs of a node without links of its own communicate over the fabric."
    if ports := "; ".join(usual_ports(cluster)):
        said += f" Ports to the fabric belong to the machine and stand in no GPU's datasheet. At the assumed default: {ports}."
    above = st.container(horizontal=True, wrap=False, vertical_alignment="bottom")
    above.caption(plain(said), width="stretch")
    base, latency_before = _base()
    edited = st.data_editor(
        base,
        key=f"cluster-table-{state.visit.edit_round}",
        num_rows="dynamic",
        height=HEIGHT if len(base) > MOST_ROWS else "auto",
        hide_index=True,
        placeholder="—",
        column_config=columns(),
    )
    latency = above.number_input(
        "Latency per send over the fabric, µs",
        0.0,
        1e6,
        latency_before,
        step=1.0,
        key=f"cluster-latency-{state.visit.edit_round}",
        width=250,
    )
    try:
        changed = to_cluster(edited, cluster, latency, base)
    except InputError as error:
        st.error(f"{plain(str(error))} The last valid cluster stays open.", icon=":material/error:")
        return
    if changed != cluster:
        state.open_cluster(changed, edited=shows(edited, changed))
        st.rerun()


def usual_ports(cluster: Cluster) -> list[str]:
    """Ports that GPUs have because nothing else was said of their type, with the catalogue's source: `H100 400 Gb/s (DGX H100,
    one
    400 Gb/s port for each GPU)`.
    """
    types, sentences = every_gpu_type(), {}
    for gpu in cluster.gpus:
        kind = types.get(gpu.type)
        if kind and gpu.send_bandwidth == gpu.receive_bandwidth == kind.bandwidth:
            taken_from = kind.note.partition("Bandwidth: ")[2].rstrip(".") or kind.source
            sentences[gpu.type] = f"{gpu.type} {units.bandwidth(kind.bandwidth)} ({taken_from})"
    return list(sentences.values())


def _base() -> tuple[pd.DataFrame, float]:
    """The table of the cluster that was last opened from outside the table, and its latency in µs.

    It stays the same object while the table is edited: a data editor drops every second edit if its input changes.
    """
    kept, cluster = state.visit.table_base, state.session.cluster
    if kept is None or kept[0] != state.visit.edit_round:
        kept = state.visit.table_base = (state.visit.edit_round, to_frame(cluster), cluster.latency * 1e6)
    return kept[1], kept[2]


def columns() -> dict:
    """Formats and checks of the columns in the browser."""
    numbers = {
        column: st.column_config.NumberColumn(title, min_value=0.0, format="%.4g") for column, (_, _, title) in _NUMBERS.items()
    }
    types = dict.fromkeys([*every_gpu_type(), *(gpu.type for gpu in state.session.cluster.gpus)])
    return {
        "node": st.column_config.TextColumn("Node", required=True, max_chars=60),
        "type": st.column_config.SelectboxColumn("GPU", options=list(types), required=True),
        **numbers,
        "link": st.column_config.NumberColumn(
            "Node's links, GB/s", min_value=0.0, format="%.4g", help="per GPU and direction; the same for all of a node"
        ),
    }


def to_frame(cluster: Cluster) -> pd.DataFrame:
    """One row per GPU, in rank order."""
    types = every_gpu_type()
    rows = []
    for node in cluster.nodes:
        for gpu in node.gpus:
            row = {"node": node.name, "type": gpu.type}
            for column, (field, unit, _) in _NUMBERS.items():
                value = getattr(gpu, field)
                usual = column not in _ALWAYS_SHOWN and gpu.type in types and value == getattr(types[gpu.type], field)
                row[column] = np.nan if usual else value / unit
            row["link"] = np.nan if node.link_bandwidth is None else node.link_bandwidth / _GIGA
            rows.append(row)
    return pd.DataFrame(rows)


def to_cluster(frame: pd.DataFrame, before: Cluster, latency: float, base: pd.DataFrame | None = None) -> Cluster:
    """The cluster that the table describes; its name and hidden fields are those of `before`. Raises InputError.

    before: the open cluster, returned itself if nothing was edited
    base: the table before it was edited, by which an edited link is told from the others of its node; None: there was none
    """
    types = every_gpu_type()
    own = {gpu.type: gpu for gpu in before.gpus}
    gpus: dict[str, list[Gpu]] = {}
    links: dict[str, list[tuple[float | None, bool]]] = {}
    for number, (index, row) in enumerate(zip(frame.index, frame.to_dict("records"), strict=True), start=1):
        node, type_name = row["node"], row["type"]
        if not isinstance(node, str) or not node.strip() or not isinstance(type_name, str):
            raise InputError(f"Row {number}: give the GPU a node and a type.")
        card = types[type_name].gpu() if type_name in types else own[type_name]
        numbers = {}
        for column, (field, unit, title) in _NUMBERS.items():
            if _empty(row[column]):
                continue
            if row[column] <= 0 and field != "flops_fp8":
                raise InputError(f"Row {number}: {title} must be above 0.")
            numbers[field] = row[column] * unit
        gpu = Gpu.from_dict(card.model_dump() | numbers, f"Row {number}")
        gpus.setdefault(node.strip(), []).append(gpu)
        link = None if _empty(row["link"]) or row["link"] <= 0 else float(row["link"]) * _GIGA
        was = None if base is None or index not in base.index else base.at[index, "link"]
        edited = base is not None and not _same(row["link"], was)
        links.setdefault(node.strip(), []).append((link, edited))
    if not gpus:
        raise InputError("A cluster needs at least one GPU.")
    nodes = []
    for place, (name, members) in enumerate(gpus.items()):
        old = _node_before(before, name, place, set(gpus))
        # A value typed into a row counts for the whole node, a GPU that came from another node takes the links that it finds,
        # and a new node has the fastest that its GPUs had.
        link = old.link_bandwidth if old else max((own for own, _ in links[name] if own is not None), default=None)
        if typed := [own for own, edited in links[name] if edited]:
            link = typed[-1]
        link_latency = old.link_latency if old else 0.0
        usual = usual_links([gpu.type for gpu in members])
        # As on the board, the second GPU brings the links that its type comes with; an emptied cell means none.
        untouched = not typed and (old is None or len(old.gpus) < 2)
        if link is None and usual and untouched:
            link, link_latency = usual.bandwidth, usual.latency
        nodes.append(Node(name=name, gpus=tuple(members), link_bandwidth=link, link_latency=link_latency))
    # As on the board, a changed cluster is no preset any more.
    title = f"{before.name}, changed" if before.name in cluster_presets() else before.name
    cluster = Cluster(name=title, nodes=tuple(nodes), latency=latency / 1e6, efficiency=before.efficiency)
    # Units converted back and forth differ by rounding.
    alike = _words(cluster) == _words(before)
    return before if alike and np.allclose(_numbers(cluster), _numbers(before), rtol=1e-12, atol=0.0) else cluster


def shows(frame: pd.DataFrame, cluster: Cluster) -> bool:
    """True if an edited table still shows every row's node in rank order and its links.

    If not, as when one GPU of a node got other links, it has to be written anew.
    """
    ours = to_frame(cluster)
    rows = zip(frame["node"], frame["link"], ours["node"], ours["link"], strict=True)
    return all(node.strip() == name and _same(link, ours) for node, link, name, ours in rows)


def _empty(cell: object) -> bool:
    return cell is None or bool(np.isnan(cell))


def _same(cell: object, other: object) -> bool:
    if _empty(cell) or _empty(other):
        return _empty(cell) and _empty(other)
    return bool(np.isclose(cell, other, rtol=1e-12, atol=0.0))


def _node_before(before: Cluster, name: str, place: int, names: set[str]) -> Node | None:
    """The node of that name; else the one in its place, if that has lost its name: then it was renamed."""
    for node in before.nodes:
        if node.name == name:
            return node
    there = before.nodes[place] if place < len(before.nodes) else None
    return there if there and there.name not in names else None


def _words(cluster: Cluster) -> list:
    return [(node.name, node.link_bandwidth is None, *(gpu.type for gpu in node.gpus)) for node in cluster.nodes]


def _numbers(cluster: Cluster) -> np.ndarray:
    of_nodes = [[node.link_bandwidth or 0.0, node.link_latency] for node in cluster.nodes]
    of_gpus = [cluster.values(field) for field, _, _ in _NUMBERS.values()]
    return np.concatenate([[cluster.latency], np.ravel(of_nodes), *of_gpus])


MOST_NAMES = 3


def offer_nvlink(cluster: Cluster) -> None:
    """A warning and a button, if nodes lack the links that their GPUs come with."""
    lacking = nodes_without_links(cluster)
    if not lacking:
        return
    names = ", ".join(node.name for node in lacking[:MOST_NAMES]) + (" …" if len(lacking) > MOST_NAMES else "")
    counts = " or ".join(dict.fromkeys(f"{len(node.gpus)} {node.gpus[0].type}" for node in lacking))
    links = {kind: usual_links([kind, kind]) for kind in dict.fromkeys(node.gpus[0].type for node in lacking)}
    rates = ", ".join(f"{units.digits(own.bandwidth / 1e9)} GB/s out of each {kind}" for kind, own in links.items())
    st.warning(
        plain(f"{names}: {counts} without links inside, though they come with NVLink ({rates})"), icon=":material/link_off:"
    )
    st.button("Add NVLink", icon=":material/add_link:", on_click=_add, args=(cluster,))


def _add(cluster: Cluster) -> None:
    state.open_cluster(with_usual_links(cluster))
    state.visit.notice = "NVLink added; its latency of 5 µs is assumed until calibrated"


def line() -> tuple[DeltaGenerator, DeltaGenerator, DeltaGenerator]:
    """The places on the line of totals: for the figures, for a control, and for the file."""
    with st.container(horizontal=True, gap="medium", vertical_alignment="center"):
        figures = st.container(horizontal=True, gap="medium", width="content")
        st.space("stretch")
        return figures, st.container(width="content"), st.container(width="content")


def totals(cluster: Cluster, figures: DeltaGenerator, file: DeltaGenerator) -> None:
    """Totals of the GPUs, the file, and the check that the open models fit the memory. figures, file: their places"""
    with figures:
        st.metric("GPUs", len(cluster.gpus))
        st.metric("Memory", f"{cluster.values('memory').sum() / 2**30:,.0f} GiB")
        st.metric("Peak, 16-bit", f"{cluster.values('flops_fp16').sum() / 1e15:.3g} PFLOP/s")
        st.metric("Fabric bandwidth", units.bandwidth(float(cluster.values("send_bandwidth").sum())))
    with file:
        # Written when asked for: a file that is ready may be gone before the browser looks, when edits follow each other.
        widgets.download("Save as JSON", lambda: cluster.model_dump_json(indent=1, exclude_none=True), f"{cluster.name}.json")
    second = state.session.model_of.get(state.session.second or "")
    models = [model for model in (state.session.model, second) if model is not None]
    for text, fits in memory_fit(cluster, models):
        if fits:
            st.markdown(f":green[:material/memory: {plain(text)}]")
        else:
            st.error(plain(text), icon=":material/memory:")
    for sentence in without_fp8(cluster, models):
        st.caption(plain(sentence))
    if not models:
        st.caption("Open a model to see whether its experts fit the memory.")


def without_fp8(cluster: Cluster, models: list[MoEModel]) -> list[str]:
    """Sentences on the number format in which GPUs without 8-bit units compute a model of 8-bit numbers, see `Gpu.flops`."""
    lacking = ", ".join(dict.fromkeys(gpu.type for gpu in cluster.gpus if not gpu.flops_fp8))
    return [
        f"{lacking} without fp8: {model.name} computes at the 16-bit rate there; its weights and tokens stay 8 bits wide."
        for model in models
        if lacking and model.dtype == "fp8"
    ]


def speeds(cluster: Cluster) -> None:
    """Speeds between nodes."""
    if len(cluster.nodes) == 1:
        st.caption("There is one node, so nothing is sent between nodes.")
        return
    widgets.chart(charts.link_speeds(cluster, st.context.theme.type == "dark"), "link-speeds")
    st.caption("Gb/s from all GPUs of a node (row) to all of another (column) at once; on the diagonal inside it.")


def memory_fit(cluster: Cluster, models: list[MoEModel]) -> list[tuple[str, bool]]:
    """A line for each model, and one for two together: if one copy of every expert fits `MEMORY_SHARE` of the memory, and the
    GPUs that are too small for as many experts as the others."""
    room = cluster.values("memory") * MEMORY_SHARE
    lines = []
    for model in models:
        slot = model.bytes_per_expert * len(model.moe_layers)
        needed, slots = slot * model.experts, room // slot
        text = (
            f"The experts of {model.name} need {units.size(needed)}: {units.share(needed / room.sum())} of the memory free for "
            f"weights ({units.share(MEMORY_SHARE)} of all)"
        )
        even = -(-model.experts // len(room))
        small = np.flatnonzero(slots < even)
        if slots.sum() < model.experts:
            text += f". This cluster holds only {slots.sum():,.0f} of the {model.experts:,} experts of every layer"
        elif len(small):
            text += (
                f". An even share, {even} experts of every layer, is too much for {len(small)} of the GPUs "
                f"({cluster.gpu_names[small[0]]} holds {slots[small[0]]:,.0f}): a plan has to place fewer there"
            )
        lines.append((text, bool(slots.sum() >= model.experts)))
    if len(models) > 1:
        needed = sum(model.bytes_per_expert * len(model.moe_layers) * model.experts for model in models)
        lines.append(
            (f"Both together: {units.size(needed)}, {units.share(needed / room.sum())} of it", bool(needed <= room.sum()))
        )
    return lines

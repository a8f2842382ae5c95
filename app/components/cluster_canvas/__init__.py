"""The drawing board: a cluster as boxes that are dragged, clicked and typed into, and back to Python after every edit."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from app.charts.theme import gpu_colour
from engine.catalogue import cluster_presets
from engine.catalogue.packaged import every_gpu_type, links_of_types
from engine.cluster import Cluster

_FOLDER = Path(__file__).parent
_PARTS = ("board.js", "draw.js", "view.js", "inspector.js", "pointer.js", "main.js")
"""One module, written as several: data, picture, zoom, form, mouse, and the page."""

_component = st.components.v2.component(
    "cluster_canvas",
    html=(_FOLDER / "canvas.html").read_text(encoding="utf-8"),
    css=(_FOLDER / "canvas.css").read_text(encoding="utf-8"),
    js="\n".join((_FOLDER / part).read_text(encoding="utf-8") for part in _PARTS),
)


@dataclass(frozen=True)
class OnGpu:
    """Load of one GPU under a plan.

    text: its experts, short
    tokens: its share of them, short
    label: both in words
    share: tokens relative to the GPU with most, 0 … 1
    layers: its experts in every layer
    """

    text: str
    tokens: str
    label: str
    share: float
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Bottleneck:
    """The port that is busy longest.

    fabric: True if it leads to the fabric, False to the node's own links
    sends: True if it is busy sending, False receiving
    seconds: of being busy
    text: all of it in words
    """

    rank: int
    fabric: bool
    sends: bool
    seconds: float
    text: str


@dataclass(frozen=True)
class Overlay:
    """A plan on the drawing. gpus: in rank order; bottleneck: None if nothing is sent."""

    gpus: tuple[OnGpu, ...]
    bottleneck: Bottleneck | None


@dataclass(frozen=True)
class Edit:
    """A cluster as the board sent it, unchecked (None: everything was removed), and the number of the edit, which has to be
    answered."""

    serial: int
    cluster: dict[str, Any] | None


def cluster_canvas(
    cluster: Cluster | None,
    answered: int,
    refused: bool,
    session: int,
    overlay: Overlay | None,
    key: str,
    on_edit: Callable[[], None],
) -> None:
    """Show the board.

    answered: number of the last edit that was dealt with
    refused: True if `cluster` is the one before that edit
    session: another number for another session, which has a history of edits of its own
    on_edit: called before the next run when there is a new edit, to be read with `edit_of`
    """
    data = {
        "cluster": cluster and cluster.model_dump(mode="json"),
        "answered": answered,
        "refused": refused,
        "session": session,
        "presets": list(cluster_presets()),
        "types": {
            name: {
                "colour": gpu_colour(name),
                "gpu": kind.gpu().model_dump(mode="json"),
                "links": (links := links_of_types().get(name))
                and {"link_bandwidth": links.bandwidth, "link_latency": links.latency},
            }
            for name, kind in every_gpu_type().items()
        },
        "overlay": overlay and asdict(overlay),
    }
    _component(key=key, data=data, default={"edit": None}, on_edit_change=on_edit)


def edit_of(key: str) -> Edit | None:
    """The latest edit of the board with this key."""
    edit = (st.session_state.get(key) or {}).get("edit")
    return Edit(int(edit["serial"]), edit["cluster"]) if edit else None

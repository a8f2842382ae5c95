"""The drawing board: a cluster as boxes that are dragged, clicked and typed into, and back to Python after every edit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from app.charts.theme import gpu_colour
from engine import catalogue
from engine.cluster import Cluster

_FOLDER = Path(__file__).parent
_PARTS = ("board.js", "draw.js", "inspector.js", "main.js")
"""One module, written as four: data, picture, form, and the page."""

_component = st.components.v2.component(
    "cluster_canvas",
    html=(_FOLDER / "canvas.html").read_text(encoding="utf-8"),
    css=(_FOLDER / "canvas.css").read_text(encoding="utf-8"),
    js="\n".join((_FOLDER / part).read_text(encoding="utf-8") for part in _PARTS),
)


@dataclass(frozen=True)
class Overlay:
    """What a plan puts on the drawing. gpus: one a GPU in rank order, {"text": short, "label": spoken, "share": 0 … 1};
    bottleneck: {"rank", "text"} of the busiest port."""

    gpus: tuple[dict[str, Any], ...]
    bottleneck: dict[str, Any] | None


@dataclass(frozen=True)
class Edit:
    """A cluster as the board sent it, unchecked, and the number of the edit, which has to be answered."""

    serial: int
    cluster: dict[str, Any]


NOTHING = {"name": "my cluster", "nodes": [], "latency": 0.0}
"""What the board starts from when no cluster is open."""


def cluster_canvas(cluster: Cluster | None, answered: int, overlay: Overlay | None, key: str, on_edit) -> None:
    """Show the board. answered: number of the last edit that `cluster` takes in (or that was refused); on_edit: called
    before the next run when there is a new edit, to be read with `edit_of`."""
    _component(
        key=key,
        data={
            "cluster": NOTHING if cluster is None else cluster.model_dump(mode="json"),
            "answered": answered,
            "types": {
                name: {"colour": gpu_colour(name), "gpu": kind.gpu().model_dump(mode="json")}
                for name, kind in catalogue.gpu_types().items()
            },
            "overlay": None if overlay is None else {"gpus": list(overlay.gpus), "bottleneck": overlay.bottleneck},
        },
        default={"edit": None},
        on_edit_change=on_edit,
    )


def edit_of(key: str) -> Edit | None:
    """The latest edit of the board with this key."""
    found = (st.session_state.get(key) or {}).get("edit")
    return Edit(int(found["serial"]), found["cluster"]) if found else None

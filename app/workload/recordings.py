"""The recordings of the session in a table, to compare and choose from."""

import streamlit as st

from app import cached, state, tables
from engine import units
from engine.errors import InputError
from engine.studies.inspection import KINDS, skew_of_layers
from engine.workload import DECODE, RoutingTrace

MOST_ROWS, ROW_HEIGHT = 5, 35
NAME_WIDTH, CROSS_WIDTH = 230, 40
"""Pixels, as the heights: columns stay where they are, whichever recording is open."""
OPEN, REMOVE = "recordings-open", "recordings-remove"


def show() -> None:
    """The table, where there is a choice of recordings."""
    digests = list(state.workloads())
    if len(digests) < 2:
        return
    st.subheader("Recordings of this session", anchor=False)
    rows = [_row(digest) for digest in digests]
    tables.show(
        rows,
        hide_index=True,
        width="content",
        height=ROW_HEIGHT * (MOST_ROWS + 1) if len(rows) > MOST_ROWS else "auto",
        column_config={
            "Open": st.column_config.ButtonColumn(
                "Recording",
                width=NAME_WIDTH,
                type="tertiary",
                alignment="left",
                on_click=_open,
                args=(digests,),
                key=OPEN,
            ),
            "Remove": st.column_config.ButtonColumn(
                "",
                width=CROSS_WIDTH,
                type="tertiary",
                on_click=_remove,
                args=(digests,),
                key=REMOVE,
                help="Takes it out of the session",
            ),
        },
    )


def _row(digest: str) -> dict[str, str]:
    name, is_open = state.workloads()[digest], digest == state.workload_digest()
    row = {"Open": f"{name} (open)" if is_open else name, "Remove": "✕"}
    try:
        return row | _figures(digest)
    except InputError:
        return row | {"Kind": "lost from the data folder"}


@st.cache_data(max_entries=512, show_spinner="Reading the recordings")
def _figures(digest: str) -> dict[str, str]:
    """What the table says of a recording beside its name. Raises InputError where the data folder has lost it."""
    recording = cached.recording(digest)
    _, kind = KINDS[type(recording)]
    return {
        "Kind": kind,
        "Tokens": f"{recording.tokens:,}" if isinstance(recording, RoutingTrace) else tables.MISSING,
        "Layers × experts": f"{recording.layers} × {recording.num_experts}",
        "Worst skew": units.ratio(float(skew_of_layers(recording).max())),
        "Phase": _phase(recording),
    }


def _phase(recording: object) -> str:
    """Prefill, decode, or how much of the tokens are decode; a dash where the recording does not say."""
    if not isinstance(recording, RoutingTrace) or recording.phase is None or not len(recording.phase):
        return tables.MISSING
    decode = float((recording.phase == DECODE).mean())
    return {0.0: "prefill", 1.0: "decode"}.get(decode, f"{units.share(decode)} decode")


def _open(digests: list[str]) -> None:
    """The recording whose name was pressed, and the model that it was made with where the open one does not fit."""
    digest = digests[st.session_state[OPEN].row]
    state.choose_workload(digest)
    made_with, recording = state.model_of(digest), cached.workload()
    if made_with is None or recording is None or state.model() is None:
        return
    if cached.model_fault(recording, state.model()) is not None:
        state.open_model(made_with)


def _remove(digests: list[str]) -> None:
    digest = digests[st.session_state[REMOVE].row]
    name = state.workloads()[digest]
    state.remove_workload(digest)
    state.notice(f"{name} is no longer in this session")

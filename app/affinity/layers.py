"""Which two layers the Affinity page compares: a slider that a person moves, or that plays through the layers."""

import streamlit as st

from app import state

PLAY, LAYERS = "affinity-play", "affinity-layers"


def plays(layers: int) -> bool:
    """The switch that steps through the layers, where there are more than two; whether it is on."""
    return layers > 2 and st.toggle("Play", key=PLAY, help="step through the layers")


def was_paused() -> bool:
    """Whether a person has ended the playing since the page ran."""
    return not st.session_state.get(PLAY)


def _pause() -> None:
    """Who moves the slider wants it to stay there."""
    st.session_state[PLAY] = False


def choose(layers: int, playing: bool) -> tuple[int, int]:
    """The two layers, from which to which; a step further when playing."""
    last = layers - 1
    if last == 1:
        return 0, 1
    start, (low, high) = state.layers_compared()
    if high > last:
        start = low, high = 0, 1
    if playing:
        high = max(high, low + 1)
        start = (low + 1, high + 1) if high < last else (0, high - low)
    elif f"{LAYERS}-{start}" not in st.session_state:
        start = low, high
    # A slider of its own for every step: one that is moved by the program can be drawn at its ends first, and a busy
    # browser then answers with those.
    shown = st.slider(
        "Layers compared",
        0,
        last,
        start,
        key=f"{LAYERS}-{start}",
        on_change=_pause,
        help="any two: from which to which",
    )
    state.compare_layers(start, shown)
    low, high = shown
    return (low, high) if low < high else (low, low + 1) if low < last else (low - 1, low)

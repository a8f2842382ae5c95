"""Which two layers the Affinity page compares: a slider that a person moves, or a step further through the layers."""

import streamlit as st

from app import state

PLAY, LAYERS = "affinity-play", "affinity-layers"


def plays(layers: int) -> bool:
    """The switch that steps through the layers, where there are more than two; whether it is on."""
    return layers > 2 and st.toggle("Play", key=PLAY, help="step through the layers")


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
        low, high = (low + 1, high + 1) if high < last else (0, high - low)
        state.compare_layers((low, high), (low, high))
        # No slider, which a busy browser may draw at its ends at first and then answer with those, as if a person had moved it.
        st.progress(high / last, f"Layers {low} and {high} of {layers}")
        return low, high
    if f"{LAYERS}-{start}" not in st.session_state:
        start = low, high
    shown = st.slider("Layers compared", 0, last, start, key=f"{LAYERS}-{start}", help="any two: from which to which")
    state.compare_layers(start, shown)
    low, high = shown
    return (low, high) if low < high else (low, low + 1) if low < last else (low - 1, low)

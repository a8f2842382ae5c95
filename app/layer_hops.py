"""Figures of the hops between the experts of one layer and another, kept between runs as those of `cached` are."""

import numpy as np
import streamlit as st

from app import cached
from engine import store
from engine.compare.affinity import KeepLimits
from engine.compare.affinity import kept_by_pair as engine_kept_by_pair
from engine.compare.affinity import sorted_choices as engine_sorted_choices
from engine.placement.affinity.bounds import spectral_limits
from engine.placement.transitions import transitions as engine_transitions
from engine.plan import Placement


@st.cache_resource(max_entries=32, show_spinner="Counting hops")
def transitions(digest: str, first_choice: bool) -> np.ndarray:
    """float64[layer - 1, expert, expert]: hops between the experts of a routing log of the session."""
    trace = cached.recording(digest)
    return engine_transitions(trace.experts, trace.num_experts, first_choice)


@st.cache_resource(max_entries=256, show_spinner=False)
def layer_pair(digest: str, layers: tuple[int, int], first_choice: bool) -> np.ndarray:
    """float64[expert, expert]: hops from the experts of one layer to those of another, not necessarily the next."""
    if layers[1] == layers[0] + 1:
        return transitions(digest, first_choice)[layers[0]]
    trace = cached.recording(digest)
    return engine_transitions(trace.experts[:, list(layers)], trace.num_experts, first_choice)[0]


@st.cache_resource(max_entries=32, show_spinner="Bounding")
def keep_limits(digest: str, first_choice: bool, groups: int) -> np.ndarray:
    """float64[layer - 1]: hops that equally large groups (GPUs or nodes) can keep at most; the experts must divide."""
    hops, choices = transitions(digest, first_choice), "first choices" if first_choice else "all choices"
    # Spectra of 57 pairs of 256 experts take half a second.
    limits = store.figures(KeepLimits, lambda: KeepLimits(spectral_limits(hops, groups)), digest, choices, f"{groups} groups")
    return limits.hops


@st.cache_resource(max_entries=64, show_spinner=False, hash_funcs={Placement: lambda placement: placement.digest})
def kept_by_pair(digest: str, first_choice: bool, placement: Placement, group_of_gpu: tuple[int, ...]) -> np.ndarray:
    """float64[layer - 1]: expected share of hops that stay in their group (GPU or node), NaN without hops."""
    groups = np.eye(max(group_of_gpu) + 1)[list(group_of_gpu)]
    return engine_kept_by_pair(placement.share @ groups, transitions(digest, first_choice))


@st.cache_resource(max_entries=32, show_spinner=False)
def sorted_choices(digest: str) -> bool:
    """True if a routing log of the session lists a token's choices by expert id."""
    return engine_sorted_choices(cached.recording(digest))

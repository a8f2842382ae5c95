"""The serving step that a person describes."""

from typing import get_args

import streamlit as st

from app import samples, state, widgets
from app.text import plain
from engine.errors import InputError
from engine.serving.step import Phase, ServingStep
from engine.serving.usual import usual_serving

PHASES: dict[Phase, str] = {"decode": "Decode, a token of each sequence", "prefill": "Prefill, whole prompts"}
OVERLAPS = {"none": "none", "two-batch": "two batches take turns"}
MOST_SEQUENCES, MOST_TOKENS = 100_000, 10_000_000
USUAL_CLUSTERS = ("hgx-h200-8", "hgx-h100-8", "hgx-h100-4-nodes")
"""Presets of one GPU type, for a serving step on a mixed cluster."""


def open_serving() -> None:
    """Look at serving: at the step last described for the open model, or a usual one."""
    state.open_serving(state.serving_of_model() or usual_serving())


def follow_model() -> None:
    """A step belongs to the model that it was described for; another model has its own."""
    if state.serving() is not None and state.model() is not None and state.serving_of_model() != state.serving():
        open_serving()


def form() -> None:
    """Inputs for the step. What cannot be is answered here, and the last valid step stays."""
    step = state.serving()
    key = f"serving-{state.model().digest[:12]}-{step.phase}"
    with st.container(border=True):
        phase = widgets.segments("Step", list(PHASES), PHASES.__getitem__, default=step.phase, required=True, key=key)
        if phase != step.phase:
            state.open_serving(step.model_copy(update={"phase": phase, "sequences": usual_serving(phase).sequences}))
            st.rerun()
        with st.container(horizontal=True, vertical_alignment="bottom"):
            values = step.model_dump() | _sizes(step, key) | _kernels(step, key)
    try:
        wanted = ServingStep.from_dict(values, "serving step")
    except InputError as error:
        st.error(f"{plain(str(error))}. The last valid step stays.", icon=":material/error:")
        return
    if wanted != step:
        state.open_serving(wanted)
        st.rerun()


def _sizes(step: ServingStep, key: str) -> dict[str, int]:
    """How much a GPU works on at once; values by field."""
    values = {
        "sequences": st.number_input(
            "Sequences per GPU" if step.phase == "decode" else "Prompts per GPU",
            1,
            MOST_SEQUENCES,
            step.sequences,
            key=f"{key}-sequences",
            width=150,
            help="Attention is data-parallel: every GPU has sequences of its own, all experts are shared by all GPUs.",
        ),
        "context": st.number_input(
            "Context, tokens in",
            1,
            MOST_TOKENS,
            step.context,
            500,
            key=f"{key}-context",
            width=150,
            help="tokens of a prompt",
        ),
    }
    if step.phase == "decode":
        values["output"] = st.number_input(
            "Output, tokens",
            1,
            MOST_TOKENS,
            step.output,
            100,
            key=f"{key}-output",
            width=150,
            help="Tokens generated for a prompt; the step is timed half-way through, memory holds them all.",
        )
    return values


def _kernels(step: ServingStep, key: str) -> dict[str, str]:
    """How the engine runs it; values by field."""
    formats = list(get_args(ServingStep.model_fields["kv_dtype"].annotation))
    return {
        "overlap": st.selectbox(
            "Overlap",
            list(OVERLAPS),
            list(OVERLAPS).index(step.overlap),
            OVERLAPS.__getitem__,
            key=f"{key}-overlap",
            width=200,
            help="Two-batch overlap cuts the step into halves: one computes while the other's tokens travel. It wins where "
            "steps are long; a short decode step reads all weights twice and loses.",
        ),
        "kv_dtype": st.selectbox(
            "KV cache",
            formats,
            formats.index(step.kv_dtype),
            key=f"{key}-kv",
            width=120,
            help="number format of kept keys and values",
        ),
    }


def offer_clusters(reason: str) -> None:
    """Why the open cluster cannot be served on, and presets that can."""
    st.info(f"{plain(reason[0].upper() + reason[1:])}. Open one of these, or draw your own:", icon=":material/dns:")
    with st.container(horizontal=True):
        for name in USUAL_CLUSTERS:
            preset = samples.clusters()[name]
            st.button(
                name,
                key=f"serving-cluster-{name}",
                help=plain(preset.description),
                icon=":material/dns:",
                on_click=state.open_cluster,
                args=(preset.cluster,),
            )

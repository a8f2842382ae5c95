"""The form of a serving step, and the open model's sizes outside the experts: from its `config.json`, or assumed."""

from typing import get_args

import streamlit as st

from app import state, widgets
from app.cached import ModelBeside
from app.tables import plain
from engine.errors import InputError
from engine.model import MoEModel
from engine.serving.sizes import usual_serving
from engine.serving.step import Phase, ServingStep

PHASES: dict[Phase, str] = {"decode": "Decode, a token of each sequence", "prefill": "Prefill, whole prompts"}
OVERLAPS = {"none": "none", "two-batch": "two batches take turns"}
MOST_SEQUENCES, MOST_TOKENS = 100_000, 10_000_000


def open_serving() -> None:
    """Look at serving: at the step last described for the open model, or a usual one."""
    state.open_serving(state.serving_of_model() or usual_serving())


def follow_model() -> None:
    """A step belongs to the model that it was described for; another model has its own."""
    if state.serving() is not None and state.session.model is not None and state.serving_of_model() != state.serving():
        open_serving()


def form() -> None:
    """Inputs for the step. An impossible value is refused here, and the last valid step stays."""
    step = state.serving()
    key = f"serving-{state.session.model.digest[:12]}-{step.phase}"
    with st.container(border=True):
        phase = widgets.segments("Step", list(PHASES), PHASES.__getitem__, default=step.phase, required=True, key=key)
        if phase != step.phase:
            state.open_serving(step.model_copy(update={"phase": phase, "sequences": usual_serving(phase).sequences}))
            st.rerun()
        with st.container(horizontal=True, vertical_alignment="bottom"):
            values = step.model_dump() | _sizes_form(step, key) | _kernels(step, key)
    try:
        wanted = ServingStep.from_dict(values, "serving step")
    except InputError as error:
        st.error(f"{plain(str(error))}. The last valid step stays.", icon=":material/error:")
        return
    if wanted != step:
        state.open_serving(wanted)
        st.rerun()


def _sizes_form(step: ServingStep, key: str) -> dict[str, int]:
    """Work of a GPU at once; values by field."""
    inputs = {
        "sequences": (
            "Sequences per GPU" if step.phase == "decode" else "Prompts per GPU",
            *(MOST_SEQUENCES, 1),
            "Attention is data-parallel: every GPU has sequences of its own, all experts are shared by all GPUs.",
        ),
        "context": ("Context, tokens in", MOST_TOKENS, 500, "tokens of a prompt"),
        "output": (
            *("Output, tokens", MOST_TOKENS, 100),
            "Tokens generated for a prompt; the step is timed half-way through, memory holds them all.",
        ),
    }
    if step.phase != "decode":
        del inputs["output"]
    return {
        field: st.number_input(label, 1, most, getattr(step, field), by, key=f"{key}-{field}", width=150, help=help)
        for field, (label, most, by, help) in inputs.items()
    }


def _kernels(step: ServingStep, key: str) -> dict[str, str]:
    """Execution by the engine; values by field."""
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


def say(model: MoEModel, beside: ModelBeside) -> None:
    """The source of the sizes, and the way to better ones if they are assumed."""
    if beside.config is not None:
        return
    st.info(
        f"The sizes of {plain(model.name)} beside its experts are {plain(beside.origin)}. Upload its Hugging Face "
        "config.json on the Workload page, or choose a model of the catalogue under its name in the sidebar.",
        icon=":material/info:",
    )

"""The form of a serving step, and the open model's sizes outside the experts: from its `config.json`, or assumed."""

from typing import get_args

import streamlit as st

from app import cached, state, widgets
from app.cached import ModelBeside
from app.tables import plain
from engine.compare.held_out import phase_of
from engine.errors import InputError
from engine.model import MoEModel
from engine.serving.sizes import named_serving, usual_serving
from engine.serving.step import Phase, ServingStep

PHASES: dict[Phase, str] = {"decode": "Decode, a token of each sequence", "prefill": "Prefill, whole prompts"}
OVERLAPS = {"none": "none", "two-batch": "two batches take turns"}
MOST_SEQUENCES, MOST_TOKENS = 100_000, 10_000_000


def open_serving() -> None:
    """Look at serving: at the step last described for the open model, or the one that the recording's name tells, or a usual
    one."""
    state.open_serving(state.serving_of_model() or _told()[0])


def open_step() -> ServingStep:
    """The step of what is open: as it was described for the open model, else with the lengths that the open recording tells."""
    return state.serving() or state.serving_of_model() or _told()[0]


def _told() -> tuple[ServingStep, str]:
    """The step with the phase and lengths that the open recording tells, and the recording's name; none if it tells nothing."""
    recording, model = cached.workload(), state.session.model
    if recording is None or model is None or cached.model_fault(recording, model) is not None:
        return usual_serving(), ""
    step = named_serving(recording.name, phase_of(recording))
    return step, "" if step == usual_serving(step.phase) else recording.name


def follow_model() -> None:
    """A step belongs to the model that it was described for; another model has its own."""
    if state.serving() is not None and state.session.model is not None and state.serving_of_model() != state.serving():
        open_serving()


def form() -> None:
    """Inputs for the step. An impossible value is refused here, and the last valid step stays."""
    step = state.serving()
    key = state.visit.widget_key(_key(step))
    with st.container(border=True):
        phase = widgets.segments("Step", list(PHASES), PHASES.__getitem__, default=step.phase, required=True, key=key)
        if phase != step.phase:
            state.open_serving(step.model_copy(update={"phase": phase, "sequences": usual_serving(phase).sequences}))
            st.rerun()
        with st.container(horizontal=True, vertical_alignment="bottom"):
            values = step.model_dump() | _sizes_form(step, key) | _kernels(step, key)
        told, name = _told()
        if name:
            _as_told(step, told, name)
    try:
        wanted = ServingStep.from_dict(values, "serving step")
    except InputError as error:
        st.error(f"{plain(str(error))}. The last valid step stays.", icon=":material/error:")
        return
    if wanted != step:
        state.open_serving(wanted)
        st.rerun()


def _as_told(step: ServingStep, told: ServingStep, name: str) -> None:
    """Say that the lengths are those in the recording's name, or offer them."""
    lengths = f"{told.context:,} tokens in" + f", {told.output:,} out" * (told.phase == "decode")
    fields = {"phase", "context", "output"} - ({"output"} if told.phase == "prefill" else set())
    if step.model_dump(include=fields) == told.model_dump(include=fields):
        st.caption(f"{told.phase.capitalize()}, {lengths}: by the name of {plain(name)}.")
    elif st.button(f"By the name of {plain(name)}: {told.phase}, {lengths}", type="tertiary", icon=":material/label:"):
        sequences = step.sequences if step.phase == told.phase else told.sequences
        state.open_serving(step.model_copy(update=told.model_dump(include=fields) | {"sequences": sequences}))
        state.visit.draw_anew([_key(told)])
        st.rerun()


def _key(step: ServingStep) -> str:
    return f"serving-{state.session.model.digest[:12]}-{step.phase}"


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

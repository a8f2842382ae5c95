"""The form of a serving step, and the open model's sizes outside the experts: from its `config.json`, or assumed."""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import streamlit as st

from app import cached, state, widgets
from app.tables import plain
from engine import formats, store
from engine.errors import InputError
from engine.formats.packaged import packaged_config
from engine.model import MoEModel
from engine.serving.sizes import TransformerSizes, usual_serving, usual_sizes
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


SAME = ("d_model", "layers", "experts")
"""Fields in which a `config.json` found by a model's name must agree with the model."""


@dataclass(frozen=True)
class ModelBeside:
    """Sizes of a model outside its experts.

    sizes: of attention, dense layers and vocabulary
    config: the file that they come from; None if they are assumed
    origin: of the sizes, in words
    """

    sizes: TransformerSizes
    config: Path | None
    origin: str


def beside_experts(model: MoEModel) -> ModelBeside:
    """Sizes of a model from the file that it was opened from, else from the packaged one of its name, else assumed. Raises
    InputError when the file is gone, or has attention of a kind that is not known."""
    config, origin = _config_of(model)
    if config is not None:
        return ModelBeside(_sizes_model(str(config)), config, origin)
    sizes = usual_sizes(model)
    kept = f"{sizes.heads} head{'s' * (sizes.heads > 1)} of {sizes.head_size}, key-value heads: {sizes.kv_heads}"
    return ModelBeside(sizes, None, f"assumed ({kept}; vocabulary: {sizes.vocabulary:,})")


def _config_of(model: MoEModel) -> tuple[Path | None, str]:
    """The file and where it came from. Raises InputError when the remembered one is gone."""
    remembered = state.session.configs.get(model.digest)
    if remembered and "/" in remembered:
        return packaged_config(remembered), f"config.json of {remembered}"
    if remembered:
        return store.config_path(remembered), "the uploaded config.json"
    return (config, f"config.json of {model.name}") if (config := _packaged(model)) else (None, "")


@st.cache_resource(max_entries=64, show_spinner=False)
def _sizes_model(config: str) -> TransformerSizes:
    return formats.read_sizes(Path(config))


@st.cache_resource(max_entries=64, show_spinner=False, hash_funcs={MoEModel: lambda model: model.digest})
def _packaged(model: MoEModel) -> Path | None:
    """The packaged file of a model of this name and these sizes."""
    try:
        config = packaged_config(model.name)
        read = formats.read_model(config)
    except InputError:
        return None
    return config if all(getattr(read, what) == getattr(model, what) for what in SAME) else None


def routing_is_assumed() -> bool:
    """True if a serving step is routed evenly, for want of a recording of the open model."""
    if state.serving() is None or state.session.model is None:
        return False
    recording = cached.workload()
    return recording is None or cached.model_fault(recording, state.session.model) is not None


def say(model: MoEModel, beside: ModelBeside) -> None:
    """The source of the sizes, and the way to better ones if they are assumed."""
    if beside.config is not None:
        return
    st.info(
        f"The sizes of {plain(model.name)} beside its experts are {plain(beside.origin)}. Upload its Hugging Face "
        "config.json on the Workload page, or choose a model of the catalogue under its name in the sidebar.",
        icon=":material/info:",
    )

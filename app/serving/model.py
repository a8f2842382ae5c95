"""What is known of the open model beside its experts: from its `config.json`, or assumed."""

from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from app import cached, state
from app.text import plain
from engine import formats, store
from engine.errors import InputError
from engine.formats.packaged import packaged_config
from engine.model import MoEModel
from engine.serving.sizes import TransformerSizes
from engine.serving.usual import usual_sizes

SAME = ("d_model", "layers", "experts")
"""What a `config.json` that goes by a model's name must say as the model does."""


@dataclass(frozen=True)
class ModelBeside:
    """sizes: of attention, dense layers and vocabulary; config: the file that says so, None where they are assumed; origin: of
    the sizes, in words."""

    sizes: TransformerSizes
    config: Path | None
    origin: str


def beside_experts(model: MoEModel) -> ModelBeside:
    """Sizes of a model from the file that it was opened from, else from the packaged one of its name, else assumed. Raises
    InputError when the file is gone, or has attention of a kind that is not known."""
    config, origin = _config_of(model)
    if config is not None:
        return ModelBeside(_sizes(str(config)), config, origin)
    sizes = usual_sizes(model)
    kept = f"{sizes.heads} head{'s' * (sizes.heads > 1)} of {sizes.head_size}, key-value heads: {sizes.kv_heads}"
    return ModelBeside(sizes, None, f"assumed ({kept}; vocabulary: {sizes.vocabulary:,})")


def _config_of(model: MoEModel) -> tuple[Path | None, str]:
    """The file and where it came from. Raises InputError when the remembered one is gone."""
    remembered = state.config_of(model)
    if remembered and "/" in remembered:
        return packaged_config(remembered), f"config.json of {remembered}"
    if remembered:
        return store.config_path(remembered), "the uploaded config.json"
    return (config, f"config.json of {model.name}") if (config := _packaged(model)) else (None, "")


@st.cache_resource(max_entries=64, show_spinner=False)
def _sizes(config: str) -> TransformerSizes:
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
    """Whether a serving step is routed evenly, for want of a recording of the open model."""
    if state.serving() is None or state.model() is None:
        return False
    recording = cached.workload()
    return recording is None or cached.model_fault(recording, state.model()) is not None


def say(model: MoEModel, beside: ModelBeside) -> None:
    """Where the sizes come from, and what to do where they are assumed."""
    if beside.config is not None:
        return
    st.info(
        f"The sizes of {plain(model.name)} beside its experts are {plain(beside.origin)}. Upload its Hugging Face "
        "config.json on the Workload page, or choose a model of the catalogue under its name in the sidebar.",
        icon=":material/info:",
    )

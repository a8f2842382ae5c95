"""Published models: a search, and those that a recording may come from."""

from collections.abc import Sequence

import streamlit as st

from app import cached, samples, state
from app.tables import plain
from engine.catalogue.packaged import PACKAGE, models_that_fit, package_folder
from engine.formats.packaged import packaged_models
from engine.model import MoEModel
from engine.workload import TrafficMatrix, Workload

MOST_TITLES = 2
"""Names of models of identical sizes on one button."""


def search(place: str) -> None:
    """A box to search and open a packaged model with its `config.json`. place: a word for the box's place on the page."""
    if package_folder() is None:
        st.caption(f"Some seventy more models come with the package {PACKAGE} (Linux x86-64), which is not installed.")
        return
    models = packaged_models()
    now = state.session.model
    chosen = st.selectbox(
        "Catalogue of models",
        list(models),
        None,
        placeholder=f"Search {len(models)} published MoE models",
        key=f"catalogue-{place}-{now.digest[:12] if now else ''}",
        help="By their names on the Hugging Face Hub; the sizes are those of their config.json.",
    )
    if chosen is not None and (models[chosen] != now or state.session.configs.get(now.digest) != chosen):
        state.change(model=models[chosen])
        state.remember_config(models[chosen], chosen)
        st.rerun()


def open_only_fit(recording: Workload) -> MoEModel | None:
    """Open the model that a recording must come from, if no model is open and those that fit are of identical sizes; None if
    nothing was opened."""
    if state.session.model is not None:
        return None
    fitting = _fitting(recording)
    return _open(fitting[0]) if len(fitting) == 1 else None


def offer(recording: Workload) -> None:
    """A button for each model that the recording may come from, if another model or none is open."""
    model = state.session.model
    if isinstance(recording, TrafficMatrix) or (model and cached.model_fault(recording, model) is None):
        return
    sizes, fitting = sizes_in_words(recording), _fitting(recording)
    if not fitting:
        st.info(f"No model of the catalogue has {sizes}: drop the model's config.json here.", icon=":material/account_tree:")
        return
    names = ", ".join(dict.fromkeys(_title(names) for names in fitting))
    with st.container(border=True):
        st.markdown(f"{sizes} fits {plain(names)}: open {'it' if len(fitting) == 1 else 'one'}?")
        with st.container(horizontal=True):
            for names in fitting:
                st.button(
                    plain(_title(names)),
                    key=f"fitting-{names[0]}",
                    help=plain(", ".join(names)),
                    icon=":material/account_tree:",
                    on_click=_open,
                    args=(names,),
                )


def say_what_counts(recording: Workload) -> None:
    """Say which sizes of the model a traffic matrix uses: it fits any model, but uses less than its reader may expect."""
    model = state.session.model
    if isinstance(recording, TrafficMatrix) and model and model.experts != recording.num_experts:
        st.caption(
            f":material/info: Of {plain(model.name)} only the sizes of a token and of an expert count: layers and experts are "
            "the matrix's."
        )


def sizes_in_words(recording: Workload) -> str:
    """`58 layers × 256 experts, top-8`, without sizes that the recording lacks."""
    top = f", top-{recording.k}" if recording.k else ""
    return f"{recording.layers} layer{'s' * (recording.layers != 1)} × {recording.num_experts} experts{top}"


def _fitting(recording: Workload) -> list[tuple[str, ...]]:
    return models_that_fit(recording, _every_model())


def _title(names: Sequence[str]) -> str:
    """Names of models of identical sizes: the presets are packaged under other names too."""
    titles = list(dict.fromkeys(name.rpartition("/")[2] for name in names))
    return ", ".join(titles[:MOST_TITLES]) + (" …" if len(titles) > MOST_TITLES else "")


def _open(names: Sequence[str]) -> MoEModel:
    """The first of some of identical sizes, and the `config.json` that is packaged for it."""
    model = _every_model()[names[0]]
    state.change(model=model)
    for checkpoint in names:
        owner, _, name = checkpoint.rpartition("/")
        if owner and name == model.name:
            state.remember_config(model, checkpoint)
    return model


def _every_model() -> dict[str, MoEModel]:
    """The presets by name, then the packaged models by checkpoint."""
    presets = {name: preset.model for name, preset in samples.models().items()}
    return presets | (packaged_models() if package_folder() else {})

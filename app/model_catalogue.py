"""Models that a package brings along with their `config.json`, to search and open."""

import streamlit as st

from app import state
from engine.catalogue.packaged import PACKAGE, package_folder
from engine.formats.packaged import packaged_models
from engine.model import MoEModel


def search(place: str) -> None:
    """A box to search and open one of them. place: where on the page it stands, by a word of its own."""
    if package_folder() is None:
        st.caption(f"Some seventy more models come with the package {PACKAGE} (Linux x86-64), which is not installed.")
        return
    models = _models()
    now = state.model()
    chosen = st.selectbox(
        "Catalogue of models",
        list(models),
        None,
        placeholder=f"Search {len(models)} published MoE models",
        key=f"catalogue-{place}-{now.digest[:12] if now else ''}",
        help="By their names on the Hugging Face Hub; the sizes are those of their config.json.",
    )
    if chosen is not None and (models[chosen] != now or state.config_of(now) != chosen):
        state.open_model(models[chosen])
        state.remember_config(models[chosen], chosen)
        st.rerun()


@st.cache_resource(show_spinner="Reading the catalogue of models")
def _models() -> dict[str, MoEModel]:
    return packaged_models()

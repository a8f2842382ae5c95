"""The sample gallery: the recordings that ship with Switchyard and the catalogue's presets."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from app import state
from engine import catalogue, formats
from engine.catalogue import ClusterPreset, ModelPreset
from engine.compare.synthetic import Recipe

FOLDER = Path(__file__).parent.parent / "sample_traces"


@dataclass(frozen=True)
class Sample:
    """A shipped recording with the model that it was recorded from."""

    file: str
    title: str
    text: str
    model: str


RECORDINGS = (
    Sample("tiny-moe/alpha-code.npz", "Alpha on code", "top-1 of 16 experts, Python source", "tiny-moe-alpha.json"),
    Sample("tiny-moe/alpha-prose.npz", "Alpha on prose", "the same model on documentation", "tiny-moe-alpha.json"),
    Sample("tiny-moe/alpha-man.npz", "Alpha on man pages", "text it was not trained on", "tiny-moe-alpha.json"),
    Sample("tiny-moe/alpha-early-code.npz", "Alpha at step 251", "early in training, on code", "tiny-moe-alpha.json"),
    Sample("traffic-8.csv", "Traffic 8 × 8", "bytes between 8 GPUs, layer 3 of Alpha on code", "tiny-moe-alpha.json"),
    Sample("tiny-moe/beta-prose.npz", "Beta on prose", "a second model, top-2 of 16", "tiny-moe-beta.json"),
    Sample("tiny-moe/beta-man.npz", "Beta on man pages", "top-2 of 16 experts", "tiny-moe-beta.json"),
    Sample("tiny-moe/beta-code.npz", "Beta on code", "text it was not trained on", "tiny-moe-beta.json"),
)


LARGE = Recipe(tokens=4096, skew=0.6, affinity=0.3)


def open_recording(sample: Sample) -> None:
    """Open a shipped recording and its model."""
    model = formats.read_model(FOLDER / sample.model)
    path = FOLDER / sample.file
    # First the writes that a full disk refuses, or half a sample would be open.
    state.open_workload(formats.read_workload(path, num_experts=model.experts, bytes_per_token=model.bytes_per_token))
    state.change(model=model)


def open_large() -> None:
    """Open a recording as large as DeepSeek-R1's, which nobody recorded, on 32 H100."""
    model = models()["DeepSeek-R1"].model
    state.open_workload(LARGE.draw(model))
    state.change(model=model)
    state.open_cluster(clusters()["hgx-h100-4-nodes"].cluster)
    state.begin_tour()


def gain() -> dict[str, Any]:
    """Seconds of the sample's forward pass with experts in order and as planned by a system, and the plan's bound.

    They are stored, as a first screen cannot wait for a plan; a test compares them with a plan.
    """
    return json.loads((Path(__file__).parent / "workload" / "gain.json").read_bytes())


def open_sample() -> None:
    """Open all inputs of the main job: a recording, its model and the mixed cluster; and on a first visit the guide."""
    open_recording(RECORDINGS[0])
    state.open_cluster(formats.read_cluster(FOLDER / "mixed-8.json"))
    state.begin_tour()


@st.cache_resource(show_spinner=False)
def clusters() -> dict[str, ClusterPreset]:
    return catalogue.cluster_presets()


@st.cache_resource(show_spinner=False)
def models() -> dict[str, ModelPreset]:
    return catalogue.model_presets()

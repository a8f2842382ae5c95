"""The serving step that is the goal, as the figures of every page need it: the open model's sizes outside the
experts, the times of its operators, and plans in the step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import streamlit as st

from app import simulations, state
from app.cached.figures import BY_CONTENT, kept_with_refusal
from app.cached.inputs import model_fault, workload
from engine import formats, store
from engine.errors import InputError
from engine.formats.packaged import packaged_config
from engine.goal import Goal
from engine.jobs.tasks import ServingAsk
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem
from engine.serving.sizes import TransformerSizes, usual_sizes
from engine.serving.step import Operators, ServingStep
from engine.simulate import serving as engine_serving
from engine.simulate.serving import ServedStep

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
    recording = workload()
    return recording is None or model_fault(recording, state.session.model) is not None


@dataclass(frozen=True)
class Serving:
    """A serving step with the model's sizes outside its experts, and the source of its operators' times.

    notes: why operators are not measured
    """

    step: ServingStep
    beside: ModelBeside
    source: Operators
    notes: tuple[str, ...]

    @property
    def timed(self) -> engine_serving.Serving:
        """The step as the engine times it."""
        return engine_serving.Serving(self.step, self.source, self.beside.sizes)

    @property
    def arguments(self) -> dict[str, Any]:
        """The step as jobs and saved plans keep it."""
        config = self.beside.config
        ask = ServingAsk(step=self.step, sizes=self.beside.sizes, config=config)
        return ask.model_dump(mode="json", exclude_none=True) | {"config": None if config is None else str(config)}


def serving_of(problem: Problem) -> Serving:
    """The open step, and the source of its times. Raises InputError if the sizes of the model cannot be known."""
    return _with_operators(problem, state.serving(), beside_experts(state.session.model))


def _with_operators(problem: Problem, step: ServingStep, beside: ModelBeside) -> Serving:
    source, notes = _operators(problem, step, beside)
    return Serving(step, beside, source, tuple(notes))


def open_serving(problem: Problem) -> Serving | None:
    """The step that is the goal, if one is open for the problem's model and can be timed on its cluster; else None, and
    the goal is a pass."""
    model = state.session.model
    if state.serving() is None or problem.goal is not Goal.INFERENCE or model is None or model.digest != problem.model.digest:
        return None
    try:
        return serving_of(problem)
    except InputError:
        return None


def kept_serving(arguments: dict[str, Any] | None, problem: Problem) -> Serving | None:
    """The step that `Serving.arguments` described; None of None, and where it can no longer be timed."""
    if arguments is None:
        return None
    try:
        ask = ServingAsk.from_dict(arguments, "serving step")
        return _with_operators(problem, ask.step, ModelBeside(ask.sizes, ask.config, "as saved"))
    except InputError:
        return None


@st.cache_resource(
    max_entries=64,
    show_spinner="Timing attention",
    hash_funcs={
        Problem: lambda problem: (problem.model.digest, problem.cluster.digest),
        ServingStep: lambda step: step.digest,
        ModelBeside: lambda beside: (str(beside.config), beside.sizes.digest),
    },
)
def _operators(problem: Problem, step: ServingStep, beside: ModelBeside) -> tuple[Operators, list[str]]:
    return simulations.operators(problem, beside.config, beside.sizes, step)


SERVED = BY_CONTENT | {Serving: lambda serving: (serving.step.digest, serving.beside.sizes.digest, serving.source.source)}


@kept_with_refusal(128, "Simulating a serving step", SERVED)
def served(plan: Plan, problem: Problem, serving: Serving) -> ServedStep:
    """A plan in the step. Raises InputError if it cannot be served, as one that is executed context-coherently."""
    return simulations.served(plan, problem, serving.step, serving.source, serving.beside.sizes)

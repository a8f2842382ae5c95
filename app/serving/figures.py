"""Plans in whole serving steps, kept between runs by the digests of all that they depend on."""

from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from app import simulations, state
from app.serving.model import ModelBeside, beside_experts
from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.serving.operators import OperatorSource
from engine.serving.roofline import RooflineOperators
from engine.serving.step import ServingStep
from engine.simulate.metrics import simulation_digest
from engine.simulate.serving import ServedStep


@dataclass(frozen=True)
class Serving:
    """What is served: the step, the model beside its experts, and what times its operators.

    notes: why operators are not measured
    """

    step: ServingStep
    beside: ModelBeside
    source: OperatorSource
    notes: tuple[str, ...]


def serving_of(problem: Problem) -> Serving:
    """The open step, and where its times come from. Raises InputError where the sizes of the model cannot be known."""
    step, beside, gpu = state.serving(), beside_experts(state.model()), problem.cluster.gpus[0]
    if beside.config is None:
        source, notes = RooflineOperators(problem.model, beside.sizes, gpu), ()
    else:
        source, notes = _operators(
            str(beside.config),
            problem.model.digest,
            gpu.digest,
            step.digest,
            beside.sizes.digest,
            problem,
            step,
            beside,
        )
    return Serving(step, beside, source, tuple(notes))


@st.cache_resource(max_entries=64, show_spinner="Timing attention")
def _operators(
    config: str,
    model: str,
    gpu: str,
    step: str,
    sizes: str,
    _problem: Problem,
    _step: ServingStep,
    _beside: ModelBeside,
) -> tuple[OperatorSource, list[str]]:
    return simulations.operators(_problem, Path(config), _beside.sizes, _step)


def served(plan: Plan, problem: Problem, serving: Serving) -> ServedStep:
    """A plan in the step. Raises InputError where it cannot be served, as one that is executed context-coherently."""
    key = (
        simulation_digest(plan, problem),
        serving.step.digest,
        serving.beside.sizes.digest,
        serving.source.source,
        problem.cluster.gpus[0].digest,
    )
    answer = _served(key, plan, problem, serving)
    if isinstance(answer, str):
        raise InputError(answer)
    return answer


@st.cache_resource(max_entries=128, show_spinner="Simulating a serving step")
def _served(key: tuple[str, ...], _plan: Plan, _problem: Problem, _serving: Serving) -> ServedStep | str:
    """Why it cannot be served is kept too: it would be asked for at every run."""
    try:
        return simulations.served(_plan, _problem, _serving.step, _serving.source, _serving.beside.sizes)
    except InputError as error:
        return str(error)


def check_cluster(problem: Problem) -> None:
    """Raise InputError unless all GPUs are of one type."""
    kinds = list(dict.fromkeys(gpu.type for gpu in problem.cluster.gpus))
    if len(kinds) > 1:
        raise InputError(
            f"a serving step needs GPUs of one type, because attention is timed for one GPU type; the open cluster has "
            f"{', '.join(kinds)}"
        )

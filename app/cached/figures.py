"""Plans on a problem: timelines, figures, bounds, moves, and the rules that they break.

How plans stand against their baseline, see `app.cached.headlines`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pandas as pd
import streamlit as st

from app import simulations
from engine import store
from engine.compare.contention import AloneAndTogether, exclusive_and_colocated
from engine.compare.figures import Metrics, Migration, balance_of
from engine.compare.figures import metrics as engine_metrics
from engine.compare.figures import migration as engine_migration
from engine.errors import InputError
from engine.goal import Goal
from engine.launch.preparation.launch import Launch
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem
from engine.provenance import SCORED_ON, input_digests, metrics_digests, simulation_digest
from engine.simulate import bound_of_plan as engine_bound
from engine.simulate import loads_of, simulate_layers, unbounded
from engine.simulate.events import waits as engine_waits
from engine.simulate.work import Load
from engine.timeline import Balance, Timeline
from engine.validate import refuse_broken, refuse_broken_launch


def key_of(problem: Problem) -> tuple[str, ...]:
    """Digests of all that a plan's figures depend on."""
    digests = input_digests(problem)
    return tuple(digests.get(role, "") for role in SCORED_ON)


BY_CONTENT = {Plan: lambda plan: plan.id, Problem: key_of, MoEModel: lambda model: model.digest}
"""Keys of cached calls: digests, since plans and problems take long to hash."""
BY_NAME = BY_CONTENT | {Plan: lambda plan: (plan.name, plan.id)}
"""Keys of cached calls with the plan's name in their answer."""


def kept_with_refusal(max_entries: int, spinner: str, keys: dict[type, Callable[[Any], Any]]) -> Callable:
    """Decorate a call: its answer, or the InputError that it raises, is kept between runs.

    keys: by type of argument, as BY_CONTENT
    """

    def decorate(call: Callable) -> Callable:
        @st.cache_resource(max_entries=max_entries, show_spinner=spinner, hash_funcs=keys)
        @wraps(call)
        def answer(*arguments: Any) -> tuple[Any, str | None]:
            try:
                return call(*arguments), None
            except InputError as error:
                return None, str(error)

        @wraps(call)
        def kept(*arguments: Any) -> Any:
            value, refusal = answer(*arguments)
            if refusal is not None:
                raise InputError(refusal)
            return value

        return kept

    return decorate


@st.cache_resource(max_entries=64, show_spinner="Simulating", hash_funcs=BY_CONTENT)
def simulate(plan: Plan, problem: Problem) -> Timeline:
    return simulations.timeline(plan, problem)


@st.cache_resource(max_entries=4, show_spinner="Simulating", hash_funcs=BY_CONTENT)
def sends_of_layer(plan: Plan, problem: Problem, layer: int) -> Timeline:
    """One MoE layer of the simulated timeline, with every send."""
    return simulate_layers(plan, problem, simulate(plan, problem), layer, layer)


@kept_with_refusal(256, "Checking the plan", BY_NAME)
def check_plan(plan: Plan, problem: Problem) -> None:
    """Raise InputError, one line, when a plan breaks a rule or does not fit the problem."""
    refuse_broken(plan, problem)


def _key_of_launch(launch: Launch) -> tuple[Any, ...]:
    inputs = (launch.workload, launch.model, launch.cluster, *(launch.second or ()), launch.step)
    return (
        *((plan.name, plan.id) for plan in launch.plans),
        *("" if document is None else document.digest for document in inputs),
    )


@kept_with_refusal(64, "Checking the plans", {Launch: _key_of_launch})
def check_launch(launch: Launch) -> None:
    """Raise InputError, one line, when a plan of a launch breaks a rule."""
    refuse_broken_launch(launch.plans, launch.workload, launch.model, launch.cluster, launch.second, launch.step)


@st.cache_resource(max_entries=64, show_spinner=False, hash_funcs=BY_CONTENT)
def waits(plan: Plan, problem: Problem) -> pd.DataFrame:
    """Seconds that all GPUs wait for in an inference plan, step by step."""
    return engine_waits(simulate(plan, problem), problem.network)


def metrics(plan: Plan, problem: Problem) -> Metrics:
    return _metrics(metrics_digests(plan, problem), plan, problem)


@st.cache_resource(max_entries=256, show_spinner="Simulating")
def _metrics(digests: tuple[str, ...], _plan: Plan, _problem: Problem) -> Metrics:
    return store.figures(
        Metrics, lambda: engine_metrics(_plan, _problem, simulate(_plan, _problem), _loads(_plan, _problem)), *digests
    )


def _loads(plan: Plan, problem: Problem) -> tuple[Load, ...]:
    return _loads_of(plan.id, key_of(problem), plan, problem)


@st.cache_resource(max_entries=2, show_spinner=False)
def _loads_of(id: str, key: tuple[str, ...], _plan: Plan, _problem: Problem) -> tuple[Load, ...]:
    return loads_of(_plan, _problem)


@st.cache_resource(max_entries=256, show_spinner=False, hash_funcs=BY_CONTENT)
def balance(plan: Plan, problem: Problem) -> Balance:
    """Evenness of the GPUs' load under a plan, without simulating it."""
    return balance_of(plan, problem)


@st.cache_resource(max_entries=64, show_spinner="Simulating each model alone", hash_funcs=BY_CONTENT)
def utilisation(plan: Plan, problem: Problem) -> AloneAndTogether:
    """Utilisation of the GPUs with each of two models alone, and with both."""
    return store.figures(
        AloneAndTogether,
        lambda: exclusive_and_colocated(plan, problem, simulate(plan, problem)),
        simulation_digest(plan, problem),
    )


@st.cache_resource(max_entries=256, show_spinner=False, hash_funcs=BY_CONTENT)
def bound(plan: Plan, problem: Problem, first: int, last: int, straight: bool = False) -> float | None:
    """Seconds below which no send order brings the plan's placement in these MoE layers; None: see `simulate.unbounded`.

    straight: True bounds orders without relays only, unless the plan's own order has some
    """
    if unbounded(plan, problem):
        return None
    return engine_bound(plan, problem, first, last, straight, _loads(plan, problem))


def migration(plan: Plan, now: Plan, problem: Problem, seconds: tuple[float, float] | None = None) -> Migration | None:
    """Cost of a move from the baseline's plan to another; None for two models and a training step, of which nothing is known to
    be in use. seconds: of the baseline and of the plan; None: as simulated."""
    if problem.goal is not Goal.INFERENCE:
        return None
    return _migration(plan, now, problem, seconds or (metrics(now, problem).total, metrics(plan, problem).total))


@st.cache_resource(max_entries=256, show_spinner="Counting moves", hash_funcs=BY_CONTENT)
def _migration(plan: Plan, now: Plan, problem: Problem, seconds: tuple[float, float]) -> Migration:
    digests = (simulation_digest(each, problem) for each in (now, plan))
    return store.figures(
        Migration, lambda: engine_migration(now.placement, plan.placement, problem, *seconds), *digests, *map(str, seconds)
    )

"""Simulations that pages wait for, in processes of their own, apart from the one that serves everybody.

A short simulation stays here as long as nobody else simulates here: threads of one process wait for one another at every step,
so that twenty at once take several times as long as one after another.
"""

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from app import state
from engine import store
from engine.compare.what_if import Change, Outlook, outlook_after
from engine.errors import InputError
from engine.goal import Goal
from engine.parallel.pool import Pool, Question
from engine.plan import Plan
from engine.problem import Problem
from engine.provenance import input_digests, simulation_digest
from engine.serving.aiconfigurator import choose_operators_of
from engine.serving.sizes import TransformerSizes
from engine.serving.step import Operators, ServingStep
from engine.simulate import simulate
from engine.simulate.compile_ahead import compile_ahead
from engine.simulate.serving import ServedStep, Serving, serve_as_measured
from engine.store.served import load_step, save_step
from engine.timeline import Timeline
from engine.workload import digest_of

FEW_SENDS = 10_000
"""About 20 ms of simulation: 8 GPUs and 150 MoE layers."""

_pool = Pool("engine.compare.what_if", compile_ahead)
_here = threading.Lock()


def outlooks(problem: Problem, plans: Sequence[Plan], change: Change, serving: Serving | None = None) -> list[Outlook]:
    """Outlooks of these plans after a change, in the step if there is one. Raises InputError as `outlook_after` does."""
    key, known = _digest(problem), {}
    if serving is not None:
        return _answers(problem, [Question(outlook_after, {key: problem, plan.id: plan}, (change, serving)) for plan in plans])
    if change.is_none:  # a page begins with this one
        kept = {plan.id: store.load_figures(Outlook, simulation_digest(plan, problem)) for plan in plans}
        known = {id: outlook for id, outlook in kept.items() if outlook is not None}
    missing = [plan for plan in plans if plan.id not in known]
    questions = [Question(outlook_after, {key: problem, plan.id: plan}, (change,)) for plan in missing]
    for plan, outlook in zip(missing, _answers(problem, questions) if questions else [], strict=True):
        known[plan.id] = outlook
        if change.is_none:
            with suppress(InputError):  # a full disk: it is simulated again
                store.save_figures(outlook, simulation_digest(plan, problem))
    return [known[plan.id] for plan in plans]


def timeline(plan: Plan, problem: Problem) -> Timeline:
    """The simulated timeline of a plan, stored if worth it. Raises InputError when the plan does not fit the problem."""
    key = simulation_digest(plan, problem)
    if (kept := store.load_timeline(key)) is not None:
        return kept
    simulated = _answers(problem, [Question(simulate, {plan.id: plan, _digest(problem): problem})])[0]
    if store.is_worth_keeping(simulated):
        with suppress(InputError):  # a full disk: it is simulated again
            store.save_timeline(key, simulated)
    return simulated


def operators(problem: Problem, config: Path | None, sizes: TransformerSizes, step: ServingStep) -> tuple[Operators, list[str]]:
    """The source that times the operators of a serving step of a model with this `config.json` (None: the datasheet), and why
    it is not the measured one."""
    small = (config, problem.model, sizes, problem.cluster, step)
    return _answers(problem, [Question(choose_operators_of, small=small)])[0]


def served(plan: Plan, problem: Problem, step: ServingStep, source: Operators, sizes: TransformerSizes) -> ServedStep:
    """A plan in a whole serving step, stored if that is worth it. Raises InputError as `serve` does."""
    key = (simulation_digest(plan, problem), step.digest, source.source, sizes.digest)
    if (kept := load_step(*key)) is not None:
        return kept
    large = {plan.id: plan, _digest(problem): problem}
    answer = _answers(problem, [Question(serve_as_measured, large, (step, source, sizes))])[0]
    with suppress(InputError):  # a full disk: it is simulated again
        save_step(answer, *key)
    return answer


def _digest(problem: Problem) -> str:
    return digest_of(*(f"{role} {digest}" for role, digest in input_digests(problem).items()))


def _answers(problem: Problem, questions: list[Question]) -> list[Any]:
    alone = _here.acquire(blocking=False)
    try:
        sends = problem.workload.layers * len(problem.cluster.gpus) ** 2 * (1 + (problem.goal is Goal.TWO_MODELS))
        if not alone or sends > FEW_SENDS:
            _pool.start()
            if _pool.ready:
                return _pool.answers(questions, state.visit.end_if_left)
        return [question.work(*question.large.values(), *question.small) for question in questions]
    finally:
        if alone:
            _here.release()

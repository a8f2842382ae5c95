"""Jobs that plan. Arguments and results are plain JSON."""

import contextlib
import threading
from typing import Any

from engine import store
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs.protocol import Context
from engine.simulate.compile_ahead import compile_ahead
from engine.simulate.metrics import Metrics, metrics_digests, simulation_digest
from engine.store.problems import problem_from
from engine.systems import SYSTEMS, TRAINING
from engine.systems.base import Outcome
from engine.systems.comparison import Comparison


def optimise(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Run systems one after another.

    arguments: those of `problem_arguments`, and systems: [{name, options}]. Result: {"candidates": [candidate...]}, see
    `candidate`, and {"refused": {title: reason}} of the systems that cannot plan for this. Raises InputError when none can.
    """
    problem = problem_from(arguments)
    registry = TRAINING if problem.goal is Goal.TRAINING else SYSTEMS
    choices = [(registry[choice["name"]], choice.get("options", {})) for choice in arguments["systems"]]
    comparison = Comparison(problem)
    # Loading the compiled simulation takes half a second, which whoever stops a job should not wait for.
    threading.Thread(target=compile_ahead, daemon=True).start()
    for system, _ in choices[:1]:
        context.report(0.0, f"{system.title}: started")
    for outcome in comparison.run(choices, context.stop, context.report):
        context.keep(comparison.to_dict())
        if not context.stop():  # what was simulated in a hurry is simulated again
            with contextlib.suppress(InputError):  # a full disk: pages simulate it again
                _keep(outcome, comparison)
    if comparison.refused and not comparison.candidates:
        raise InputError(next(iter(comparison.refused.values())))
    return comparison.to_dict()


def _keep(outcome: Outcome, comparison: Comparison) -> None:
    """Keep what was simulated of the newest plan, so that no page does it again."""
    plan, problem = outcome.result.solution, comparison.problem
    figures = Metrics.from_dict(comparison.candidates[-1]["metrics"])
    store.save_figures(figures, *metrics_digests(plan, problem))
    if store.is_worth_keeping(outcome.timeline):
        store.save_timeline(simulation_digest(plan, problem), outcome.timeline)

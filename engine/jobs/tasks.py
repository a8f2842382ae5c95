"""Jobs that plan. Arguments and results are plain JSON."""

import contextlib
import threading
from typing import Any

from engine import store
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs.protocol import Context
from engine.simulate.compile_ahead import compile_ahead
from engine.simulate.metrics import simulation_digest
from engine.store.problems import problem_from
from engine.systems import SYSTEMS, TRAINING
from engine.systems.comparison import Comparison

LONG = 20_000
"""Events of a timeline that is kept, so that no page has to simulate it again; one with fewer takes about a second."""


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
        long = outcome.timeline.bundled or len(outcome.timeline.events) > LONG
        if long and not context.stop():  # what was simulated in a hurry is simulated again
            with contextlib.suppress(InputError):  # a full disk: pages simulate it again
                store.save_timeline(simulation_digest(outcome.result.solution, problem), outcome.timeline)
    if comparison.refused and not comparison.candidates:
        raise InputError(next(iter(comparison.refused.values())))
    return comparison.to_dict()

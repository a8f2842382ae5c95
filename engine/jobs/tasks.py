"""Jobs that plan. Arguments and results are plain JSON."""

import contextlib
import math
import threading
from functools import partial
from typing import Any

from engine import store
from engine.compare.comparison import Choice, Comparison
from engine.compare.figures import Metrics
from engine.errors import InputError
from engine.goal import Goal
from engine.jobs import runtimes
from engine.jobs.protocol import Context
from engine.problem import Problem
from engine.provenance import metrics_digests, simulation_digest
from engine.simulate.compile_ahead import compile_ahead
from engine.store.problems import problem_from
from engine.systems import SYSTEMS, TRAINING
from engine.systems.base import Outcome


def optimise(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Run systems: baselines first, since gains are counted from them, and of the others what is soonest done.

    arguments: those of `problem_arguments`, and systems: [{name, options}]. Result: {"candidates": [candidate...]} in the order
    of these systems, see `candidate`, and {"refused": {title: reason}} of the systems that cannot plan for this. Raises
    InputError when none can.
    """
    problem = problem_from(arguments)
    registry = TRAINING if problem.goal is Goal.TRAINING else SYSTEMS
    choices = [(registry[choice["name"]], choice.get("options", {})) for choice in arguments["systems"]]
    choices, seconds = _soonest_first(choices, problem)
    comparison = Comparison(problem)
    # Loading the compiled simulation takes half a second, which whoever stops a job should not wait for.
    threading.Thread(target=compile_ahead, daemon=True).start()
    report = partial(context.report, expected=runtimes.expected(seconds))
    for system, _ in choices[:1]:
        report(0.0, f"{system.title}: started")
    known = seconds if None not in seconds else None
    for outcome in comparison.run(choices, context.stop, report, known):
        context.keep(_as_asked(comparison, arguments))
        if not context.stop():  # what was simulated in a hurry is simulated again
            with contextlib.suppress(InputError):  # a full disk: pages simulate it again
                _keep(outcome, comparison)
    if comparison.refused and not comparison.candidates:
        raise InputError(next(iter(comparison.refused.values())))
    return _as_asked(comparison, arguments)


def _soonest_first(choices: list[Choice], problem: Problem) -> tuple[list[Choice], list[float | None]]:
    """The choices in the order in which they are run, and the seconds that each is expected to take."""
    timed = [(runtimes.estimate(problem, system, options), (system, options)) for system, options in choices]
    timed.sort(key=lambda pair: (not pair[1][0].baseline, math.inf if pair[0] is None else pair[0]))
    return [choice for _, choice in timed], [seconds for seconds, _ in timed]


def _as_asked(comparison: Comparison, arguments: dict[str, Any]) -> dict[str, Any]:
    """What has come so far, in the order in which systems were asked for."""
    places = {choice["name"]: place for place, choice in enumerate(arguments["systems"])}
    found = comparison.to_dict()
    return found | {
        "candidates": sorted(found["candidates"], key=lambda row: places[row["plan"]["provenance"]["optimiser"]])
    }


def _keep(outcome: Outcome, comparison: Comparison) -> None:
    """Keep what was simulated of the newest plan, so that no page does it again, and how long its system took."""
    plan, problem = outcome.result.solution, comparison.problem
    system = (TRAINING if problem.goal is Goal.TRAINING else SYSTEMS)[plan.provenance.optimiser]
    runtimes.note(runtimes.run_of(problem, system, plan.provenance.options, outcome.result.runtime))
    figures = Metrics.from_dict(comparison.candidates[-1]["metrics"])
    store.save_figures(figures, *metrics_digests(plan, problem))
    if store.is_worth_keeping(outcome.timeline):
        store.save_timeline(simulation_digest(plan, problem), outcome.timeline)

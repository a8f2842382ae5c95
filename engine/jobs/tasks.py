"""Jobs that plan, and the question about a problem that most jobs begin with. It is apart from `engine.jobs.kinds`, since a
worker that waits has no need of problems."""

import contextlib
import math
import threading
from functools import partial

from pydantic import Field

from engine import store
from engine.compare.comparison import Candidate, Comparison
from engine.errors import InputError
from engine.jobs import runtimes
from engine.jobs.kinds import Answer, Ask, Document
from engine.jobs.protocol import Context
from engine.problem import Problem
from engine.provenance import metrics_digests, simulation_digest
from engine.schema import Frozen
from engine.simulate.compile_ahead import compile_ahead
from engine.store.problems import problem_from
from engine.systems import named_for
from engine.systems.base import Outcome


class ProblemAsk(Ask):
    """A question about a problem, as `engine.store.problems.problem_arguments` writes it.

    workload, others: digests of recordings in the data folder
    cost: None: the datasheet's
    """

    workload: str
    cluster: Document
    model: Document
    others: tuple[str, ...] = ()
    cost: Document | None = None
    second: Document | None = None
    in_use: Document | None = None
    step: Document | None = None
    graph: Document | None = None
    travel: Document | None = None

    def problem(self) -> Problem:
        """The problem with its recordings. Raises InputError if one is lost or a part does not fit."""
        arguments = {name: getattr(self, name) for name in ProblemAsk.model_fields}
        return problem_from({name: value for name, value in arguments.items() if value is not None})


class ChosenSystem(Frozen):
    """A system to run, by name."""

    name: str
    options: Document = Field(default_factory=dict)


class OptimiseAsk(ProblemAsk):
    """Systems to run on a problem."""

    systems: tuple[ChosenSystem, ...]


class OptimiseAnswer(Answer):
    """Candidates in the order in which their systems were asked for; refused: by title, why a system cannot plan for this."""

    candidates: tuple[Candidate, ...] = ()
    refused: dict[str, str] = Field(default_factory=dict)


def optimise(ask: OptimiseAsk, context: Context) -> OptimiseAnswer:
    """Run systems: baselines first, since gains are counted from them, then the others, soonest done first.

    Raises InputError if none of them can plan for this.
    """
    problem = ask.problem()
    registry = named_for(problem)
    choices = [(registry[choice.name], choice.options) for choice in ask.systems]
    timed = [(runtimes.estimate(problem, system, options), (system, options)) for system, options in choices]
    timed.sort(key=lambda pair: (not pair[1][0].baseline, math.inf if pair[0] is None else pair[0]))
    choices, seconds = [choice for _, choice in timed], [seconds for seconds, _ in timed]
    comparison = Comparison(problem)
    # Loading the compiled simulation takes half a second, which whoever stops a job should not wait for.
    threading.Thread(target=compile_ahead, daemon=True).start()
    report = partial(context.report, expected=runtimes.expected(seconds))
    for system, _ in choices[:1]:
        report(0.0, f"{system.title}: started")
    known = seconds if None not in seconds else None
    for outcome in comparison.run(choices, context.stop, report, known):
        context.keep(_as_asked(comparison, ask))
        if not context.stop():  # a timeline of a hurried end is simulated again
            with contextlib.suppress(InputError):  # a full disk: pages simulate it again
                _keep(outcome, comparison)
    if comparison.refused and not comparison.candidates:
        raise InputError(next(iter(comparison.refused.values())))
    return _as_asked(comparison, ask)


def _as_asked(comparison: Comparison, ask: OptimiseAsk) -> OptimiseAnswer:
    """The candidates so far, in the order in which systems were asked for."""
    places = {choice.name: place for place, choice in enumerate(ask.systems)}
    rows = sorted(comparison.candidates, key=lambda row: places[row.plan.provenance.optimiser])
    return OptimiseAnswer(candidates=tuple(rows), refused=dict(comparison.refused))


def _keep(outcome: Outcome, comparison: Comparison) -> None:
    """Keep the simulation of the newest plan, so that no page does it again, and the time that its system took."""
    plan, problem = outcome.result.solution, comparison.problem
    system = named_for(problem)[plan.provenance.optimiser]
    runtimes.note(runtimes.run_of(problem, system, plan.provenance.options, outcome.result.runtime))
    store.save_figures(comparison.candidates[-1].metrics, *metrics_digests(plan, problem))
    if store.is_worth_keeping(outcome.timeline):
        store.save_timeline(simulation_digest(plan, problem), outcome.timeline)

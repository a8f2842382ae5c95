"""Systems run side by side on one problem, and the rows that tell of their plans."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, JsonValue, PlainSerializer, PlainValidator, field_serializer
from pydantic_core import to_json

from engine.compare.figures import Metrics, metrics, proof_of_plan
from engine.errors import InputError, StoppedError
from engine.parallel import in_order
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Stop, never
from engine.schema import Frozen
from engine.simulate.work import Load
from engine.systems.base import Notes, Outcome, Report, System, run, silent
from engine.systems.options import Value
from engine.timeline import Timeline


class PlanRow(Frozen):
    """A plan and how it came about, as jobs keep it.

    status: of the search, see `Status`; runtime: seconds that the optimiser took, NaN: not known
    notes: findings of the recipe by subject, as fields of a `Note`; the first version kept bare values
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=True)

    plan: Plan
    status: str
    runtime: float
    notes: dict[str, JsonValue]

    @cached_property
    def text(self) -> bytes:
        """The row as JSON. Kept: a job writes all its rows again with every new one."""
        return to_json(self.model_dump(mode="json"), inf_nan_mode="constants")

    @field_serializer("plan")
    def _write_plan(self, plan: Plan) -> dict[str, JsonValue]:
        return plan.model_dump(mode="json", exclude_none=True)


def _read_metrics(data: object) -> Metrics | None:
    if data is None or isinstance(data, Metrics):
        return data
    try:
        return Metrics.from_dict(data)
    except (LookupError, TypeError, ValueError):
        return None


KeptMetrics = Annotated[
    Metrics | None,
    PlainValidator(_read_metrics),
    PlainSerializer(lambda figures: None if figures is None else figures.to_dict()),
]
"""Figures of a plan; None of those that another version kept, of which a page simulates them again."""


class Candidate(PlanRow):
    """One row of the candidate table: a plan with the words of its optimiser (`proof`) and the figures of the simulation."""

    proof: str = ""
    metrics: KeptMetrics = None


Choice = tuple[System, Mapping[str, Value]]
"""A system to run, and its options."""


class Comparison:
    """The answers of systems on a problem so far.

    candidates: a row for every plan; refused: by the title of a system that cannot plan for this, why
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.candidates: list[Candidate] = []
        self.refused: dict[str, str] = {}

    def run(
        self, choices: Sequence[Choice], stop: Stop = never, report: Report = silent, seconds: Sequence[float] | None = None
    ) -> Iterator[Outcome]:
        """Run the systems; yields every outcome in their order once it has its row. Asked to stop, systems at work hand back
        the best they have and no others begin. `report` is told of all systems as one piece of work, of which each is as
        large a part as the seconds that it is expected to take; None: all alike. Raises InputError when the only system of
        `choices` refuses, and as it does when it fails; with several, the one that refuses or fails is noted."""
        parts = np.array(seconds or [1.0] * len(choices), dtype=np.float64)
        parts /= parts.sum()

        def report_of(finished: int, index: int) -> Report:
            fastest = min((row.metrics.total for row in self.candidates), default=None)
            # All before the one that is waited for have finished, and as many others: the shortest, since all began at once.
            others = np.sort(parts[index + 1 :])[: max(0, finished - index)]
            before, part, title = (float(parts[:index].sum() + others.sum()), float(parts[index]), choices[index][0].title)

            def report_turn(done: float, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
                best = min((seconds for seconds in (incumbent, fastest) if seconds is not None), default=None)
                report(before + done * part, f"{title}: {message}", best, bound)

            return report_turn

        def begun(finished: int, index: int) -> None:
            if finished:
                report_of(finished, index)(0.0, "started")

        common = (self.problem, tuple((system, dict(options)) for system, options in choices))
        answers = in_order(_run_choice, common, len(choices), stop, begun, lambda index: report_of(index, index))
        for index, answer in answers:
            if isinstance(answer, InputError):
                if len(choices) == 1:
                    raise answer
                if isinstance(answer, StoppedError):
                    continue
                self.refused[choices[index][0].title] = str(answer)
            else:
                outcome, row = answer
                self.candidates.append(row)
                yield outcome


def _run_choice(
    common: tuple[Problem, tuple[Choice, ...]], index: int, stop: Stop, report: Report
) -> tuple[Outcome, Candidate] | InputError:
    """The outcome of a system and its row, or why there is none."""
    problem, choices = common
    system, options = choices[index]
    try:
        outcome = run(system, problem, options, stop, report)
        row = candidate(outcome, problem)
    except InputError as error:
        return error
    except Exception as error:
        if len(choices) == 1:
            raise
        # A bug of one system must not cost the plans of the others.
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        return InputError(f"it failed by a fault of Switchyard ({said}); run {system.name} alone for the trace, and report it")
    # The loads, which are large, stay in this process.
    return replace(outcome, loads=()), row


def candidate(outcome: Outcome, problem: Problem) -> Candidate:
    """The row of an outcome."""
    result = outcome.result
    return candidate_of_plan(result.solution, problem, result.runtime, outcome.notes, outcome.timeline, outcome.loads)


def candidate_of_plan(
    plan: Plan, problem: Problem, runtime: float, notes: Notes, timeline: Timeline, loads: tuple[Load, ...] | None = None
) -> Candidate:
    """The row of a plan that has a claim; runtime: seconds that its optimiser took; timeline, loads: see `metrics`."""
    figures = metrics(plan, problem, timeline, loads)
    return Candidate(
        plan=plan,
        status=plan.claim.status.value,
        proof=proof_of_plan(plan, figures).in_words,
        runtime=runtime,
        notes={about: note._asdict() for about, note in notes.items()},
        metrics=figures,
    )

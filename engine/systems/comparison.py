"""Systems run one after another on one problem, and the rows that tell of their plans."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Stop, never
from engine.simulate.metrics import metrics
from engine.systems.base import Notes, Outcome, Report, System, Value, run, silent
from engine.timeline import Timeline

Choice = tuple[System, Mapping[str, Value]]
"""A system to run, and its options."""


class Comparison:
    """What has come so far of systems on a problem.

    candidates: a row for every plan, see `candidate`; refused: by the title of a system that cannot plan for this, why
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.candidates: list[dict[str, Any]] = []
        self.refused: dict[str, str] = {}

    def run(self, choices: Sequence[Choice], stop: Stop = never, report: Report = silent) -> Iterator[Outcome]:
        """Run the systems in turn; yields every outcome once it has its row. Asked to stop, the system at work hands back the
        best it has and no other begins. `report` is told of all systems as one piece of work. Raises InputError when the
        only system of `choices` refuses; with several, what refuses is noted."""
        for turn, (system, options) in enumerate(choices):
            fastest = min((row["metrics"]["total"] for row in self.candidates), default=None)
            report_turn = _report_of_turn(report, turn, len(choices), system, fastest)
            if turn:
                report_turn(0.0, "started")
            try:
                outcome = run(system, self.problem, options, stop, report_turn)
            except InputError as error:
                if len(choices) == 1:
                    raise
                self.refused[system.title] = str(error)
                continue
            self.candidates.append(candidate(outcome, self.problem))
            yield outcome
            if stop():
                return

    def to_dict(self) -> dict[str, Any]:
        return {"candidates": self.candidates, "refused": self.refused}


def _report_of_turn(report: Report, turn: int, turns: int, system: System, fastest: float | None) -> Report:
    """The report of one system among several, whose plans so far take `fastest` seconds at the least."""

    def report_turn(done: float, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
        best = min((seconds for seconds in (incumbent, fastest) if seconds is not None), default=None)
        report((turn + done) / turns, f"{system.title}: {message}", best, bound)

    return report_turn


def candidate(outcome: Outcome, problem: Problem) -> dict[str, Any]:
    """One row of the candidate table: the plan, what its optimiser says and what the simulation says."""
    result = outcome.result
    return candidate_of_plan(result.solution, problem, result.runtime, outcome.notes, outcome.timeline)


def candidate_of_plan(plan: Plan, problem: Problem, runtime: float, notes: Notes, timeline: Timeline) -> dict[str, Any]:
    """The same of a plan that has a claim; runtime: seconds that its optimiser took; timeline: the simulated one."""
    return {
        "plan": plan.model_dump(mode="json", exclude_none=True),
        "status": plan.claim.status.value,
        "proof": plan.claim.proof,
        "runtime": runtime,
        "notes": {about: note._asdict() for about, note in notes.items()},
        "metrics": metrics(plan, problem, timeline).to_dict(),
    }

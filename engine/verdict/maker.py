"""The system that made a plan, to be run again on other recordings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import InputError, StoppedError
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Provenance, Stop
from engine.systems import SYSTEMS, System
from engine.systems.base import Report
from engine.systems.options import Options
from engine.workload import Workload

REPLICATING = "eplb"
"""The system that stands in for one that cannot be run without replicas."""


@dataclass(frozen=True, eq=False)
class Maker:
    """A system with its options, and the plans it has made so far by the recordings they are made from.

    problem: cluster, model, costs and the deployed placement; its recordings do not count. seconds of work are the system's.
    """

    system: System
    settings: Options
    problem: Problem
    made: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    def plan(self, recordings: tuple[Workload, ...], stop: Stop, report: Report) -> Plan:
        """The plan for the first recording; the others it must serve as well. Raises InputError where the system refuses, and
        StoppedError when asked to stop: an unfinished search is not the plan that the system makes."""
        key = tuple(recording.digest for recording in recordings)
        if key not in self.made:
            problem = replace(self.problem.with_workload(recordings[0]), others=recordings[1:])
            draft = self.system.recipe(problem, self.settings, stop, report)
            if stop():
                raise StoppedError("stopped before there was a verdict")
            provenance = Provenance(optimiser=self.system.name, options=self.settings.model_dump())
            self.made[key] = draft.plan(self.system.title, provenance, problem.travel)
        return self.made[key]

    def without_replicas(self) -> "Maker | None":
        """The same system with no spare slots; None where it has no such option."""
        if "redundant" not in self.system.options.model_fields:
            return None
        return Maker(self.system, self.settings.model_copy(update={"redundant": 0}), self.problem)


def maker_of(plan: Plan, problem: Problem) -> Maker | None:
    """The system that made a plan, by its provenance; None where it is none of ours, or has other options by now."""
    return _maker(plan.provenance.optimiser, plan.provenance.options, problem, plan)


def replicating_without_replicas(plan: Plan, problem: Problem) -> Maker:
    """EPLB's balance without spare slots, for plans with replicas whose maker cannot do without."""
    return _maker(REPLICATING, {"redundant": 0}, problem, plan)


def _maker(name: str, options: Mapping[str, Any], problem: Problem, plan: Plan) -> Maker | None:
    system = SYSTEMS.get(name)
    if system is None or problem.goal not in system.goals:
        return None
    try:
        settings = system.settings(options)
    except InputError:
        return None
    return Maker(system, settings, replace(problem, travel=plan.travel))

"""Planning on imprecise traffic: no noise is the plain system, and every point is a plan timed on the real traffic."""

import numpy as np
import pytest

from engine.errors import InputError
from engine.simulate import simulate
from engine.studies.imprecision import ImprecisionPoint, check_levels, imprecision, systems_of
from engine.studies.noise import noisy
from engine.systems import SYSTEMS, run
from tests.studies.test_what_if import small, step_problem

BRIEF = {"aurora": {"time_limit": 1.0}}


def test_without_noise_every_system_is_itself() -> None:
    problem = small()
    points = list(imprecision(problem, [0.0], seeds=5, options=BRIEF))
    assert [point.system for point in points] == ["aurora", "rga", "rcs", "sjf"], "nothing to draw: one seed"
    for point in points:
        options = BRIEF.get(point.system, {})
        assert point.total == run(SYSTEMS[point.system], problem, options).result.objective


def test_a_point_is_a_plan_for_noisy_traffic_on_the_real_one() -> None:
    problem = small()
    points = list(imprecision(problem, [0.75], seeds=2, noise="experts", options=BRIEF))
    assert len(points) == 8
    for point in points:
        planned_on = noisy(problem, 0.75, point.seed, "experts")
        plan = run(SYSTEMS[point.system], planned_on, BRIEF.get(point.system, {})).result.solution
        assert point.total == simulate(plan, problem).total
        assert ImprecisionPoint.from_dict(point.to_dict()) == point


def test_noise_costs_a_plan_that_was_proven_optimal() -> None:
    problem = small()
    exact = run(SYSTEMS["aurora"], problem, {}).result.bound
    points = [point.total for point in imprecision(problem, [0.75], seeds=1, options=BRIEF) if point.system == "aurora"]
    assert min(points) >= exact * (1 - 1e-9)


def test_what_cannot_be_studied() -> None:
    problem = small()
    assert check_levels([0.5, 0, 0.5], 1) == [0, 0.5]
    for levels, seeds, said in (
        ([], 1, "give 1 to"),
        ([1.5], 1, "between 0 and 1"),
        ([0.5], 0, "0 draws"),
        (np.linspace(0, 1, 40), 1, "not 40"),
    ):
        with pytest.raises(InputError, match=said):
            check_levels(levels, seeds)
    with pytest.raises(InputError, match="training step"):
        systems_of(step_problem())
    assert list(imprecision(problem, [0.5], stop=lambda: True)) == []

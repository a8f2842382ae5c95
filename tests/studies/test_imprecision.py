"""Traffic noise in the paper's direction: every point is a plan from the recorded traffic timed on a mixture with noise."""

import numpy as np
import pytest

from engine.compare.imprecision import ImprecisionPoint, check_levels, contenders_of, gains, imprecision, noisy
from engine.errors import InputError
from engine.simulate import simulate
from engine.systems import SYSTEMS, run
from tests.studies.test_what_if import small, step_problem
from tests.systems.test_colocated import pair_of_samples

BRIEF = {"aurora": {"time_limit": 1.0}}


def test_without_noise_every_system_is_itself() -> None:
    problem = small()
    points = list(imprecision(problem, [0.0], seeds=5, options=BRIEF))
    assert [point.system for point in points] == ["aurora", "rga", "rcs", "sjf"], "nothing to draw: one seed"
    for point in points:
        options = BRIEF.get(point.system, {})
        assert point.total == run(SYSTEMS[point.system], problem, options).result.objective


def test_a_point_is_a_plan_from_the_recorded_traffic_on_noisy_one() -> None:
    """Aurora §8.2: the first layer's traffic is planned on, and what comes has other layers' added."""
    problem = small()
    points = list(imprecision(problem, [0.75], seeds=2, noise="experts", options=BRIEF))
    assert len(points) == 8
    for point in points:
        plan = run(SYSTEMS[point.system], problem, BRIEF.get(point.system, {})).result.solution
        assert point.total == simulate(plan, noisy(problem, 0.75, point.seed, "experts")).total
        assert ImprecisionPoint(**point.to_dict()) == point


def test_two_models_are_compared_with_random_gpus_and_random_colocation() -> None:
    problem = pair_of_samples(4, 8)
    points = list(imprecision(problem, [0.0, 0.75], seeds=1, noise="layers", options=BRIEF))
    assert [point.system for point in points] == ["aurora", "rga+rec", "rec"] * 2
    plan = run(SYSTEMS["rec"], problem, {"gpus": "random"}).result.solution
    by_system = {point.system: point.total for point in points if point.level}
    assert by_system["rga+rec"] == simulate(plan, noisy(problem, 0.75, 0, "layers")).total
    baseline, first, last = gains(points)
    assert baseline == "rga+rec" and last == by_system["rga+rec"] / by_system["aurora"] and first > 1


def test_a_gain_needs_two_levels() -> None:
    points = [ImprecisionPoint("aurora", 0.0, 0, 1.0), ImprecisionPoint("rga", 0.0, 0, 2.0)]
    assert gains(points) is None and gains([]) is None
    more = [ImprecisionPoint("aurora", 0.5, seed, 1.0) for seed in range(3)]
    more += [ImprecisionPoint("rga", 0.5, seed, total) for seed, total in enumerate((1.2, 1.5, 9.0))]
    assert gains(points + more) == ("rga", 2.0, 1.5)


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
        contenders_of(step_problem())
    assert list(imprecision(problem, [0.5], stop=lambda: True)) == []

"""Utilisation with each model alone and with both, as Aurora defines it: compute time over total time."""

import numpy as np
import pytest

from app.charts import cluster as charts
from engine import store
from engine.compare.contention import AloneAndTogether, Utilisation, exclusive_and_colocated
from engine.errors import InputError
from engine.problem import make_problem
from engine.simulate import simulate
from engine.simulate.work import work_of
from engine.systems import SYSTEMS, run
from tests.cases.two_models import pair_of_samples

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("system", ["aurora", "packing", "linear"])
def test_busy_times_are_those_of_the_work_and_add_up_when_colocated(system):
    problem = pair_of_samples(8, 16)
    plan = run(SYSTEMS[system], problem).result.solution
    first, second, both = exclusive_and_colocated(plan, problem).parts
    moved = problem.as_planned(plan)
    for alone, placement, side in ((first, plan.placement, moved), (second, plan.placement_b, moved.second)):
        work = work_of(placement, side)
        busy = sum(seconds.sum(axis=0) for seconds in work.compute.values())
        np.testing.assert_allclose(alone.gpu * alone.seconds, busy)
    together = first.gpu * first.seconds + second.gpu * second.seconds
    np.testing.assert_allclose(both.gpu * both.seconds, together)
    assert both.seconds == simulate(plan, problem).total and 0 < both.mean <= 1


def test_colocating_uses_the_gpus_more_than_either_model_alone():
    problem = pair_of_samples(8, 16)
    first, second, both = exclusive_and_colocated(run(SYSTEMS["aurora"], problem).result.solution, problem).parts
    assert both.mean > max(first.mean, second.mean)
    figure = charts.exclusive_and_colocated((first, second, both))
    bars, dots = figure.data
    np.testing.assert_allclose(bars.x, [100 * part.mean for part in (first, second, both)])
    assert len(set(bars.y)) == 3 and len(dots.x) == 24
    assert figure.layout.title.text.startswith("Colocated, GPUs compute ")


def test_it_is_kept_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_DATA", str(tmp_path))
    parts = tuple(Utilisation(name, np.array([0.25, 1 / 3]), 1e-3) for name in ("first", "second", "both"))
    store.save_figures(AloneAndTogether(parts), "0" * 64)
    kept = store.load_figures(AloneAndTogether, "0" * 64).parts
    assert [(part.served, part.gpu.tolist(), part.seconds) for part in kept] == [
        (part.served, part.gpu.tolist(), part.seconds) for part in parts
    ]


def test_one_model_cannot_be_colocated():
    problem = pair_of_samples()
    alone = make_problem(problem.workload, problem.cluster, problem.model, problem.cost)
    with pytest.raises(InputError, match="open the second"):
        exclusive_and_colocated(run(SYSTEMS["linear"], problem).result.solution, alone)

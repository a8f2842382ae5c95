"""Degrees of the backward pass by the time of the whole step: against every choice of them, and what its bound promises."""

from itertools import product

import numpy as np
import pytest

from engine.errors import InputError
from engine.plan import Pipeline, Priority
from engine.problem import Problem
from engine.result import Status, never
from engine.simulate import simulate
from engine.simulate.training import step_seconds
from engine.systems import TRAINING, run
from engine.systems.base import silent
from engine.systems.training.step_degrees import degrees_of_step
from engine.workload import RoutingTrace
from tests.cases.training import plan_of, problem_of
from tests.strategies import cluster_of, make_gpu

MOST = 4


def plan_to_begin(problem: Problem, bucket: float, forward: int = 1, order: str = "dispatch-first"):
    layers = problem.workload.layers
    pipeline = Pipeline(forward=(forward,) * layers, backward=(1,) * layers, order=order)
    return plan_of(problem, Priority(policy="fair", bucket=bucket), pipeline=pipeline)


def seconds_of(problem: Problem, plan, backward, forward=None) -> float:
    parts = {"backward": tuple(backward)} | ({"forward": tuple(forward)} if forward else {})
    return step_seconds(plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update=parts)}), problem)


def random_problem(seed: int) -> tuple[Problem, float]:
    """A step and the size of its buckets: dear or cheap start-ups, GPUs alike or not, balanced or recorded, top-1 or top-2."""
    rng = np.random.default_rng(seed)
    rate = 10 ** rng.uniform(5, 7)
    cards = [make_gpu(0, rate) if kind == 0 or seed % 2 else make_gpu(1, rate / 2, flops=1e9) for kind in range(4)]
    cluster = cluster_of(*cards, latency=10 ** rng.uniform(-5, -3.5))
    sizes = {"batch": 8, "sequence_length": int(rng.integers(4, 64)), "dense_d_ff": int(rng.integers(16, 400))}
    more = {}
    if seed % 3 == 0:
        chosen = rng.choice(4, size=(320, 3, 1), p=(0.5, 0.25, 0.15, 0.1)).astype(np.int16)
        more = {"workload": RoutingTrace("skewed", chosen, 4, sequence=np.arange(320) // 16), "routing": "recorded"}
    return problem_of(cluster, layers=3, **more, **sizes), 10 ** rng.uniform(3, 5)


@pytest.mark.parametrize("seed", range(6))
def test_no_degrees_are_faster_than_the_best_found_nor_below_the_bound(seed):
    problem, bucket = random_problem(seed)
    order = ("dispatch-first", "interleaved")[seed % 2]
    plan = plan_to_begin(problem, bucket, order=order)
    result = degrees_of_step(plan, problem, MOST, 1000, never, silent)
    every = {degrees: seconds_of(problem, plan, degrees) for degrees in product(range(1, MOST + 1), repeat=3)}
    assert result.objective == pytest.approx(min(every.values()), rel=1e-9) == every[result.solution]
    assert result.status is Status.OPTIMAL and result.bound == pytest.approx(result.objective, rel=1e-8)
    one = degrees_of_step(plan, problem, MOST, 1, never, silent)
    assert one.bound <= min(every.values()) * (1 + 1e-9) and one.objective == every[1, 1, 1]


def test_the_forward_pass_may_keep_the_degrees_of_its_layers_alone():
    """No choice of both passes' degrees is faster than that of the backward pass on the best forward ones."""
    problem, _ = random_problem(4)
    options = {"algorithm": "step", "max_degree": 3, "bucket_mb": 0.01, "evaluations": 1000}
    outcome = run(TRAINING["pipemoe"], problem, options)
    plan = outcome.result.solution
    both = product(product(range(1, 4), repeat=3), repeat=2)
    least = min(seconds_of(problem, plan, backward, forward) for forward, backward in both)
    assert outcome.result.objective == pytest.approx(least, rel=1e-9) == simulate(plan, problem).total
    said = outcome.notes["the step, degrees chosen with all-reduces"].value
    assert "proven optimal among degrees" in said


def test_all_reduces_change_the_best_degrees_and_the_step_gains():
    problem = problem_of(cluster_of(*[make_gpu(0, 4.6e6)] * 4, latency=5e-4), layers=3, sequence_length=12, dense_d_ff=1625)
    options = {"max_degree": MOST, "bucket_mb": 0.0033}
    alone, step = (
        run(TRAINING["pipemoe"], problem, {**options, "algorithm": algorithm}).result for algorithm in ("exact", "step")
    )
    assert alone.objective > 1.005 * step.objective
    assert alone.solution.pipeline.forward == step.solution.pipeline.forward
    assert alone.solution.pipeline.backward != step.solution.pipeline.backward


def test_it_stops_with_the_best_so_far_and_counts_its_steps():
    problem, bucket = random_problem(1)
    plan, reports = plan_to_begin(problem, bucket), []
    result = degrees_of_step(plan, problem, MOST, 9, never, lambda *report: reports.append(report))
    assert len(reports) <= 9 and [report[2] for report in reports] == sorted((r[2] for r in reports), reverse=True)
    stopped = degrees_of_step(plan, problem, MOST, 1000, lambda: True, silent)
    assert stopped.status is Status.CANCELLED and stopped.bound <= result.objective
    assert stopped.objective == seconds_of(problem, plan, stopped.solution)
    with pytest.raises(InputError, match="take algorithm exact"):
        degrees_of_step(replace_policy(plan), problem, MOST, 9, never, silent)


def replace_policy(plan):
    return plan.model_copy(update={"priority": Priority(policy="fifo", bucket=1e4)})

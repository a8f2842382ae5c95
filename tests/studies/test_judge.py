"""Gains of plans over others on any recording, and how sure they are."""

from dataclasses import replace

import numpy as np
import pytest

from engine.compare.held_out import by_time
from engine.compare.judge import BLOCK, Judge, Serving, gain_of, resampled
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import usual_sizes
from engine.serving.step import ServingStep
from engine.simulate import simulate
from engine.simulate.serving import serve_as_measured
from engine.systems import SYSTEMS, usual_plan
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix
from tests.cases.samples import EIGHT, sample, sample_problem
from tests.verdict.hand import laid_out, loads, log, problem_of

UNEVEN = loads("uneven", [6000.0, 1000.0, 1000.0, 2000.0])
NOW, NEW = laid_out("now", [[0, 3], [1, 2]]), laid_out("new", [[0, 1], [2, 3]])


def test_a_gain_and_its_error_by_hand():
    """8000 s against 7000. Of independent Poisson counts (x0 + x3) / (x0 + x1) has by the delta method the variance
    6000 (1000 / 7000²)² + 2000 / 7000² + 1000 (8000 / 7000²)²."""
    gain = gain_of(Judge(problem_of(UNEVEN)), NOW, NEW, UNEVEN)
    assert (gain.seconds_now, gain.seconds, gain.gain) == (8000, 7000, pytest.approx(1 / 7))
    expected = np.sqrt(6000 * (1000 / 7000**2) ** 2 + 2000 / 7000**2 + 1000 * (8000 / 7000**2) ** 2)
    assert gain.error == pytest.approx(expected, rel=0.4)  # of 24 draws


def test_the_same_plan_gains_nothing_for_certain_and_another_the_same_again():
    judge = Judge(problem_of(UNEVEN))
    gain = gain_of(judge, NOW, NOW.model_copy(update={"name": "again"}), UNEVEN)
    assert (gain.gain, gain.error) == (0, 0)
    first, again, other = (gain_of(judge, NOW, NEW, UNEVEN, seed=seed) for seed in (0, 0, 1))
    assert first == again and first.error != other.error


def test_a_pass_is_what_is_simulated_and_a_step_what_is_served():
    problem = sample_problem("alpha-code")
    plan, _ = usual_plan(SYSTEMS["linear"], problem)
    other = sample("alpha-man", 2000)
    assert Judge(problem).seconds(plan, other) == simulate(plan, problem.with_workload(other)).total
    sizes = usual_sizes(problem.model)
    source = RooflineOperators(problem.model, sizes, EIGHT.gpus[0])
    step = ServingStep(phase="decode", sequences=8, context=100, output=10)
    served = serve_as_measured(plan, problem.with_workload(other), step, source, sizes).figures
    judge = Judge(problem, Serving(step, source, sizes))
    assert judge.seconds(plan, other) == served.seconds
    assert judge.memory_shares(plan).max() == pytest.approx(served.memory.total / EIGHT.gpus[0].memory)
    assert "decode step of 8 sequences" in judge.unit and "pass" in Judge(problem).unit
    assert sum(judge.layer_seconds(plan, other)) < served.seconds
    many = loads("many", *[[1000.0] * 150] * 60)
    assert Judge(problem_of(many, 150)).unit.endswith(", every all-to-all at its busiest port")
    assert not Judge(problem_of(UNEVEN)).unit.endswith("port")


# Recordings as likely as the real ones


def test_whole_sequences_are_drawn():
    trace = sample("alpha-code")
    drawn = resampled(trace, np.random.default_rng(0))
    assert drawn.tokens == trace.tokens  # all sequences are equally long
    for number, tokens in zip(*np.unique(drawn.sequence, return_counts=True), strict=True):
        whole = trace.experts[trace.sequence == number]
        np.testing.assert_array_equal(drawn.experts[drawn.sequence == number], np.repeat(whole, tokens // 128, axis=0))


def test_of_few_sequences_blocks_are_drawn():
    trace = RoutingTrace("one", np.arange(10 * BLOCK).reshape(-1, 1, 1) % 4, 4, np.zeros(10 * BLOCK, dtype=np.int32))
    assert resampled(trace, np.random.default_rng(0)).tokens == 10 * BLOCK
    ranks = RoutingTrace("ranks", trace.experts, 4, None, np.arange(10 * BLOCK) // BLOCK)
    drawn = resampled(ranks, np.random.default_rng(0))
    assert set(np.bincount(drawn.source_rank)) - {0} >= {BLOCK} and (np.bincount(drawn.source_rank) % BLOCK == 0).all()


def test_counts_scatter_by_their_root():
    load = ExpertLoad("even", np.full((1, 20_000), 400.0), (1,))
    drawn = resampled(load, np.random.default_rng(0)).load
    assert drawn.mean() == pytest.approx(400, rel=0.01) and drawn.std() == pytest.approx(20, rel=0.05)
    empty = RoutingTrace("empty", np.zeros((0, 1, 1), dtype=np.int16), 4)
    assert resampled(empty, np.random.default_rng(0)).tokens == 0
    traffic = resampled(TrafficMatrix("even", np.full((1, 100, 100), 4000.0), 10.0), np.random.default_rng(0))
    assert traffic.bytes.mean() == pytest.approx(4000, rel=0.01) and traffic.bytes.std() == pytest.approx(200, rel=0.05)
    assert (traffic.bytes % 10 == 0).all()


# Cut in time


def test_halves_in_time_keep_whole_sequences_and_what_has_no_order_in_time_is_not_cut():
    earlier, later = by_time(sample("alpha-code"))
    assert earlier.sequence.max() < later.sequence.min()
    assert earlier.tokens + later.tokens == sample("alpha-code").tokens
    assert (earlier.name, later.name) == ("alpha-code, earlier half", "alpha-code, later half")
    assert by_time(UNEVEN) is None
    assert by_time(log("lone", [1])) is None
    assert by_time(log("padded", [1], [-1])) is None


def test_loads_that_were_kept_by_steps_are_cut_in_time():
    steps = np.arange(3 * 2 * 4, dtype=np.float64).reshape(3, 2, 4)
    load = ExpertLoad("loads", steps.sum(axis=0), (0, 1), by_step=steps)
    earlier, later = by_time(load)
    np.testing.assert_array_equal(earlier.load, steps[0] + steps[1])
    np.testing.assert_array_equal(later.load, steps[2])
    np.testing.assert_array_equal(earlier.load + later.load, load.load)
    assert (earlier.name, later.name) == ("loads, earlier half", "loads, later half")
    assert by_time(ExpertLoad("loads", load.load, (0, 1))) is None
    assert by_time(replace(load, by_step=load.load[None])) is None

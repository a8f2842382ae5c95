"""Spare slots: numbers that engines accept, their gain held out, the advised number, and plans made even."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import parallel
from engine.catalogue import cluster_presets
from engine.compare import redundancy as study
from engine.compare.judge import RESAMPLES, Judge, deviation, gain_of
from engine.compare.redundancy import (
    RedundancyPoint,
    Replication,
    counts_of,
    knee,
    most_slots,
    planned_and_judged,
    project_evenly,
    redundancy,
)
from engine.costs import Datasheet
from engine.errors import InputError
from engine.problem import MEMORY_SHARE, make_problem
from engine.simulate import simulate
from engine.workload import ExpertLoad
from tests.cases.examples import examples
from tests.cases.samples import sample, sample_problem, with_memory
from tests.strategies import cluster_of, make_gpu, make_model, seeds
from tests.verdict.hand import laid_out, loads, log, problem_of

A = loads("a", [7000.0, 1000.0, 2000.0, 2000.0])
B = loads("b", [4000.0, 2000.0, 3000.0, 3000.0])


def curve(problem, *recordings, **options) -> list[RedundancyPoint]:
    planned, judged, _ = planned_and_judged(recordings)
    return list(redundancy(Judge(problem), planned, judged, Replication(**options)))


def test_a_curve_and_its_errors_by_hand():
    """In a, expert 0 outweighs all others, so that it shares a GPU with 1; in b both GPUs have 6000 tokens. With a slot more a
    GPU, 0 and 1 are on both, 2 and 3 on one each: 3500 + 500 + 2000 tokens per GPU in a, and 6000 again in b."""
    points = curve(problem_of(A), A, B)
    assert [(at.slots, at.spare, at.slots_of_gpu) for at in points] == [(4, 0, 2), (6, 2, 3), (8, 4, 4)]
    assert [at.planned_balancedness for at in points] == pytest.approx([6000 / 8000, 1, 1])
    assert [(at.seconds, at.gain, at.balancedness) for at in points] == [pytest.approx((6000, 0, 1))] * 3
    size = 3 * 64 * 96 * 2
    assert [at.memory_bytes for at in points] == [0, 2 * size, 4 * size]
    assert [at.gpu_bytes for at in points] == [2 * size, 3 * size, 4 * size]
    few, more, _ = points  # the error of a gain is that of a verdict
    plans = laid_out("4 slots", [[0, 1], [2, 3]]), laid_out("6 slots", [[0, 1, 2], [0, 1, 3]])
    assert (few.error, few.interval) == (0, (0, 0))
    assert more.error == pytest.approx(gain_of(Judge(problem_of(A)), *plans, B).error) and more.error > 0
    assert more.interval == pytest.approx((more.gain - 1.96 * more.error, more.gain + 1.96 * more.error), abs=1e-5)


def test_more_tokens_have_a_smaller_error_and_several_recordings_share_it_and_the_worst_is_named():
    """The error of the mean over independent recordings is the root of the sum of squares over their number."""
    other, many = loads("other", [2000.0, 6000.0, 3000.0, 1000.0]), ExpertLoad("many", B.load * 100, (1,))
    *alone, hundredfold = (curve(problem_of(A), A, judged)[1] for judged in (B, other, many))
    assert hundredfold.error == pytest.approx(alone[0].error / 10, rel=0.4)
    both = curve(problem_of(A), A, B, other)[1]
    assert both.gain == pytest.approx(np.mean([at.gain for at in alone]))
    assert both.gain_worst == min(at.gain for at in alone) < both.gain
    assert both.error == pytest.approx(np.hypot(*(at.error for at in alone)) / 2, rel=0.5)  # of 24 draws


@pytest.mark.parametrize("gpus", [3, 5, 7])
def test_any_number_of_gpus_has_slots_that_divide(gpus):
    problem = problem_of(loads("a", np.arange(16) + 100.0), gpus)
    points = curve(problem, problem.workload, loads("b", np.arange(16)[::-1] + 100.0), algorithm="eplb")
    assert points[0].slots_of_gpu == -(-16 // gpus)
    assert all(at.slots % gpus == 0 and at.slots >= 16 and at.slots_of_gpu <= 16 for at in points)
    assert points[-1].balancedness <= 1


def test_the_smallest_gpu_limits_all():
    workload, model = loads("a", [1000.0] * 6, [1000.0] * 6), make_model(2, 6)
    room = [model.bytes_per_expert * 2 * slots / MEMORY_SHARE * 1.001 for slots in (9, 3, 9)]
    cluster = cluster_of(*(make_gpu(kind, memory=memory) for kind, memory in enumerate(room)))
    judge = Judge(make_problem(workload, cluster, model, Datasheet()))
    assert most_slots(judge)[0] == 3 and most_slots(judge)[1].startswith("GPU 1 · type-1 has ")
    assert counts_of(judge) == [2, 3]
    points = list(redundancy(judge, workload, [workload]))
    assert [at.slots for at in points] == [6, 9]


def test_experts_that_do_not_fit_are_refused_and_no_more_slots_than_experts_are_needed():
    problem = problem_of(A)
    assert most_slots(Judge(problem)) == (4, "a GPU needs no more than one slot for each of 4 experts")
    small = cluster_of(*[make_gpu(memory=make_model(1, 4).bytes_per_expert * 1.5)] * 2)
    with pytest.raises(InputError, match="2 slots per layer are needed for 4 experts, but GPU 0"):
        list(redundancy(Judge(replace(problem, cluster=small)), A, [B]))


def test_on_faster_gpus_more_is_done():
    """Balance counts the speed of GPUs: of one twice as fast two thirds of the tokens."""
    cluster = cluster_of(
        *(make_gpu(kind, send=1e12, flops=speed, memory_bandwidth=1e18) for kind, speed in ((0, 2e9), (1, 1e9)))
    )
    workload = loads("a", [30_000.0, 30_000.0, 30_000.0, 30_000.0])
    problem = make_problem(workload, cluster, make_model(1, 4), Datasheet())
    two, three, *_ = curve(problem, workload, workload)
    # Half the tokens each, where the slow one should have a third.
    assert two.balancedness == pytest.approx(0.6667, abs=0.01)
    assert three.balancedness >= two.balancedness and three.seconds <= two.seconds


def test_groups_stay_on_nodes():
    problem = sample_problem("alpha-code", cluster=cluster_presets()["lina-4-nodes"].cluster)
    recordings = sample("alpha-code", 2000), sample("alpha-man", 2000)
    points = curve(problem, *recordings, algorithm="eplb", groups=4)
    free = curve(problem, *recordings, algorithm="eplb")
    assert [at.slots for at in points] == [at.slots for at in free]
    assert points[1].planned_balancedness < free[1].planned_balancedness
    with pytest.raises(InputError, match="16 experts do not divide into 5 groups"):
        curve(problem, *recordings, groups=5)


def test_asked_to_stop_it_ends_and_a_point_that_was_stopped_midway_ends_the_curve(monkeypatch):
    assert list(redundancy(Judge(problem_of(A)), A, [B], stop=lambda: True)) == []
    common = (Judge(problem_of(A)), A, ((B, B.load[None]),), Replication(), [2, 3, 4])
    whole = list(parallel.in_order(study._count, common, 3))
    monkeypatch.setattr(parallel, "in_order", lambda *_: iter([whole[0], (1, None), whole[2]]))
    assert [at.slots_of_gpu for at in redundancy(Judge(problem_of(A)), A, [B])] == [2]


def test_what_is_planned_on_and_what_is_judged():
    assert planned_and_judged([A, B]) == (A, (B,), True)
    assert planned_and_judged([A]) == (A, (A,), False)
    planned, (judged,), held_out = planned_and_judged([log("log", [0], [1], [2], [3])])
    assert (planned.name, judged.name, held_out) == ("log, earlier half", "log, later half", True)
    with pytest.raises(InputError, match="at least one recording"):
        planned_and_judged([])


def points(*gains: float, noise: np.ndarray | float = 0.0) -> list[RedundancyPoint]:
    """From four slots on, two GPUs with one more each at a time. noise: float64[point, draw], or alike everywhere; the first
    point is the one that gains are over, and has none."""
    noise = np.broadcast_to(noise, (len(gains), RESAMPLES))
    alike = dict.fromkeys(("balancedness", "least_balancedness", "planned_balancedness", "seconds"), 1.0)
    return [
        RedundancyPoint(
            slots=4 + 2 * turn,
            spare=2 * turn,
            slots_of_gpu=2 + turn,
            **alike | {"gain": gain, "gain_worst": gain, "memory_bytes": 0.0, "gpu_bytes": 0.0},
            error=deviation(noise[turn]) if turn else 0.0,
            draws=gain + noise[turn] if turn else np.zeros(RESAMPLES),
        )
        for turn, gain in enumerate(gains)
    ]


ALTERNATING = np.resize([0.05, -0.05], RESAMPLES)
"""Noise with a standard deviation of 0.05 · √(24 / 23)."""


@pytest.mark.parametrize(
    ("gains", "slots", "rule"),
    [
        ((0.0, 0.09, 0.1), 6, "enough"),  # nine tenths of the most
        ((0.0, 0.089, 0.1), 8, "enough"),
        ((0.0, 0.1, 0.05), 6, "enough"),  # more is worse
        ((0.0, 0.009, 0.0099), 4, "too little"),
        ((0.0, 0.0, 0.01), 8, "enough"),
        ((0.0, -0.1, -0.2), 4, "too little"),
        ((0.0,), 4, "too little"),
    ],
)
def test_the_knee_where_nothing_is_noise(gains, slots, rule):
    advised = knee(points(*gains))
    assert (advised.slots, advised.rule) == (slots, rule)


@pytest.mark.parametrize(
    ("gains", "signs", "slots", "rule", "reason"),
    [
        (  # 8 % more, plus or minus twice 5 %
            (0.0, 0.04, 0.08),
            (0, 1, 1),
            4,
            "noise",
            "the most that any number of spare slots brings may as well be nothing (+8.0 % with 8 slots, 95 % interval -2.0 % "
            "to +18.0 %)",
        ),
        (  # nine tenths of 20 % are 4 % more than 14 %; that the noise of the two is of opposite sign leaves open
            (0.0, 0.14, 0.2),
            (0, -1, 1),
            6,
            "as good",
            "the fewest whose gain cannot be told from 90 % of the most that any number brings (+20.0 % with 8 slots, 95 % "
            "interval +10.0 % to +30.0 %)",
        ),
        # The same noise at both numbers: in every draw the larger one gains 6 % more, less a tenth of the noise.
        (
            (0.0, 0.14, 0.2),
            (0, 1, 1),
            8,
            "enough",
            "the fewest that bring 90 % of the most that any number brings (+20.0 % with ",
        ),
    ],
)
def test_the_knee_where_there_is_noise(gains, signs, slots, rule, reason):
    advised = knee(points(*gains, noise=np.outer(signs, ALTERNATING)))
    assert (advised.slots, advised.rule) == (slots, rule) and advised.reason.startswith(reason)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(-0.3, 0.5), min_size=1, max_size=6), seeds, st.floats(0, 0.2), st.floats(1, 5))
def test_more_noise_never_advises_more_slots(gains, seed, size, more):
    noise = size * np.random.default_rng(seed).standard_normal((len(gains) + 1, RESAMPLES))
    fewer, advised = (knee(points(0.0, *gains, noise=scale * noise)).slots for scale in (more, 1.0))
    assert fewer <= advised <= knee(points(0.0, *gains)).slots


TWO_LAYERS = loads("loads", [40.0, 10.0, 30.0, 20.0], [10.0, 10.0, 10.0, 70.0])


def test_the_fullest_layer_says_how_many_slots_and_the_price_is_simulated():
    problem = problem_of(TWO_LAYERS)
    plan = laid_out("p", [[2, 0, 1], [3]], [[0, 1], [3, 2, 0]])
    projection = project_evenly(plan, problem)
    rows = projection.plan.placement.experts_of_gpu
    assert [len(slots) for row in rows for slots in row] == [3] * 4
    assert (rows[0][0], rows[1][1]) == ((2, 0, 1), (3, 2, 0)), "experts that stay keep their slots"
    assert rows[1][0] == (0, 1, 3), "the busiest expert gets the replica"
    assert (projection.slots, projection.added, projection.dropped) == (3, 3, 0)
    assert projection.plan.parent == plan.id and projection.plan.name == "p, even"
    assert projection.before.total == simulate(plan, problem).total
    assert projection.after.total == simulate(projection.plan, problem).total
    projection = project_evenly(laid_out("p", [[2, 0], [1, 3]], [[0, 1], [3, 2]]), problem)
    assert (projection.slots, projection.added, projection.dropped) == (2, 0, 0), "an even plan stays as it is"
    assert projection.plan.placement.experts_of_gpu == (((2, 0), (1, 3)), ((0, 1), (3, 2)))
    assert projection.before == projection.after


def test_the_smallest_memory_limits_the_slots():
    problem = problem_of(TWO_LAYERS)
    projection = project_evenly(laid_out("p", [[2, 0, 1], [3, 0]], [[0, 1, 2], [3, 2]]), with_memory(problem, [3, 2]))
    assert (projection.slots, projection.added, projection.dropped) == (2, 0, 2)
    with pytest.raises(InputError, match=r"needs 2 experts per layer on every GPU, but .* has memory for 1;"):
        project_evenly(laid_out("p", [[2, 0, 1], [3]], [[0, 1, 2], [3]]), with_memory(problem, [3, 1]))

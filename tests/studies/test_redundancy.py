"""Gains of plans over others on any recording, and how sure they are. Spare slots: numbers that engines accept, their
gain held out, the advised number, and plans made even."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import parallel
from engine.catalogue import cluster_presets
from engine.compare import redundancy
from engine.compare import redundancy as study
from engine.compare.held_out import by_time
from engine.compare.judge import BLOCK, RESAMPLES, Judge, Serving, deviation, gain_of, resampled
from engine.costs import Datasheet
from engine.errors import InputError
from engine.plan import Travel
from engine.problem import MEMORY_SHARE, make_problem
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import usual_sizes
from engine.serving.step import ServingStep
from engine.simulate import simulate
from engine.simulate.serving import serve_as_measured
from engine.systems import SYSTEMS, usual_plan
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix
from tests.cases.examples import examples
from tests.cases.samples import EIGHT, sample, sample_problem, with_memory
from tests.strategies import cluster_of, make_gpu, make_model, seeds
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


A = loads("a", [7000.0, 1000.0, 2000.0, 2000.0])
B = loads("b", [4000.0, 2000.0, 3000.0, 3000.0])


def curve(problem, *recordings, **options) -> list[redundancy.RedundancyPoint]:
    planned, judged, _ = redundancy.planned_and_judged(recordings)
    return list(redundancy.redundancy(Judge(problem), planned, judged, redundancy.Replication(**options)))


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


def test_numbers_in_all_are_tried_too_but_never_advised(monkeypatch):
    """The one slot more halves expert 0: 3500 + 1000 + 2000 tokens on one GPU, and 3500 + 2000 on the other."""
    monkeypatch.setattr(redundancy, "IN_ALL", (1, 2))
    points = curve(problem_of(A), A, A)
    assert [(at.slots, at.spare, at.slots_of_gpu, at.even) for at in points[:3]] == [
        (4, 0, 2, True),
        (5, 1, 3, False),
        (6, 2, 3, True),
    ]
    assert [at.planned_balancedness for at in points[:3]] == pytest.approx([6000 / 8000, 6000 / 6500, 1])
    judge = Judge(problem_of(A))
    for same in (redundancy.Replication("eplb"), redundancy.Replication(groups=2)):
        assert redundancy.counts_of(judge, same) == [4, 6, 8]
    gains = [replace(point, gain=gain, error=0.0) for point, gain in zip(points[:3], (0.0, 0.5, 0.1), strict=True)]
    assert redundancy.knee(gains).slots == 6


def test_replicas_are_planned_and_judged_by_the_rule_of_copies():
    """A rank uses its own copy, and the first has three quarters of a. Experts 0 and 1 on both GPUs would leave it 8000 tokens
    with 2; 1 and 2 on both leave the other 7000 of 0, 250 and 500, and no copies less."""
    uneven = replace(A, by_source=np.stack([0.75 * A.load, 0.25 * A.load]))
    problem = replace(problem_of(uneven), travel=Travel(replicas="nearest-static"))
    _, more, _ = curve(problem, uneven, uneven)
    assert (more.planned_balancedness, more.balancedness) == pytest.approx((6000 / 7750, 6000 / 7750))


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
    assert redundancy.most_slots(judge)[0] == 3 and redundancy.most_slots(judge)[1].startswith("GPU 1 · type-1 has ")
    assert redundancy.counts_of(judge, redundancy.Replication()) == [6, 9]
    points = list(redundancy.redundancy(judge, workload, [workload]))
    assert [at.slots for at in points] == [6, 9]


def test_experts_that_do_not_fit_are_refused_and_no_more_slots_than_experts_are_needed():
    problem = problem_of(A)
    assert redundancy.most_slots(Judge(problem)) == (4, "a GPU needs no more than one slot for each of 4 experts")
    small = cluster_of(*[make_gpu(memory=make_model(1, 4).bytes_per_expert * 1.5)] * 2)
    with pytest.raises(InputError, match="2 slots per layer are needed for 4 experts, but GPU 0"):
        list(redundancy.redundancy(Judge(replace(problem, cluster=small)), A, [B]))


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
    assert list(redundancy.redundancy(Judge(problem_of(A)), A, [B], stop=lambda: True)) == []
    common = (Judge(problem_of(A)), A, ((B, B.load[None]),), redundancy.Replication(), [4, 6, 8])
    whole = list(parallel.in_order(study._count, common, 3))
    monkeypatch.setattr(parallel, "in_order", lambda *_: iter([whole[0], (1, None), whole[2]]))
    assert [at.slots_of_gpu for at in redundancy.redundancy(Judge(problem_of(A)), A, [B])] == [2]


def test_what_is_planned_on_and_what_is_judged():
    assert redundancy.planned_and_judged([A, B]) == (A, (B,), True)
    assert redundancy.planned_and_judged([A]) == (A, (A,), False)
    planned, (judged,), held_out = redundancy.planned_and_judged([log("log", [0], [1], [2], [3])])
    assert (planned.name, judged.name, held_out) == ("log, earlier half", "log, later half", True)
    with pytest.raises(InputError, match="at least one recording"):
        redundancy.planned_and_judged([])


def points(*gains: float, noise: np.ndarray | float = 0.0) -> list[redundancy.RedundancyPoint]:
    """From four slots on, two GPUs with one more each at a time. noise: float64[point, draw], or alike everywhere; the first
    point is the one that gains are over, and has none."""
    noise = np.broadcast_to(noise, (len(gains), RESAMPLES))
    alike = dict.fromkeys(("balancedness", "least_balancedness", "planned_balancedness", "seconds"), 1.0)
    return [
        redundancy.RedundancyPoint(
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
    advised = redundancy.knee(points(*gains))
    assert (advised.slots, advised.rule) == (slots, rule)


@pytest.mark.parametrize(
    ("gains", "signs", "slots", "rule", "reason"),
    [
        (  # 8 % more, plus or minus twice 5 %
            (0.0, 0.04, 0.08),
            (0, 1, 1),
            4,
            "noise",
            "the most that any number of spare slots brings may as well be nothing (+8.0 % with 8 slots, 95 % interval −2.0 % "
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
    advised = redundancy.knee(points(*gains, noise=np.outer(signs, ALTERNATING)))
    assert (advised.slots, advised.rule) == (slots, rule) and advised.reason.startswith(reason)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.floats(-0.3, 0.5), min_size=1, max_size=6), seeds, st.floats(0, 0.2), st.floats(1, 5))
def test_more_noise_never_advises_more_slots(gains, seed, size, more):
    noise = size * np.random.default_rng(seed).standard_normal((len(gains) + 1, RESAMPLES))
    fewer, advised = (redundancy.knee(points(0.0, *gains, noise=scale * noise)).slots for scale in (more, 1.0))
    assert fewer <= advised <= redundancy.knee(points(0.0, *gains)).slots


TWO_LAYERS = loads("loads", [40.0, 10.0, 30.0, 20.0], [10.0, 10.0, 10.0, 70.0])


def test_the_fullest_layer_says_how_many_slots_and_the_price_is_simulated():
    problem = problem_of(TWO_LAYERS)
    plan = laid_out("p", [[2, 0, 1], [3]], [[0, 1], [3, 2, 0]])
    projection = redundancy.project_evenly(plan, problem)
    rows = projection.plan.placement.experts_of_gpu
    assert [len(slots) for row in rows for slots in row] == [3] * 4
    assert (rows[0][0], rows[1][1]) == ((2, 0, 1), (3, 2, 0)), "experts that stay keep their slots"
    assert rows[1][0] == (0, 1, 3), "the busiest expert gets the replica"
    assert (projection.slots, projection.added, projection.dropped) == (3, 3, 0)
    assert projection.plan.parent == plan.id and projection.plan.name == "p, even"
    assert projection.before.total == simulate(plan, problem).total
    assert projection.after.total == simulate(projection.plan, problem).total
    projection = redundancy.project_evenly(laid_out("p", [[2, 0], [1, 3]], [[0, 1], [3, 2]]), problem)
    assert (projection.slots, projection.added, projection.dropped) == (2, 0, 0), "an even plan stays as it is"
    assert projection.plan.placement.experts_of_gpu == (((2, 0), (1, 3)), ((0, 1), (3, 2)))
    assert projection.before == projection.after


def test_the_smallest_memory_limits_the_slots():
    problem = problem_of(TWO_LAYERS)
    projection = redundancy.project_evenly(
        laid_out("p", [[2, 0, 1], [3, 0]], [[0, 1, 2], [3, 2]]), with_memory(problem, [3, 2])
    )
    assert (projection.slots, projection.added, projection.dropped) == (2, 0, 2)
    with pytest.raises(InputError, match=r"needs 2 experts per layer on every GPU, but .* has memory for 1;"):
        redundancy.project_evenly(laid_out("p", [[2, 0, 1], [3]], [[0, 1, 2], [3]]), with_memory(problem, [3, 1]))

"""Spare slots: which numbers engines accept, what they are worth held out, and where the knee is."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.catalogue import cluster_presets, model_presets
from engine.compare.judge import Judge, gain_of
from engine.compare.redundancy import (
    RedundancyPoint,
    Replication,
    counts_of,
    most_slots,
    planned_and_judged,
    redundancy,
)
from engine.costs import Datasheet
from engine.errors import InputError
from engine.formats import read_workload
from engine.problem import MEMORY_SHARE, make_problem
from engine.workload import ExpertLoad
from tests.cases.samples import sample, sample_problem
from tests.strategies import cluster_of, make_gpu, make_model
from tests.verdict.hand import loads, log, plan_of, problem_of

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "deepseek-r1-loads"
A = loads("a", [7000.0, 1000.0, 2000.0, 2000.0])
B = loads("b", [4000.0, 2000.0, 3000.0, 3000.0])


def point(slots: int, gain: float) -> RedundancyPoint:
    return RedundancyPoint(slots, slots - 4, slots // 2, 1.0, 1.0, 1.0, 1.0, gain, 0.0, 0.0, 0.01, gain)


def curve(problem, *recordings, **options) -> list[RedundancyPoint]:
    planned, judged, _ = planned_and_judged(recordings)
    return list(redundancy(Judge(problem), planned, judged, Replication(**options)))


def test_a_curve_by_hand():
    """Of a, expert 0 outweighs all others, so that it stands beside 1, and of b both GPUs have 6000 tokens. With a slot more a
    GPU, 0 and 1 are on both, 2 and 3 on one each: of a, 3500 + 500 + 2000 tokens per GPU, and of b 6000 again."""
    points = curve(problem_of(A), A, B)
    assert [(at.slots, at.spare, at.slots_of_gpu) for at in points] == [(4, 0, 2), (6, 2, 3), (8, 4, 4)]
    assert [at.planned_balancedness for at in points] == pytest.approx([6000 / 8000, 1, 1])
    assert [(at.seconds, at.gain, at.balancedness) for at in points] == [pytest.approx((6000, 0, 1))] * 3
    size = 3 * 64 * 96 * 2
    assert [at.memory_bytes for at in points] == [0, 2 * size, 4 * size]
    assert [at.gpu_bytes for at in points] == [2 * size, 3 * size, 4 * size]


def test_the_error_of_a_gain_is_that_of_a_verdict():
    """The plans of the curve by hand, one beside the other."""
    few, more, _ = curve(problem_of(A), A, B)
    plans = plan_of("4 slots", [[0, 1], [2, 3]]), plan_of("6 slots", [[0, 1, 2], [0, 1, 3]])
    assert (few.error, few.interval) == (0, (0, 0))
    assert more.error == pytest.approx(gain_of(Judge(problem_of(A)), *plans, B).error) and more.error > 0
    assert more.interval == pytest.approx((more.gain - 1.96 * more.error, more.gain + 1.96 * more.error), abs=1e-5)


def test_a_hundred_times_the_tokens_have_a_tenth_of_the_error():
    many = ExpertLoad("many", B.load * 100, (1,))
    errors = [curve(problem_of(A), A, judged)[1].error for judged in (B, many)]
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.4)


def test_several_recordings_share_the_error_and_the_worst_is_named():
    """Of independent recordings the error of the mean is the root of the sum of squares over their number."""
    other = loads("other", [2000.0, 6000.0, 3000.0, 1000.0])
    alone = [curve(problem_of(A), A, judged)[1] for judged in (B, other)]
    both = curve(problem_of(A), A, B, other)[1]
    assert both.gain == pytest.approx(np.mean([at.gain for at in alone]))
    assert both.gain_worst == min(at.gain for at in alone) < both.gain
    assert both.error == pytest.approx(np.hypot(*(at.error for at in alone)) / 2, rel=0.5)  # of 24 draws


@pytest.mark.parametrize("gpus", [3, 5, 7])
def test_any_number_of_gpus_has_slots_that_divide(gpus):
    problem = problem_of(loads("a", np.arange(16) + 100.0), gpus)
    points = curve(problem, problem.workload, loads("b", np.arange(16)[::-1] + 100.0))
    assert points[0].slots_of_gpu == -(-16 // gpus)
    assert all(at.slots % gpus == 0 and at.slots >= 16 and at.slots_of_gpu <= 16 for at in points)
    assert points[-1].balancedness <= 1


def test_the_smallest_gpu_limits_all():
    """Room for three slots of two layers on the small GPU, for more on the large ones."""
    workload, model = loads("a", [1000.0] * 6, [1000.0] * 6), make_model(2, 6)
    room = [model.bytes_per_expert * 2 * slots / MEMORY_SHARE * 1.001 for slots in (9, 3, 9)]
    cluster = cluster_of(*(make_gpu(kind, memory=memory) for kind, memory in enumerate(room)))
    judge = Judge(make_problem(workload, cluster, model, Datasheet()))
    assert most_slots(judge)[0] == 3 and most_slots(judge)[1].startswith("GPU 1 · type-1 has ")
    assert counts_of(judge) == [2, 3]
    points = list(redundancy(judge, workload, [workload]))
    assert [at.slots for at in points] == [6, 9]


def test_experts_that_do_not_fit_are_refused():
    model = make_model(1, 4)
    tight = problem_of(A, memory=1e9)
    with pytest.raises(InputError, match="2 slots per layer are needed for 4 experts, but GPU 0"):
        small = cluster_of(*[make_gpu(memory=model.bytes_per_expert * 1.5)] * 2)
        list(redundancy(Judge(replace(tight, cluster=small)), A, [B]))


def test_no_more_slots_than_experts():
    judge = Judge(problem_of(A))
    assert most_slots(judge) == (4, "a GPU needs no more than one slot for each of 4 experts")


def test_on_faster_gpus_more_is_done():
    """Balance counts the speed of GPUs: of one twice as fast two thirds of the tokens."""
    cluster = cluster_of(
        *(make_gpu(kind, send=1e12, flops=speed, memory_bandwidth=1e18) for kind, speed in ((0, 2e9), (1, 1e9)))
    )
    workload = loads("a", [30_000.0, 30_000.0, 30_000.0, 30_000.0])
    problem = make_problem(workload, cluster, make_model(1, 4), Datasheet())
    two, three, *_ = curve(problem, workload, workload)
    assert two.balancedness == pytest.approx(
        0.6667, abs=0.01
    )  # half the tokens each, where the slow one should have a third
    assert three.balancedness >= two.balancedness and three.seconds <= two.seconds


def test_groups_stay_on_nodes():
    problem = sample_problem("alpha-code", cluster=cluster_presets()["lina-4-nodes"].cluster)
    points = curve(problem, sample("alpha-code", 2000), sample("alpha-man", 2000), algorithm="eplb", groups=4)
    free = curve(problem, sample("alpha-code", 2000), sample("alpha-man", 2000), algorithm="eplb")
    assert [at.slots for at in points] == [at.slots for at in free]
    assert points[1].planned_balancedness < free[1].planned_balancedness
    with pytest.raises(InputError, match="16 experts do not divide into 5 groups"):
        curve(problem, sample("alpha-code", 2000), sample("alpha-man", 2000), groups=5)


def test_asked_to_stop_it_ends():
    assert list(redundancy(Judge(problem_of(A)), A, [B], stop=lambda: True)) == []


def test_what_is_planned_on_and_what_is_judged():
    assert planned_and_judged([A, B]) == (A, (B,), True)
    assert planned_and_judged([A]) == (A, (A,), False)
    planned, (judged,), held_out = planned_and_judged([log("log", [0], [1], [2], [3])])
    assert (planned.name, judged.name, held_out) == ("log, earlier half", "log, later half", True)
    with pytest.raises(InputError, match="at least one recording"):
        planned_and_judged([])


def test_a_point_survives_json():
    assert RedundancyPoint.from_dict(point(6, 0.5).to_dict()) == point(6, 0.5)


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")
def test_spare_slots_of_deepseek_r1():
    """As in docs/verdict-examples.md: held out, balance rises more slowly with every further slot."""
    planned, judged = (read_workload(DATA / f"{name}.json") for name in ("decode_in1000out1000", "decode_in2000out100"))
    problem = make_problem(
        planned, cluster_presets()["hgx-h100-4-nodes"].cluster, model_presets()["DeepSeek-R1"].model, Datasheet()
    )
    points = list(redundancy(Judge(problem), planned, [judged], Replication("eplb")))
    balance = np.array([at.balancedness for at in points])
    assert [at.slots for at in points[:3]] == [256, 288, 320]
    assert (np.diff(balance) > 0).all() and balance[1] - balance[0] > balance[3] - balance[2]
    assert isinstance(planned, ExpertLoad) and (balance < [at.planned_balancedness for at in points]).all()

"""Verdicts reckoned by hand and on recorded loads, and laws that all of them keep."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compare.baseline import running
from engine.compare.evidence import Evidence, Thresholds
from engine.compare.held_out import split_by_origin
from engine.compare.judge import Judge, Serving
from engine.compare.verdict import evidence_of, verdict_from, verdict_of
from engine.errors import InputError, StoppedError
from engine.plan import Travel
from engine.problem import MEMORY_SHARE
from engine.result import Provenance
from engine.serving.figures import bytes_beside_experts
from engine.serving.sizes import TransformerSizes
from engine.serving.step import Operator, ServingStep
from engine.systems import SYSTEMS, run
from engine.workload import ExpertLoad, RoutingTrace
from tests.benchmarks.bench_verdict import DATA, DECODE, NAMES, R1, by_batch, lite
from tests.cases.examples import examples
from tests.costs.silicon import needs_tables
from tests.serving.samples import DEEPSEEK_SIZES
from tests.strategies import seeds
from tests.verdict.hand import laid_out, loads, log, problem_of

pytestmark = [pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")]

A = loads("a", [3000.0, 3000.0, 1000.0, 1000.0])
B = loads("b", [3000.0, 2000.0, 1000.0, 2000.0])
LINEAR, APART = [[0, 1], [2, 3]], [[0, 2], [1, 3]]


def test_the_gain_on_another_recording_and_the_move_by_hand():
    """On a, contiguous blocks take 6000 s and the plan 4000, half as many again; on b 5000 and 4000, a quarter. Two experts of
    3 × 64 × 96 numbers of two bytes change places, over ports that take no time to speak of."""
    plan = laid_out("plan", APART, made_from=A)
    verdict = verdict_of(plan, problem_of(A), [A, B])
    (part,) = verdict.parts
    assert (part.by, part.part, part.planned_on) == ("recording", "b", "a")
    assert (part.seconds_deployed, part.seconds) == (5000, 4000)
    assert verdict.gain_held_out == verdict.gain_worst == pytest.approx(0.25)
    assert verdict.persistence == pytest.approx(0.25 / 0.5)  # nothing makes it again: over its gain on a
    assert verdict.gain_low < 0.25 < verdict.gain_high
    assert verdict.gain_high - verdict.gain_low < 0.1  # Poisson: 5000 ± 71
    assert verdict.verdict == "do-it"
    assert {row.name: row.gain for row in verdict.beside}["no plan: experts in contiguous blocks"] == 0
    assert verdict.memory_bytes == 0 and verdict.move_copies == 2 and verdict.move_bytes == 2 * 3 * 64 * 96 * 2
    assert (verdict.move_seconds, verdict.break_even_steps) == pytest.approx((0, 0), abs=1e-20)


@dataclass(frozen=True)
class HalfASecond:
    """Attention of half a second, and a prompt's keys and values that the memory has room for 1, 2 and 4 times."""

    source: str = "by hand"

    def operators(self, step: ServingStep) -> tuple[Operator, ...]:
        return (Operator("attention", "attention", 0.5, 1, "datasheet"),)


def test_steps_of_more_and_more_sequences_by_hand():
    """On b the fuller GPU has 5/8 of the copies under contiguous blocks and 4/8 under the plan; two GPUs with n sequences have
    2n copies, a second each, and half a second of attention."""
    plan, problem = laid_out("plan", APART, made_from=A), problem_of(A)
    step = ServingStep(phase="decode", sequences=1, context=1000, output=1000)
    sizes = TransformerSizes(heads=1, kv_heads=1, head_size=64, value_size=64, dense_d_ff=64, vocabulary=10)
    serving = Serving(step, HalfASecond(), sizes)
    others, *each = bytes_beside_experts(problem.model, sizes, step)
    memory = (problem.held_bytes(plan.placement).max() + others + 4.5 * sum(each)) / MEMORY_SHARE
    verdict = verdict_of(plan, problem_of(A, memory=float(memory)), [A, B], serving=serving)
    assert [batch.sequences for batch in verdict.batches] == [1, 2, 4] and verdict.pays_from_sequences == 1
    for batch in verdict.batches:
        assert (batch.seconds_deployed, batch.seconds) == pytest.approx((0.5 + 1.25 * batch.sequences, 0.5 + batch.sequences))
    assert not verdict_of(plan, problem_of(A), [A, B]).batches  # a pass has no sequences


def test_memory_of_replicas_by_hand():
    """Two of six slots are spare; each GPU holds three experts where it held two."""
    plan = laid_out("plan", [[0, 1, 2], [0, 1, 3]], made_from=A, optimiser="eplb", options={"algorithm": "eplb"})
    verdict = verdict_of(plan, problem_of(A), [A, B], thresholds=Thresholds(replica_gain=0.1))
    size = 3 * 64 * 96 * 2
    assert (verdict.memory_bytes, verdict.memory_bytes_per_gpu) == (2 * size, size)
    assert verdict.memory_share == pytest.approx(3 * size / 1e9)
    # b: 3500 s and 4500 s with replicas; EPLB without, made of a, puts a popular expert on each GPU: 4000 s whatever the pairs.
    assert verdict.gain_held_out == pytest.approx(5000 / 4500 - 1)
    bare = next(row for row in verdict.beside if row.name.startswith("no replicas"))
    assert bare.gain == pytest.approx(0.25) and bare.replica_bytes == 0
    lost = "and lose 11 % against the same system without them: plan without spare slots."
    assert any(reason.endswith(lost) for reason in verdict.reasons)


def test_by_time_the_system_is_run_again_on_the_earlier_half():
    """800 tokens of 0 and 1 come first, then 800 of 0 and 2: a plan that separates 0 and 1 does not separate 0 and 2."""
    drifted = log("drifted", *[[0], [1]] * 400, *[[0], [2]] * 400)
    problem = problem_of(drifted)
    plan = run(SYSTEMS["eplb"], problem, {"redundant": 0, "algorithm": "eplb"}).result.solution
    verdict = verdict_of(plan, problem, [drifted])
    (part,) = verdict.parts
    assert (part.by, part.part, part.planned_on) == ("time", "drifted, later half", "drifted, earlier half")
    assert part.seconds_deployed == 400 and part.made_for_it == pytest.approx(0)
    assert verdict.persistence is None  # contiguous blocks are best in the later half: there is nothing to keep


def test_a_plan_for_two_recordings_is_made_again_from_the_earlier_halves_of_both():
    rng = np.random.default_rng(0)
    first, second = (log(name, *rng.integers(0, 4, (400, 1)).tolist()) for name in ("first", "second"))
    problem = replace(problem_of(first), others=(second,))
    plan = run(SYSTEMS["eplb"], problem, {"redundant": 0}).result.solution
    verdict = verdict_of(plan, problem, [second, first])
    assert [(part.part, part.planned_on) for part in verdict.parts] == [
        (f"{name}, later half", "first, earlier half and second, earlier half") for name in ("first", "second")
    ]
    # With one of the two missing nothing can be made again, and traffic known to be seen is no evidence.
    assert verdict_of(plan, problem, [second]).parts == ()


def test_a_system_that_refuses_a_recording_leaves_open_what_it_would_gain():
    """ExFlow follows tokens, and loads have none; in time it can be run again."""
    rng = np.random.default_rng(0)
    mine = log("mine", *rng.integers(0, 4, (400, 2)).tolist())
    problem = problem_of(mine)
    plan = run(SYSTEMS["exflow"], problem, {"time_limit": 0.2, "execution": "vanilla"}).result.solution
    verdict = verdict_of(plan, problem, [mine, loads("loads", *[[300.0, 200.0, 100.0, 200.0]] * 2)])
    in_time, other = verdict.parts
    assert in_time.made_for_it is not None and other.made_for_it is None
    assert verdict.persistence in (None, pytest.approx(in_time.gain / (in_time.made_for_it or 1)))


@dataclass(frozen=True)
class ThousandSeconds:
    """Everything around the MoE layers."""

    source: str = "1000 s"

    def operators(self, step):
        return (Operator("attention", "attention", 1000.0, 2, "datasheet"),)


@pytest.mark.parametrize(
    ("tokens", "cost", "recovered", "said"),
    [
        ([3000.0, 2000.0, 1000.0, 2000.0], 0.2, 1.0, "costs 20 %, this plan gets 100 % of it back."),
        ([3500.0, 1500.0, 1000.0, 2000.0], 0.2, 0.5, "costs 20 %, this plan gets 50 % of it back."),
        ([3000.0, 1500.0, 2000.0, 1500.0], 0.1, -1.0, "costs 10 %, this plan adds 100 % to that."),
        ([2000.0] * 4, 0.0, None, "costs less than 0.1 %."),
    ],
)
def test_forced_balance_by_hand(tokens, cost, recovered, said):
    """Each of two GPUs has 4000 of 8000 tokens with balanced routing: 5000 s with all else. The first two recordings put 5000
    on the busiest in contiguous blocks, the third 4500."""
    step = ServingStep(phase="decode", sequences=4000, context=100, output=50)
    serving = Serving(step, ThousandSeconds(), DEEPSEEK_SIZES)
    plan = laid_out("plan", APART, made_from=A)
    verdict = verdict_of(plan, problem_of(A), [A, loads("other", tokens)], serving=serving)
    assert verdict.balanced.model_dump() == pytest.approx({"seconds": 5000.0, "cost": cost, "recovered": recovered})
    assert verdict.reasons[-1] == f"With balanced routing a step takes 5,000 s: today's skew {said}"
    # The deployed plan gets nothing back, on all recordings: 7000 s on a. Without a step nothing is said.
    same = verdict_of(laid_out("same", LINEAR, made_from=A), problem_of(A), [A], serving=serving)
    assert same.balanced.model_dump() == pytest.approx({"seconds": 5000.0, "cost": 0.4, "recovered": 0.0})
    assert verdict_of(laid_out("new", APART, made_from=A), problem_of(A), [A], serving=serving).balanced.recovered is None
    assert verdict_of(plan, problem_of(A), [A]).balanced is None
    of_two = Provenance(optimiser="by hand", inputs={"workload": A.digest, "workload_also_1": B.digest})
    missing = plan.model_copy(update={"provenance": of_two})  # so that not even its own recording counts
    assert verdict_of(missing, problem_of(A), [A], serving=serving).balanced is None


SILENT = loads("silent", [3000.0, 3000.0, 1000.0, 1000.0], [0.0] * 4)
FEW = [ExpertLoad(name, load / 100, (1,)) for name, load in (("a", A.load), ("b", B.load))]


@pytest.mark.parametrize(
    ("recordings", "parts", "said"),
    [([A], 0, "Nothing was held out"), ([SILENT], 0, "received no tokens"), (FEW, 1, "Record at least 100 tokens")],
    ids=["one recording of loads", "errors", "few tokens"],
)
def test_what_says_nothing(recordings, parts, said):
    first = recordings[0]
    plan = laid_out("plan", *[APART] * first.layers, made_from=None if first is SILENT else first)
    verdict = verdict_of(plan, problem_of(first), recordings)
    assert verdict.verdict == "cannot-say" and said in verdict.reasons[0] and len(verdict.parts) == parts
    assert (verdict.gain_held_out is None) == (parts == 0) and (parts == 0 or verdict.tokens_per_expert == 20)


def test_a_plan_that_does_not_fit_is_refused_and_a_stop_leaves_no_verdict():
    three = loads("three", [1.0] * 6)
    with pytest.raises(InputError, match="the plan plan is for 4 experts"):
        verdict_of(laid_out("plan", APART), problem_of(three), [three])
    with pytest.raises(StoppedError, match="stopped before there was a verdict"):
        verdict_of(laid_out("plan", APART, made_from=A), problem_of(A), [A, B], stop=lambda: True)


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"gain": 0.5, "try_gain": 0.3},
        {"confidence": 0.6},
        {"worst_gain": 0.4, "persistence": 1.0, "replica_gain": 3.0},
        {"memory": 1e-9},
        {"tokens_per_expert": 1e9, "break_even_minutes": 0.0},
    ],
)
def test_no_threshold_enters_the_evidence(limits):
    plan = laid_out("plan", [[0, 1, 2], [0, 1, 3]], made_from=A, optimiser="eplb", options={"algorithm": "eplb"})
    kept = Evidence.from_json(evidence_of(plan, problem_of(A), [A, B]).to_json(), "kept")
    thresholds = Thresholds(**limits)
    assert verdict_from(kept, thresholds) == verdict_of(plan, problem_of(A), [A, B], thresholds=thresholds)


def test_tokens_of_linear_travel_as_those_of_the_plan():
    plan = laid_out("plan", APART, made_from=A).model_copy(update={"travel": Travel(unit="gpu")})
    assert verdict_of(plan, problem_of(A), [A, B]).gain_held_out == pytest.approx(0.25)


@settings(max_examples=examples(15), deadline=None)
@given(seeds, st.sampled_from((16.0, 1000.0)))
def test_scaling_loads_changes_no_gain(seed, factor):
    rng = np.random.default_rng(seed)
    first, second = (rng.integers(100, 10_000, (2, 4)).astype(np.float64) for _ in range(2))
    plan = {"optimiser": "eplb", "options": {"redundant": 1, "algorithm": "eplb"}}
    verdicts = []
    for scale in (1.0, factor):
        a, b = (ExpertLoad(name, load * scale, (1, 2)) for name, load in (("a", first), ("b", second)))
        laid = laid_out("plan", [[0, 1, 2], [3, 0, 1]], [[0, 3, 2], [1, 0, 3]], made_from=a, **plan)
        verdicts.append(verdict_of(laid, problem_of(a), [a, b]))
    first, other = verdicts
    assert other.gain_held_out == pytest.approx(first.gain_held_out)
    assert other.persistence == (None if first.persistence is None else pytest.approx(first.persistence))
    assert [row.gain for row in other.beside] == pytest.approx([row.gain for row in first.beside])
    assert other.gain_high - other.gain_low <= first.gain_high - first.gain_low + 1e-12  # more tokens, less noise


def test_a_bare_placement_runs_as_the_plan_does():
    plan = laid_out("plan", APART).model_copy(update={"travel": Travel(unit="gpu"), "execution": "context-coherent"})
    bare = laid_out("bare", LINEAR).placement
    now = running(bare, plan)
    assert (now.name, now.travel, now.execution, now.placement) == ("deployed", plan.travel, plan.execution, bare)
    assert running(laid_out("copies", [[0, 1, 2], [0, 2, 3]]).placement, plan).execution == "vanilla"


# Which recordings a plan has seen


def test_recordings_are_known_by_their_digests():
    judge, plan = Judge(problem_of(A)), laid_out("plan", APART, made_from=A)
    again = loads("another name of the same", *A.load.tolist())
    assert split_by_origin(plan, [B, A, again, A], judge) == ((A,), (B,))
    assert split_by_origin(laid_out("plan", APART), [A, B], judge) == ((), (A, B))


def test_a_recording_at_the_tokens_of_a_step_is_its_whole_one():
    whole = RoutingTrace("chat", A.load.astype(np.int16).reshape(-1, 1, 1) % 4, 4)
    step = loads("chat, at 64 tokens per GPU", [30.0, 30.0, 10.0, 10.0])
    judge, plan = Judge(problem_of(step)), laid_out("plan", APART, made_from=step)
    assert split_by_origin(plan, [step, whole, B], judge) == ((whole,), (B,))
    assert split_by_origin(plan, [step, B], judge) == ((step,), (B,))


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "verdict-examples.md"


@pytest.mark.everything
@needs_tables
def test_the_table_of_deepseek_r1():
    """One row; `python -m tests.benchmarks.bench_verdict` prints them all."""
    first = R1(DECODE).row(NAMES[1])
    assert first in DOCUMENT.read_text() and first.endswith("| do it |")


@pytest.mark.everything
@needs_tables
def test_from_which_batch_on_balance_pays_for_deepseek_r1():
    assert by_batch("H200") in DOCUMENT.with_name("verdict.md").read_text()


@pytest.mark.everything
@needs_tables
def test_the_table_of_moves_from_a_plan_of_deepseek_r1():
    assert R1(DECODE).verdict(NAMES[3], deployed=NAMES[2]).verdict == "not-now"


def test_a_task_and_another_on_deepseek_v2_lite():
    """The second half of a task is served by a plan for its first half; another task is not."""
    alone, both = lite(0, "intent"), lite(0, "intent", "summary")
    assert alone.verdict == "do-it" and alone.persistence > 0.9
    assert both.verdict == "try-it" and both.persistence < 0.5 and both.gain_worst < 0
    assert both.parts[0] == alone.parts[0]

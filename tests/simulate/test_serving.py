"""A whole step of serving: its figures, and the effect of plans and overlap."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from engine.cluster import Cluster
from engine.costs import Datasheet
from engine.errors import InputError
from engine.plan import Placement, Plan, Travel
from engine.problem import MEMORY_SHARE, Problem, make_problem
from engine.serving.aiconfigurator import choose_operators_of
from engine.serving.figures import ServingFigures
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import TransformerSizes
from engine.serving.step import Operator, OperatorsOfTypes, ServingStep, computing
from engine.simulate.serving import dealt_by_speed, serve, with_fused_experts, work_of_step
from engine.simulate.work import work_of
from engine.training import balanced_load
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.launch_plans import plan_with
from tests.costs.silicon import needs_tables
from tests.serving.samples import DECODE, DEEPSEEK, DEEPSEEK_SIZES, PREFILL, h200
from tests.strategies import cluster_of, make_gpu, make_model

MODEL = make_model(4, 8, 2, d_model=64, d_ff=96)
SIZES = TransformerSizes(heads=4, kv_heads=2, head_size=16, value_size=16, dense_d_ff=128, vocabulary=1000)
FOUR = cluster_of(*[make_gpu()] * 4)
STEP = ServingStep(phase="decode", sequences=8, context=100, output=50)


@dataclass(frozen=True)
class Stub:
    """Attention of 1 ms a layer and sequence, a head of 0.5 ms; or so many times as long."""

    layers: int = MODEL.layers
    source: str = "stub"
    scale: float = 1.0

    def operators(self, step):
        seconds = 1e-3 * self.scale * step.sequences * self.layers
        return (
            Operator("attention", "attention", seconds, self.layers, "datasheet"),
            Operator("head", "head", 0.5e-3 * self.scale, 1, "datasheet"),
        )


def problem_of(load: np.ndarray | None = None, model=MODEL, cluster: Cluster = FOUR) -> Problem:
    workload = balanced_load(model) if load is None else ExpertLoad("recorded", load, model.moe_layers)
    return make_problem(workload, cluster, model, Datasheet(launch=0.0))


def plan_of(gpu_of_expert: list[int], problem: Problem, travel: Travel | None = None, **more) -> Plan:
    rows = np.tile(gpu_of_expert, (problem.workload.layers, 1))
    placement = Placement.from_gpu_of_expert(rows, len(problem.cluster.gpus), problem.model.moe_layers)
    return plan_with(placement, name="blocks", travel=travel, **more)


BLOCKS = [0, 0, 1, 1, 2, 2, 3, 3]


def test_without_overlap_a_step_is_its_operators_and_its_simulated_layers():
    problem = problem_of()
    figures = serve(plan := plan_of(BLOCKS, problem), problem, STEP, Stub(), SIZES).figures
    work = work_of_step(plan, problem, STEP)
    assert work.dispatch.shape == (4, 4, 4)
    # Each GPU has 8 tokens of 2 copies, an eighth of them for each expert and so a quarter for each GPU.
    assert work.dispatch[0] == pytest.approx(np.full((4, 4), 8 * 2 / 4 * MODEL.bytes_per_token))
    assert figures.seconds == pytest.approx(5 * 8e-3 + 0.5e-3 + sum(figures.moe.values()))
    assert figures.hidden == pytest.approx(0.0, abs=1e-12)
    assert figures.bound <= figures.seconds * (1 + 1e-9)
    assert figures.tokens_per_second == pytest.approx(8 / figures.seconds)
    assert figures.parts["attention"] == pytest.approx(5 * 8e-3) and figures.parts["head"] == pytest.approx(0.5e-3)
    assert sum(figures.parts.values()) == pytest.approx(figures.seconds)


def test_the_gain_of_a_balanced_plan_is_of_the_whole_step():
    load = np.tile([8.0, 8, 1, 1, 1, 1, 1, 1], (4, 1))
    problem = problem_of(load)
    blocks, spread = plan_of(BLOCKS, problem), plan_of([0, 1, 2, 2, 3, 3, 0, 1], problem)
    slow, fast = (serve(plan, problem, STEP, Stub(), SIZES).figures for plan in (blocks, spread))
    gain = fast.gain_over(slow)
    assert gain > 0 and gain == pytest.approx(fast.tokens_per_second / slow.tokens_per_second - 1)
    moe_alone = sum(slow.moe.values()) / sum(fast.moe.values()) - 1
    assert gain < moe_alone  # attention is the same under both


def test_two_batches_hide_what_travels():
    problem = problem_of()
    plan = plan_of(BLOCKS, problem)
    both = STEP.model_copy(update={"overlap": "two-batch"})
    plain, overlapped = (serve(plan, problem, step, Stub(), SIZES) for step in (STEP, both))
    assert overlapped.figures.seconds < plain.figures.seconds
    assert overlapped.figures.hidden > 0
    assert overlapped.figures.bound <= overlapped.figures.seconds * (1 + 1e-9)
    # The dense layer's attention and the head (once a batch) take no turns.
    assert overlapped.figures.seconds == pytest.approx(overlapped.timeline.total + 8e-3 + 2 * 0.5e-3)
    assert set(overlapped.timeline.events.model) == {0, 1}
    assert (overlapped.timeline.events.kind == "dense").sum() == 4 * 2 * 4


def test_kernels_that_exchange_rows_of_a_node_hold_processors_beside_computation():
    problem = problem_of()
    both = STEP.model_copy(update={"overlap": "two-batch"})
    copies, rows = (
        serve(plan_of(BLOCKS, problem, Travel(unit=unit)), problem, both, Stub(), SIZES).figures for unit in ("copies", "node")
    )
    for part in ("attention", "ffn", "gate"):
        assert rows.parts[part] == pytest.approx(copies.parts[part] * 132 / 112)
    assert rows.parts["head"] == copies.parts["head"]  # nothing travels at the same time


def test_memory_is_experts_other_weights_and_the_cache_at_full_length():
    problem = problem_of()
    memory = serve(plan_of(BLOCKS, problem), problem, STEP, Stub(), SIZES).figures.memory
    assert memory.experts == 4 * 2 * MODEL.bytes_per_expert
    assert memory.kv == 8 * 150 * 2 * 2 * 16 * 5 * 2  # sequences, tokens, keys and values, heads, size, layers, bytes
    attention = 64 * (4 + 2 + 2) * 16 + 64 * 64
    dense, embeddings, routers = 3 * 64 * 128, 2 * 1000 * 64, 4 * 8 * 64
    assert memory.others == 2 * (5 * attention + dense + embeddings + routers)
    assert memory.room == MEMORY_SHARE * 1e9 and memory.fits
    assert memory.most_sequences(STEP) == int((memory.room - memory.experts - memory.others) / (memory.kv / 8))

    long = STEP.model_copy(update={"context": 1_000_000})
    memory = serve(plan_of(BLOCKS, problem), problem, long, Stub(), SIZES).figures.memory
    assert not memory.fits and memory.most_sequences(long) < 8


def test_rows_that_experts_share_are_counted_on_recorded_tokens():
    """Both choices of every token sit on one GPU: a row a GPU is one row, not the 13 / 7 of two different experts by chance."""
    chosen = np.array([[[2 * (token % 4), 2 * (token % 4) + 1]] * 4 for token in range(40)], dtype=np.int16)
    trace = RoutingTrace("pairs", chosen, 8, sequence=np.zeros(40, dtype=np.int64))
    problem = make_problem(trace, FOUR, MODEL, Datasheet())
    plan = plan_of(BLOCKS, problem, Travel(unit="gpu"))
    work = work_of_step(plan, problem, STEP)
    row = work.dispatch[0].sum() / (8 * 4)
    assert row == pytest.approx(plan.travel.row_bytes(MODEL)[0])
    loads = problem.with_workload(ExpertLoad("loads", trace.load, MODEL.moe_layers))
    by_chance = work_of(plan.placement, loads, travel=plan.travel).dispatch[0].sum() / 40
    assert by_chance == pytest.approx(13 / 7 * plan.travel.row_bytes(MODEL)[0])


@pytest.mark.parametrize(
    ("change", "execution", "message"),
    [
        ({"second": problem_of()}, "vanilla", "is for one model, but two are open"),
        ({"cluster": cluster_of(*[make_gpu()] * 3, make_gpu(1))}, "vanilla", "timed for one type of GPU, but .* has several"),
        ({}, "context-coherent", "tokens go home after every layer"),
    ],
)
def test_what_is_not_served_is_refused(change, execution, message):
    problem = problem_of()
    with pytest.raises(InputError, match=message):
        serve(plan_of(BLOCKS, problem, execution=execution), replace(problem, **change), STEP, Stub(), SIZES)


@needs_tables
@pytest.mark.parametrize("step", [DECODE, PREFILL], ids=lambda step: step.phase)
def test_deepseek_on_32_h200_has_measured_experts(step):
    problem = make_problem(balanced_load(DEEPSEEK), cluster := h200(4), DEEPSEEK, Datasheet())
    plan = plan_of(np.repeat(np.arange(32), 8), problem, Travel(dispatch="fp8", combine="bf16"))
    fused = with_fused_experts(problem, plan, step)
    source = RooflineOperators(DEEPSEEK, DEEPSEEK_SIZES, cluster.gpus[0])
    figures = serve(plan, fused, step, source, DEEPSEEK_SIZES).figures
    assert "experts: fused kernels of SGLang" in figures.sources[1]
    by_gemm = serve(plan, problem, step, source, DEEPSEEK_SIZES).figures
    assert figures.moe["ffn"] != by_gemm.moe["ffn"]
    for kind in ("dispatch", "combine"):
        assert figures.moe[kind] == pytest.approx(by_gemm.moe[kind])
    assert figures.memory.fits and figures.memory.total < 60e9


@needs_tables
def test_a_model_without_measured_kernels_keeps_its_costs():
    problem = problem_of()
    assert with_fused_experts(problem, plan_of(BLOCKS, problem), STEP) is problem


FAST = make_gpu(1, flops=4e9, memory_bandwidth=1e9)
MIXED = cluster_of(*[make_gpu()] * 2, *[FAST] * 2)


def test_gpus_of_several_types_divide_the_sequences_by_their_speed():
    """The fast ones time a sequence at half the seconds, so of 32 sequences they have two thirds."""
    problem = problem_of(cluster=MIXED)
    source = OperatorsOfTypes({computing(gpu): Stub(scale=scale) for gpu, scale in ((make_gpu(), 2.0), (FAST, 1.0))})
    served = serve(plan := plan_of(BLOCKS, problem), problem, STEP, source, SIZES)
    dealt = dealt_by_speed(problem, STEP, source, SIZES, problem.held_bytes(plan.placement))
    assert dealt.sum() == 8 * 4 and dealt.tolist() in ([5, 5, 11, 11], [6, 5, 11, 10], [6, 6, 10, 10])
    slow, fast = 2e-3 * dealt[0], 1e-3 * dealt[2]
    slowest = 4 * max(slow, fast) + max(slow + 2 * 0.5e-3, fast + 0.5e-3)  # MoE layers, then the dense one and the head
    assert served.figures.seconds == pytest.approx(slowest + sum(served.figures.moe.values()), rel=1e-3)
    assert sum(served.figures.parts.values()) == pytest.approx(served.figures.seconds)
    assert served.figures.bound <= served.figures.seconds * (1 + 1e-9)
    even = serve(plan, problem, STEP, source, SIZES, dealt=np.full(4, 8)).figures
    assert even.seconds > served.figures.seconds
    work = work_of_step(plan, problem, STEP, dealt)
    assert work.dispatch[0].sum(axis=1) == pytest.approx(dealt * 2 * MODEL.bytes_per_token)
    both = STEP.model_copy(update={"overlap": "two-batch"})
    overlapped = serve(plan, problem, both, source, SIZES).figures
    assert overlapped.bound <= overlapped.seconds * (1 + 1e-9) and overlapped.hidden > 0


def test_keys_and_values_count_on_every_type_alone():
    """A fast GPU with little memory takes only the sequences that it has room for; a step without room for all says so."""
    small = make_gpu(1, flops=4e9, memory_bandwidth=1e9, memory=1.2e6)
    problem = problem_of(cluster=cluster_of(*[make_gpu()] * 2, *[small] * 2))
    source, _ = choose_operators_of(None, MODEL, SIZES, problem.cluster, STEP)
    memory = serve(plan_of([0, 0, 0, 0, 1, 1, 2, 3], problem), problem, STEP, source, SIZES).figures.memory
    assert memory.fits and memory.sequences < 8
    kv = 150 * 2 * 2 * 16 * 5 * 2  # bytes of a sequence
    held = [count * 4 * MODEL.bytes_per_expert for count in (4, 2, 1, 1)]
    room = [
        (MEMORY_SHARE * gpu.memory - mine - memory.others) // kv for gpu, mine in zip(problem.cluster.gpus, held, strict=True)
    ]
    assert memory.most_sequences(STEP) == sum(room) // 4
    long = STEP.model_copy(update={"context": 10_000_000})
    assert not serve(plan_of(BLOCKS, problem), problem, long, source, SIZES).figures.memory.fits


def test_equal_gpus_have_as_many_sequences_whatever_their_ports():
    problem = problem_of(cluster=cluster_of(*[make_gpu()] * 2, *[make_gpu(send=2e6)] * 2))
    assert serve(plan_of(BLOCKS, problem), problem, STEP, Stub(), SIZES).figures.memory.sequences is None
    with pytest.raises(InputError, match="no operators are timed for type-0; time them for every type"):
        serve(plan_of(BLOCKS, problem), problem, STEP, OperatorsOfTypes({computing(FAST): Stub()}), SIZES)


def speeds(slow: float, fast: float) -> OperatorsOfTypes:
    return OperatorsOfTypes({computing(make_gpu()): Stub(scale=slow), computing(FAST): Stub(scale=fast)})


@pytest.mark.parametrize(("slow", "fast"), [(2.0, 1.0), (3.0, 1.0), (1.0, 1.0), (1.3, 0.7), (100.0, 1.0), (1.0, 7.0)])
@pytest.mark.parametrize("sequences", [1, 3, 8])
def test_no_other_deal_ends_sooner(slow, fast, sequences):
    """All deals of whole sequences to two GPUs of either type, by hand: 5 ms a sequence and 0.5 ms, times the type's scale."""
    problem = problem_of(cluster=MIXED)
    step = STEP.model_copy(update={"sequences": sequences})
    dealt = dealt_by_speed(problem, step, speeds(slow, fast), SIZES)

    def ends(*counts):
        return max(
            scale * (5e-3 * count + 0.5e-3 * (count > 0)) for scale, count in zip((slow, slow, fast, fast), counts, strict=True)
        )

    total = 4 * sequences
    every = [
        (one, other - one, third, total - other - third)
        for other in range(total + 1)
        for one in {other // 2}
        for third in {(total - other) // 2}
    ]
    assert dealt.sum() == total and ends(*dealt.tolist()) == pytest.approx(min(ends(*deal) for deal in every), rel=1e-6)


def test_more_speed_in_a_type_never_slows_and_types_that_compute_alike_are_one_to_the_last_digit():
    quick = cluster_of(
        *[make_gpu(send=1e15, receive=1e15)] * 2,
        *[FAST.model_copy(update={"send_bandwidth": 1e15, "receive_bandwidth": 1e15})] * 2,
    )
    problem = problem_of(cluster=quick)
    plan = plan_of(BLOCKS, problem)
    times = [
        serve(plan, problem, STEP, speeds(2.0, fast), SIZES).figures.seconds for fast in (8, 3, 2, 1.5, 1.0, 0.9, 0.3, 0.01)
    ]
    assert times == sorted(times, reverse=True) and times[0] > 1.5 * times[-1]
    twin = make_gpu().model_copy(update={"type": "twin"})
    alike, mixed = problem_of(), problem_of(cluster=cluster_of(*[make_gpu()] * 2, *[twin] * 2))
    both = OperatorsOfTypes({computing(gpu): RooflineOperators(MODEL, SIZES, gpu) for gpu in (make_gpu(), twin)})
    for overlap in ("none", "two-batch"):
        step = STEP.model_copy(update={"overlap": overlap})
        one = serve(plan, alike, step, RooflineOperators(MODEL, SIZES, make_gpu()), SIZES).figures
        two = serve(plan, mixed, step, both, SIZES).figures
        assert (two.seconds, two.bound, two.parts, two.memory) == (one.seconds, one.bound, one.parts, one.memory)
        assert not two.dealt


@pytest.mark.parametrize(("overlap", "cut"), [("none", 0.5e-3), ("two-batch", 1e-3)])
def test_a_timeline_of_the_whole_step_has_every_gpu_as_busy_as_it_is(overlap, cut):
    """But for the longer heads of the slow GPUs, which the next step's beginning makes up for."""
    problem = problem_of(cluster=MIXED)
    step = STEP.model_copy(update={"overlap": overlap})
    served = serve(plan_of(BLOCKS, problem), problem, step, source := speeds(2.0, 1.0), SIZES)
    dealt, whole = dealt_by_speed(problem, step, source, SIZES), served.whole(MODEL)
    assert whole.total == pytest.approx(served.figures.seconds)
    dense = whole.events[whole.events["kind"] == "dense"]
    busy = (dense["end"] - dense["start"]).groupby(dense["resource"]).sum()
    heads = 2 if overlap == "two-batch" else 1
    by_hand = np.array([2, 2, 1, 1]) * (5e-3 * dealt + heads * 0.5e-3)
    missing = by_hand - busy.to_numpy()
    assert missing[2:] == pytest.approx(0, abs=1e-12) and np.all((missing > -1e-12) & (missing < cut + 1e-12))
    words = served.figures.dealt_in_words
    assert words.startswith(f"{dealt[:2].min()}") and f"on each {FAST.type}" in words
    assert ServingFigures.from_fields(served.figures.fields()) == served.figures

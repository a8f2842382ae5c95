"""The knobs one after another: times never rise, every one is simulated, and the floor lies below them all."""

from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.compare.baseline import baseline_of, plan_of_placement
from engine.compare.waterfall import Knobs, Turn, Waterfall, _copied, _cut_anew, waterfall
from engine.errors import InputError
from engine.plan import Placement, Travel
from engine.problem import MEMORY_SHARE
from engine.simulate import simulate
from engine.simulate.training import step_seconds
from engine.systems import SYSTEMS, TRAINING, run
from tests.cases.examples import tried
from tests.cases.samples import (
    chained,
    in_nodes,
    problem_of,
    sample,
    sample_problem,
    small_problem,
    training_problem,
    with_memory,
)
from tests.strategies import cluster_of, make_gpu, placements, planned_or_skipped, problems

QUICK = Knobs(time_limit=0.02)
NAMES = ["Placement", "Uneven experts", "Copies", "Execution", "Send order"]


def turned(problem, deployed=None, found=(), knobs=QUICK, **more) -> list[Waterfall]:
    return list(waterfall(problem, deployed or baseline_of(problem), found, knobs, **more))


@tried(40, problems(travelling=True, experts=(2, 6)), st.booleans(), st.data(), fewest=3)
def test_times_never_rise_and_lie_between_the_found_plans_and_the_floor(problem, free, data):
    sizes = problem.workload.layers, problem.workload.num_experts, len(problem.cluster.gpus)
    deployed = baseline_of(problem)
    if data.draw(st.booleans()):
        deployed = plan_of_placement(data.draw(placements(*sizes)), "deployed", travel=problem.travel)
    knobs = QUICK._replace(travels=(None, Travel(unit="gpu")) if free else ())
    found = [run(SYSTEMS[name], problem).result.solution for name in ("linear", "round-robin")]
    steps = planned_or_skipped(lambda: turned(problem, deployed, found, knobs))
    last = steps[-1]
    assert [row.knob.partition(",")[0] for row in last.rows] == ["Travel"] * free + NAMES
    assert [len(step.rows) for step in steps] == list(range(1, len(last.rows) + 1))
    assert last.deployed == simulate(deployed, problem).total
    times = [last.deployed, *(row.after for row in last.rows)]
    assert times == sorted(times, reverse=True) and last.total == times[-1]
    assert all(row.alone is None or row.alone <= last.deployed for row in last.rows)
    for plan in found:
        if plan.placement.slots.sum(axis=1).max() <= deployed.placement.slots.sum(axis=1).max():
            assert last.total <= simulate(plan, problem).total
    assert last.floor is None or last.floor <= last.total
    assert last == turned(problem, deployed, found, knobs)[-1]


def test_each_knob_alone_is_the_deployed_plan_with_that_one_thing_changed():
    problem = problem_of(chained(0, 400, 12, 8, 1.0), in_nodes(4, 4, None))
    deployed = baseline_of(problem)
    rows = {row.knob.partition(",")[0]: row for row in turned(problem)[-1].rows}
    coherent = simulate(deployed.model_copy(update={"execution": "context-coherent"}), problem).total
    assert rows["Execution"].alone == min(coherent, turned(problem)[-1].deployed)
    assert rows["Placement"].alone == rows["Placement"].after
    assert rows["Execution"].knob == "Execution, context-coherent", "tokens follow one another from expert to expert"
    again = turned(replace(problem, in_use=deployed.placement), deployed.model_copy(update={"execution": "context-coherent"}))
    assert again[-1].deployed == coherent and again[-1].floor is None


def test_a_way_to_travel_is_only_chosen_where_it_is_free():
    problem = sample_problem("beta-code", tokens=300)
    fixed = turned(problem)[-1]
    free = turned(problem, knobs=QUICK._replace(travels=(Travel(unit="gpu"),)))[-1]
    assert free.rows[0].knob == "Travel, one row per GPU" and free.rows[0].after < free.deployed == fixed.deployed
    assert free.rows[1].alone == fixed.rows[0].alone
    slower = turned(replace(problem, travel=Travel(unit="gpu")), knobs=QUICK._replace(travels=(None,)))[-1]
    assert slower.rows[0].after == slower.deployed and slower.floor is not None


@pytest.mark.parametrize("seed", range(4))
def test_the_experts_of_a_layer_are_cut_so_that_the_busiest_gpu_has_least_to_do(seed):
    rng = np.random.default_rng(seed)
    load, pace, fits = rng.uniform(0, 9, (1, 6)), rng.uniform(0.5, 2, 3), rng.integers(2, 7, 3)
    order = rng.permutation(6)
    deployed = Placement(experts=6, experts_of_gpu=[[order[at : at + 2].tolist() for at in (0, 2, 4)]], model_layers=(1,))
    usual = SimpleNamespace(workload=SimpleNamespace(load=load))
    work = SimpleNamespace(usual=usual, pace=pace, fits=fits)
    (row,) = _cut_anew(work, deployed)

    def longest(cuts) -> float:
        parts = list(pairwise((0, *cuts, 6)))
        if any(end - begin > most for (begin, end), most in zip(parts, fits, strict=True)):
            return np.inf
        return max(load[0, order[begin:end]].sum() * own for (begin, end), own in zip(parts, pace, strict=True))

    assert [expert for held in row for expert in held] == order.tolist()
    best = min(map(longest, combinations_with_replacement(range(7), 2)))
    assert longest(np.cumsum([len(held) for held in row])[:2]) == pytest.approx(best)


def test_copies_of_the_busiest_expert_go_to_the_gpu_with_least_to_do():
    usual = SimpleNamespace(workload=SimpleNamespace(load=np.array([[8.0, 1.0, 3.0, 1.0]])))
    work = SimpleNamespace(usual=usual, pace=np.ones(2))
    deployed = Placement(experts=4, experts_of_gpu=[[[0, 1], [2, 3]]], model_layers=(1,))
    assert _copied(work, deployed, 1) == [[[0, 1, 2], [0, 2, 3]]]
    assert _copied(work, deployed, 9) == [[[0, 1, 2, 3]] * 2], "no GPU has a second copy"


def test_without_memory_for_a_spare_slot_there_are_no_copies():
    rows = turned(with_memory(small_problem(), [2, 2, 2]))[-1].rows
    assert rows[2] == Turn(knob="Copies, no room", alone=None, after=rows[1].after)
    rows = turned(problem_of(sample("beta-code", 200), in_nodes(4, 2, 8e6)), knobs=QUICK._replace(spare=2))[-1].rows
    assert rows[2].knob == "Copies, 2 spare slots" and rows[2].after < rows[1].after
    rows = turned(with_memory(small_problem(), [3, 2, 2]))[-1].rows
    assert rows[2].knob == "Copies, 1 slot in all", "fewer than one on every GPU"


def test_slots_left_over_by_uneven_division_and_those_beside_a_step_are_as_best_counts_them():
    problem = problem_of(sample("alpha-code", 200), in_nodes(3, 1, None))
    local = replace(problem, travel=Travel(unit="copies", replicas="nearest-static"))
    everywhere = Placement(experts=16, experts_of_gpu=[[list(range(16))] * 3] * 4, model_layers=problem.model.moe_layers)
    found = plan_of_placement(everywhere, "ten spare slots, and two that are left over", travel=local.travel)
    last = turned(local, found=[found], knobs=QUICK._replace(spare=10))[-1]
    assert last.total == simulate(found, local).total and last.rows[2].knob == "Copies, 10 spare slots"
    held = problem.model.bytes_per_expert * problem.workload.layers
    room = problem.cluster.values("memory") * MEMORY_SHARE - 7.5 * held  # one more than six of sixteen experts
    step = SimpleNamespace(bytes_beside=lambda problem: room)
    assert turned(replace(problem, judged_by=step))[-1].rows[2].knob == "Copies, 1 spare slot"
    step.bytes_beside = lambda problem: problem.cluster.values("memory")
    assert turned(replace(problem, judged_by=step))[-1].rows[2].knob == "Copies, no room", "the step fills the memory"


def test_layers_with_unequal_slots_that_fit_by_turns_are_no_fault():
    """Five slots of both layers fit a GPU: three in one and two in the other, not three in both, though the third is slow."""
    slow = cluster_of(make_gpu(), make_gpu(), make_gpu(1, flops=1e6))
    problem = with_memory(replace(small_problem(), cluster=slow), [2, 2, 2])
    held = [[[0, 1, 2], [3, 4], [5]], [[0, 1], [2, 3, 4], [5]]]
    placement = Placement(experts=6, experts_of_gpu=held, model_layers=problem.model.moe_layers)
    deployed = plan_of_placement(placement, "by turns")
    assert turned(problem, deployed)[-1].total <= simulate(deployed, problem).total
    with pytest.raises(InputError, match="can be used"):
        turned(problem, plan_of_placement(placement.model_copy(update={"experts_of_gpu": (held[0],) * 2}), "too much"))


def test_asked_to_stop_it_ends_with_the_knobs_so_far():
    asked = iter(range(10**9))
    steps = turned(small_problem(), stop=lambda: next(asked) > 25)
    assert len(steps) < len(NAMES) and all(step.floor is None for step in steps)


def test_a_training_step_falls_to_the_fastest_plan_there_is_and_two_models_are_refused():
    problem = training_problem()
    plans = [run(TRAINING[name], problem).result.solution for name in ("lancet", "tutel")]
    (answer,) = waterfall(problem, base := baseline_of(problem), plans)
    assert answer.deployed == step_seconds(base, problem)
    assert answer.total == min(step_seconds(plan, problem) for plan in plans) >= answer.floor > 0
    assert answer.rows and not list(waterfall(problem, base))
    first = small_problem()
    with pytest.raises(InputError, match="close the second one"):
        turned(replace(first, second=first), baseline_of(first))


def of(deployed: float, *rows: tuple[str, float], floor: float | None = None) -> Waterfall:
    return Waterfall(deployed=deployed, rows=[Turn(knob=knob, after=after) for knob, after in rows], floor=floor)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            of(5.9e-3, ("Placement", 5e-3), ("Copies, 1 spare slot", 4.6e-3), ("Send order", 4.5999e-3), floor=4.6e-3 / 1.12),
            "Placement saves 900 µs of 5.9 ms, copies 400 µs; at most 12 % is left (proven)",
        ),
        (of(2.0, ("Placement", 2.0), ("Copies", 1.5)), "Copies save 500 ms of 2 s; how much is left is not known"),
        (of(2.0, ("Placement", 2.0), floor=2.0), "No knob saves anything that counts of 2 s; nothing is left (proven)"),
        (of(2.0, ("Send order", 1.0), floor=0.9999), "Send order saves 1 s of 2 s; less than 0.1 % is left (proven)"),
        (
            of(2.0, ("Uneven experts", 1.0), floor=1e-3),
            "Uneven experts save 1 s of 2 s; the proven floor, 1 ms, is too far below to say how much is left",
        ),
        (of(0.0, ("Placement", 0.0)), "No knob saves anything that counts of 0 s; how much is left is not known"),
    ],
)
def test_a_sentence_names_what_saves_most_first(answer, said):
    assert answer.in_words == said

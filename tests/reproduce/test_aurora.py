"""Aurora's evaluation: published numbers, the stand-ins for its traffic, and the pieces of its comparisons."""

from itertools import permutations

import numpy as np
import pytest

from engine.reproduce.aurora import ENTRIES, colocated, exclusive, imprecise
from engine.reproduce.aurora.setting import (
    DATASETS,
    EQUAL,
    MIXED,
    PRESETS,
    RECORDINGS,
    alone,
    bars,
    drawn,
    hottest,
    layer_of,
    pairs,
    recording,
)
from engine.reproduce.aurora.tokens_follow import aurora_rows, follow, packed_rows, random_rows
from engine.systems import SYSTEMS, run, systems_for

TWO = [recording("COCO", model) for model in PRESETS]


def test_published_numbers_are_those_of_section_8():
    assert exclusive.SJF_AT_MOST == 1.38 and exclusive.RGA == (1.36, 1.81)
    assert colocated.LINA == {EQUAL: (1.25, 2.38), MIXED: (1.91, 3.54)}
    assert (colocated.OVER_EXCLUSIVE, colocated.OVER_LINA) == ((1.57, 1.72), (1.28, 1.50))
    assert (colocated.EXCLUSIVE_BELOW, colocated.OVER_OPTIMUM) == (0.2, 1.07)
    assert (imprecise.PRECISE, imprecise.IMPRECISE) == ({1: 1.9, 2: 2.0}, {1: 1.6, 2: 1.8})
    assert imprecise.MOST_LOST == round(1 - imprecise.IMPRECISE[1] / imprecise.PRECISE[1], 3) == 0.158
    assert [imprecise.level_of(layers) for layers in (1, 2, 4)] == [0, 0.5, 0.75]


def test_the_stand_ins_have_the_papers_sizes():
    assert len(list(bars())) == 16 and len(list(pairs())) == 8
    for dataset in DATASETS:
        for model in PRESETS:
            trace = recording(dataset, model)
            assert (trace.layers, trace.num_experts, trace.k) == (4, 8, 1)
            demand = alone(trace, MIXED, model).demand
            assert np.all(demand.sum(axis=2) == trace.tokens / 8)
    assert hottest(drawn(0.0, 0)) < 1.1 < hottest(drawn(0.8, 0)) == pytest.approx(8 / sum(np.arange(1, 9) ** -0.8), rel=0.05)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.number)
def test_openings_can_be_planned(entry):
    assert entry.openings and len({opening.title for opening in entry.openings}) == len(entry.openings)
    for opening in entry.openings:
        problem = opening.problem()
        systems_for(problem)[opening.system].settings(opening.options)
        assert problem.workload.layers == 4 and len(problem.cluster.gpus) == 8
        for side in (problem, problem.second) if problem.second else (problem,):
            stood_in, _, about = side.workload.name.partition(" for ")
            assert stood_in in RECORDINGS.values() and about.endswith(", 8 experts"), "no data set of the paper's is open"
            model, _, dataset = about.removesuffix(", 8 experts").partition(" on ")
            assert stood_in in opening.title.partition(" for ")[0]
            assert model in opening.title.partition(" for ")[2] and f" on {dataset}, " in opening.title


def test_orders_are_compared_on_one_placement_and_aurora_communicates_least():
    trace = layer_of(TWO[0], 0)
    seconds = exclusive.orders(alone(trace, EQUAL))
    assert min(seconds, key=seconds.get) == "Aurora"
    computing = {name: whole - moving for name, (whole, moving) in seconds.items()}
    assert computing["SJF"] == pytest.approx(computing["Aurora"]) == pytest.approx(computing["RCS"])


def test_lina_leaves_each_model_its_half():
    problem = colocated.together(*(layer_of(trace, 0) for trace in TWO), EQUAL)
    seconds, _ = colocated.lina(problem, {})
    both = run(SYSTEMS["packing"], problem).result.objective
    assert both * 0.999 < max(seconds) <= both  # the models compute on one clock, though on GPUs of their own


def test_the_best_matching_is_proven_and_below_all_others():
    problem = colocated.together(*(layer_of(trace, 0) for trace in TWO), MIXED)
    ((largest, least, proven),) = colocated.matchings(problem)
    assert proven and least <= largest
    (sides,) = colocated.sides_of_layers(problem)
    slots = colocated.shared_slots((problem, problem.second), "even")
    _, cost, _ = colocated.matching_tables(sides, slots, colocated.DecoupledOptions(), 1, lambda: False)
    rng, gpus = np.random.default_rng(0), np.arange(8)
    assert least <= min(cost[gpus, rng.permutation(8), rng.permutation(8)].max() for _ in range(2000))


def test_where_tokens_go_with_their_experts_theorem_5_1_is_optimal_and_packing_keeps_to_its_half():
    traces = [layer_of(TWO[0], 0)]
    load, rate = traces[0].load[0], alone(traces[0], MIXED).network.send
    away = load * (1 - load / load.sum())
    (best,) = aurora_rows(traces, MIXED)
    assert (away / rate[best]).max() == min((away / rate[list(order)]).max() for order in permutations(range(8)))
    timeline = follow(traces, MIXED, [best], "matched")
    moved = timeline.seconds_of_kind()
    assert moved["dispatch"] == pytest.approx(moved["combine"]) and moved["dispatch"] >= (away * 1536 / rate[best]).max()
    assert follow(traces, MIXED, random_rows(traces, 0), "matched").total > timeline.total
    both = [layer_of(trace, 0) for trace in TWO]
    first, second = packed_rows(both, None)
    assert set(first) == {0, 2, 4, 6} and set(second) == {1, 3, 5, 7}
    assert first[both[0].load[0].argmax()] == first[both[0].load[0].argmin()]


def test_gains_begin_with_the_plans_own_traffic_and_agreeing_layers_keep_them():
    models = (TWO[0],)
    traffic = alone(layer_of(TWO[0], 0), MIXED)
    ours, theirs = exclusive.random_gpus(traffic)
    found = imprecise.gains(models)
    assert found[0] == pytest.approx(theirs / ours) and len(found) == 4
    agreed = imprecise.agreeing(TWO[0])
    order = np.argsort(-agreed.load, axis=1, kind="stable")
    assert np.array_equal(np.sort(agreed.load), np.sort(TWO[0].load)) and np.all(order == order[0])
    assert imprecise.gains((agreed,))[-1] > found[-1]
    assert len(imprecise.gains_of_followed(models)) == 4


def test_layers_are_renamed_as_far_as_asked():
    trace = drawn(0.6, 0, 4)
    first = np.argsort(-trace.load[0], kind="stable")
    for others in range(4):
        agreed = imprecise.agreeing(trace, others)
        ranked = np.argsort(-agreed.load, axis=1, kind="stable")
        assert (ranked[: others + 1] == first).all()
        assert np.array_equal(agreed.experts[:, others + 1 :], trace.experts[:, others + 1 :])


def test_figure_12_bounds_what_one_model_can_take():
    """Utilisation is work over time, so of two models that compute as long it goes by the harmonic mean of their times."""
    most = colocated.most_of_one(1.5, 1.25)
    assert most == pytest.approx(1.875) and 2 / (1 / most + 1 / 1.25) == pytest.approx(1.5)
    assert colocated.one_after_the_other([1.0, 2.0, 3.0, 4.0]) == [3.0, 7.0]

"""Lina at inference: legal hosting, a plan that carries its scheduler, and notes that can be counted again."""

from dataclasses import replace

import numpy as np
import pytest

from engine.compare.figures import metrics
from engine.errors import InputError
from engine.plan import Plan, Reaction
from engine.problem import Problem
from engine.simulate import bound_of_plan, simulate, simulate_layers
from engine.simulate.scheduler import TwoPhaseOptions
from engine.simulate.two_phase import two_phase
from engine.systems import SYSTEMS, run
from engine.systems.base import Outcome
from engine.units import digits, ratio, share
from engine.units import seconds as seconds_in_words
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix
from tests.cases.refusals import refusal
from tests.cases.samples import chained, problem_of, walks, with_room_for
from tests.oracles.placing import check_devices
from tests.oracles.plans import check_plan
from tests.strategies import cluster_of, make_gpu

FOUR = cluster_of(*[make_gpu()] * 4)


def lina(problem: Problem, **options) -> Outcome:
    return run(SYSTEMS["lina"], problem, options)


def largest_loads(plan: Plan, problem: Problem, cap: int) -> np.ndarray:
    """float64[layer]: the validator's largest device load over the mean."""
    loads, gpus = [other.load for other in (problem.workload, *problem.others)], plan.placement.gpus
    popularity = sum(load / load.sum(axis=1, keepdims=True) for load in loads)  # every recording counts alike
    rows = zip(plan.placement.experts_of_gpu, popularity, strict=True)
    return np.array([check_devices(row, layer, gpus, cap) * gpus / layer.sum() for row, layer in rows])


# Hosting


@pytest.mark.parametrize("packing", ["lina", "best"])
def test_hosting_is_legal_in_every_layer_and_the_note_has_its_largest_load(packing):
    short = chained(1, 40, 2, 6, 0.9, "short")
    problem = problem_of(chained(0, 400, 2, 6, 0.7), FOUR, others=(short,))
    outcome = lina(problem, packing=packing, max_experts=2)
    plan = outcome.result.solution
    worst = largest_loads(plan, problem, 2).max()
    text = outcome.notes["largest device load"].value
    assert text.startswith(f"{ratio(worst)} the mean in the worst layer, ")
    assert text.endswith(("proven optimal", "is needed (proven)"))
    assert plan.send_order.mode == "concurrent" and plan.execution == "vanilla"
    assert check_plan(plan, problem) == pytest.approx(outcome.result.objective, rel=1e-9)


def test_the_best_packing_is_nowhere_worse_and_somewhere_better():
    problem = problem_of(chained(3, 300, 3, 8, 0.8), FOUR)
    plans = (lina(problem, packing=packing, max_experts=3).result.solution for packing in ("lina", "best"))
    usual, best = (largest_loads(plan, problem, 3) for plan in plans)
    assert np.all(best <= usual + 1e-9) and best.max() < usual.max()


def test_a_popular_expert_is_hosted_by_as_many_devices_as_its_popularity_asks_for():
    """Half of the tokens on four devices are worth two of them."""
    rows = np.where(np.arange(80)[:, None] % 2 == 0, 0, 1 + np.arange(80)[:, None] // 2 % 7).repeat(2, axis=1)
    placement = lina(problem_of(walks(rows, 8), FOUR), path_length=1, batch_tokens=10).result.solution.placement
    hosts = (placement.share > 0).sum(axis=2)
    assert np.all(hosts[:, 0] == 2) and np.all(hosts[:, 1:] == 1)
    # Every recording counts alike, however long it is.
    long, short = walks(np.zeros((900, 2)), 8, "long"), walks(np.full((30, 2), 5), 8, "short")
    placement = lina(problem_of(long, FOUR, others=(short,)), path_length=1).result.solution.placement
    assert np.all((placement.share > 0).sum(axis=2)[:, [0, 5]] == 2)


@pytest.mark.parametrize(
    ("max_experts", "experts", "room", "cap"),
    [(0, 8, 100, 4), (0, 16, 100, 8), (0, 32, 100, 16), (3, 8, 100, 3), (0, 16, 5, 5), (9, 16, 5, 5)],
)
def test_the_cap_is_as_asked_for_or_twice_an_even_share_and_never_above_the_memory(max_experts, experts, room, cap):
    problem = problem_of(chained(0, 100, 2, experts, 0.5), with_room_for([room] * 4, 2, experts))
    plan = lina(problem, max_experts=max_experts, path_length=1).result.solution
    assert plan.reaction.max_experts_per_device == cap
    largest_loads(plan, problem, cap)


# The scheduler in the plan


def test_the_plan_carries_the_scheduler():
    problem = problem_of(chained(0, 200, 4, 8, 0.7), FOUR)
    plan = lina(problem, path_length=2, top_k=3, max_experts=5, batch_tokens=50).result.solution
    wanted = Reaction(path_length=2, top_k=3, check_experts=2, max_experts_per_device=5)
    assert plan.reaction == wanted and Plan.from_json(plan.to_json(), "again").reaction == wanted
    assert plan.id != plan.model_copy(update={"reaction": None}).id


def predicted_hits(profile: RoutingTrace, served: RoutingTrace, path: int, top_k: int, size: int) -> list[tuple[bool, bool]]:
    """For every batch and scheduled layer whether the two most popular experts were predicted, as a set and in order."""
    answers = []
    for begin in range(0, served.tokens - size + 1, size):
        for layer in range(path, served.layers):
            followers: dict[tuple, dict[int, int]] = {}
            for token in profile.experts[:, :, 0].tolist():
                for key in (tuple(token[layer - path : layer]), ()):
                    counts = followers.setdefault(key, {})
                    counts[token[layer]] = counts.get(token[layer], 0) + 1
            estimate, actual = [0.0] * served.num_experts, [0] * served.num_experts
            for token in served.experts[begin : begin + size, :, 0].tolist():
                counts = followers.get(tuple(token[layer - path : layer]), followers[()])
                for expert in sorted(counts, key=lambda count: (-counts[count], count))[:top_k]:
                    estimate[expert] += counts[expert] / sum(counts.values())
                actual[token[layer]] += 1
            first, second = (
                sorted(range(served.num_experts), key=lambda expert, of=values: (-round(of[expert], 9), expert))[:2]
                for values in (estimate, actual)
            )
            answers.append((set(first) == set(second), first == second))
    return answers


def test_the_notes_are_counted_again():
    """A trace of fifteen sequences: the first seven teach, the others are served in batches."""
    trace = replace(chained(4, 300, 5, 8, 0.8), sequence=np.repeat(np.arange(15), 20).astype(np.int32))
    problem = problem_of(trace, FOUR)
    outcome = lina(problem, path_length=2, top_k=2, batch_tokens=50, copies=10)
    profile, served = (
        RoutingTrace("part", trace.experts[part], 8, trace.sequence[part]) for part in (slice(0, 140), slice(140, 300))
    )
    answers = predicted_hits(profile, served, 2, 2, 50)
    right, in_order = (np.mean(column) for column in zip(*answers, strict=True))
    assert 0 < in_order <= right < 1
    notes = outcome.notes
    assert notes["estimates right (top 2 as a set, in order)"].value == (f"{share(right)}, {share(in_order)} of 3 batches")
    assert notes["layers tuned again"].value == share(1 - right)
    options = TwoPhaseOptions(path_length=2, top_k=2, batch_tokens=50, copies=10, start="popularity")
    result = two_phase(problem.with_workload(served), profile, options)
    priced = result.options.schedule_seconds, result.options.check_seconds
    assert notes["priced at"].value.startswith("{} to schedule again and {} to check".format(*map(seconds_in_words, priced)))
    names = {"no scheduling": "baseline", "hosted once": "static", "both phases": "lina"}
    names |= {"without estimation": "without_estimation", "without fine-tuning": "without_fine_tuning"}
    for title, percent in (("median", 50), ("95th percentile", 95)):
        ideal = np.percentile(result.schemes["ideal"].layer.sum(axis=1), percent)
        times = {name: np.percentile(result.schemes[scheme].layer.sum(axis=1), percent) for name, scheme in names.items()}
        assert notes[f"inference time over ideal, {title}"].value == ", ".join(
            f"{name} {digits(seconds / ideal)}×" for name, seconds in times.items()
        )


# Plans that cannot be simulated, and problems that cannot be planned


@pytest.mark.parametrize(
    ("layers", "tokens", "says"),
    [
        (3, 30, "not simulated: 3 layers are too few for a path of 3; choose a shorter path_length"),
        (1, 30, "not simulated: a single layer is too few for a path of 3; nothing comes before it"),
        (4, 3, "not simulated: 3 tokens are too few to learn from half of them"),
    ],
)
def test_too_little_for_the_scheduler_still_has_a_plan(layers, tokens, says):
    problem = problem_of(chained(0, tokens, layers, 8, 0.5), FOUR)
    outcome = lina(problem)
    assert outcome.notes["at run time"].value == says and len(outcome.notes) == 2
    largest_loads(outcome.result.solution, problem, 4)
    assert "shorter path_length" not in says or "layers tuned again" in lina(problem, path_length=2).notes


@pytest.mark.parametrize(
    "workload",
    [ExpertLoad("counts", np.arange(16.0).reshape(2, 8), (1, 2)), TrafficMatrix("bytes", np.ones((2, 4, 4)), 128.0)],
    ids=["loads", "traffic"],
)
def test_without_tokens_there_is_a_hosting_and_nothing_to_say_of_run_time(workload):
    problem = problem_of(workload, FOUR)
    outcome = lina(problem)
    assert list(outcome.notes) == ["largest device load"]
    largest_loads(outcome.result.solution, problem, 4)


def test_experts_that_do_not_fit_say_what_would_help():
    trace = chained(0, 60, 2, 8, 0.5)
    few = refusal(lina, problem_of(trace, FOUR), max_experts=1)
    assert "8 experts do not fit 4 devices with at most 1 " in few and "allow 2 experts per device" in few
    tight = refusal(lina, problem_of(trace, with_room_for([2, 3, 1, 2], 2, 8)))
    assert "GPU 2 · type-0 has memory for 1 per layer, " in tight and " for 8; add GPUs or memory" in tight
    assert "allow" not in tight
    wanted = "top_k: 9; wanted at most the number of experts, 8"
    assert wanted in refusal(lina, problem_of(trace, FOUR), top_k=9, path_length=1)
    fitting = problem_of(trace, with_room_for([2] * 4, 2, 8))
    assert lina(fitting, path_length=1).result.solution.placement.slots.tolist() == [[2] * 4] * 2


def test_the_plan_is_named_for_its_hosting_and_says_what_its_scheduler_makes_of_it():
    """Its time is that of the placement alone, so a person who compares plans must read the scheduled one too."""
    problem = problem_of(chained(0, 400, 5, 8, 0.8), FOUR)
    outcome = lina(problem, path_length=2, batch_tokens=50)
    assert outcome.result.solution.name == "Lina's hosting, unscheduled"
    profile, served = problem.workload.halves()
    options = TwoPhaseOptions(path_length=2, batch_tokens=50, copies=64.0, start="popularity")
    result = two_phase(replace(problem, workload=served), profile, options)
    scheduled = np.median(result.inference_seconds("lina"))
    for scheme, over in (("baseline", "contiguous blocks"), ("static", "this hosting left as it is")):
        note = outcome.notes[f"with its scheduler, against {over}"]
        assert note.value == pytest.approx(np.median(result.inference_seconds(scheme)) / scheduled) and note.unit == "×"


@pytest.mark.parametrize("k", [1, 2])
def test_a_plan_that_is_ranked_by_its_scheduler_takes_its_median_batch(k):
    rows = np.stack([chained(choice, 240, 5, 8, 0.8).experts[:, :, 0] + 0 for choice in range(k)], axis=2)
    rows[:, :, 1:] = (rows[:, :, :1] + 1 + rows[:, :, 1:] % 7) % 8  # distinct experts of a token
    problem = problem_of(RoutingTrace("two", rows.astype(np.int16), 8), FOUR)
    outcome = lina(problem, path_length=2, batch_tokens=40, scheduler=True)
    plan, timeline = outcome.result.solution, outcome.timeline
    assert plan.name == "Lina (inference)" and plan.reaction.batch == 40 and plan.reaction.check_experts == 2 * k
    profile, served = problem.workload.halves()
    options = TwoPhaseOptions(path_length=2, batch_tokens=40, copies=6.0, start="popularity", choices=k, check_experts=2 * k)
    quick, sends = (
        two_phase(replace(problem, workload=served), profile, replace(options, network=network))
        for network in ("bound", "concurrent")
    )
    middle = np.argsort(quick.inference_seconds("lina"), kind="stable")[1]
    own, waited = sends.schemes["lina"], quick.schemes["lina"].waiting
    assert timeline.total == pytest.approx((own.layer - own.waiting + waited)[middle].sum())
    assert waited[middle].sum() > 0
    assert simulate(plan, problem).total == outcome.result.objective == timeline.total
    assert outcome.result.bound == bound_of_plan(plan, problem) == 0
    again = Plan.from_json(plan.to_json(), "again")
    assert again == plan and again.id != lina(problem, path_length=2, batch_tokens=40).result.solution.id
    figures = metrics(plan, problem)
    assert figures.total == timeline.total and figures.to_dict()["order_gap"] is None
    assert simulate_layers(plan, problem, timeline, 0, 1).total < timeline.total
    load = ExpertLoad("counts", np.ones((5, 8)), (0, 1, 2, 3, 4))
    with pytest.raises(InputError, match="follows tokens from layer to layer"):
        simulate(plan, problem.with_workload(load))

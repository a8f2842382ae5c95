"""The work of a pass for GPUs and network, above all when tokens stay with their experts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from engine.cluster import MEMORY_SHARE
from engine.compare.figures import metrics
from engine.compare.what_if import least
from engine.costs import Datasheet
from engine.errors import InputError
from engine.plan import Placement, Plan
from engine.problem import Problem
from engine.serving.step import ServingStep
from engine.simulate import bound_of_plan, simulate
from engine.simulate.work import carriers, work_of
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases.examples import tried
from tests.cases.refusals import refusal
from tests.cases.samples import problem_of
from tests.cases.simulations import coherent, coherent_plans
from tests.oracles.plans import check_plan
from tests.strategies import cluster_of, make_gpu, make_model


@tried(80, coherent_plans())
def test_a_coherent_pass_is_what_every_token_does(case):
    plan, problem = case
    total = simulate(plan, problem).total
    assert total == pytest.approx(check_plan(plan, problem), rel=1e-9)
    assert total >= bound_of_plan(plan, problem) * (1 - 1e-7)
    assert 0 <= metrics(plan, problem, simulate(plan, problem)).kept_local <= 1


def top_one(path: list[list[int]], experts: int, ranks: list[int]) -> RoutingTrace:
    chosen = np.array(path, dtype=np.int16)[:, :, None]
    return RoutingTrace("paths", chosen, experts, source_rank=np.array(ranks, dtype=np.int32))


def test_top_one_has_no_second_all_to_all_and_ends_with_an_all_gather():
    """ExFlow §IV-A's example, three layers of eight experts on four GPUs: token 1 on GPU 1 goes through E0, E4, E2, token 2
    on GPU 3 through E5, E5, E4 (all on GPU 2)."""
    trace = top_one([[0, 4, 2], [5, 5, 4]], 8, [1, 3])
    problem = Problem(trace, cluster_of(*[make_gpu()] * 4), make_model(3, 8), Datasheet())
    placement = Placement.from_gpu_of_expert(np.tile(np.arange(8) // 2, (3, 1)), 4, (0, 1, 2))
    plan = coherent(placement)
    size = problem.model.bytes_per_token
    assert carriers(trace, placement, 4).tolist() == [[1, 3], [0, 2], [2, 2], [1, 2]]
    away = ~np.eye(4, dtype=bool)
    work, vanilla = work_of(placement, problem, "context-coherent"), work_of(placement, problem)
    assert [step[away].sum() / size for step in work.dispatch] == [2, 1, 1]
    assert not work.combine[:, away].any()
    # The paper counts four crossings for token 1 and six for token 2.
    assert (vanilla.dispatch[:, away].sum() + vanilla.combine[:, away].sum()) / size == 4 + 6
    assert (work.gather / size).tolist() == [[0] * 4, [1] * 4, [1] * 4, [0] * 4]
    kinds = simulate(plan, problem).events["kind"].value_counts()
    assert kinds["combine"] == 0 and kinds["all_gather"] == kinds["prompt_gather"] == 6


def sent(problem: Problem, plan: Plan, kind: str) -> np.ndarray:
    """float64[src, dst] tokens that a step of the simulated pass carries."""
    events = simulate(plan, problem).events
    events = events[events["kind"] == kind]
    tokens = np.zeros((problem.network.gpus,) * 2)
    np.add.at(tokens, (events["resource"], events["peer"]), events["bytes"] / problem.model.bytes_per_token)
    return tokens


def test_the_all_gather_of_the_prompts_comes_first_and_counts():
    """ExFlow §IV-A: before inference every GPU gives its prompts to all others; tokens without any expert are padding."""
    trace = top_one([[0, 0], [1, 1], [2, 2], [-1, -1]], 4, [0, 1, 1, 3])
    problem = Problem(trace, cluster_of(*[make_gpu()] * 4), make_model(2, 4), Datasheet())
    plan = coherent(Placement.from_gpu_of_expert(np.tile(np.arange(4), (2, 1)), 4, (0, 1)))
    assert sent(problem, plan, "prompt_gather").sum(axis=1).tolist() == [3, 6, 0, 0]
    timeline = simulate(plan, problem)
    first = timeline.events[timeline.events["kind"] == "prompt_gather"]
    assert (first["layer"] == 0).all() and first["end"].max() == timeline.events["start"].drop(first.index).min() > 0
    figures = metrics(plan, problem, timeline)
    vanilla = simulate(plan.model_copy(update={"execution": "vanilla"}), problem)
    assert figures.seconds["prompt_gather"] == first["end"].max() and vanilla.seconds_of_kind()["prompt_gather"] == 0
    assert bound_of_plan(plan, problem, 0, 0) >= problem.network.bound(sent(problem, plan, "prompt_gather") * 128)


def test_the_all_gather_of_the_prompts_is_once_a_prompt():
    """Two tokens of 128 bytes on GPU 0 and one on GPU 1, ports of 1 MB/s: GPU 0 sends two rows to each of two GPUs."""
    trace = top_one([[0, 0], [0, 0], [1, 1]], 3, [0, 0, 1])
    cluster, model = cluster_of(*[make_gpu(send=1e6)] * 3, latency=1e-5), make_model(2, 3)
    problem = Problem(trace, cluster, model, Datasheet())
    plan = coherent(Placement.from_gpu_of_expert(np.tile(np.arange(3), (2, 1)), 3, (0, 1)))

    def gather(**inputs) -> float:
        events = simulate(plan, replace(problem, **inputs)).events
        return float(events.loc[events["kind"] == "prompt_gather", "end"].max())

    step = partial(ServingStep, sequences=1, context=2000)
    assert model.bytes_per_token == 128 and gather() == pytest.approx(1e-5 + 4 * 128e-6)
    # Prompts of 2000 tokens, with a gather that 500 steps share: four rows to each for every token of a step.
    answered = step(phase="decode", output=500)
    assert gather(serving_step=answered) == pytest.approx((1e-5 + 2000 * 4 * 128e-6) / 500)
    assert sent(replace(problem, serving_step=answered), plan, "prompt_gather").sum(axis=1) == pytest.approx([16, 8, 0])
    assert gather(serving_step=step(phase="prefill", output=500)) == gather()
    assert replace(problem, serving_step=answered).context_bytes == 2500 * problem.context_bytes > 0
    # Of a recording with both phases the tokens of prompts alone; of generated ones alone, as if they were prompts.
    for phase, rows in (([0, 1, 1], 2), ([1, 1, 0], 2), ([1, 1, 1], 4), ([0, 0, 1], 4)):
        recorded = replace(trace, phase=np.array(phase, dtype=np.int8))
        assert gather(workload=recorded) == pytest.approx(1e-5 + rows * 128e-6)
    both = replace(problem, workload=replace(trace, phase=np.array([0, 1, 1], dtype=np.int8)))
    assert sent(replace(both, runs_attention=False), plan, "prompt_gather").sum() == 6  # in a launch all are gathered
    own, total = replace(problem, serving_step=answered), simulate(plan, replace(problem, serving_step=answered)).total
    assert bound_of_plan(plan, own) <= total and least(plan, own).parts["prompt_gather"] == pytest.approx(
        gather(serving_step=answered)
    )


def test_loads_have_no_tokens_to_follow_and_replicas_no_single_home():
    problem = problem_of(ExpertLoad("loads", np.ones((2, 4)), (0, 1)), cluster_of(*[make_gpu()] * 2))
    placement = Placement.from_gpu_of_expert(np.array([[0, 0, 1, 1]] * 2), 2, (0, 1))
    with pytest.raises(InputError, match="use a routing log"):
        simulate(coherent(placement), problem)
    twice = Placement(experts=2, experts_of_gpu=(((0, 1), (1,)),), model_layers=(0,))
    with pytest.raises(ValueError, match="exactly one GPU"):
        coherent(twice)


COST = Datasheet()


def crowded(**sizes) -> tuple[Problem, Placement]:
    """Four tokens, two on each GPU, all of which go on from GPU 1."""
    trace = top_one([[1, 1, 0]] * 4, 2, [0, 0, 1, 1])
    problem = Problem(trace, cluster_of(*[make_gpu()] * 2), make_model(3, 2, **sizes), COST)
    return problem, Placement.from_gpu_of_expert(np.tile(np.arange(2), (3, 1)), 2, (1, 2, 3))


def test_the_busiest_gpu_s_attention_counts_beyond_that_of_tokens_at_home():
    problem, placement = crowded(sequence_length=7)
    plan = coherent(placement)
    gpu, model = problem.cluster.gpus[0], problem.model
    seconds = [float(COST.attention(gpu, np.array(tokens), 4, model)) for tokens in (2.0, 4.0)]
    timeline = simulate(plan, problem)
    events = timeline.events[timeline.events["kind"] == "attention"]
    assert events["layer"].tolist() == [1, 2] and (events["resource"] == 1).all()
    assert (events["end"] - events["start"]).tolist() == pytest.approx([seconds[1] - seconds[0]] * 2)
    begins = timeline.events[timeline.events["kind"] == "gate"].groupby("layer")["start"].min()
    assert events.set_index("layer")["end"].to_dict() == pytest.approx(begins.loc[1:].to_dict())
    assert timeline.total == pytest.approx(check_plan(plan, problem), rel=1e-9)
    assert metrics(plan, problem, timeline).seconds["attention"] == pytest.approx(2 * (seconds[1] - seconds[0]))
    assert least(plan, problem).parts["attention"] == pytest.approx(2 * (seconds[1] - seconds[0]))
    bare = replace(problem, runs_attention=False)
    added = bound_of_plan(plan, problem, 1, 1) - bound_of_plan(plan, bare, 1, 1)
    assert added == pytest.approx(seconds[1] - seconds[0])


def test_other_plans_and_launches_run_no_attention_and_even_carriers_cost_nothing_more():
    problem, placement = crowded()
    plan = coherent(placement)
    vanilla = simulate(plan.model_copy(update={"execution": "vanilla"}), problem)
    launched = simulate(plan, replace(problem, runs_attention=False))
    even = top_one([[0, 0, 1], [1, 1, 0]] * 2, 2, [0, 0, 1, 1])
    for timeline in (vanilla, launched, simulate(plan, replace(problem, workload=even))):
        assert "attention" not in set(timeline.events["kind"])
    assert launched.total == pytest.approx(check_plan(plan, replace(problem, runs_attention=False)), rel=1e-9)


def test_longer_sequences_and_dense_layers_in_between_make_the_busiest_gpu_s_attention_longer():
    problem, placement = crowded()
    short = replace(problem, workload=replace(problem.workload, sequence=np.arange(4, dtype=np.int32)))
    sizes = {"layers": 6, "dense_layers": (0, 2, 4)}
    deeper = replace(problem, model=problem.model.model_copy(update=sizes))
    seconds = [simulate(coherent(placement), other).seconds_of_kind()["attention"] for other in (problem, short, deeper)]
    assert seconds[1] < seconds[0] and seconds[2] == pytest.approx(2 * seconds[0])


def test_contexts_of_all_tokens_have_to_fit_beside_the_experts():
    problem, placement = crowded()
    model = problem.model
    assert problem.context_bytes == 4 * 2 * model.d_model * 2 * model.layers
    latent = model.model_copy(update={"kv_numbers": 16, "dtype": "fp8"})
    assert replace(problem, model=latent).context_bytes == 4 * 16 * 2 * model.layers
    wanted = problem.held_bytes(placement).max() + problem.context_bytes
    plan = coherent(placement)

    def with_memory(size: float) -> Problem:
        return replace(problem, cluster=cluster_of(*[make_gpu(memory=size / MEMORY_SHARE)] * 2))

    with_memory(wanted * 1.001).check_plan(plan)
    with_memory(wanted * 0.999).check_plan(plan.model_copy(update={"execution": "vanilla"}))
    message = refusal(simulate, plan, with_memory(wanted * 0.999))
    assert message.startswith("GPU 0 · type-0 would hold ") and "GB of keys and values of all 4 tokens" in message

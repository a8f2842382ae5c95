"""Lina's scheduler in a launch: real ranks estimate, host, fetch and check as its rules say, and the outcome stays the same."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch

from engine.cli.launch import as_text
from engine.costs import Datasheet
from engine.goal import Goal
from engine.jobs.launches import LaunchAnswer, describe_run
from engine.launch.places.fold import fold_plan
from engine.launch.preparation.inference import prepare_inference
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.instructions import REPORT, read_instructions, write_instructions
from engine.launch.rank.layer import Weights
from engine.launch.rank.scheduled import FetchedWeights, in_thread
from engine.launch.results import scheduled as results
from engine.launch.results.comparison import compare
from engine.launch.results.run import MeasuredPlan, Run
from engine.launch.results.scheduled import PIECES, Foreseen
from engine.launch.running import clusters
from engine.model import MoEModel
from engine.plan import Plan, Reaction, Travel
from engine.problem import Problem
from engine.runtime.exchange.routes import route
from engine.simulate.events import last_of_steps
from engine.simulate.scheduler import HOST_BANDWIDTH, Decision, Scheduler, TwoPhaseOptions, options_of
from engine.simulate.two_phase import two_phase
from engine.systems import SYSTEMS
from engine.systems import run as plan_by
from engine.timeline import SCHEDULER_KINDS, Timeline
from engine.workload import ExpertLoad, RoutingTrace
from tests.cases import launches
from tests.cases.cluster_launches import destination, launch_for
from tests.cases.launch_plans import beside, blocks, coherent, plan_with
from tests.cases.samples import chained, in_nodes, problem_of
from tests.cases.training import plan_of as step_plan_of
from tests.cases.training import problem_of as step_problem
from tests.strategies import cluster_of, make_gpu

LAYERS, EXPERTS, GPUS, FIRST, BATCH = 5, 8, 4, 2, 120
MODEL = MoEModel(name="chains", layers=LAYERS, experts=EXPERTS, experts_per_token=2, d_model=16, d_ff=24)
KEPT = ((0, 1), (2, 3), (4, 5), (6, 7))


def recording() -> RoutingTrace:
    """Paths that mostly go on alike, with a second expert for every token, so that estimates are right here and wrong there."""
    first = chained(2, 520, LAYERS, EXPERTS, 0.8).experts[:, :, 0].astype(np.int64)
    second = (first + 1 + np.arange(520)[:, None] % 2 * 3) % EXPERTS
    return RoutingTrace("chains", np.stack([first, second], axis=2).astype(np.int16), EXPERTS)


@pytest.fixture(scope="module")
def launch() -> PreparedLaunch:
    """Lina's plan as its system makes it, the same in three ways of travel, and blocks, on four ranks of two nodes."""
    trace, nodes = recording(), in_nodes(GPUS, 2, 1e7)
    problem = problem_of(trace, nodes)
    options = {"path_length": FIRST, "batch_tokens": BATCH, "top_k": 3, "scheduler": True}
    plan = plan_by(SYSTEMS["lina"], problem, options).result.solution
    shared = [plan.with_parts(name=f"rows of {unit}s", travel=Travel(unit=unit)) for unit in ("gpu", "node")]
    plans = (plan, *shared, plan_with(blocks(MODEL, GPUS), name="blocks"))
    return prepare_inference(Launch(plans, trace, MODEL, nodes, ranks=GPUS, repeats=1), launches.HOST)


@pytest.fixture(scope="module")
def finished(launch, launch_once) -> Run:
    return launch_once(launch)


@pytest.fixture(scope="module")
def scheduled(finished) -> tuple[MeasuredPlan, ...]:
    return finished.runs[:3]


def fetched_by_hand(decisions: list[Decision]) -> dict[tuple[int, int], int]:
    """{(layer in which it runs, rank): experts fetched}, by the definition: what a hosting needs beyond what is there."""
    counts: dict[tuple[int, int], int] = {}
    for (layer, decision), rank in product(enumerate(decisions), range(GPUS)):
        if decision.predicted is None:
            continue
        ahead = set(decision.predicted[rank]) - set(KEPT[rank])
        again = set(decision.hosting[rank]) - set(KEPT[rank]) - ahead if decision.off else set()
        for at, experts in ((layer - 1, ahead), (layer, again)):
            counts[at, rank] = counts.get((at, rank), 0) + len(experts)
    return {key: count for key, count in counts.items() if count}


def test_the_outcome_is_that_of_the_unplanned_computation(finished):
    assert [run.scheduled is not None for run in finished.runs] == [True, True, True, False]
    assert all(run.difference.error <= 1e-5 for run in finished.runs)


def test_ranks_host_as_the_simulation_of_the_same_batch_does(launch, scheduled):
    """The scheduler's own simulation, batch by batch, on the tokens that were replayed."""
    (batch,), reaction = launch.workloads, launch.instructions.plans[0].reaction
    assert batch.tokens == BATCH and launch.profile.tokens == 260 and reaction.check_experts == 4
    problem = Problem(batch, cluster_of(*[make_gpu()] * GPUS), MODEL, Datasheet())
    simulated = two_phase(problem, launch.profile, options_of(reaction, 2, BATCH))
    for run in scheduled:
        decisions = run.scheduled.decisions
        assert [decision.predicted is not None for decision in decisions] == [False] * FIRST + [True] * (LAYERS - FIRST)
        assert tuple(decision.hosting for decision in decisions[FIRST:]) == simulated.hostings[0][FIRST:]
        assert [decision.off for decision in decisions] == simulated.fine_tuned[0].tolist()
        assert [decision.hosting for decision in decisions[:FIRST]] == [*run.plan.placement.experts_of_gpu[:FIRST]]


def test_a_layer_is_hosted_again_exactly_where_the_most_popular_2k_are_others(launch, scheduled):
    """Estimates counted token by token: top-3 of the experts that followed its path of two first choices, else of all."""
    (batch,), profile = launch.workloads, launch.profile.experts.astype(int)
    off = []
    for layer in range(FIRST, LAYERS):
        expected = np.zeros(EXPERTS)
        for path in batch.experts[:, layer - FIRST : layer, 0]:
            same = (profile[:, layer - FIRST : layer, 0] == path).all(axis=1)
            after = np.bincount(profile[same if same.any() else slice(None), layer].ravel(), minlength=EXPERTS)
            kept = np.argsort(-after, kind="stable")[:3]
            expected[kept] += after[kept] / after.sum()
        chosen = np.bincount(batch.experts[:, layer].ravel(), minlength=EXPERTS)
        top = [set(np.argsort(-np.round(counts, 9), kind="stable")[:4]) for counts in (expected, chosen)]
        off.append(top[0] != top[1])
    assert any(off) and not all(off)
    for run in scheduled:
        assert [decision.off for decision in run.scheduled.decisions[FIRST:]] == off


def test_rows_go_where_the_decisions_have_their_experts(launch, scheduled):
    (batch,), run = launch.workloads, scheduled[0]
    placement = Foreseen(None, run.scheduled.decisions).hosted(launch.instructions.plans[0]).placement
    assert not np.array_equal(placement.share[FIRST:], run.plan.placement.share[FIRST:])
    size = launch.instructions.model.bytes_per_token
    for layer in range(LAYERS):
        rows = route(batch.experts[:, layer], batch.source_rank, placement.share[layer], None).counts * size
        np.testing.assert_array_equal(launches.sent(run.measured, "dispatch", layer, GPUS), np.where(np.eye(GPUS), 0, rows))


def test_as_many_bytes_are_fetched_as_the_decisions_need(launch, scheduled):
    expert = launch.instructions.model.bytes_per_expert
    for run in scheduled:
        wanted = {key: count * expert for key, count in fetched_by_hand(run.scheduled.decisions).items()}
        for timeline in (run.predicted, run.measured):
            copies = timeline.events[timeline.events["kind"] == "host_copy"]
            assert copies.groupby(["layer", "resource"])["bytes"].sum().to_dict() == wanted
        assert run.scheduled.fetched == (sum(wanted.values()),) * 2 and run.scheduled.as_foreseen


def test_every_step_of_the_scheduler_is_measured_in_its_turn(scheduled):
    for run, timeline in product(scheduled, ("predicted", "measured")):
        events = getattr(run, timeline).events
        steps = events[events["kind"].isin(SCHEDULER_KINDS)]
        assert (steps["stream"] == "host").all() and (events[events["kind"] == "host_copy"]["stream"] == "host").all()
        for (layer, decision), rank in product(enumerate(run.scheduled.decisions), range(GPUS)):
            here = events[events["layer"] == layer]
            own = here[here["resource"] == rank].set_index("kind")
            ahead = layer + 1 < LAYERS and layer + 1 >= FIRST
            expected = ["check"] * (decision.predicted is not None) + ["schedule"] * decision.off
            expected += ["estimate", "schedule"] * ahead
            mine = steps[(steps["layer"] == layer) & (steps["resource"] == rank)].sort_values("start")
            assert mine["kind"].tolist() == expected
            assert (mine["end"].to_numpy()[:-1] <= mine["start"].to_numpy()[1:] + 1e-9).all()
            sent = here[here["kind"] == "dispatch"]["start"].min()
            if decision.predicted is not None:  # phase two: behind all gates, before any row
                gates = here[here["kind"] == "gate"]["end"].max()
                assert gates <= own.loc["check", "start"] + 1e-4 and own.loc["check", "end"] <= sent + 1e-4
            if ahead:  # phase one of the next layer: behind this gate, over before the next one
                following = events[(events["layer"] == layer + 1) & (events["kind"] == "gate")]["start"].min()
                done = here[here["stream"] == "host"]["end"].max()
                assert own.loc["gate", "end"] <= own.loc["estimate", "start"] + 1e-9 and done <= following + 1e-4


def test_the_report_has_each_piece_as_predicted_and_as_measured(finished, scheduled):
    for run in scheduled:
        pieces = {name: (before, after) for name, before, after in run.scheduled.pieces}
        assert list(pieces) == list(PIECES.values())
        assert all(min(pair) > 0 for name, pair in pieces.items() if not name.startswith("waited"))
        again = sum(decision.off for decision in run.scheduled.decisions)
        assert f"3 of 5 MoE layers anew, {again} of them again after the gate" in run.scheduled.in_words
        assert run.scheduled.in_words.endswith("all as foreseen")
    answer = describe_run(finished)
    assert LaunchAnswer.from_json(answer.to_json(), "answer") == answer and answer.runs[3].scheduler is None
    text = as_text(answer)
    assert text.count("the scheduler hosted 3 of 5") == 3 and text.count("hosting again") == 3
    assert text.count(results.ASSUMED) == 3 and "(assumed)" in results.ASSUMED
    other = results.Scheduled(run.scheduled.decisions, False, (1e6, 2e6), ())
    assert other.in_words.endswith("2 MB of weights were fetched out of host memory (foreseen: 1 MB): other than foreseen")


# Before anything runs.


def ready(plan: Plan, trace: RoutingTrace | None = None, **more) -> PreparedLaunch:
    return prepare_inference(Launch((plan,), trace or recording(), MODEL, **{"ranks": GPUS} | more), launches.HOST)


def reacting(**settings) -> Plan:
    usual = {"path_length": FIRST, "top_k": 2, "check_experts": 4, "max_experts_per_device": 3, "batch": BATCH}
    return plan_with(blocks(MODEL, GPUS), name="Lina", reaction=Reaction(**usual | settings))


def scheduler_line(launch: PreparedLaunch) -> str:
    (line,) = [check.text for check in launch.checks if check.name == "Scheduler"]
    return line


def test_a_pass_is_a_batch_that_the_scheduler_has_not_seen(launch):
    trace = recording()
    np.testing.assert_array_equal(launch.profile.experts, trace.experts[:260])
    np.testing.assert_array_equal(launch.workloads[0].experts, trace.experts[260 : 260 + BATCH])
    lines = [check.text for check in launch.checks if check.name == "Scheduler"]
    assert len(lines) == 3 and "a batch of 120 tokens" in lines[0] and "MoE layers 2 to 4" in lines[0]
    fewer = ready(reacting(), tokens=50)
    assert fewer.workloads[0].tokens == 50 and "a batch of 50 tokens" in scheduler_line(fewer)
    folded = ready(reacting(), ranks=2)
    assert folded.instructions.plans[0].reaction.max_experts_per_device == 6 and "at most 6 experts" in scheduler_line(folded)
    assert fold_plan(reacting(max_experts_per_device=8), 2).reaction.max_experts_per_device == EXPERTS


def test_where_no_scheduler_runs_a_line_says_so_and_the_placement_stays():
    trace = recording()
    silent = replace(trace, experts=np.where(np.arange(520)[:, None, None] < 260, np.int16(-1), trace.experts))
    for plan, workload, part in (
        (reacting(batch=None), trace, "counts as its own placement"),
        (reacting(path_length=5), trace, "5 MoE layers are too few for a path of 5"),
        (reacting(top_k=9), trace, "keeps 9 next experts, of 8"),
        (reacting(max_experts_per_device=1), trace, "8 experts do not fit 4 devices"),
        (coherent(reacting()), trace, "not for tokens that stay with their experts"),
        (reacting(), silent, "nothing to learn from"),
        (reacting(), ExpertLoad("loads", trace.load, tuple(range(LAYERS))), "needs a routing log"),
    ):
        prepared = ready(plan, workload)
        line = scheduler_line(prepared)
        assert part in line and "does not run, its placement stays as it is" in line
        (launched,) = prepared.instructions.plans
        assert launched.reaction is None and launched.placement == plan.placement and prepared.profile is None
    pair = beside(reacting(), plan_with(blocks(MODEL, GPUS)))
    assert pair.reaction is not None
    assert "not for two models" in scheduler_line(ready(pair, second=(trace, MODEL)))


def test_a_training_step_says_that_it_has_no_scheduler():
    problem = step_problem(experts=4, layers=2)
    step_plan = step_plan_of(problem, reaction=reacting().reaction)
    asked = Launch((step_plan,), problem.workload, problem.model, ranks=2, step=problem.step)
    assert asked.goal is Goal.TRAINING and "not for a training step" in scheduler_line(prepare(asked, launches.HOST))


def test_slots_pools_and_paths_count_as_memory():
    usual, more = (ready(plan).checks for plan in (plan_with(blocks(MODEL, GPUS)), reacting()))
    big = MODEL.model_copy(update={"d_model": 1024, "d_ff": 4096})
    needed = []
    for plan in (plan_with(blocks(MODEL, GPUS)), reacting()):
        prepared = prepare_inference(Launch((plan,), recording(), big, ranks=GPUS, tokens=8), launches.HOST)
        (text,) = [check.text for check in prepared.checks if check.name == "Memory"]
        needed.append(float(text.split()[0]))
    expert = big.model_copy(update={"dtype": "fp32"}).bytes_per_expert / 2**30
    # Six slots, one more expert in a hosting, and two copies of the pool, which is a little larger than an expert.
    assert needed[1] - needed[0] == pytest.approx((6 + 1 + 2 * 1.02) * expert, rel=0.03) and len(more) == len(usual) + 1


def test_tokens_to_learn_from_reach_the_ranks_and_whoever_collects(tmp_path, monkeypatch):
    where = destination("slurm", tmp_path, gpus=0)
    launch = replace(launch_for(where), profile=recording())
    clusters.write(launch, tmp_path / "run")
    _, (tokens, *_) = read_instructions(tmp_path / "run")
    np.testing.assert_array_equal(tokens.profile, recording().experts)
    for name in (REPORT, *(f"events-{rank}.npz" for rank in range(where.ranks))):
        (tmp_path / "run" / name).touch()
    monkeypatch.setattr(clusters, "read_run", lambda launch, folder, cores: launch)
    np.testing.assert_array_equal(clusters.collect(tmp_path / "run").profile.experts, recording().experts)
    write_instructions(tmp_path / "none", launch.instructions, launch.workloads)
    assert read_instructions(tmp_path / "none")[1][0].profile is None


# Parts.


def test_fetched_experts_are_those_of_the_pool_bit_for_bit_and_others_are_not_there():
    for dtype in (torch.float32, torch.bfloat16):
        weights = Weights(MODEL, LAYERS, 5, torch.device("cpu"), dtype)
        here = FetchedWeights(weights, (0, 1), 3)
        assert here.missing(1, (0, 4, 1, 6)) == [4, 6]
        per_expert = MODEL.ffn_matrices * MODEL.d_model * MODEL.d_ff * dtype.itemsize
        assert here.fetch(1, [4, 6]) == 2 * per_expert and here.missing(1, (4, 6, 7)) == [7]
        for mine, pool in zip(here.experts(1, [6, 1, 4]), weights.experts(1, [6, 1, 4]), strict=True):
            assert torch.equal(mine, pool)
        for layer, expert in ((1, 7), (2, 4)):
            with pytest.raises(KeyError):
                here.experts(layer, [expert])
        here.clear()
        assert here.missing(1, (4,)) == [4] and here.experts(1, [])[0].shape[0] == 0


def test_what_fails_in_the_thread_is_raised_where_it_is_waited_for():
    with torch.inference_mode():
        assert in_thread(torch.is_inference_mode_enabled).result()
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 / 0).result()


def test_sums_of_parts_estimate_and_host_as_the_whole_does():
    trace = recording()
    scheduler = Scheduler(TwoPhaseOptions(path_length=2, top_k=3, max_experts_per_device=3, choices=2), trace, GPUS)
    paths, rng = trace.experts[:200, :, 0].astype(np.int64), np.random.default_rng(0)
    assert scheduler.kept == KEPT
    for layer in range(FIRST, LAYERS):
        whole = scheduler.estimate([scheduler.expected(paths, layer)], 200)
        for _ in range(20):
            ends = np.sort(rng.integers(0, 200, 3))
            parts = [scheduler.expected(part, layer) for part in np.split(paths[rng.permutation(200)], ends)]
            estimate = scheduler.estimate(parts, 200)
            np.testing.assert_array_equal(estimate, whole)
            assert scheduler.hosting(estimate, 7) == scheduler.hosting(whole, 7)


def test_the_prediction_waits_for_what_is_not_hidden(monkeypatch):
    """Layers of gate 1 s and 4 s of the rest; 2 s to count, 3 s to host, 5 s a weight; a check that passes takes 2.5 s."""
    monkeypatch.setattr(results, "counting_seconds", lambda problem, options: 2.0)
    monkeypatch.setattr(results, "reaction_seconds", lambda problem, options: (5.0, 2.5))
    rows = [
        (rank, "compute", 5.0 * layer + start, 5.0 * layer + start + length, kind, layer, 0, -1, 0.0)
        for layer in range(3)
        for rank in range(2)
        for kind, start, length in (("gate", 0.0, 1.0), ("ffn", 1.0, 4.0))
    ]
    columns = ["resource", "stream", "start", "end", "kind", "layer", "model", "peer", "bytes"]
    events = pd.DataFrame(rows, columns=columns)
    model = MODEL.model_copy(update={"layers": 3})
    weight = HOST_BANDWIDTH * 5.0 / model.bytes_per_expert  # so that one expert takes 5 s
    monkeypatch.setattr(results, "HOST_BANDWIDTH", HOST_BANDWIDTH / weight)
    trace = replace(recording(), experts=recording().experts[:, :3])
    scheduler = Scheduler(TwoPhaseOptions(path_length=1, max_experts_per_device=8), trace, 2)
    blocks_of_two = ((0, 1, 2, 3), (4, 5, 6, 7))
    other = ((0, 1, 2, 4), (3, 5, 6, 7))
    decisions = [
        Decision(None, blocks_of_two, False),
        Decision(other, other, False),
        Decision(blocks_of_two, ((0, 1, 2, 3, 5), (4, 6, 7)), True),
    ]
    problem = Problem(trace, cluster_of(*[make_gpu()] * 2), model, Datasheet())
    after = Foreseen(scheduler, decisions).added_to(events, problem, on_gpus=True, stop=0.0)

    def span(kind: str, layer: int, rank: int = 0) -> list[tuple[float, float]]:
        chosen = after[(after["kind"] == kind) & (after["layer"] == layer) & (after["resource"] == rank)]
        return [(round(start, 9), round(end, 9)) for start, end in zip(chosen["start"], chosen["end"], strict=True)]

    # Layer 0 ends at 5; phase one of layer 1 begins at 1 and takes 2 + 3 + 5 s, so layer 1 begins at 11.
    assert span("estimate", 0) == [(1, 3)] and span("schedule", 0) == [(3, 6)] and span("host_copy", 0) == [(6, 11)]
    assert span("gate", 1) == [(11, 12)] and span("check", 1) == [(12, 14.5)] and span("ffn", 1) == [(14.5, 18.5)]
    # Phase one of layer 2 needs no weights: 14.5 + 2 + 3 s, a second more than the layer takes.
    assert span("estimate", 1) == [(14.5, 16.5)] and span("schedule", 1) == [(16.5, 19.5)] and span("host_copy", 1) == []
    assert span("gate", 2) == [(19.5, 20.5)] and span("check", 2) == [(20.5, 22.5)] and span("schedule", 2) == [(22.5, 25.5)]
    assert span("host_copy", 2) == [(25.5, 30.5)] and span("host_copy", 2, rank=1) == [] and span("ffn", 2) == [(30.5, 34.5)]
    pieces = results._seconds(after)
    assert {key: round(seconds, 9) for key, seconds in pieces.items()} == {
        ("estimate", False): 4, ("schedule", False): 6, ("host_copy", False): 5, ("waited", False): 7,
        ("check", True): 4.5, ("schedule", True): 3, ("host_copy", True): 5,
    }  # fmt: skip
    assert Timeline(after, ("a", "b"), "simulated", "by hand").total == 34.5
    # Of a scheduler and its copies, which come several times in a layer, all seconds count, and no step waits for hidden ones.
    as_one = Timeline(after.assign(layer=0), ("a", "b"), "simulated", "by hand")
    by_kind = compare(as_one, as_one).by_kind.set_index("kind")["predicted"]
    assert (by_kind["estimate"], by_kind["schedule"], by_kind["check"], by_kind["host_copy"]) == (4, 9, 4.5, 10)
    assert set(last_of_steps(after)["kind"]) == {"gate", "ffn"} and last_of_steps(after)["seconds"].sum() == 34.5
    stopped = Foreseen(scheduler, decisions).added_to(events, problem, on_gpus=True, stop=1.0)
    assert Timeline(stopped, ("a", "b"), "simulated", "by hand").total == 36.5

"""Batch-prioritised routing by recorded gate scores: who is served, and the parts that follow, against a count by tokens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.formats import read_workload
from engine.formats.writers import write_recording
from engine.launch.places.fold import fold_trace
from engine.launch.rank.instructions import RankInstructions, Tokens, read_instructions, write_instructions
from engine.launch.step.layout import choices, kept
from engine.plan import Overlap, PartitionRange
from engine.problem import Problem
from engine.simulate import simulate
from engine.simulate.training.pricing import route, route_parts
from engine.systems import TRAINING, run
from engine.systems.pieces import linear_placement
from engine.training import served_in_words
from engine.workload import RoutingTrace
from tests.cases.examples import tried
from tests.cases.training import graph_of, plan_of, problem_of
from tests.oracles.training import check_step

GPUS, TOKENS = 4, 128
"""Tokens on each GPU, as many as 8 sequences of 16: nothing is scaled."""


def trace_of(k: int = 1, scored: bool = True, seed: int = 3) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    keys = rng.random((GPUS * TOKENS, 2, 4)) ** (1 / np.array([8.0, 2.0, 1.0, 0.5]))
    experts = np.argsort(-keys, axis=2)[:, :, :k].astype(np.int16)
    scores = rng.random(experts.shape).astype(np.float32) if scored else None
    return RoutingTrace("scored", experts, 4, source_rank=np.repeat(np.arange(GPUS), TOKENS).astype(np.int32), scores=scores)


def problem(trace: RoutingTrace, **step) -> Problem:
    return problem_of(workload=trace, routing="recorded", gate="batch-prioritised", k=trace.k, **step)


def served(experts: np.ndarray, importance: np.ndarray, capacity: int) -> np.ndarray:
    """bool[token, choice]: one choice after the other, all first ones before any second one, the largest importance first."""
    mask, taken = np.zeros(experts.shape, dtype=bool), dict.fromkeys(range(4), 0)
    for choice in range(experts.shape[1]):
        for token in sorted(range(len(experts)), key=lambda token: (-importance[token], token)):
            expert = int(experts[token, choice])
            if expert >= 0 and taken[expert] < capacity:
                taken[expert] += 1
                mask[token, choice] = True
    return mask


@tried(40, st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(0, 12))
def test_the_most_important_tokens_are_served_first(seed, k, capacity):
    rng = np.random.default_rng(seed)
    experts = rng.integers(-1, 4, (20, k))
    importance = rng.integers(0, 6, 20) / 4  # equal ones among them
    mask = kept(experts, 4, capacity, "choice", importance)
    assert (mask & (experts >= 0) == served(experts, importance, capacity)).all()


@pytest.mark.parametrize(("k", "parts"), [(1, 1), (1, 4), (2, 2), (2, 8)])
@pytest.mark.parametrize("factor", [0, 1, 1.5])
def test_parts_have_the_tokens_that_are_served_in_the_whole_batch(k, parts, factor):
    trace = trace_of(k)
    step = problem(trace, capacity_factor=factor)
    cut = route_parts(step, linear_placement(step), parts)
    assert sum(part.traffic for part in cut) == pytest.approx(route(step, linear_placement(step), irregular=True).traffic)
    capacity = int(min(step.step.capacity(step.model), TOKENS))
    for layer, rank in ((0, 0), (1, 3)):
        own = trace.source_rank == rank
        mask = served(trace.experts[own, layer], trace.scores[own, layer].sum(axis=1), capacity)
        for part, (experts, taken) in enumerate(
            zip(np.split(trace.experts[own, layer], parts), np.split(mask, parts), strict=True)
        ):
            rows = cut[part].traffic[layer, rank] / step.model.bytes_per_token
            assert rows == pytest.approx(np.bincount(experts[taken], minlength=4))
    # The launched step drops the same ones.
    tokens = Tokens(trace.experts, trace.source_rank, trace.importance)
    (choice, other) = choices(step.model, step.step, GPUS, tokens)
    if factor:
        own = trace.source_rank == 0
        mask = served(trace.experts[own, 0], trace.scores[own, 0].sum(axis=1), capacity)
        assert (choice.kept[0] == mask).all() and not mask.all() and (choice.kept != other.kept).any()


def test_with_one_choice_a_token_scores_decide_where_switch_goes_by_the_batch():
    """Top-1 batch-prioritised routing was Switch's: the first part of a batch used up the capacity."""
    trace = trace_of()
    by_score, switch = problem(trace), problem_of(workload=trace, routing="recorded", gate="switch")
    first, last = (
        [route_parts(step, linear_placement(step), 4)[part].traffic[0, 0, 0] for step in (by_score, switch)] for part in (0, 3)
    )
    chose = np.count_nonzero(trace.experts[: TOKENS // 4, 0] == 0)
    assert 0 < first[0] < first[1] == chose * by_score.model.bytes_per_token and last[0] > last[1] == 0


def test_a_cut_step_is_simulated_by_importance_or_says_that_it_is_not_known():
    trace, cut = trace_of(), PartitionRange(first="1.dispatch", last="1.aggregate", parts=4)
    steps = [problem(trace), problem(replace(trace, scores=None)), problem(replace(trace, scores=np.ones_like(trace.scores)))]
    said, lengths = [], []
    for step in steps:
        plan = plan_of(step, overlap=Overlap(ranges=(cut,), irregular=True))
        timeline = simulate(plan, step)
        assert check_step(timeline, plan, step, graph_of(step)) == pytest.approx(timeline.total)
        said.append(timeline.cost_source)
        lengths.append(timeline.total)
        assert served_in_words(step.step, step.workload) in timeline.cost_source
    assert "largest recorded scores first" in said[0] and lengths[0] != lengths[1] == lengths[2]
    assert "scored has no gate scores" in said[1] and "add up to the same for every token" in said[2]
    notes = run(TRAINING["lancet"], steps[1], {"weight_gradients": "none"}).notes
    assert "has no gate scores, so that the gate serves tokens in the order of the batch" in str(notes["gate"])
    assert served_in_words(problem_of().step, trace) is None


def test_scores_travel_with_their_recording(tmp_path):
    trace = trace_of()
    write_recording(trace, tmp_path / "scored.npz")
    again = read_workload(tmp_path / "scored.npz")
    assert (again.scores == trace.scores).all() and again.digest == trace.digest != replace(trace, scores=None).digest
    half = again.halves()[0]
    assert (half.scores == trace.scores[: len(half.scores)]).all()
    assert replace(again, experts=again.experts[:, :1]).scores is None, "of other layers they say nothing"


def test_ranks_of_a_launch_get_the_importance(tmp_path):
    trace = trace_of()
    step = problem(trace)
    about = {"model": step.model, "ranks": 2, "backend": "gloo", "plans": (plan_of(step),)}
    folded = fold_trace(trace, GPUS, 2)
    for name, of_step, workload in (("with", step.step, folded), ("without", step.step, replace(folded, scores=None))):
        write_instructions(tmp_path / name, RankInstructions(**about, step=of_step), (workload,))
        (tokens,) = read_instructions(tmp_path / name)[1]
        assert (tokens.experts == trace.experts).all() and (tokens.source == trace.source_rank // 2).all()
        assert (tokens.importance is None) == (name == "without")
    assert read_instructions(tmp_path / "with")[1][0].importance == pytest.approx(trace.importance)

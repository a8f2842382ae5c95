"""Measured and predicted: the ends of a send become one event, and numbers are as far off as rounding takes them."""

from dataclasses import replace
from math import comb, exp, log, sqrt
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from engine.launch.rank import layers
from engine.launch.rank.difference import ALWAYS, Difference, allowed, coarsest, in_words, relative, worst
from engine.launch.rank.instructions import RankInstructions, Tokens
from engine.launch.rank.layers import Layers
from engine.launch.results.comparison import compare, furthest, layer_in_words
from engine.launch.results.preference import APART, prefer
from engine.launch.results.run_files import measured_timelines
from engine.model import MoEModel
from engine.plan import Placement, Travel
from engine.runtime.exchange.recorder import COLUMNS as RECORDED
from engine.runtime.experts import expert_ffns
from engine.timeline import COLUMNS, INFERENCE_KINDS, KINDS, STREAMS, Timeline
from tests.cases.launch_plans import plan_with
from tests.launch import lockstep

EVENT = ("number", "layer", "kind", "phase", "src", "dst", "row", "bytes", "start", "end")
"""A timeline of one plan; plan, model and label are the same for all events."""


def write(folder: Path, *by_rank: list[tuple]) -> None:
    """The event files of a launch, one list of events a rank."""
    for rank, events in enumerate(by_rank):
        columns = {name: np.array(column) for name, column in zip(EVENT, zip(*events, strict=True), strict=True)}
        count = len(events)
        columns |= {"plan": np.zeros(count, int), "model": np.zeros(count, int), "label": np.full(count, "")}
        assert set(columns) == set(RECORDED)
        np.savez(folder / f"events-{rank}.npz", **columns)


def timeline(*events: tuple) -> Timeline:
    """A timeline from (kind, layer, resource, start, end)."""
    frame = pd.DataFrame(events, columns=["kind", "layer", "resource", "start", "end"])
    stream = np.where(frame["kind"].isin(("dispatch", "combine")), "network", "compute")
    frame = frame.assign(model=0, peer=-1, bytes=0.0, stream=pd.Categorical(stream, categories=list(STREAMS)))
    frame["kind"] = pd.Categorical(frame["kind"], categories=list(KINDS))
    return Timeline(frame[list(COLUMNS)], ("rank 0", "rank 1"), "measured", "test")


def test_a_send_runs_from_its_senders_post_to_its_receivers_end_apart_by_pass_piece_and_direction(tmp_path):
    files, expected = [[], []], []
    for number in (1, 2):
        origin = 50.0 * number
        for rank in (0, 1):
            files[rank].append((number, 0, "gate", 0, rank, -1, 0, 0.0, origin + rank / 2, origin + 1))
        at = origin + 1
        for kind in ("dispatch", "combine"):
            for src, dst in ((0, 1), (1, 0)):
                for phase, row in ((0, 0), (0, 7), (1, 9)):  # folding makes two pieces of one pair in one phase
                    key = (number, 0, kind, phase, src, dst, row, 64.0 + row)
                    files[src].append((*key, at, at + 5))
                    files[dst].append((*key, at - 0.5, at + 2))
                    expected.append((number, kind, src, dst, 64.0 + row, at - origin, at + 2 - origin))
                    at += 3
    write(tmp_path, *files)
    (timelines,) = measured_timelines(tmp_path, 2, 1, "two cores")
    sends = [
        (number, row.kind, row.resource, row.peer, row.bytes, row.start, row.end)
        for number, timeline in enumerate(timelines, start=1)
        for row in timeline.events[timeline.events["stream"] == "network"].itertuples()
    ]
    assert sorted(sends) == sorted(expected)
    for timeline in timelines:
        assert (timeline.source, timeline.cost_source, timeline.resources) == ("measured", "two cores", ("rank 0", "rank 1"))
        assert set(timeline.events.columns) == set(COLUMNS) and timeline.total == 36


def test_the_sums_are_those_of_the_steps():
    first = [("gate", 0, 0, 0, 1), ("gate", 0, 1, 0, 2), ("dispatch", 0, 0, 2, 5), ("ffn", 0, 0, 5, 6), ("ffn", 0, 1, 5, 9)]
    predicted = timeline(*first, ("gate", 1, 0, 9, 10), ("dispatch", 1, 0, 10, 12), ("ffn", 1, 1, 12, 13))
    first = [("gate", 0, 0, 0, 1), ("gate", 0, 1, 1, 4), ("dispatch", 0, 0, 4.5, 7.5)]
    first += [("ffn", 0, 0, 8, 10), ("ffn", 0, 1, 8, 12)]
    measured = timeline(*first, ("gate", 1, 0, 12, 14), ("dispatch", 1, 0, 15, 19), ("ffn", 1, 1, 19, 20))
    itself = compare(measured, measured)
    assert itself.ratio == 1 and (itself.by_kind["ratio"] == 1).all() and (itself.by_layer["ratio"] == 1).all()
    assert itself.waiting == itself.predicted_waiting == pytest.approx(2.0)
    assert measured.seconds_of_kind() == dict.fromkeys(INFERENCE_KINDS, 0.0) | {"gate": 6, "dispatch": 7, "ffn": 5}
    laid = compare(predicted, measured)
    assert laid.by_kind.to_numpy().tolist() == [["gate", 3, 6, 2], ["ffn", 5, 5, 1], ["dispatch", 5, 7, 1.4]]
    assert laid.by_layer["layer"].tolist() == [0, 1]
    assert laid.by_layer["predicted"].tolist() == [9, 4] and laid.by_layer["measured"].tolist() == [11, 7]
    assert (laid.predicted, laid.measured, laid.ratio) == (13, 20, pytest.approx(20 / 13))
    # Between 4 and 4.5, 7.5 and 8, 14 and 15 no step runs.
    assert laid.waiting == pytest.approx(2.0)
    assert laid.by_kind["measured"].sum() + laid.waiting == pytest.approx(laid.measured)
    assert laid.by_layer["measured"].sum() + laid.waiting == pytest.approx(laid.measured)


def test_steps_of_two_models_that_overlap_count_once_in_the_time_of_a_layer():
    measured = timeline(
        ("gate", 0, 0, 0, 2), ("gate", 0, 0, 2, 4), ("dispatch", 0, 0, 2, 7), ("ffn", 0, 0, 8, 9), ("ffn", 1, 0, 9, 12)
    )
    measured = replace(measured, events=measured.events.assign(model=[0, 1, 0, 0, 1]))
    laid = compare(measured, measured)
    assert laid.by_kind.set_index("kind")["measured"].to_dict() == {"gate": 4, "ffn": 4, "dispatch": 5}
    assert laid.by_layer["measured"].tolist() == [8, 3] and laid.waiting == laid.predicted_waiting == 1


# Numbers.
LAYERS, EXPERTS, RANKS = 48, 8, 4
DEEP = MoEModel(
    name="deep", layers=LAYERS, experts=EXPERTS, experts_per_token=2, d_model=64, d_ff=96, ffn_matrices=3, dtype="bf16"
)
PLAN = plan_with(
    Placement.from_gpu_of_expert(np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS) % RANKS, RANKS, range(LAYERS))
)


@pytest.fixture(scope="module")
def ranks() -> list[Layers]:
    """After a pass of a plan that is right."""
    rng = np.random.default_rng(3)
    tokens = Tokens(rng.integers(0, EXPERTS, (96, LAYERS, 2)).astype(np.int16), np.arange(96, dtype=np.int32) % RANKS)
    ranks = lockstep.ranks_of(RankInstructions(plans=(PLAN,), model=DEEP, ranks=RANKS, backend="gloo"), tokens)
    lockstep.run(ranks)
    return ranks


def output_of(ranks: list[Layers]) -> torch.Tensor:
    """[token, d_model], of all ranks."""
    output = ranks[0].first_tokens()
    for rank in ranks:
        output[rank.held(LAYERS)] = rank.x
    return output


def test_a_deep_model_in_16_bits_is_off_by_far_and_right(ranks, monkeypatch):
    """Here with the kernel of another machine, which rounds less often: on one machine both computations round alike."""

    def in_32_bits(rows, counts, inward, outward, gated, ends):
        return expert_ffns(rows.float(), counts, inward.float(), outward.float(), gated, ends).to(rows.dtype)

    monkeypatch.setattr(layers, "expert_ffns", in_32_bits)
    lockstep.run(ranks)
    with torch.inference_mode():
        output = output_of(ranks)
        difference = ranks[0].comparison()(output)
        assert relative(output, ranks[0].unplanned()) > 5 * ALWAYS["bf16"], "a fixed bound would call it wrong"
    assert difference.share < 0.7, difference


@pytest.mark.parametrize("layer", [0, 20, LAYERS - 1])
def test_a_mistake_in_one_layer_of_one_rank_is_seen_among_all_that_rounding(ranks, monkeypatch, layer):
    """The rank's rows go back in the wrong order."""
    real = Layers.ffn

    def turned(self: Layers, number: int) -> None:
        real(self, number)
        if number == layer and self.context.rank == 1:
            self.result = self.result.flip(0)

    monkeypatch.setattr(Layers, "ffn", turned)
    lockstep.run(ranks)
    with torch.inference_mode():
        assert ranks[0].comparison()(output_of(ranks)).share > 1


def test_of_what_is_allowed():
    assert allowed("fp32") == 1e-4 and allowed("bf16", 0.03) == pytest.approx(0.09) and allowed("bf16", 0.0) == 1e-2
    travelling = PLAN.model_copy(update={"travel": Travel(unit="gpu", dispatch="fp8", combine="fp16")})
    assert coarsest(DEEP, PLAN) == "bf16" and coarsest(DEEP, travelling) == "fp8"
    assert worst([Difference(0.5, 1.0), Difference(1e-3, 1e-4), Difference(2.0, 1.0)]) == (1e-3, 1e-4)
    no_number = Difference(float("nan"), 1.0)
    assert no_number.share == float("inf") and worst([Difference(5.0, 1.0), no_number]) is no_number
    assert relative(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) == 0.25
    assert relative(torch.zeros(2), torch.zeros(2)) == 0 and relative(torch.ones(2), torch.zeros(2)) == float("inf")
    assert relative(torch.tensor([float("nan"), 0.0]), torch.ones(2)) == float("inf")
    assert in_words("fp32", "fp8", "the largest") == ", to a relative tolerance of 0.05 of the largest"
    assert in_words("bf16", "bf16", "it").endswith("3 times as far from that as an unplanned one in bf16 is, or 0.01 of it")


# Preference.
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 6: 2.571}
"""Student's t by passes: the 97.5 % point with passes - 1 degrees of freedom, from a table."""


def timed(name: str, totals: tuple[float, ...], predicted: float = 1.0) -> SimpleNamespace:
    """The part of a `MeasuredPlan` that `prefer` reads. predicted: seconds"""
    return SimpleNamespace(plan=SimpleNamespace(name=name), totals=totals, predicted=SimpleNamespace(total=predicted))


def test_plans_are_ranked_by_their_median_and_compared_two_by_two():
    preference = prefer([timed("slow", (3.0, 3.1, 3.2)), timed("quick", (1.0, 1.1, 9.0)), timed("middle", (2.0, 2.1, 1.9))])
    assert preference.order == (1, 2, 0)
    assert [(pair.faster, pair.slower) for pair in preference.pairs] == [(1, 2), (1, 0), (2, 0)]


@pytest.mark.parametrize("passes", T_95)
def test_the_interval_is_students_of_the_logarithms_of_paired_passes(passes):
    rng = np.random.default_rng(passes)
    quick = rng.uniform(1, 2, passes)
    factor = rng.uniform(1.05, 1.15, passes)
    (pair,) = prefer([timed("a", tuple(quick * factor)), timed("b", tuple(quick))]).pairs
    ratios = [log(value) for value in factor]
    mean = sum(ratios) / passes
    reach = T_95[passes] * sqrt(sum((value - mean) ** 2 for value in ratios) / (passes - 1) / passes)
    assert pair.times == pytest.approx(exp(mean))
    assert (pair.low, pair.high) == pytest.approx((exp(mean - reach), exp(mean + reach)), rel=1e-3)
    assert pair.decided == (pair.low > 1)


@pytest.mark.parametrize(("longer", "passes"), [(3, 3), (2, 3), (5, 6), (6, 6), (2, 4)])
def test_luck_is_that_of_tossed_coins(longer, passes):
    other = (2.0,) * longer + (0.9,) * (passes - longer)
    (pair,) = prefer([timed("a", (1.0,) * passes), timed("b", other)]).pairs
    most = max(longer, passes - longer)
    both_sides = 2 * sum(comb(passes, heads) for heads in range(most, passes + 1)) / 2**passes
    assert (pair.agreeing, pair.passes) == (longer, passes)
    assert pair.chance == pytest.approx(min(1.0, both_sides))


def test_one_pass_decides_nothing_and_equal_passes_do_not_either():
    assert not prefer([timed("a", (1.0, 1.6, 0.8, 2.5)), timed("b", (2.75, 0.9, 1.7, 1.1))]).decided
    (pair,) = prefer([timed("a", (1.0,)), timed("b", (5.0,))]).pairs
    assert (pair.low, pair.high, pair.decided) == (None, None, False) and pair.times == pytest.approx(5)
    (pair,) = prefer([timed("a", (1.0, 2.0)), timed("b", (1.0, 2.0))]).pairs
    assert (pair.agreeing, pair.chance, pair.decided, pair.times) == (0, 1.0, False, 1.0)


def test_predictions_are_held_against_the_ranking_only_where_they_tell_plans_apart():
    def alike(*predictions: float) -> bool | None:
        plans = [timed(f"plan {at}", (1.0 + at, 1.0 + at), value) for at, value in enumerate(predictions)]
        return prefer(plans).ranked_alike

    near = APART * 0.999
    assert alike(1.0, 1.2, 1.5) is True
    assert alike(1.0, near) is None and alike(near, 1.0) is None
    assert alike(APART * 1.001, 1.0) is False
    assert alike(1.0, 2.0, 1.5) is False
    assert alike(1.0, near, 2.0) is True and alike(near, 1.0, 2.0) is True


def test_it_is_told_in_words():
    runs = [
        timed("slow", (2.0, 2.02, 2.01), 2.2),
        timed("quick", (1.0, 1.01, 1.0)),
        timed("like quick", (1.02, 1.0, 1.01), 3.0),
    ]
    preference = prefer(runs)
    first, *others, ranked = preference.lines
    assert first == "too close to call: quick and like quick differ by less than the noise"
    near = prefer([timed("a", (1.0, 1.02, 1.01), 1.0), timed("b", (1.02, 1.0, 1.01), 1.01)])
    assert near.lines[-1] == "as predicted: within 10 % of each other"
    once = prefer([timed("a", (1.0,), 1.0), timed("b", (2.0,), 1.01)])
    assert "a single pass does not tell" in once.lines[0] and "rank nothing" in once.lines[-1]
    assert "like quick takes 1.01× as long" in others[0] and others[0].endswith("within the noise")
    assert "pass by pass, slow takes 2× as long (1.99× to 2.02× at 95 % confidence)" in others[1]
    assert "longer in 3 of 3 passes (p = 0.25)" in others[1]
    assert ranked == "slow was predicted to be faster than like quick (1.36×), but is slower"
    assert prefer(runs[:2]).lines[0] == "measured, quick is the fastest"
    assert prefer(runs[:2]).lines[-1] == "as predicted: slow takes 2× as long, predicted 2.2×"
    # Too few passes for Student's interval, but every one of them says the same.
    uneven = [timed("lina", (9.4, 9.5, 6.6), 9.35), timed("deepspeed", (5.8, 5.9, 5.9), 7.92)]
    first, middle, ranked = prefer(uneven).lines
    assert first == "measured, deepspeed is the fastest in every pass" and middle.endswith("too few passes to rule out noise")
    assert ranked == "as predicted: lina takes 1.43× as long, predicted 1.18×"
    alike = prefer([timed("a", (1.0, 1.0, 1.0), 1.0), timed("b", (1.4, 1.5, 1.3), 1.05)]).lines[-1]
    assert alike == "the predictions, within 10 % of each other, rank nothing: b takes 1.4× as long, predicted 1.05×"
    answer = preference.to_dict()
    assert answer["order"] == [1, 2, 0] and answer["lines"] == preference.lines and not answer["decided"]
    assert answer["pairs"][0]["slower"] == 2 and answer["pairs"][2]["foretold"] is False


def test_the_worst_part_is_named_though_parts_cancel():
    assert furthest(["all-reduce", "attention"], [1.0, 3.8], [4.0, 0.8]) == "all-reduce is furthest off, 4 s instead of 1 s, 4×"
    assert furthest(["a", "b"], [1.0, 3.0], [1.05, 3.05]) is None and furthest([], [], []) is None
    assert furthest(["a", "b"], [None, 1.0], [1.0, 1.0]) == "a is furthest off, 1 s instead of 0 s"
    assert layer_in_words(3) == "layer 3" and "all-reduce" in layer_in_words(-1)

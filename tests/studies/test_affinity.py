"""The affinity studies: against every placement of a tiny recording, planted affinity, and recordings of real models."""

import time
from pathlib import Path

import numpy as np
import pytest

from engine import parallel
from engine.compare import affinity as study
from engine.compare.affinity import (
    OutOfDistribution,
    SamplePoint,
    TokensEnough,
    kept_by_pair,
    out_of_distribution,
    sorted_choices,
    tokens_enough,
)
from engine.compare.held_out import halves, sample
from engine.errors import InputError
from engine.jobs.studies import AffinityAnswer
from engine.parallel import processes
from engine.placement.affinity import kernel
from engine.placement.affinity.kernel import affinity
from engine.placement.transitions import transitions
from engine.workload import RoutingTrace
from tests.cases import recordings
from tests.cases.processes import workers
from tests.cases.samples import every_placement

ROOT = Path(__file__).parents[2]
DEEPSEEK = ROOT.parent / "shared" / "data" / "deepseek-v2-lite-routing.npz"
BRIEF = 0.1


def planted(seed: int, tokens: int = 4000, stay: float = 0.6, name: str = "planted") -> RoutingTrace:
    """Four layers of eight experts on four GPUs; a token stays with probability `stay` on the GPU of a hidden placement."""
    rng = np.random.default_rng(seed)
    place = np.array([rng.permutation(8) // 2 for _ in range(4)])
    walk = [rng.integers(0, 8, tokens)]
    for layer in range(1, 4):
        held = np.argsort(place[layer], kind="stable").reshape(4, 2)
        mate = held[place[layer - 1][walk[-1]], rng.integers(0, 2, tokens)]
        walk.append(np.where(rng.random(tokens) < stay, mate, rng.integers(0, 8, tokens)))
    return RoutingTrace(name, np.array(walk).T[:, :, None].astype(np.int16), 8, np.repeat(np.arange(tokens // 20), 20))


def kept_by_hand(place: list, experts: np.ndarray) -> float:
    """Share of the hops between first choices that stay, token by token."""
    hops = stays = 0
    for token in experts[:, :, 0].tolist():
        for layer in range(len(token) - 1):
            if token[layer] >= 0 and token[layer + 1] >= 0:
                hops += 1
                stays += place[layer][token[layer]] == place[layer + 1][token[layer + 1]]
    return stays / hops


def little(seed: int, tokens: int = 60) -> RoutingTrace:
    rng = np.random.default_rng(seed)
    experts = rng.integers(-1, 4, (tokens, 3, 1)).astype(np.int16)
    return RoutingTrace("little", experts, 4, np.repeat(np.arange(tokens // 5), 5))


@pytest.mark.parametrize("seed", range(3))
def test_a_tiny_recording_against_every_placement(seed: int) -> None:
    trace = little(seed)
    plan_on, score_on, _ = halves(trace)
    curve = tokens_enough(trace, 2, sizes=[12, 10**9], seeds=1, time_limit=BRIEF)
    placements = every_placement(3, 4, 2)
    best = max(kept_by_hand(place, score_on.experts) for place in placements)
    assert curve.ceiling == pytest.approx(best)
    assert best <= curve.limit + 1e-12
    assert curve.linear == pytest.approx(kept_by_hand([[0, 0, 1, 1]] * 3, score_on.experts))
    for point in curve.points:
        drawn = sample(plan_on, point.tokens, point.seed)
        most = max(kept_by_hand(place, drawn) for place in placements)
        ties = [place for place in placements if kept_by_hand(place, drawn) > most - 1e-12]
        assert any(point.kept == pytest.approx(kept_by_hand(place, score_on.experts)) for place in ties)
    assert [point.tokens for point in curve.points] == [plan_on.tokens, 12]


def test_the_halves_share_no_sequence_and_miss_no_token_and_without_sequences_the_later_tokens_are_held_out() -> None:
    trace = planted(1)
    plan_on, score_on, unit = halves(trace)
    assert unit == "sequences"
    assert not set(plan_on.sequence) & set(score_on.sequence)
    assert plan_on.tokens + score_on.tokens == trace.tokens
    experts = np.arange(11).repeat(2).reshape(11, 2, 1).astype(np.int16)
    experts[3] = -1
    plan_on, score_on, unit = halves(RoutingTrace("plain", experts, 11))
    assert unit == "tokens"
    assert plan_on.experts[:, 0, 0].tolist() == [0, 1, 2, 4, 5]
    assert score_on.experts[:, 0, 0].tolist() == [6, 7, 8, 9, 10]
    single = RoutingTrace("one sequence", experts, 11, np.zeros(11, dtype=np.int32))
    assert halves(single)[2] == "tokens"


def test_a_sample_takes_whole_sequences_and_cuts_the_last() -> None:
    number = np.repeat(np.arange(6), 10)
    trace = RoutingTrace("s", np.column_stack([number, number])[:, :, None].astype(np.int16), 6, number)
    drawn = sample(trace, 34, 5)[:, 0, 0]
    assert sorted(np.unique(drawn, return_counts=True)[1]) == [4, 10, 10, 10]
    assert not np.array_equal(drawn, sample(trace, 34, 6)[:, 0, 0])
    loose = RoutingTrace("t", np.arange(60).repeat(2).reshape(60, 2, 1).astype(np.int16), 60)
    assert len(set(sample(loose, 34, 5)[:, 0, 0].tolist())) == 34


def test_points_arrive_one_by_one_and_a_stop_keeps_them() -> None:
    seen, done = [], []
    curve = tokens_enough(
        planted(0),
        4,
        sizes=[50, 2000],
        seeds=3,
        time_limit=BRIEF,
        stop=lambda: len(seen) >= 3,
        report=lambda share, message: done.append((pytest.approx(share), message)),
        on_point=seen.append,
    )
    assert [len(curve_so_far.points) for curve_so_far in seen] == [0, 1, 2] and seen[0].ceiling is not None
    named = ["the held-out half itself", "2,000 tokens", "50 tokens", "50 tokens"]
    assert done == [(place / 5, f"planning from {name}") for place, name in enumerate(named)]
    assert curve == seen[-1] and not curve.complete and curve.enough() is None
    nothing = tokens_enough(planted(0), 4, time_limit=BRIEF, stop=lambda: True)
    assert nothing.ceiling is None and nothing.points == ()
    rows: list[OutOfDistribution] = []
    moved = out_of_distribution(
        [planted(0), planted(1), planted(2)], 4, time_limit=BRIEF, stop=lambda: len(rows) == 2, on_point=rows.append
    )
    assert not moved.complete and np.isnan(moved.matrix()).all(axis=1).tolist() == [False, False, True]


def test_plans_are_made_side_by_side_with_the_same_answers_which_survive_json(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, traces, here = planted(2), [planted(seed, name=f"planted {seed}") for seed in range(4)], []

    def both() -> tuple[TokensEnough, OutOfDistribution, int]:
        here.clear()
        curve = tokens_enough(trace, 4, sizes=[50, 500], seeds=2, time_limit=BRIEF)
        return curve, out_of_distribution(traces, 4, time_limit=BRIEF), len(here)

    def slow_here(*arguments, **options):
        here.append(arguments)
        until = time.monotonic() + 60
        while parallel.PATIENCE == 0.0 and not workers() and time.monotonic() < until:
            time.sleep(0.1)
        return affinity(*arguments, **options)

    monkeypatch.setattr(study, "affinity", slow_here)
    monkeypatch.setattr(parallel, "PATIENCE", 1e6)
    curve, moved, plans = both()
    assert curve.complete and moved.complete and plans == 5 + 4
    monkeypatch.setattr(parallel, "PATIENCE", 0.0)
    for module in (parallel, processes):
        monkeypatch.setattr(module, "processors", lambda: 2)
    again, moved_again, plans = both()
    assert (again, moved_again) == (curve, moved) and plans < 5 + 4
    assert not workers()
    answer = AffinityAnswer(tokens=curve, others=moved)
    assert AffinityAnswer.from_json(answer.to_json(), "answer") == answer


def test_a_busy_processor_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search may get a fifth of a processor; optima of small problems take no search."""
    monkeypatch.setattr(kernel, "EXACT_WORK", 0)
    clock, curves = time.process_time, []  # free time on this machine does not count
    for slower in (1, 5):
        monkeypatch.setattr(time, "perf_counter", lambda slower=slower: slower * clock())
        curves.append(tokens_enough(recordings.sample("alpha-code"), 8, sizes=[3000], seeds=1))
    assert curves[0] == curves[1]


def test_a_stop_leaves_no_row_in_the_place_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points are computed at the same time, so a later one may come first."""
    row = (0.1, 0.2, 0.3)
    monkeypatch.setattr(parallel, "in_order", lambda *_: iter([(0, row), (1, None), (2, row)]))
    assert out_of_distribution([planted(seed) for seed in range(3)], 4, time_limit=BRIEF).kept == (row,)
    monkeypatch.setattr(parallel, "in_order", lambda *_: iter([(0, None), (1, 0.4), (2, 0.5)]))
    curve = tokens_enough(planted(0), 4, sizes=[50, 2000], seeds=1, time_limit=BRIEF)
    assert curve.ceiling is None and [point.kept for point in curve.points] == [0.4, 0.5] and not curve.complete


def test_enough_is_the_smallest_size_from_which_on_all_suffice() -> None:
    def curve(*kept: float, linear: float = 0.1) -> TokensEnough:
        points = tuple(SamplePoint(100 * 10**i, 0, share) for i, share in enumerate(kept))
        return TokensEnough(8, True, "tokens", 100 * 10 ** (len(kept) - 1), 5, linear, 0.9, 0.5, points, True)

    assert curve(0.2, 0.49, 0.5).enough() == 1000
    assert curve(0.49, 0.2, 0.5).enough() == 10_000  # a lucky small sample is not enough
    assert curve(0.2, 0.3, 0.5).enough() == 10_000
    assert curve(0.5, 0.5, 0.5).enough() == 100
    assert curve(0.5, 0.5, 0.5, linear=0.6).enough() is None
    assert curve(0.2, 0.3, 0.5).gain(1000) == pytest.approx(0.5)


def test_a_plan_holds_on_its_like_and_not_on_another_planting() -> None:
    halves_of_one = planted(7, tokens=8000)
    first, second = (
        RoutingTrace(name, halves_of_one.experts[part], 8, halves_of_one.sequence[part])
        for name, part in (("first", slice(0, 4000)), ("second", slice(4000, 8000)))
    )
    table = out_of_distribution([first, second, planted(8, name="other")], 4, time_limit=BRIEF)
    own, row = table.against_own(), table.row_normalised()
    assert table.complete and table.names == ("first", "second", "other")
    assert own[:2, :2] == pytest.approx(np.ones((2, 2)), abs=0.02)
    assert own[2, 0] < 0.7 and own[0, 2] < 0.7
    assert row.diagonal() == pytest.approx(1) and own.diagonal() == pytest.approx(1)
    assert row[0, 2] == pytest.approx(table.kept[0][2] / table.kept[0][0])
    assert own[0, 2] == pytest.approx(table.kept[0][2] / table.kept[2][2])


def test_the_diagonal_is_scored_on_tokens_the_plan_has_not_seen() -> None:
    """Tokens without any affinity: in sample a plan keeps more than by chance, held out it cannot."""
    rng = np.random.default_rng(0)
    noise = RoutingTrace("noise", rng.integers(0, 16, (800, 5, 1)).astype(np.int16), 16)
    table = out_of_distribution([noise], 4, time_limit=BRIEF)
    assert table.kept[0][0] == pytest.approx(0.25, abs=0.03)
    assert tokens_enough(noise, 4, sizes=[400], time_limit=BRIEF).ceiling > 0.33


def test_expected_shares_by_pair_with_replicas() -> None:
    rng = np.random.default_rng(3)
    experts = rng.integers(0, 3, (50, 4, 1)).astype(np.int16)
    experts[:, 3] = -1
    share = rng.dirichlet(np.ones(2), (4, 3))
    kept_of_pair = kept_by_pair(share, transitions(experts, 3, True))
    for pair in (0, 1):
        kept = [share[pair, here] @ share[pair + 1, there] for here, there in experts[:, pair : pair + 2, 0]]
        assert kept_of_pair[pair] == pytest.approx(np.mean(kept))
    assert np.isnan(kept_of_pair[2])


def test_sorted_choices_are_noticed() -> None:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((100, 4, 16)), axis=2)[:, :, :4].astype(np.int16)
    assert not sorted_choices(RoutingTrace("by weight", experts, 16))
    assert sorted_choices(RoutingTrace("by id", np.sort(experts, axis=2), 16))
    assert not sorted_choices(RoutingTrace("top-1", experts[:, :, :1], 16))


@pytest.mark.parametrize(
    "trace, gpus, text",
    [
        (planted(0), 3, "cannot be spread equally over 3 GPUs"),
        (RoutingTrace("flat", np.zeros((9, 1, 1), dtype=np.int16), 4), 2, "has a single layer"),
        (RoutingTrace("gaps", np.array([[0, -1, 0]] * 9, dtype=np.int16)[:, :, None], 4), 2, "no hops"),
        (RoutingTrace("blank", np.full((9, 3, 1), -1, dtype=np.int16), 4), 2, "0 tokens with a choice"),
    ],
)
def test_what_cannot_be_studied_is_said(trace: RoutingTrace, gpus: int, text: str) -> None:
    with pytest.raises(InputError, match=text):
        tokens_enough(trace, gpus, time_limit=BRIEF)
    with pytest.raises(InputError, match=text):
        out_of_distribution([trace], gpus, time_limit=BRIEF)


def test_recordings_of_two_models_and_empty_samples_are_refused_and_default_sizes_end_with_the_whole_half() -> None:
    with pytest.raises(InputError, match="little has 3 layers of 4 experts, planted has 4 of 8"):
        out_of_distribution([planted(0), little(0)], 4)
    with pytest.raises(InputError, match="at least one recording"):
        out_of_distribution([], 4)
    with pytest.raises(InputError, match="at least one token"):
        tokens_enough(planted(0), 4, sizes=[0])
    assert study.default_sizes(6144) == [100, 300, 1000, 3000, 6144]
    assert study.default_sizes(3100) == [100, 300, 1000, 3100]
    assert study.default_sizes(60) == [60]


def test_alpha_on_eight_gpus_needs_thousands_of_tokens_and_holds_in_part_on_other_text() -> None:
    curve = tokens_enough(recordings.sample("alpha-code"), 8, seeds=1)
    assert curve.unit == "sequences"
    assert curve.linear < 0.13 < 0.33 < curve.mean_by_size()[6144] < curve.ceiling < curve.limit < 0.46
    assert curve.enough() in (1000, 3000)
    moved = out_of_distribution([recordings.sample("alpha-code"), recordings.sample("alpha-man")], 8)
    assert moved.kept[0][0] == pytest.approx(curve.mean_by_size()[6144], abs=0.01)
    assert 0.5 < moved.against_own()[0, 1] < 0.85
    assert np.all(moved.matrix() > np.array(moved.linear))


@pytest.mark.everything
@pytest.mark.skipif(not DEEPSEEK.exists(), reason="shared/data/deepseek-v2-lite-routing.npz is not there")
def test_deepseek_keeps_held_out_what_alternating_assignment_does() -> None:
    with np.load(DEEPSEEK) as archive:
        traces = [RoutingTrace(name, archive[name].astype(np.int16), 64) for name in ("intent", "summary")]
    assert all(sorted_choices(trace) for trace in traces)
    table = out_of_distribution(traces, 8, first_choice=False)
    assert table.kept[0][0] > 0.39 and table.kept[1][1] > 0.33
    assert table.linear == pytest.approx((0.125, 0.125), abs=0.005)
    assert np.nanmin(table.against_own()) < 0.8  # here Table III's finding does not hold

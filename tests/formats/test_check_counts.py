"""Findings about counts of slots, copies, phases and profile rows, and the remedies that mend them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import units
from engine.formats import check_recording, read_workload
from engine.formats.checks.copies import skew_of
from engine.formats.checks.profile_rows import Stretch, distance_of_phases, profile_stretches
from engine.formats.remedies import REMEDIES, mend, what_was_done
from engine.formats.writers import write_recording
from engine.plan import Placement
from engine.workload import DECODE, PREFILL, ExpertLoad, Finding, Origin, RoutingTrace, TrafficMatrix
from tests.cases.examples import examples
from tests.cases.fuzzing import EXAMPLES
from tests.cases.recordings import MODEL, SAMPLES, doubts, finding_of, holds, random_load, random_trace, sample
from tests.cases.refusals import refusal


def placement(seed: int, layers: int = 6, experts: int = 16, spare: int = 4, gpus: int = 4) -> Placement:
    """Every expert once and some twice, in any order."""
    rng = np.random.default_rng(seed)
    slots = np.stack([rng.permutation(np.r_[0:experts, rng.choice(experts, spare, False)]) for _ in range(layers)])
    return Placement.from_slots(slots, np.full(gpus, (experts + spare) // gpus), experts, tuple(range(2, layers + 2)))


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_slots_are_folded_back_with_the_plan_that_ran(seed):
    trace, plan = random_trace(seed), placement(seed)
    assert finding_of(trace, "slot-ids", MODEL) is None  # ids of the model are experts
    rng, experts = np.random.default_rng(seed), np.empty_like(trace.experts)
    for layer, row in enumerate(plan.experts_of_gpu):
        slots = np.array([expert for held in row for expert in held])
        for expert in range(plan.experts):
            chosen = trace.experts[:, layer] == expert
            experts[:, layer][chosen] = rng.choice(np.flatnonzero(slots == expert), chosen.sum())
    recorded = replace(trace, experts=experts, num_experts=20)
    other = MODEL.model_copy(update={"layers": 5 * MODEL.layers + 3})
    codes = [finding.code for finding in check_recording(recorded, other)]
    assert "other-layers" in codes and "slot-ids" not in codes, "of another model"
    finding = finding_of(recorded, "slot-ids", MODEL)
    assert finding_of(recorded, "slot-ids") is None  # a model of 20 experts might have chosen so
    assert (finding.severity, finding.remedy) == ("error", "fold-slots")
    assert "4 of them redundant" in finding.message
    assert REMEDIES["fold-slots"].apply(recorded, plan).digest == trace.digest
    loads = ExpertLoad("l", recorded.load, tuple(range(2, 8)), by_step=np.stack([recorded.load / 2] * 2))
    mended = REMEDIES["fold-slots"].apply(loads, plan)
    np.testing.assert_array_equal(mended.load, trace.load)
    np.testing.assert_array_equal(mended.by_step.sum(axis=0), trace.load)
    assert doubts(mended, MODEL) == doubts(trace, MODEL)
    for sizes, says in (
        ({"spare": 0}, "slots go up to 19, the plan that ran has 16"),
        ({"layers": 5}, "has 6 layers, the plan that ran 5"),
    ):
        assert says in refusal(REMEDIES["fold-slots"].apply, recorded, placement(seed, **sizes))


@pytest.mark.parametrize("copies", [2, 3, 8])
def test_counts_multiplied_by_data_parallelism(copies):
    loads = random_load()
    steps = np.random.default_rng(1).dirichlet(np.ones(3), loads.load.shape).transpose(2, 0, 1) * loads.load
    many = replace(loads, load=loads.load * copies, by_step=steps * copies)
    finding = finding_of(many, "multiplied-counts")
    assert (finding.severity, finding.remedy) == ("warning", "divide-by-copies")
    assert f"multiples of {copies}" in finding.message
    assert REMEDIES["divide-by-copies"].title(many) == f"Divide all counts by {copies}"
    mended = REMEDIES["divide-by-copies"].apply(many)
    np.testing.assert_array_equal(mended.load, loads.load)
    np.testing.assert_allclose(mended.by_step, steps)
    assert doubts(mended) == []


def test_other_counts_have_no_common_factor():
    assert doubts(ExpertLoad("few", np.array([[10.0, 20.0], [20.0, 10.0]]), (0, 1))) == []
    loads = random_load()
    assert doubts(replace(loads, load=loads.load * 1.5)) == []
    rounded = np.ceil(random_load(tokens=400_000_000).load / 128) * 128  # in blocks, with totals that differ
    loads = ExpertLoad("l", rounded, tuple(range(2, 8)))
    assert finding_of(loads, "rounded-counts").severity == "ok"
    assert finding_of(loads, "multiplied-counts") is None
    assert "not multiples" in refusal(REMEDIES["divide-by-copies"].apply, loads)


def test_ranks_blocks_and_sources_of_the_same_tokens():
    trace = random_trace(tokens=300)
    ranks = np.repeat(np.arange(3, dtype=np.int32), 100)
    both = replace(trace.part(np.r_[0:300, 0:300]), source_rank=np.concatenate([ranks * 2, ranks * 2 + 1]).astype(np.int32))
    finding = finding_of(both, "copies")
    assert finding.remedy == "drop-copies" and "Ranks 0 and 1" in finding.message and "3 such groups" in finding.message
    mended = REMEDIES["drop-copies"].apply(both)
    np.testing.assert_array_equal(mended.experts, trace.experts)
    np.testing.assert_array_equal(mended.source_rank, ranks * 2 + np.arange(300) % 2)  # dealt in turn
    assert doubts(mended) == []
    trace = random_trace(tokens=100)
    assert "3 times the same 100 tokens" in finding_of(trace.part(np.arange(300) % 100), "copies").message
    assert REMEDIES["drop-copies"].apply(trace.part(np.arange(300) % 100)).digest == trace.digest
    assert finding_of(trace.part(np.arange(290) % 100), "copies") is None
    trace = random_trace(tokens=200)
    by_pass = np.concatenate([np.tile(tokens, 4) for tokens in np.split(np.arange(200), 10)])
    for order in (np.repeat(np.arange(200), 4), by_pass):  # one after another, and pass by pass
        mixed = trace.part(order)
        assert "comes 4 times or a multiple" in finding_of(mixed, "copies").message
        assert finding_of(mixed, "padding-rows") is None
        assert REMEDIES["drop-copies"].apply(mixed).digest == trace.digest
    assert finding_of(random_trace(tokens=50).part(np.arange(100) % 50), "copies") is None  # few tokens may come twice
    counts = np.stack([random_load(seed).load for seed in (1, 1, 2, 2)])
    loads = ExpertLoad("l", counts.sum(axis=0), tuple(range(6)), by_source=counts, by_step=np.stack([counts.sum(axis=0)]))
    assert finding_of(loads, "copies").remedy == "drop-copies"
    mended = REMEDIES["drop-copies"].apply(loads)
    np.testing.assert_array_equal(mended.load, counts[0] + counts[2])
    np.testing.assert_array_equal(mended.by_source.sum(axis=0), mended.load)
    np.testing.assert_allclose(mended.by_step.sum(axis=0), mended.load)


def mixed(seed: int, shift: float) -> RoutingTrace:
    """Prefill at random, decode with a liking for the first experts."""
    rng = np.random.default_rng(seed)
    liking = np.where(np.arange(3000) % 3 == 0, shift, 0)[:, None, None] * (np.arange(16) < 4)
    experts = np.argsort(rng.random((3000, 4, 16)) - liking, axis=2)[:, :, :2].astype(np.int16)
    return RoutingTrace("mixed", experts, 16, phase=np.where(np.arange(3000) % 3 == 0, DECODE, PREFILL).astype(np.int8))


def test_phases_that_like_other_experts():
    trace = mixed(0, 1.0)
    keep = [finding.remedy for finding in check_recording(trace) if finding.code == "phases-mixed"]
    assert keep == ["keep-prefill", "keep-decode"]
    assert "Prefill (67 % of the tokens)" in finding_of(trace, "phases-mixed").message
    loads = [trace.part(trace.phase == phase).load for phase in (PREFILL, DECODE)]
    shares = [load / load.sum(axis=1)[:, None] for load in loads]
    assert distance_of_phases(trace)[0] == pytest.approx(np.abs(shares[0] - shares[1]).sum(axis=1).mean() / 2)
    for phase, remedy in ((PREFILL, "keep-prefill"), (DECODE, "keep-decode")):
        kept = REMEDIES[remedy].apply(trace)
        np.testing.assert_array_equal(kept.experts, trace.experts[trace.phase == phase])
        assert finding_of(kept, "phases-mixed") is None


def test_phases_that_differ_by_chance_alone_or_are_not_known():
    trace = mixed(1, 0.0)
    distance, chance = distance_of_phases(trace)
    assert distance == pytest.approx(chance, rel=0.3)
    assert finding_of(trace, "phases-mixed").severity == "ok"
    unknown = replace(mixed(0, 1.0), phase=None)
    assert finding_of(unknown, "phases-mixed") is None
    assert "which phase" in refusal(REMEDIES["keep-decode"].apply, unknown)


def filled(trace: RoutingTrace, batch: list[int], size: int, rows: int = 1) -> tuple[RoutingTrace, np.ndarray]:
    """(the trace in batches of so many tokens in turn, each filled up to a size with one of the last rows of the trace, 0: with
    its own last token; bool[token], True for what was filled in)"""
    order, begin = [], 0
    for turn in range(trace.tokens):
        if begin >= trace.tokens - 4:
            break
        tokens = np.arange(begin, min(begin + batch[turn % len(batch)], trace.tokens - 4))
        fill = tokens[-1] if not rows else trace.tokens - 1 - turn % rows
        order += [*tokens, *[fill] * (size - len(tokens))]
        begin += len(tokens)
    kept, seen = np.array(order), np.zeros(trace.tokens, bool)
    again = np.array([seen[token] or token >= trace.tokens - 4 or seen.__setitem__(token, True) for token in kept], bool)
    return trace.part(kept), again


@pytest.mark.parametrize(
    ("batch", "size", "rows"),
    [([5], 8, 1), ([7], 8, 1), ([1], 8, 1), ([1, 3, 7, 8, 6], 8, 1), ([5, 3], 8, 2), ([16] * 9 + [13], 16, 1), ([5], 8, 0)],
)
@pytest.mark.parametrize("k", [1, 2])
def test_padding_between_the_tokens_of_batches(batch, size, rows, k):
    whole, added = filled(random_trace(tokens=2000, layers=5, k=k), batch, size, rows)
    sequence = np.arange(whole.tokens, dtype=np.int32) % size  # by the place in the batch
    for trace in (whole, replace(whole, phase=np.full(whole.tokens, DECODE, np.int8), sequence=sequence)):
        finding = finding_of(trace, "padding-rows")
        assert (finding.severity, finding.remedy) == ("warning", "cut-padding-rows")
        assert f"{added.sum():,} of {trace.tokens:,} tokens ({units.share(added.mean())})" in finding.message
        mended = REMEDIES["cut-padding-rows"].apply(trace)
        np.testing.assert_array_equal(mended.experts, trace.experts[~added])
        assert finding_of(mended, "padding-rows") is None and "padding rows" in what_was_done(mended)[0]


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_rows_that_nobody_wrote_and_rows_in_runs_of_few_layers(layers):
    whole, added = filled(random_trace(tokens=2000, layers=layers, experts=8), [5], 8)
    unwritten = replace(whole, experts=np.where(added[:, None, None], np.int16(0), whole.experts))
    assert "expert 0 as every choice in every layer" in finding_of(unwritten, "padding-rows").message
    np.testing.assert_array_equal(REMEDIES["cut-padding-rows"].apply(unwritten).experts, whole.experts[~added])
    said = [finding_of(whole, code) for code in ("padding-rows", "repeated-row")]
    assert (said[0] is None, said[1] is None) == (layers == 1, layers > 1)
    assert layers > 1 or ("1 layer cannot tell" in said[1].message and said[1].remedy is None)
    plain = random_trace(tokens=2000, layers=layers, experts=8)
    assert all(finding_of(plain, code) is None for code in ("padding-rows", "repeated-row"))


def test_rows_of_text_that_recur_are_no_padding():
    trace, sequence = random_trace(tokens=3000), np.repeat(np.arange(100), 30)
    begins = np.arange(3000) % 30
    for shared in (1, 4):  # the first token of every request, and a prompt that all share
        order = np.where(begins < shared, begins, np.arange(3000))
        for columns in ({}, {"sequence": sequence}):
            assert finding_of(replace(trace.part(order), **columns), "padding-rows") is None
    assert all(finding_of(read_workload(path), "padding-rows") is None for path in SAMPLES.glob("*.npz"))


def with_rows(trace: RoutingTrace, *places: tuple[int, int], row: int = 77) -> RoutingTrace:
    """The trace with so many copies of one of its tokens put in before the token at each place."""
    order = np.arange(trace.tokens)
    for place, count in sorted(places, reverse=True):
        order = np.insert(order, place, np.full(count, row))
    return trace.part(order)


def test_real_recordings_with_profile_rows():
    trace = sample()
    profiled = with_rows(trace, (0, 8448), row=5000)
    finding = finding_of(profiled, "profile-rows")
    assert (finding.severity, finding.rows, finding.remedy) == ("warning", (0, 8448), "cut-profile-rows")
    assert f"skew reads {skew_of(profiled.load):.1f}×, without them {skew_of(trace.load):.1f}×" in finding.message
    assert "41 % of the recording" in finding.message
    remedy = REMEDIES["cut-profile-rows"]
    assert remedy.title(profiled) == "Cut the first 8,448 tokens"
    mended = remedy.apply(profiled)
    assert mended.digest == trace.digest
    assert finding_of(mended, "profile-rows") is None
    trace = random_trace(tokens=4000, layers=2, experts=256, k=8)
    profiled = with_rows(trace, (0, 1800))
    assert skew_of(trace.load) < 1.4 and skew_of(profiled.load) > 9
    assert skew_of(REMEDIES["cut-profile-rows"].apply(profiled).load) == pytest.approx(skew_of(trace.load), rel=1e-2)
    finding = finding_of(random_trace(tokens=1).part(np.zeros(500, np.int64)), "profile-rows")
    assert (finding.severity, finding.remedy) == ("error", None)


def test_several_stretches_and_side_by_side_ones():
    trace = random_trace(tokens=3000)
    profiled = with_rows(trace, (0, 200), (1000, 100))
    other = with_rows(profiled, (200, 300), row=1500)  # other dummy inputs, right after the first
    assert profile_stretches(other) == [Stretch(0, 500), Stretch(1500, 1600)]
    assert "600 with those in 1 other places" in finding_of(other, "profile-rows").message
    assert REMEDIES["cut-profile-rows"].title(other) == "Cut 600 tokens in 2 places"
    assert REMEDIES["cut-profile-rows"].apply(other).digest == trace.digest
    trace = random_trace(tokens=1000, sequence=np.arange(1000, dtype=np.int32), phase=np.arange(1000) % 2)
    mended = REMEDIES["cut-profile-rows"].apply(with_rows(trace, (500, 90)))
    holds(mended, sequence=np.r_[0:500, 500:1000], phase=np.arange(1000) % 2)


@pytest.mark.parametrize(("tokens", "rows", "seen"), [(20000, 64, False), (20000, 66, True), (400, 19, False), (400, 23, True)])
def test_longer_than_64_or_than_5_percent(tokens, rows, seen):
    assert (finding_of(with_rows(random_trace(tokens=tokens), (10, rows), row=300), "profile-rows") is not None) == seen


def test_what_is_taken_for_neither_profile_rows_nor_copies():
    for path in SAMPLES.glob("*.npz"):
        assert profile_stretches(sample(path.stem)) == []
    trace = sample()
    assert doubts(replace(trace, source_rank=(trace.sequence % 8).astype(np.int32))) == []
    # One of two experts, nearly always: neighbours are often alike, and long stretches natural.
    chosen = (np.random.default_rng(2).random((20000, 1, 1)) < 0.02).astype(np.int16)
    assert np.diff(np.flatnonzero(np.diff(chosen[:, 0, 0]))).max() > 64
    assert profile_stretches(RoutingTrace("skewed", chosen, 2)) == []
    padded = random_trace(tokens=1000)
    padded.experts[600:] = -1
    assert profile_stretches(padded) == []


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 900), st.integers(70, 300))
def test_cutting_brings_the_recording_back(seed, place, rows):
    trace = random_trace(seed, tokens=900, layers=3)
    row = min(place, trace.tokens - 1)
    mended = REMEDIES["cut-profile-rows"].apply(with_rows(trace, (place, rows), row=row))
    # The token that the rows are copies of is next to them and goes with them.
    np.testing.assert_array_equal(mended.experts, np.delete(trace.experts, row, axis=0))
    assert profile_stretches(mended) == []


def with_layer(trace, place, choices):
    """The trace with one more layer. choices: int16[token, k]"""
    return replace(trace, experts=np.insert(trace.experts, place, choices, axis=1))


DAMAGES = {
    "copies": lambda trace: trace.part(np.r_[0 : trace.tokens, 0 : trace.tokens]),
    "empty layer": lambda trace: with_layer(trace, 0, 0),
    "empty last layer": lambda trace: with_layer(trace, trace.layers, 0),
    "mtp": lambda trace: with_layer(trace, trace.layers, trace.experts[:, 0]),
    "padded layer": lambda trace: with_layer(trace, 2, -1),
    "profile rows": lambda trace: trace.part(np.r_[np.full(90, 7), 0 : trace.tokens]),
    "layers from 1": lambda trace: replace(trace, model_layers=tuple(range(3, trace.layers + 3))),
}
"""Each makes a recording one that a check is there for; in the order in which they are made."""


def test_several_faults_at_once_and_what_was_done_which_outlasts_the_file(tmp_path):
    """A dense layer, an MTP layer, profile rows and a second copy."""
    trace = random_trace(tokens=500, layers=6)
    layers = np.stack([np.zeros_like(trace.experts[:, 0]), *trace.experts.transpose(1, 0, 2), trace.experts[:, 5]], axis=1)
    bad = replace(trace, experts=layers[np.r_[np.zeros(100, np.int64), 1:500]], model_layers=tuple(range(1, 9)))
    bad = bad.part(np.r_[0:599, 0:599])
    findings = check_recording(bad, MODEL)
    assert set(doubts(bad, MODEL)) == {"never-captured", "with-mtp-layer", "profile-rows", "copies"}
    mended = mend(bad, findings)
    np.testing.assert_array_equal(mended.experts, trace.experts[1:])
    assert mended.model_layers == MODEL.moe_layers and doubts(mended, MODEL) == []
    layers, mtp, copies, cut = what_was_done(mended)
    assert (layers, mtp) == ("Dropped 1 dense or empty layers.", "Dropped the MTP layer, the last.")
    assert copies == "Dropped 599 tokens that were copies."
    assert cut.startswith("Cut 100 tokens with identical choices (skew ")
    again = read_workload(write_recording(mended, tmp_path / "a.npz").path)
    assert (again.digest, what_was_done(again)) == (mended.digest, what_was_done(mended))
    named = Finding(severity="warning", code="a", message="m", remedy="divide-by-copies")
    assert mend(bad, [named]) is bad
    assert mend(bad, [named, *findings]).digest == mended.digest


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sets(st.sampled_from(list(DAMAGES))), st.booleans())
def test_mended_recordings_show_nothing_of_the_kind(seed, kinds, as_loads):
    """Any damages together, to routing and to its loads."""
    workload = random_trace(seed, tokens=400)
    for kind, damage in DAMAGES.items():
        workload = damage(workload) if kind in kinds else workload
    if as_loads:
        numbers = workload.model_layers or tuple(range(workload.layers))
        workload = ExpertLoad("loads", workload.load * (4 if "copies" in kinds else 1), numbers)
    findings = check_recording(workload, MODEL)
    mended = mend(workload, findings)
    named = {finding.remedy for finding in findings} - {None}
    assert named <= set(REMEDIES)
    assert not named & {finding.remedy for finding in check_recording(mended, MODEL)}
    assert (mended is workload) == (not named)


def test_findings_that_a_remedy_settles():
    cut = Finding(severity="warning", code="a", message="m", remedy="cut-profile-rows")
    other = Finding(severity="warning", code="b", message="n", rows=(3, 4))
    trace = random_trace(tokens=400, origin=Origin(format="x", findings=(cut, other)))
    mended = REMEDIES["cut-profile-rows"].apply(trace.part(np.r_[np.zeros(100, np.int64), 0:400]))
    assert [finding.code for finding in mended.origin.findings] == ["b", "cut-profile-rows"]
    assert mended.origin.findings[0].rows is None and mended.origin.format == "x"
    findings = tuple(
        Finding(severity="warning", code="p", message="m", remedy=name) for name in ("keep-prefill", "keep-decode")
    )
    trace = random_trace(phase=np.arange(200) % 2, origin=Origin(format="x", findings=findings))
    assert [finding.code for finding in REMEDIES["keep-decode"].apply(trace).origin.findings] == ["keep-decode"]
    assert mend(trace, check_recording(trace)) is trace  # which one to keep is for a person to say
    by_hand = {name for name, remedy in REMEDIES.items() if not remedy.automatic}
    assert by_hand == {"fold-slots", "keep-prefill", "keep-decode"}
    assert [name for name, remedy in REMEDIES.items() if remedy.needs_placement] == ["fold-slots"]


@pytest.mark.parametrize("name", [name for name, remedy in REMEDIES.items() if not remedy.needs_placement])
@pytest.mark.parametrize(
    "workload", [random_trace(layers=1), ExpertLoad("l", np.ones((1, 3)), (0,)), TrafficMatrix("m", np.ones((1, 2, 2)), 1.0)]
)
def test_what_has_no_such_fault_cannot_be_mended(workload, name):
    assert refusal(REMEDIES[name].apply, workload).startswith(f"{workload.name}: ")

"""Counts of slots, of several copies of the same tokens, and of two phases."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.formats import check_recording, read_workload
from engine.formats.checks.profile_rows import distance_of_phases
from engine.formats.remedies import REMEDIES
from engine.plan import Placement
from engine.workload import DECODE, PREFILL, ExpertLoad, RoutingTrace
from tests.cases.examples import examples
from tests.formats.checks.recordings import MODEL, doubts, finding_of, random_load, random_trace, sample

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "deepseek-r1-loads"


def placement(seed: int, layers: int = 6, experts: int = 16, spare: int = 4, gpus: int = 4) -> Placement:
    """Every expert once and some twice, in any order."""
    rng = np.random.default_rng(seed)
    slots = np.stack([rng.permutation(np.r_[0:experts, rng.choice(experts, spare, False)]) for _ in range(layers)])
    return Placement.from_slots(slots, np.full(gpus, (experts + spare) // gpus), experts, tuple(range(2, layers + 2)))


def in_slots(trace: RoutingTrace, plan: Placement, seed: int) -> RoutingTrace:
    """The trace as an engine with this plan would record it: for each choice one of the slots of its expert."""
    rng, experts = np.random.default_rng(seed), np.empty_like(trace.experts)
    for layer, row in enumerate(plan.experts_of_gpu):
        slots = np.array([expert for held in row for expert in held])
        for expert in range(plan.experts):
            chosen = trace.experts[:, layer] == expert
            experts[:, layer][chosen] = rng.choice(np.flatnonzero(slots == expert), chosen.sum())
    return replace(trace, experts=experts, num_experts=20)


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_slots_are_folded_back_with_the_plan_that_ran(seed):
    trace, plan = random_trace(seed), placement(seed)
    recorded = in_slots(trace, plan, seed)
    finding = finding_of(recorded, "slot-ids", MODEL)
    assert (finding.severity, finding.remedy) == ("error", "fold-slots")
    assert "4 of them redundant" in finding.message
    folded = REMEDIES["fold-slots"].apply(recorded, plan)
    assert folded.digest == trace.digest
    loads = ExpertLoad("l", recorded.load, tuple(range(2, 8)), by_step=np.stack([recorded.load / 2] * 2))
    mended = REMEDIES["fold-slots"].apply(loads, plan)
    np.testing.assert_array_equal(mended.load, trace.load)
    np.testing.assert_array_equal(mended.by_step.sum(axis=0), trace.load)
    assert doubts(mended, MODEL) == doubts(trace, MODEL)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (placement(0, spare=0), "slots go up to 19, the plan that ran has 16"),
        (placement(0, layers=5), "has 6 layers, the plan that ran 5"),
    ],
)
def test_another_plan_does_not_fold(plan, says):
    with pytest.raises(InputError, match=says):
        REMEDIES["fold-slots"].apply(in_slots(random_trace(), placement(0), 0), plan)


def test_ids_of_the_model_are_experts():
    assert finding_of(random_trace(), "slot-ids", MODEL) is None
    assert finding_of(random_trace(experts=20), "slot-ids") is None


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


def test_few_or_broken_counts_have_no_common_factor():
    assert doubts(ExpertLoad("l", np.array([[10.0, 20.0], [20.0, 10.0]]), (0, 1))) == []
    loads = random_load()
    assert doubts(replace(loads, load=loads.load * 1.5)) == []


def test_counts_in_blocks_of_128_with_totals_that_differ_are_rounded():
    rounded = np.ceil(random_load(tokens=400_000_000).load / 128) * 128
    loads = ExpertLoad("l", rounded, tuple(range(2, 8)))
    assert finding_of(loads, "rounded-counts").severity == "ok"
    assert finding_of(loads, "multiplied-counts") is None
    with pytest.raises(InputError, match="not multiples"):
        REMEDIES["divide-by-copies"].apply(loads)


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")
def test_one_of_the_r1_statistics_was_rounded_by_deepep():
    rounded = [path.stem for path in DATA.glob("*.json") if finding_of(read_workload(path), "rounded-counts")]
    assert rounded == ["prefill_in2000out100"]


def test_ranks_that_recorded_the_same_tokens():
    trace = random_trace(tokens=300)
    ranks = np.repeat(np.arange(3, dtype=np.int32), 100)
    both = replace(
        trace.part(np.r_[0:300, 0:300]), source_rank=np.concatenate([ranks * 2, ranks * 2 + 1]).astype(np.int32)
    )
    finding = finding_of(both, "copies")
    assert finding.remedy == "drop-copies" and "Ranks 0 and 1" in finding.message and "3 such groups" in finding.message
    mended = REMEDIES["drop-copies"].apply(both)
    np.testing.assert_array_equal(mended.experts, trace.experts)
    np.testing.assert_array_equal(mended.source_rank, ranks * 2 + np.arange(300) % 2)  # dealt in turn
    assert doubts(mended) == []


def test_blocks_of_the_same_tokens_one_after_another():
    trace = random_trace(tokens=100)
    assert "3 times the same 100 tokens" in finding_of(trace.part(np.arange(300) % 100), "copies").message
    assert REMEDIES["drop-copies"].apply(trace.part(np.arange(300) % 100)).digest == trace.digest
    assert finding_of(trace.part(np.arange(290) % 100), "copies") is None
    assert finding_of(random_trace(tokens=50).part(np.arange(100) % 50), "copies") is None  # few tokens may come twice


def test_sources_of_loads_that_counted_the_same():
    counts = np.stack([random_load(seed).load for seed in (1, 1, 2, 2)])
    loads = ExpertLoad(
        "l", counts.sum(axis=0), tuple(range(6)), by_source=counts, by_step=np.stack([counts.sum(axis=0)])
    )
    assert finding_of(loads, "copies").remedy == "drop-copies"
    mended = REMEDIES["drop-copies"].apply(loads)
    np.testing.assert_array_equal(mended.load, counts[0] + counts[2])
    np.testing.assert_array_equal(mended.by_source.sum(axis=0), mended.load)
    np.testing.assert_allclose(mended.by_step.sum(axis=0), mended.load)


def test_a_real_recording_has_no_copies():
    trace = sample()
    assert doubts(replace(trace, source_rank=(trace.sequence % 8).astype(np.int32))) == []


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
    apart = np.abs(shares[0] - shares[1]).sum(axis=1).mean() / 2
    assert distance_of_phases(trace)[0] == pytest.approx(apart)
    for phase, remedy in ((PREFILL, "keep-prefill"), (DECODE, "keep-decode")):
        kept = REMEDIES[remedy].apply(trace)
        np.testing.assert_array_equal(kept.experts, trace.experts[trace.phase == phase])
        assert finding_of(kept, "phases-mixed") is None


def test_phases_that_differ_by_chance_alone():
    trace = mixed(1, 0.0)
    distance, chance = distance_of_phases(trace)
    assert distance == pytest.approx(chance, rel=0.3)
    assert finding_of(trace, "phases-mixed").severity == "ok"


def test_nothing_is_said_of_phases_that_are_not_known():
    assert finding_of(replace(mixed(0, 1.0), phase=None), "phases-mixed") is None
    with pytest.raises(InputError, match="which phase"):
        REMEDIES["keep-decode"].apply(replace(mixed(0, 1.0), phase=None))

"""Findings about good and doubtful recordings, and about the numbering of their layers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats import check_recording, read_workload
from engine.formats.checks import limited_groups
from engine.formats.remedies import REMEDIES
from engine.workload import DECODE, PREFILL, ExpertLoad, Finding, Origin, RoutingTrace, TrafficMatrix
from tests.cases.examples import examples
from tests.cases.recordings import MODEL, doubts, finding_of, holds, random_load, random_trace

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def trace(experts, num_experts=4, **columns):
    return RoutingTrace("t", np.asarray(experts, np.int16), num_experts, **columns)


def texts(workload, severity):
    return [finding.message for finding in check_recording(workload) if finding.severity == severity]


GOOD = np.stack([np.arange(12) % 4, (np.arange(12) + 1) % 4], axis=1)[:, None, :].repeat(2, axis=1)


def changed(place, value):
    experts = GOOD.copy()
    experts[place] = value
    return trace(experts)


def of_ranks(experts, tokens=4000):
    load = np.zeros((3, 16))
    load[:, experts] = tokens / len(experts)
    return ExpertLoad("l", load, (0, 1, 2))


LOAD = ExpertLoad("l", np.array([[5.0, 5.0], [5.0, 5.0], [1.0, 3.0]]), (0, 1, 2))
FAR_RANKS = np.where(np.arange(12) < 6, 0, 2_000_000_000).astype(np.int32)
SEQUENCES = trace(GOOD, sequence=np.repeat(np.arange(4, dtype=np.int32), 3))
TRAFFIC = TrafficMatrix("m", np.array([[[0, 5, 0], [0, 0, 0], [0, 0, 0]], np.zeros((3, 3))]), 1.0)


@pytest.mark.parametrize(
    ("workload", "severity", "said"),
    [
        (trace(GOOD, source_rank=np.arange(12, dtype=np.int32) % 3), "ok", ["tokens × k = 24"]),
        (trace(GOOD + 4), "error", ["token 0, layer 0"]),  # ids of other experts
        (changed(np.s_[:, 1], -1), "error", ["layer 1 received no tokens"]),
        (changed(np.s_[:, 1], -1), "warning", None),  # said of the layer alone
        (trace(np.where(np.arange(12)[:, None, None] < 3, -1, GOOD)), "warning", ["3 of 12 tokens (25 %) have no choice"]),
        (changed(np.s_[:, 1, 1], -1), "warning", ["25 % of the choices of tokens that have any", "layer 1 (50 %)", "capacity"]),
        (trace(np.zeros((5, 2, 1))), "error", ["expert 0", "layer 0 (and 1 more)"]),
        (trace(np.ones((5, 2, 1))), "warning", ["single expert"]),
        (trace(np.ones((5, 2, 1))), "error", None),
        (changed((7, 1), 2), "error", ["token 7, layer 1"]),  # the same expert twice
        (changed((7, 1), -1), "error", None),
        (trace(GOOD, num_experts=6), "warning", ["layer 0: 2 of 6"]),  # experts never used
        (
            trace(GOOD, source_rank=FAR_RANKS),
            "warning",
            ["1999999999 of 2000000001 source ranks have no tokens (first: rank 1)"],
        ),
        (trace(GOOD, sequence=np.zeros(12, np.int32)), "warning", ["one sequence"]),
        (LOAD, "warning", ["Layer 2 counted 4"]),
        (ExpertLoad("l", LOAD.load[:2], (0, 1)), "warning", None),
        (of_ranks([0, 1, 2, 3]), "error", ["The same 12 of 16 experts (first: expert 4)", "1 of 4 expert-parallel ranks was"]),
        (of_ranks([1, 5, 9, 13]), "error", ["(first: expert 0)", "1 of 4"]),  # dealt in turn
        (of_ranks([*range(8), *range(12, 16)]), "error", ["The same 4 of 16 experts (first: expert 8)", "3 of 4"]),
        (of_ranks([0, 1, 2, 4]), "warning", ["some experts were never chosen"]),
        (of_ranks([0, 1, 2, 3], tokens=20), "warning", ["some experts were never chosen"]),
        (TRAFFIC, "error", ["layer 1 moves no bytes"]),
        (TRAFFIC, "warning", ["rank 1 (and 1 more) sends nothing"]),
        (TRAFFIC, "warning", ["rank 0 (and 1 more) receives nothing"]),
        (SEQUENCES, "ok", ["4 sequences are distributed over the GPUs; on a cluster of more than 4 GPUs"]),
    ],
)
def test_what_is_said(workload, severity, said):
    found = texts(workload, severity)
    assert found == [] if said is None else any(all(part in text for part in said) for text in found)


def test_what_the_reader_saw_comes_first():
    moved = Finding(severity="error", code="balancer-moved", message="Experts were moved while this was recorded.")
    first, *others = check_recording(trace(GOOD, origin=Origin(format="x", findings=(moved,))))
    assert first == moved and others == check_recording(trace(GOOD))
    assert {finding.severity for finding in others} == {"ok"}


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared recordings are not here")
def test_real_recordings_are_clean():
    for path in (*DATA.glob("tiny-moe/*.npz"), *DATA.glob("deepseek-r1-loads/*.json")):
        assert {finding.severity for finding in check_recording(read_workload(path))} == {"ok"}, path.name


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(100, 600), st.sampled_from([0.3, 1, 5]))
def test_no_false_alarm_on_skewed_routing(seed, tokens, evenness):
    """Six layers of 12 experts, some of them liked far more than others."""
    rng = np.random.default_rng(seed)
    liked = np.log(rng.gamma(evenness, size=(6, 12)) + 1e-9)
    chosen = np.argsort(-rng.gumbel(size=(tokens, 6, 12)) - liked, axis=2)[:, :, :2].astype(np.int16)
    workload = RoutingTrace("t", chosen, 12, source_rank=rng.integers(0, 2, tokens).astype(np.int32))
    for recording in (workload, ExpertLoad("l", workload.load, tuple(range(6)))):
        assert {finding.code for finding in check_recording(recording) if finding.severity != "ok"} <= {"idle-experts"}


def grouped(rng: np.random.Generator, most: int) -> RoutingTrace:
    """4000 tokens, top-8 of 64 in 8 groups, of at most so many groups each."""
    allowed = np.argsort(rng.random((4000, 2, 8)), axis=2) < most
    scores = np.where(np.repeat(allowed, 8, axis=2), rng.random((4000, 2, 64)), 0)
    return RoutingTrace("log", np.argsort(-scores, axis=2)[:, :, :8].astype(np.int16), 64)


def test_a_gate_that_is_limited_to_groups_is_read_from_its_tokens_and_a_free_one_is_not_called_so():
    rng = np.random.default_rng(0)
    assert limited_groups(grouped(rng, 4)) == (8, 4)
    assert limited_groups(grouped(rng, 2)) == (8, 2)  # which are also two of four, and four of sixteen
    said = texts(grouped(rng, 4), "ok")
    assert any("at most 4 nodes" in text and "more than 4 of 8 groups of 8" in text for text in said)
    few = RoutingTrace("few", np.zeros((10, 2, 2), dtype=np.int16) + np.array([0, 1], dtype=np.int16), 8)
    assert limited_groups(few) is None
    for experts, k in ((512, 22), (64, 8), (64, 6), (8, 2), (16, 1)):
        keys = rng.gumbel(size=(3000, 2, experts)) + np.linspace(0, 2, experts)
        assert limited_groups(RoutingTrace("log", np.argsort(-keys, axis=2)[:, :, :k].astype(np.int16), experts)) is None


def blank(trace, *layers, value=0):
    experts = trace.experts.copy()
    experts[:, list(layers)] = value
    return replace(trace, experts=experts)


def test_layers_of_zeros_are_dense_and_not_expert_0():
    trace = blank(random_trace(layers=5), 0, 3)
    finding = finding_of(trace, "never-captured")
    assert (finding.severity, finding.layers, finding.remedy) == ("error", (0, 3), "drop-empty-layers")
    assert "dense, or was never captured" in finding.message
    assert doubts(trace) == ["never-captured"]  # and not: the same expert twice, experts never chosen
    mended = REMEDIES["drop-empty-layers"].apply(replace(trace, model_layers=(0, 1, 2, 3, 4)))
    holds(mended, experts=trace.experts[:, [1, 2, 4]], model_layers=(1, 2, 4))
    assert doubts(mended) == []
    trace = random_trace(layers=4, k=1)
    assert finding_of(blank(trace, 2), "expert-zero").layers == (2,)
    assert finding_of(blank(trace, 2, value=-1), "silent-layers").layers == (2,)
    for value in (0, -1):
        mended = REMEDIES["drop-empty-layers"].apply(blank(trace, 2, value=value))
        np.testing.assert_array_equal(mended.experts, trace.experts[:, [0, 1, 3]])
    one_choice = blank(random_trace(layers=3), 1, value=(0, -1))  # expert 0 alone may have been chosen
    assert "expert-zero" in doubts(one_choice)
    assert finding_of(one_choice, "never-captured") is None
    zeros = blank(random_trace(layers=2), 0, 1)
    assert finding_of(zeros, "never-captured").remedy is None
    assert "Record again" in finding_of(zeros, "never-captured").message


def test_empty_layers_of_loads_and_traffic():
    loads = random_load(layers=3)
    loads.load[0], loads.load[1, 1:], loads.load[1, 0] = 0, 0, 4000
    assert {"silent-layers", "expert-zero"} <= set(doubts(loads))
    mended = REMEDIES["drop-empty-layers"].apply(loads)
    assert mended.model_layers == (4,) and doubts(mended) == []
    amounts = np.random.default_rng(1).random((3, 4, 4))
    amounts[1] = np.eye(4)
    traffic = TrafficMatrix("m", amounts, 1.0)
    assert finding_of(traffic, "silent-layers").layers == (1,)
    np.testing.assert_array_equal(REMEDIES["drop-empty-layers"].apply(traffic).bytes, amounts[[0, 2]])


def test_totals_of_layers():
    loads = random_load(layers=5)
    loads.load[0] *= 1.8  # passes of the MTP layer
    finding = finding_of(loads, "extra-passes")
    assert finding.layers == (0,) and "1.80×" in finding.message and "MTP" in finding.message
    assert finding_of(loads, "layer-totals") is None
    of_one_layer = ExpertLoad("l", np.array([[0.0, 0.0], [0.0, 0.0], [3.0, 5.0]]), (0, 1, 2))
    assert finding_of(of_one_layer, "layer-totals").severity == "ok"
    shares = random_load(layers=5)
    shares.load[:] /= shares.load.sum(axis=1, keepdims=True)
    finding = finding_of(shares, "layer-totals")
    assert finding.severity == "warning" and "shares, not counts" in finding.message


@pytest.mark.parametrize("make", [random_trace, random_load])
@pytest.mark.parametrize(
    ("layers", "code"),
    [(6, None), (7, "with-mtp-layer"), (3, "local-layers"), (2, "local-layers"), (5, "other-layers"), (9, "other-layers")],
)
def test_layers_against_the_models(make, layers, code):
    assert doubts(make(layers=layers), MODEL) == ([code] if code else [])
    assert doubts(make(layers=layers)) == []


def test_numbers_of_layers_against_the_models():
    named = random_trace(layers=8, model_layers=tuple(range(8)))
    for workload in (random_trace(layers=8), named):
        finding = finding_of(workload, "counts-in-dense-layers", MODEL)
        assert finding.layers == (0, 1) and "All 8 decoder layers" in finding.message
    assert doubts(replace(named, model_layers=tuple(range(2, 10))), MODEL) == ["other-layers"]
    assert "one of 3 pipeline stages" in finding_of(random_trace(layers=2), "local-layers", MODEL).message
    assert doubts(blank(random_trace(layers=8), 0, 1), MODEL) == ["never-captured"]  # and not: missing elsewhere
    assert "0 … 5" in finding_of(random_trace(model_layers=(0, 1, 2, 3, 4, 5)), "other-layer-numbers", MODEL).message


def test_layers_that_are_dropped_or_numbered_anew():
    loads = random_load(layers=7)
    mended = REMEDIES["drop-mtp-layer"].apply(loads)
    np.testing.assert_array_equal(mended.load, loads.load[:6])
    assert doubts(mended, MODEL) == []
    trace = random_trace(model_layers=(3, 4, 5, 6, 7, 8))
    finding = finding_of(trace, "layers-from-one", MODEL)
    assert finding.remedy == "number-layers-from-zero"
    mended = REMEDIES[finding.remedy].apply(trace)
    assert mended.model_layers == MODEL.moe_layers and doubts(mended, MODEL) == []


def test_nothing_else_is_said_of_the_experts_of_one_rank():
    loads = random_load(experts=4)
    loads.load[0] *= 2
    assert doubts(loads, MODEL) == ["experts-of-one-rank"]
    assert "as many as one of 4" in finding_of(loads, "experts-of-one-rank", MODEL).message
    assert doubts(of_ranks([0, 1, 2, 3])) == ["ranks-not-counted"]


def test_tokens_that_chose_nothing_are_told_of_by_phase_and_no_phase_is_compared_without_any():
    phase = np.repeat(np.array([PREFILL, DECODE], np.int8), [150, 50])
    trace = random_trace(phase=phase)
    trace.experts[:150] = -1
    said = finding_of(trace, "tokens-not-captured").message
    assert "150 of 200 tokens (75 %)" in said and "of prefill 100 %; of decode 0.0 %" in said
    assert said.endswith("Nothing is known of prefill: record it too, if it is to be planned for.")
    assert finding_of(trace, "phases-mixed") is None
    few = random_trace(phase=np.where(np.arange(200) == 7, DECODE, PREFILL).astype(np.int8))
    assert "too few to tell" in finding_of(few, "phases-mixed").message
    padded = random_trace(k=3)
    padded.experts[:, :, 2] = -1
    assert "1 of the 3 places" in finding_of(padded, "unused-places").message and doubts(padded) == []


def test_minus_one_of_a_model_with_choices_without_computation_is_no_drop():
    trace = random_trace()
    trace.experts[::3, :, 1] = -1
    assert finding_of(trace, "dropped-choices").severity == "warning"
    model = MODEL.model_copy(update={"zero_experts": 8})
    assert doubts(trace, model) == [] and "17 %" in finding_of(trace, "zero-experts", model).message

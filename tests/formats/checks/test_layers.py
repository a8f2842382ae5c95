"""Layers that nobody wrote, and layers of other numbers than the model's."""

from dataclasses import replace

import numpy as np
import pytest

from engine.formats.remedies import REMEDIES
from engine.workload import ExpertLoad, TrafficMatrix
from tests.formats.checks.recordings import MODEL, doubts, finding_of, random_load, random_trace


def blank(trace, *layers, value=0):
    experts = trace.experts.copy()
    experts[:, list(layers)] = value
    return replace(trace, experts=experts)


def test_zeros_for_every_choice_are_a_dense_layer_not_expert_0():
    trace = blank(random_trace(layers=5), 0, 3)
    finding = finding_of(trace, "never-captured")
    assert (finding.severity, finding.layers, finding.remedy) == ("error", (0, 3), "drop-empty-layers")
    assert "dense, or was never captured" in finding.message
    assert doubts(trace) == ["never-captured"]  # and not: the same expert twice, experts never chosen
    mended = REMEDIES["drop-empty-layers"].apply(replace(trace, model_layers=(0, 1, 2, 3, 4)))
    np.testing.assert_array_equal(mended.experts, trace.experts[:, [1, 2, 4]])
    assert mended.model_layers == (1, 2, 4)
    assert doubts(mended) == []


def test_top_1_choices_of_expert_0_and_padding_are_dropped_too():
    trace = random_trace(layers=4, k=1)
    assert finding_of(blank(trace, 2), "expert-zero").layers == (2,)
    assert finding_of(blank(trace, 2, value=-1), "silent-layers").layers == (2,)
    for value in (0, -1):
        mended = REMEDIES["drop-empty-layers"].apply(blank(trace, 2, value=value))
        np.testing.assert_array_equal(mended.experts, trace.experts[:, [0, 1, 3]])


def test_one_choice_of_expert_0_beside_padding_is_possible():
    trace = random_trace(layers=3)
    experts = trace.experts.copy()
    experts[:, 1] = (0, -1)
    assert "expert-zero" in doubts(replace(trace, experts=experts))
    assert finding_of(replace(trace, experts=experts), "never-captured") is None


def test_a_recording_of_zeros_alone_has_no_remedy():
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


def test_a_layer_of_loads_with_passes_of_the_mtp_layer():
    loads = random_load(layers=5)
    loads.load[0] *= 1.8
    finding = finding_of(loads, "extra-passes")
    assert finding.layers == (0,) and "1.80×" in finding.message and "MTP" in finding.message
    assert finding_of(loads, "layer-totals") is None


@pytest.mark.parametrize("make", [random_trace, random_load])
@pytest.mark.parametrize(
    ("layers", "code"),
    [
        (6, None),
        (7, "with-mtp-layer"),
        (3, "local-layers"),
        (2, "local-layers"),
        (5, "other-layers"),
        (9, "other-layers"),
    ],
)
def test_layers_against_the_models(make, layers, code):
    assert doubts(make(layers=layers), MODEL) == ([code] if code else [])
    assert doubts(make(layers=layers)) == []


def test_tokens_in_dense_layers():
    named = random_trace(layers=8, model_layers=tuple(range(8)))
    for workload in (random_trace(layers=8), named):
        finding = finding_of(workload, "counts-in-dense-layers", MODEL)
        assert finding.layers == (0, 1) and "All 8 decoder layers" in finding.message
    assert doubts(replace(named, model_layers=tuple(range(2, 10))), MODEL) == ["other-layers"]


def test_stages_are_counted():
    assert "one of 3 pipeline stages" in finding_of(random_trace(layers=2), "local-layers", MODEL).message


def test_dense_layers_that_were_recorded_are_not_missing_elsewhere():
    assert doubts(blank(random_trace(layers=8), 0, 1), MODEL) == ["never-captured"]


def test_the_mtp_layer_is_dropped():
    loads = random_load(layers=7)
    mended = REMEDIES["drop-mtp-layer"].apply(loads)
    np.testing.assert_array_equal(mended.load, loads.load[:6])
    assert doubts(mended, MODEL) == []


def test_layers_that_count_from_1():
    trace = random_trace(model_layers=(3, 4, 5, 6, 7, 8))
    finding = finding_of(trace, "layers-from-one", MODEL)
    assert finding.remedy == "number-layers-from-zero"
    mended = REMEDIES[finding.remedy].apply(trace)
    assert mended.model_layers == MODEL.moe_layers and doubts(mended, MODEL) == []


def test_layers_that_are_dense_in_the_model():
    trace = random_trace(model_layers=(0, 1, 2, 3, 4, 5))
    assert "0 … 5" in finding_of(trace, "other-layer-numbers", MODEL).message


def test_totals_look_at_layers_with_tokens_alone():
    assert (
        finding_of(ExpertLoad("l", np.array([[0.0, 0.0], [0.0, 0.0], [3.0, 5.0]]), (0, 1, 2)), "layer-totals").severity
        == "ok"
    )

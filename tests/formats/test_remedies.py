"""All automatic remedies together, and what is left behind of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.formats import check_recording, read_workload
from engine.formats.remedies import REMEDIES, mend, what_was_done
from engine.formats.writers import write_recording
from engine.workload import ExpertLoad, Finding, Origin, TrafficMatrix
from tests.formats.checks.recordings import MODEL, doubts, random_load, random_trace
from tests.formats.fuzzing import EXAMPLES


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


def damaged():
    """A recording with a dense layer, an MTP layer, profile rows and a second copy; and the sound one."""
    trace = random_trace(tokens=500, layers=6)
    order = np.r_[np.zeros(100, np.int64), 1:500]
    layers = np.stack(
        [np.zeros_like(trace.experts[:, 0]), *trace.experts.transpose(1, 0, 2), trace.experts[:, 5]], axis=1
    )
    bad = replace(trace, experts=layers[order], model_layers=tuple(range(1, 9)))
    return bad.part(np.r_[0:599, 0:599]), trace.part(np.arange(1, 500))


def test_several_faults_at_once():
    bad, sound = damaged()
    assert set(doubts(bad, MODEL)) == {"never-captured", "with-mtp-layer", "profile-rows", "copies"}
    mended = mend(bad, check_recording(bad, MODEL))
    np.testing.assert_array_equal(mended.experts, sound.experts)
    assert mended.model_layers == MODEL.moe_layers
    assert doubts(mended, MODEL) == []
    assert what_was_done(mended) == (
        "Dropped 1 dense or empty layers.",
        "Dropped the MTP layer, the last.",
        "Dropped 599 tokens that were copies.",
        what_was_done(mended)[3],
    )
    assert what_was_done(mended)[3].startswith("Cut 100 tokens with identical choices (skew ")


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


def test_what_was_done_outlasts_the_file(tmp_path):
    bad, _ = damaged()
    mended = mend(bad, check_recording(bad, MODEL))
    again = read_workload(write_recording(mended, tmp_path / "a.npz").path)
    assert again.digest == mended.digest
    assert what_was_done(again) == what_was_done(mended)


def test_a_sound_recording_stays_what_it_is():
    for workload in (random_trace(), random_load()):
        assert mend(workload, check_recording(workload, MODEL)) is workload


def test_a_remedy_that_finds_nothing_leaves_the_others_to_work():
    bad, _ = damaged()
    named = Finding(severity="warning", code="a", message="m", remedy="divide-by-copies")
    assert mend(bad, [named]) is bad
    findings = check_recording(bad, MODEL)
    assert mend(bad, [named, *findings]).digest == mend(bad, findings).digest


def test_a_readers_finding_is_settled_and_others_stay_without_their_old_rows():
    cut = Finding(severity="warning", code="a", message="m", remedy="cut-profile-rows")
    other = Finding(severity="warning", code="b", message="n", rows=(3, 4))
    trace = random_trace(tokens=400, origin=Origin(format="x", findings=(cut, other)))
    mended = REMEDIES["cut-profile-rows"].apply(trace.part(np.r_[np.zeros(100, np.int64), 0:400]))
    assert [finding.code for finding in mended.origin.findings] == ["b", "cut-profile-rows"]
    assert mended.origin.findings[0].rows is None and mended.origin.format == "x"


def test_keeping_one_phase_settles_the_other():
    findings = tuple(
        Finding(severity="warning", code="p", message="m", remedy=name) for name in ("keep-prefill", "keep-decode")
    )
    trace = random_trace(phase=np.arange(200) % 2, origin=Origin(format="x", findings=findings))
    assert [finding.code for finding in REMEDIES["keep-decode"].apply(trace).origin.findings] == ["keep-decode"]
    assert mend(trace, check_recording(trace)) is trace  # which one to keep is for a person to say


def test_only_what_needs_no_decision_is_automatic():
    assert {name for name, remedy in REMEDIES.items() if not remedy.automatic} == {
        "fold-slots",
        "keep-prefill",
        "keep-decode",
    }
    assert [name for name, remedy in REMEDIES.items() if remedy.needs_placement] == ["fold-slots"]


@pytest.mark.parametrize("name", [name for name, remedy in REMEDIES.items() if not remedy.needs_placement])
@pytest.mark.parametrize(
    "workload",
    [random_trace(layers=1), ExpertLoad("l", np.ones((1, 3)), (0,)), TrafficMatrix("m", np.ones((1, 2, 2)), 1.0)],
)
def test_what_has_no_such_fault_cannot_be_mended(workload, name):
    with pytest.raises(InputError, match=f"^{workload.name}: "):
        REMEDIES[name].apply(workload)

"""The decision table: every rule, every threshold on both sides, and that noise never helps."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.compare.evidence import Evidence, Move, Thresholds, decide
from engine.compare.held_out import Batch, HeldOut
from engine.compare.wording import RULES, reasons
from tests.cases.examples import examples

LIMITS = Thresholds()


def part(gain: float, error: float = 0.0, name: str = "b", **more) -> HeldOut:
    fields = {"by": "recording", "tokens": 1000.0, "planned_on": "a", "seconds_deployed": 1.0, "seconds": 1 / (1 + gain)}
    return HeldOut(part=name, gain=gain, error=error, **(fields | more))


def evidence(*gains: float, error: float = 0.0, **more) -> Evidence:
    """The evidence of a plan that meets every threshold and has no replicas, with changes."""
    named = {"plan": "new", "deployed": "old", "unit": "a pass", "same": False, "faults": (), "scarcest": "b"}
    tokens = {"tokens_per_expert": 100.0, "tokens_for_each": 200.0, "persistence": 0.9, "linear": 0.0}
    replicas = {"without_replicas": None, "bare_system": None, "replica_bytes": 0.0, "deployed_bytes": 0.0, "added_bytes": 0.0}
    parts = tuple(part(gain, error, f"part {index}") for index, gain in enumerate(gains or (0.2,)))
    move = Move(copies=3, bytes=3e6, seconds=1.0, steps=6.0)
    return Evidence(**(named | tokens | replicas | {"parts": parts, "memory": 0.5, "move": move} | more))


def word(case: Evidence, **limits) -> str:
    return decide(case, LIMITS.model_copy(update=limits)).word


def said(case: Evidence) -> tuple[str, ...]:
    return reasons(case, decide(case, LIMITS), LIMITS)


@pytest.mark.parametrize(
    ("case", "expected", "rule"),
    [
        ({}, "do-it", "all"),
        ({"same": True}, "not-now", "same"),
        ({"memory": 0.95}, "not-now", "memory"),
        ({"faults": ("a: wrong.",)}, "cannot-say", "faults"),
        ({"parts": ()}, "cannot-say", "nothing held out"),
        ({"tokens_per_expert": 3.0}, "cannot-say", "few tokens"),
        ({"parts": (part(0.0),)}, "not-now", "too little"),
        ({"parts": (part(-0.3),)}, "not-now", "too little"),
        ({"parts": (part(0.2, error=0.2),)}, "cannot-say", "noise"),
        ({"parts": (part(0.015, error=0.005),)}, "not-now", "too little"),
        ({"move": Move(copies=1, bytes=1.0, seconds=1.0, steps=None)}, "not-now", "move"),
        ({"persistence": None}, "try-it", "some"),
    ],
)
def test_the_first_rule_that_holds_decides(case, expected, rule):
    decision = decide(evidence(**case), LIMITS)
    assert (decision.word, decision.rule) == (expected, rule)
    assert rule in RULES and (expected != "do-it" or all(criterion.passed for criterion in decision.criteria))
    sentences = said(evidence(**case))
    assert sentences and all(sentence.endswith(".") for sentence in sentences)
    assert not any(word in sentence for sentence in sentences for word in ("None", "nan"))


@pytest.mark.parametrize(
    ("name", "case", "value", "missed"),
    [
        ("gain", {"parts": (part(0.2),)}, 0.2, "try-it"),
        ("try_gain", {"parts": (part(0.2),)}, 0.2, "not-now"),
        ("worst_gain", {"parts": (part(0.3), part(0.1, name="c"))}, 0.1, "try-it"),
        ("persistence", {"persistence": 0.6}, 0.6, "try-it"),
        ("replica_gain", {"parts": (part(0.5),), "without_replicas": 0.2, "replica_bytes": 1.0}, 0.25, "try-it"),
        ("tokens_per_expert", {"tokens_per_expert": 40.0}, 40.0, "cannot-say"),
    ],
)
def test_a_threshold_that_is_just_met_and_one_just_missed(name, case, value, missed):
    assert word(evidence(**case), **{name: value - 1e-9}) == "do-it"
    assert word(evidence(**case), **{name: value + 1e-9}) == missed


@pytest.mark.parametrize(("name", "value"), [("memory", 0.5), ("break_even_minutes", 6 / 1.2 / 60)])
def test_the_same_of_what_may_be_taken_at_most(name, value):
    """Six steps of 1 / 1.2 s each."""
    assert word(evidence(), **{name: value + 1e-9}) == "do-it"
    assert word(evidence(), **{name: value - 1e-9}) == "not-now"


def test_the_error_of_a_mean_of_independent_parts():
    case = evidence(parts=(part(0.1, error=0.03), part(0.3, error=0.04, name="c")))
    assert case.gain == pytest.approx(0.2) and case.error == pytest.approx(0.05 / 2)


def test_tokens_needed_by_hand():
    """1000 tokens leave 1.96 × 0.2 around a gain of 0.2: 1.96² times as many leave the gain itself."""
    case = evidence(parts=(part(0.2, error=0.2),))
    assert case.tokens_needed(0.02, 0.95) == pytest.approx(1000 * 1.959964**2, rel=1e-5)
    assert "about 3,900 tokens" in said(case)[0]


FRESH = "what a plan made for the held-out parts would gain there"
UNTOLD = "How long a plan like this serves cannot be told:"


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ({"parts": (part(0.2),)}, "On b, held out, its gain over what is deployed is +20.0 %"),
        ({"parts": (part(0.2),) * 2}, "On 2 held-out parts its gain over what is deployed is +20.0 %"),
        # 1000 tokens are 5 for an expert, so 25 for each are 5000.
        ({"tokens_per_expert": 5.0}, "Record at least 5,000 tokens"),
        ({"tokens_per_expert": 1e-3}, "or give the counts if these are shares."),
        ({"persistence": 0.2, "parts": (part(0.03),)}, ". Below threshold: gain held out, persistence."),
        ({"persistence": None, "parts": (part(0.03),)}, ". Below threshold: gain held out. Not known: persistence."),
        ({"persistence": 0.7, "parts": (part(0.2, made_for_it=0.3),)}, f" It keeps 70 % of {FRESH}."),
        ({"persistence": 0.7, "parts": (part(0.2),)}, " It keeps 70 % of what it gains on what it was made from."),
        ({"persistence": 0.2, "parts": (part(0.2, made_for_it=0.3),)}, f" It keeps only 20 % of {FRESH}: routing differs, "),
        ({"persistence": -0.2, "parts": (part(0.2, made_for_it=0.3),)}, f" Nothing is left of {FRESH}: "),
        (
            {"persistence": None, "parts": (part(0.2, made_for_it=-0.1),)},
            f" {UNTOLD} a plan made for the held-out parts gains nothing",
        ),
        ({"persistence": None}, f" {UNTOLD} its system cannot be run again"),
    ],
)
def test_sentences_of_parts_tokens_and_persistence(case, sentence):
    assert sentence in " ".join(said(evidence(**case)))


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        (0.2, "and add 25 % to the same system without them."),
        (0.4951, "and add 0.3 % to the same system without them, too little for that memory: plan without spare slots."),
        (0.5, "and add 0.0 % to the same system without them, too little for that memory: plan without spare slots."),
        (1.0, "and lose 25 % against the same system without them: plan without spare slots."),
    ],
)
def test_replicas_in_words(without, sentence):
    case = evidence(0.5, without_replicas=without, replica_bytes=1e9, added_bytes=1e8)
    (found,) = (reason for reason in said(case) if reason.startswith("Its replicas take"))
    assert found == f"Its replicas take 1 GB of memory in all, up to 100 MB more on a GPU, {sentence}"


@pytest.mark.parametrize(
    ("parts", "sentences"),
    [
        ((0.2,), []),
        ((0.2, 0.1), ["The worst part is part 1 with +10.0 %."]),
        ((0.3, -0.1), ["On part 1 it loses 10 %, and no part should be below 0.0 %."]),
    ],
)
def test_the_worst_part_is_named_where_there_are_several(parts, sentences):
    assert [text for text in said(evidence(*parts)) if "worst part is" in text or "below" in text] == sentences


def test_the_docs_have_every_threshold_with_its_value():
    text = (Path(__file__).resolve().parents[2] / "docs" / "verdict.md").read_text()
    for name, field in Thresholds.model_fields.items():
        assert f"| `{name}` | {field.default:g} |" in text


gains = st.floats(-0.5, 2.0)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(gains, min_size=1, max_size=3), st.floats(0, 1), st.floats(0, 0.49), st.floats(0, 1))
def test_more_noise_never_makes_a_plan_better(values, error, more, persistence):
    """Nor does a lower gain, a lower persistence, or a fuller memory."""
    height = {"cannot-say": 0, "not-now": 0, "try-it": 1, "do-it": 2}
    before = evidence(*values, error=error, persistence=persistence)
    reached = height[word(before)]
    assert height[word(evidence(*values, error=error + more, persistence=persistence))] <= reached
    lower = evidence(*[value - more for value in values], error=error, persistence=persistence)
    assert height[word(lower)] <= reached
    for worse in ({"persistence": persistence * more}, {"memory": 0.5 + more}, {"tokens_per_expert": 100 * more}):
        assert height[word(before.model_copy(update=worse))] <= reached


@pytest.mark.parametrize(
    ("unit", "paid", "timed"),
    [
        ("one pass through the MoE layers", "after 6 passes,", "with the 2,048 tokens of a held-out part: a pass of more"),
        ("a whole decode step of 64 sequences per GPU", "after 6 steps,", "Times are of a whole decode step of 64"),
    ],
)
def test_what_is_timed_and_paid_in_has_one_name(unit: str, paid: str, timed: str):
    sentences = said(evidence(unit=unit, parts=(part(0.2, tokens=2048),)))
    assert any(paid in sentence for sentence in sentences)
    assert timed in sentences[-1]


@pytest.mark.parametrize(("linear", "is_said"), [(0.0, False), (0.0001, True)])
def test_what_is_deployed_is_not_said_to_be_as_fast_as_itself(linear, is_said):
    assert ("as fast as what is deployed." in " ".join(said(evidence(linear=linear)))) == is_said


@pytest.mark.parametrize(
    ("gains", "sentence"),
    [
        ((-0.02, -0.005, 0.04, 0.5), "pays from 4 sequences on a GPU: +4.0 % and +50.0 % at 8; at 1 it costs 2.0 %."),
        ((0.1, -0.03, 0.0, 0.2), "pays from 8 sequences on a GPU: +20.0 %; at 2 it costs 3.0 %."),
        ((0.01, 0.2), "pays from 1 sequence on a GPU: +1.0 % and +20.0 % at 2."),
        ((0.1, -0.01), "does not pay with 2 sequences on a GPU, the most that was tried; at 2 it costs 1.0 %."),
        ((0.0,), "does not pay with 1 sequence on a GPU, the most that was tried."),
    ],
)
def test_a_plan_pays_from_the_batch_on_after_which_none_is_slower(gains, sentence):
    batches = tuple(Batch(sequences=2**turn, seconds_deployed=1 + gain, seconds=1.0) for turn, gain in enumerate(gains))
    assert f"Evening out the load {sentence}" in said(evidence(batches=batches))
    assert not any("Evening out" in sentence for sentence in said(evidence()))

"""The thresholds of this session: a form to set others, their differences from a verdict's, and the criteria of a verdict."""

from collections.abc import Callable, Sequence

import pandas as pd
import streamlit as st

from app import failing, state
from engine import units
from engine.compare.evidence import Criterion, Thresholds
from engine.compare.verdict import Verdict
from engine.compare.wording import spread_in_words

LABELS = {
    "gain": "gain held out",
    "try_gain": "gain held out, to try it",
    "worst_gain": "gain on the worst part",
    "persistence": "persistence",
    "replica_gain": "gain from replicas",
    "break_even_minutes": "minutes until the move pays off",
    "memory": "memory of the fullest GPU",
    "tokens_per_expert": "tokens per expert",
    "confidence": "confidence of the interval",
}
"""Names as in the criteria of a verdict."""

SHARES = set(LABELS) - {"break_even_minutes", "tokens_per_expert"}
"""Thresholds that are asked for in per cent."""


def popover(decide: Callable[[Thresholds], None]) -> None:
    """A popover that changes the thresholds of this session.

    decide: called with the changed thresholds; another key then is another popover, which is closed
    """
    now = state.session.thresholds
    others = "" if now == Thresholds() else ", changed"
    with st.popover(f"Thresholds{others}", icon=":material/tune:", key=f"thresholds-{now.digest[:12]}"):
        st.caption("Saved for this session. An existing verdict is re-evaluated immediately.")
        with st.form(f"thresholds-form-{now.digest[:12]}", border=False):
            values, places = {}, st.columns(2)
            for turn, name in enumerate(Thresholds.model_fields):
                with places[turn % 2]:
                    values[name] = _field(name, getattr(now, name))
            with st.container(horizontal=True):
                kept = st.form_submit_button("Apply", icon=":material/check:", type="primary")
                usual = st.form_submit_button("Restore defaults", icon=":material/restart_alt:")
        if kept or usual:
            with failing.saying():
                chosen = Thresholds() if usual else Thresholds.from_values(values)
                state.update(thresholds=chosen)
                decide(chosen)
                st.rerun()


def _field(name: str, value: float) -> float:
    schema = Thresholds.schemas()[name]
    high = float(schema["maximum"])
    low = float(schema["minimum"]) if "minimum" in schema else float(schema["exclusiveMinimum"]) + 0.01
    scale = 100 if name in SHARES else 1
    text = f"{LABELS[name][0].upper()}{LABELS[name][1:]}{', %' if name in SHARES else ''}"
    shown = st.number_input(
        text, scale * low, scale * high, round(scale * value, 9), step=1.0, format="%g", help=schema["description"]
    )
    return round(shown / scale, 11)


def differences(of_verdict: Thresholds, of_session: Thresholds) -> str:
    """`gain held out 15 % (here 5 %), memory of the fullest GPU 80 % (here 90 %)`"""
    pairs = {name: (getattr(of_verdict, name), getattr(of_session, name)) for name in Thresholds.model_fields}
    return ", ".join(
        f"{LABELS[name]} {_quantity(name, theirs)} (here {_quantity(name, ours)})"
        for name, (theirs, ours) in pairs.items()
        if theirs != ours
    )


def changes(before: dict[str, float], after: dict[str, float]) -> str:
    """`gain held out 5 % → 15 %, memory of the fullest GPU 80 % → 90 %`; thresholds unknown to this version are left out."""
    known = [name for name in LABELS if before.get(name) != after.get(name) and name in before and name in after]
    return ", ".join(f"{LABELS[name]} {_quantity(name, before[name])} → {_quantity(name, after[name])}" for name in known)


def _quantity(name: str, value: float) -> str:
    return f"{100 * value:,.10g} %" if name in SHARES else f"{value:,.10g}"


def as_text(criteria: Sequence[Criterion]) -> pd.DataFrame:
    """One row for each criterion, with its purpose."""
    columns = {
        "": ["✓ passed" if criterion.passed else "✗ not passed" for criterion in criteria],
        "Figure": [criterion.title for criterion in criteria],
        "Value": [_value(criterion) for criterion in criteria],
        "Threshold": [
            f"{'at least' if criterion.at_least else 'at most'} {_quantity_criteria(criterion.threshold, criterion.unit)}"
            for criterion in criteria
        ],
        "Criterion": [Thresholds.schemas()[criterion.name]["description"] for criterion in criteria],
    }
    return pd.DataFrame(columns)


def _value(criterion: Criterion) -> str:
    """The value of a criterion; a plan without replicas adds none, and a move may never pay."""
    if criterion.infinite:
        return "no replicas" if criterion.at_least else "never"
    if criterion.value is None:
        return "unknown"
    value, threshold = (_quantity_criteria(number, criterion.unit) for number in (criterion.value, criterion.threshold))
    if value == threshold and criterion.unit == "share" and not criterion.passed:
        return f"{100 * criterion.value:.2f} %"  # a near miss must not read as if it were met
    return value


def _quantity_criteria(value: float, unit: str) -> str:
    if unit == "minutes":
        return minutes(value)
    return units.digits(value) if unit == "count" else units.share(value)


def minutes(value: float) -> str:
    """`12.3 min`; shorter times in seconds."""
    return units.seconds(60 * value) if value < 1 else f"{units.digits(value)} min"


def spread(verdict: Verdict) -> str:
    """The range of the gain held out."""
    parts = (verdict.gain_worst, verdict.gain_best) if len(verdict.parts) > 1 else None
    return spread_in_words(parts, (verdict.gain_low, verdict.gain_high), verdict.confidence)

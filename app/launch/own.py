"""A person's own model on the Launch page: the model and the texts of a launch, and the pace of its plans in the report."""

from collections.abc import Sequence

import streamlit as st

from app import kept, own_model, tables
from app.own_model import OwnTexts
from app.tables import plain, sentence
from engine import units
from engine.jobs.launches import LaunchAnswer
from engine.launch.rank.instructions import OwnModel
from engine.launch.results.own import Generated, OwnFacts, Pace

CALLED = {"attention": "dense"}
"""Kinds of events of such a launch that other timelines have by another name: of theirs, attention is that for carried tokens
alone."""
USUAL_TOKENS = 20
"""New tokens of each text unless a person wants others."""


def choose() -> tuple[OwnTexts, OwnModel] | None:
    """The texts, with the model that they run through; None while something is missing or wrong, which is said."""
    with st.container(horizontal=True):
        folder = own_model.choose_folder("launch-model")
        if folder is None:
            return None
        help = "of each text, chosen greedily, after a prefill; the time of the first is that of the prefill"
        new_tokens = kept.number_input("New tokens", 1, 100_000, USUAL_TOKENS, key="launch-new", help=help, width=150)
    own_model.say_sizes(folder)
    given = own_model.ask_for_texts(folder, new_tokens, "launch")
    if given is None:
        return None
    ids = given.texts.ids
    st.caption(
        f"{len(ids):,} text{'s' * (len(ids) != 1)}, {sum(map(len, ids)):,} tokens, dealt to the ranks in turn; "
        f"{len(ids) * new_tokens:,} new ones in each pass."
    )
    for note in given.texts.notes_on_texts():
        st.caption(f":material/info: {sentence(note)}")
    prompts = tuple(map(tuple, ids))
    return given, OwnModel(folder=str(folder), prompts=prompts, new_tokens=new_tokens)


def finding(answer: LaunchAnswer, names: Sequence[str]) -> str:
    """`EPLB generates 812 tokens/s, 1.08× linear's 752`: the fastest plan and the slowest, if one is faster for sure."""
    paces = [run.generated.measured.tokens_per_second for run in answer.runs]
    order = answer.preference.order
    (first, fast), (last, slow) = ((names[at], paces[at]) for at in (order[0], order[-1]))
    if not answer.preference.decided:
        return f"{first} generates {units.digits(fast)} tokens/s, {last} {units.digits(slow)}: noise is not ruled out"
    return f"{first} generates {units.digits(fast)} tokens/s, {units.ratio(fast / slow)} {last}'s {units.digits(slow)}"


def show_paces(answer: LaunchAnswer, names: Sequence[str]) -> None:
    """The pace of every plan, measured and predicted."""
    times = [
        value for run in answer.runs for pace in _both(run.generated) for value in (pace.prefill_seconds, pace.token_seconds)
    ]
    factor, unit = units.scale_of(min(value for value in times if value), units.TIME)
    rows = []
    for name, run in zip(names, answer.runs, strict=True):
        measured, predicted = _both(run.generated)
        rows.append(
            {
                "Plan": name,
                "Tokens/s": units.digits(measured.tokens_per_second),
                "predicted": units.digits(predicted.tokens_per_second),
                f"{unit} to first token": units.digits(measured.prefill_seconds / factor),
                "predicted ": units.digits(predicted.prefill_seconds / factor),
                f"{unit} a token": _digits(measured.token_seconds, factor),
                "predicted  ": _digits(predicted.token_seconds, factor),
            }
        )
    tables.show(rows, hide_index=True, alt="Pace of every plan")


def _both(generated: Generated) -> tuple[Pace, Pace]:
    return generated.measured, generated.predicted


def _digits(seconds: float | None, factor: float) -> str:
    return tables.MISSING if seconds is None else units.digits(seconds / factor)


def say_if_same(answer: LaunchAnswer, names: Sequence[str]) -> None:
    """Say if logits and tokens of the plans are those of the unplanned model, or why nobody knows."""
    if answer.own.not_compared:
        st.info(f"Not compared with the unplanned model: {plain(answer.own.not_compared)}.", icon=":material/info:")
        return
    differing = [name for name, run in zip(names, answer.runs, strict=True) if not run.generated.same_tokens]
    most = max(run.difference for run in answer.runs)
    logits = f"Logits are those of the unplanned model to {most:.1g} of the largest"
    if differing:
        text = f"{logits}. Tokens under {units.in_a_row(differing)} are others: where two logits nearly tie, rounding decides."
        st.warning(plain(text), icon=":material/warning:")
    else:
        count = answer.own.prompts * answer.own.new_tokens
        st.markdown(f":green[:material/check_circle:] {plain(logits)}, and all {count:,} new tokens are the same.")


def say_what_ran(own: OwnFacts) -> None:
    """The model and its texts, in words."""
    if own.random_weights:
        st.warning(
            "The folder has no weights: random ones were run. Times are the model's, its tokens are nobody's.",
            icon=":material/casino:",
        )
    padded = f", {own.padded:,} computed as padding" if own.padded else ""
    predicted, measured = (units.size(max(memory, default=0.0)) for memory in (own.predicted_memory, own.measured_memory))
    st.caption(
        f"{own.prompts:,} texts, {own.prompt_tokens:,} tokens{padded}, {own.new_tokens:,} new tokens of each. Weights on the "
        f"fullest rank {measured}, predicted {predicted}. {sentence(own.predicted_from)}"
    )

"""From figures to one of four words: the decision table of docs/verdict.md, rule by rule."""

from dataclasses import dataclass
from math import inf
from typing import Literal

from engine.schema import Frozen
from engine.verdict.evidence import Evidence
from engine.verdict.thresholds import Thresholds

Word = Literal["do-it", "try-it", "not-now", "cannot-say"]

Unit = Literal["share", "minutes", "count"]


class Criterion(Frozen):
    """A figure beside its threshold. name: of the threshold; value: None where it is unknown, which does not pass, and where it
    is infinite: a move that never pays, or replicas that have nothing to justify, as there are none; at_least: whether more is
    better."""

    name: str
    title: str
    value: float | None
    threshold: float
    unit: Unit
    at_least: bool
    passed: bool
    infinite: bool = False


@dataclass(frozen=True)
class Decision:
    """rule: the one that decided, a key of `engine.verdict.words.RULES`"""

    word: Word
    rule: str
    criteria: tuple[Criterion, ...]


def decide(evidence: Evidence, thresholds: Thresholds) -> Decision:
    """The first rule that holds. A wider interval of the gain never brings a plan nearer to "do it"."""
    criteria = _criteria(evidence, thresholds)
    passed = {criterion.name: criterion.passed for criterion in criteria}

    def decided(word: Word, rule: str) -> Decision:
        return Decision(word, rule, criteria)

    if evidence.same:
        return decided("not-now", "same")
    if not passed["memory"]:
        return decided("not-now", "memory")
    if evidence.faults:
        return decided("cannot-say", "faults")
    if not evidence.parts:
        return decided("cannot-say", "nothing held out")
    if not passed["tokens_per_expert"]:
        return decided("cannot-say", "few tokens")
    low, high = evidence.interval(thresholds.confidence)
    if high < thresholds.try_gain:
        return decided("not-now", "too little")
    if low <= 0:
        return decided("cannot-say", "noise")
    if not passed["try_gain"]:
        return decided("not-now", "too little")
    if not passed["break_even_minutes"]:
        return decided("not-now", "move")
    if all(passed[name] for name in ("gain", "worst_gain", "persistence", "replica_gain")):
        return decided("do-it", "all")
    return decided("try-it", "some")


def _criteria(evidence: Evidence, thresholds: Thresholds) -> tuple[Criterion, ...]:
    def criterion(name: str, title: str, value: float | None, unit: Unit = "share", at_least: bool = True) -> Criterion:
        limit = getattr(thresholds, name)
        passed = value is not None and (value >= limit if at_least else value <= limit)
        return Criterion(
            name=name,
            title=title,
            value=None if value in (None, inf) else value,
            threshold=limit,
            unit=unit,
            at_least=at_least,
            passed=passed,
            infinite=value == inf,
        )

    # A plan without replicas has nothing to justify.
    replicas = evidence.replica_gain() if evidence.replica_bytes else inf
    worst = evidence.worst and evidence.worst.gain
    minutes = evidence.minutes if evidence.parts else None
    return (
        criterion("gain", "gain held out", evidence.gain),
        criterion("try_gain", "gain held out, to try it", evidence.gain),
        criterion("worst_gain", "gain on the worst part", worst),
        criterion("persistence", "persistence", evidence.persistence),
        criterion("replica_gain", "gain from replicas", replicas),
        criterion("break_even_minutes", "until the move pays off", minutes, "minutes", at_least=False),
        criterion("memory", "memory of the fullest GPU", evidence.memory, at_least=False),
        criterion("tokens_per_expert", "tokens per expert", evidence.tokens_per_expert, "count"),
    )

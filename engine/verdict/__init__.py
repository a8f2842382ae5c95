"""Is a plan worth it? Its gain on recordings that it was not made from, its price, and one word on both."""

from engine.verdict.decide import Criterion, Decision, Word, decide
from engine.verdict.deployed import running
from engine.verdict.evidence import Evidence, Move
from engine.verdict.held_out import HeldOut
from engine.verdict.sources import roles_of
from engine.verdict.thresholds import Thresholds
from engine.verdict.verdict import Beside, Judgement, Verdict, evidence_of, verdict_from, verdict_of
from engine.verdict.words import WORDS, break_even

__all__ = [
    "WORDS",
    "Beside",
    "Criterion",
    "Decision",
    "Evidence",
    "HeldOut",
    "Judgement",
    "Move",
    "Thresholds",
    "Verdict",
    "Word",
    "break_even",
    "decide",
    "evidence_of",
    "roles_of",
    "running",
    "verdict_from",
    "verdict_of",
]

"""Is a plan worth it? Its gain on recordings that it was not made from, its price, and one word on both.

Studies: how far a plan can be trusted, answered by making many plans from parts of recordings and scoring each on others.
"""

from engine.compare.baseline import baseline_of, plan_of_placement, running
from engine.compare.evidence import Criterion, Decision, Evidence, Move, Thresholds, Word, decide
from engine.compare.held_out import HeldOut, roles_of
from engine.compare.verdict import Beside, Judgement, Verdict, evidence_of, verdict_from, verdict_of
from engine.compare.wording import WORDS, break_even

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
    "baseline_of",
    "break_even",
    "decide",
    "evidence_of",
    "plan_of_placement",
    "roles_of",
    "running",
    "verdict_from",
    "verdict_of",
]

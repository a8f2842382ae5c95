"""Comparison of plans: one baseline, one standing, one verdict (the gain on recordings that a plan was not made from, its
price, and one word on both), and studies that make many plans and score each.
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

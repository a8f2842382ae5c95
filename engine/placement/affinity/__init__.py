"""Experts that follow each other on one GPU: ExFlow's placement, solved exactly or with a bound."""

from engine.placement.affinity.kernel import affinity

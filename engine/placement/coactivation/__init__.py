"""Experts that fire together on one GPU or node, so that a token's row goes to few of them, with a proven bound."""

from engine.placement.coactivation.copies import chosen_copies, served, with_copies
from engine.placement.coactivation.instance import CoactivationInstance, Travel
from engine.placement.coactivation.kernel import coactivation

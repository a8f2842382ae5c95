"""Experts of two models that share a GPU: Aurora sections 6 and 7."""

from engine.placement.colocation.heterogeneous import colocate_heterogeneous, decoupled
from engine.placement.colocation.pairs import colocate, pair_weight, random_colocation, sorted_colocation

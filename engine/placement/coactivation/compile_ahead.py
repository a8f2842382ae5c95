"""Compile what is compiled here before a clock starts; the machine code is kept beside the sources (numba's rule)."""

from functools import cache

import numpy as np

from engine.placement.coactivation.copies import served
from engine.placement.coactivation.instance import CoactivationInstance
from engine.placement.coactivation.layer import Layer


@cache
def compile_ahead() -> None:
    """Run every compiled function once, with the types that it always has."""
    experts = np.array([[[0, 1], [2, 3], [1, 2]]])
    for exact in (True, False):
        instance = CoactivationInstance(experts, np.array([0, 1, 1]), 2, cap=2.0)
        layer = Layer(instance, 0, 1.0)
        hurry = np.zeros(1, dtype=bool)
        layer.begin(1.0, exact, hurry)
        layer.balance(1.0, 0, hurry)
        layer.search(1e-6, 0, hurry)
        layer.bound = 0
        layer.tighten(0.1, hurry)
    served(instance, 0, np.ones((4, 2), dtype=bool))

"""The number of examples of a property test: a fifth in `make test`, all in `make everything`."""

import os
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

EVERYTHING = "SWITCHYARD_TEST_EVERYTHING"
"""Set in the environment by `make everything`."""
FEWEST = 8


def examples(full: int, fewest: int = FEWEST) -> int:
    """The number of hypothesis examples for a property test: `full` in `make everything`, in `make test` a fifth of it, but not
    less than `fewest`, which is lower if an example plans with several systems."""
    if EVERYTHING in os.environ:
        return full
    return min(full, max(fewest, full // 5))


def tried(full: int, *drawn: SearchStrategy, fewest: int = FEWEST, **named: SearchStrategy) -> Callable[[Callable], Callable]:
    """A property test without a deadline, of examples drawn from these strategies. full, fewest: as of `examples`"""

    def property_test(test: Callable) -> Callable:
        return settings(max_examples=examples(full, fewest), deadline=None)(given(*drawn, **named)(test))

    return property_test

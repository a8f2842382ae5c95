"""The number of examples of a property test: a fifth in `make test`, all in `make everything`."""

import os

EVERYTHING = "SWITCHYARD_TEST_EVERYTHING"
"""Set in the environment by `make everything`."""
FEWEST = 8


def examples(full: int, fewest: int = FEWEST) -> int:
    """The number of hypothesis examples for a property test.

    full: the number that `make everything` tries; `make test` tries a fifth of it
    fewest: the least that `make test` tries; fewer if an example plans with several systems
    """
    if EVERYTHING in os.environ:
        return full
    return min(full, max(fewest, full // 5))

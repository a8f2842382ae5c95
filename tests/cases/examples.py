"""How many examples a property test tries: a fifth in `make test`, all in `make everything`."""

import os

EVERYTHING = "SWITCHYARD_TEST_EVERYTHING"
"""Set in the environment by `make everything`."""
FEWEST = 8


def examples(full: int) -> int:
    """The number of hypothesis examples for a property test.

    full: the number that `make everything` tries; `make test` tries a fifth of it, at least `FEWEST`.
    """
    if EVERYTHING in os.environ:
        return full
    return min(full, max(FEWEST, full // 5))

"""Limits of rows, held against every set of experts that a group can have, token by token."""

from collections.abc import Sequence
from itertools import combinations

from tests.oracles.rules import illegal_if


def check_limit(
    tokens: Sequence[Sequence[int]],
    prices: Sequence[float],
    size: Sequence[float],
    slots: int,
    seconds: float,
    part: Sequence[float],
) -> float:
    """Check that in no group of at most so many experts and seconds these parts sum to more than the price of its rows;
    (rows - parts) / rows where they are the closest.

    tokens: the experts of every one
    prices: of a row of each
    size: seconds of every expert
    part: of every expert
    """
    closest = 1.0
    for count in range(1, slots + 1):
        for held in combinations(range(len(size)), count):
            if sum(size[expert] for expert in held) > seconds:
                continue
            rows = sum(price for chosen, price in zip(tokens, prices, strict=True) if set(chosen) & set(held))
            parts = sum(part[expert] for expert in held)
            illegal_if(parts > rows * (1 + 1e-9) + 1e-12, f"experts {held}: {parts} above {rows}")
            closest = min(closest, (rows - parts) / rows if rows else 1.0)
    return closest

"""Wording that findings share."""

import numpy as np


def name_of(what: str, numbers: np.ndarray) -> str:
    """`layer 3` or `layer 3 (and 4 more)`."""
    return f"{what} {numbers[0]}" + (f" (and {len(numbers) - 1} more)" if len(numbers) > 1 else "")


def skew_of(load: np.ndarray) -> float:
    """Busiest expert / mean expert on average over layers with tokens; 1 without any. load: float64[layer, expert]"""
    load = load[load.any(axis=1)]
    return float((load.max(axis=1) / load.mean(axis=1)).mean()) if len(load) else 1.0

"""How evenly a recording or a plan spreads tokens, in the words that the engines use for it.

The number of one layer has three names: the overload factor, largest / mean load (Megatron-LM, pull request #4110); its
inverse, balancedness (EPLB, vLLM, SGLang); and the imbalance ratio, the overload factor less 1 (TensorRT-LLM). Over layers,
Megatron-LM asks for percentiles (issue #2398), for a mean hides the layers that all others wait for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.timeline import balancedness
from engine.units import ratio

PERCENTILES = (50, 75, 90, 95)


@dataclass(frozen=True)
class Balance:
    """overload: float64[layer] as a tuple, the largest load over the mean one; 1 is even, and what a layer without load has."""

    overload: tuple[float, ...]

    @classmethod
    def of(cls, load: np.ndarray) -> "Balance":
        """The balance of loads float64[layer, gpu], or float64[layer, expert] where experts are compared."""
        return cls(tuple((1 / balancedness(load)).tolist()))

    @property
    def mean(self) -> float:
        """Over layers: Megatron-LM's `avg_overload_factor`."""
        return float(np.mean(self.overload))

    @property
    def worst(self) -> float:
        """Of the least even layer: Megatron-LM's `max_overload_factor`."""
        return max(self.overload)

    @property
    def balancedness(self) -> float:
        """Mean over layers of mean / max load; not the inverse of `mean`, which weighs uneven layers more."""
        return float(np.mean([1 / factor for factor in self.overload]))

    @property
    def imbalance_ratio(self) -> float:
        """Mean over layers of max / mean - 1, as TensorRT-LLM reports it."""
        return self.mean - 1

    @property
    def percentiles(self) -> dict[str, float]:
        """p50, p75, p90 and p95 of the overload factors over layers, linear between two of them."""
        names = (f"p{percentile}" for percentile in PERCENTILES)
        return dict(zip(names, np.percentile(self.overload, PERCENTILES).tolist(), strict=True))

    @property
    def factors(self) -> dict[str, float]:
        """Overload factors over layers: `mean`, the percentiles and `max`."""
        return {"mean": self.mean, **self.percentiles, "max": self.worst}

    def to_dict(self) -> dict[str, Any]:
        """Overload factor and imbalance ratio over layers, each as mean, percentiles and max, and the factor of every layer."""
        return {
            "overload_factor": self.factors,
            "imbalance_ratio": {name: factor - 1 for name, factor in self.factors.items()},
            "overload_factor_of_layer": list(self.overload),
        }


def over_layers(factors: Mapping[str, float]) -> str:
    """`p50 1.2×, p75 1.31×, p90 1.44×, p95 1.5×, worst 1.61×` of `Balance.factors`."""
    shown = {name: factor for name, factor in factors.items() if name not in ("mean", "max")} | {
        "worst": factors["max"]
    }
    return ", ".join(f"{name} {ratio(factor)}" for name, factor in shown.items())

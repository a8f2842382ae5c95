"""Affinity placement against the linear one: `python -m tests.benchmarks.bench_affinity [SECONDS]`.

SECONDS for each instance (default 5; of 256 experts twice that, of the studio's generator a minute). Printed are the share
of hops that stay, the most that any placement keeps, and the proven gap.
"""

import sys
from typing import NamedTuple

import numpy as np

from engine.compare.synthetic import Recipe, synthetic
from engine.placement.affinity.kernel import AffinityInstance, affinity
from engine.placement.transitions import kept, transitions
from engine.result import Limits
from tests.benchmarks.shared import columns
from tests.cases.placements import permutation_affinity, topic_affinity
from tests.oracles.placing import check_affinity


class ModelOfSize(NamedTuple):
    """The attributes of a model that the generator reads."""

    moe_layers: range
    experts: int
    experts_per_token: int


def linear(layers: int, experts: int, gpus: int) -> np.ndarray:
    return np.tile(np.arange(experts) // (experts // gpus), (layers, 1))


def main(seconds: float = 5.0) -> None:
    formats = {"instance": "40.40", "linear": "7.4f", "affinity": "9.4f", "at most": "9.4f", "gap": "7.1%"}
    row = columns(formats | {"seconds": "7.1f", "status": "9"})

    def solved(name: str, instance: AffinityInstance, limit: float) -> None:
        """Print the row of an instance, its cost recomputed."""
        counts, nodes = instance.transitions, (instance.gpus_per_node, 1.0, instance.cost_node)
        result = affinity(instance, Limits(limit))
        cost, _, _ = check_affinity(result.solution, counts, instance.gpus, *nodes)
        assert abs(cost - result.objective) <= 1e-9 * cost
        places = linear(len(counts) + 1, counts.shape[1], instance.gpus), result.solution
        most = 1 - min(result.bound, cost) / counts.sum() if nodes[0] is None else ""
        row(name, *(kept(place, counts) for place in places), most, result.gap, result.runtime, result.status)

    for family in (permutation_affinity, topic_affinity):
        for layers, experts, gpus, node, tokens in (
            (12, 32, 8, None, 20_000),
            (24, 64, 32, None, 50_000),
            (24, 64, 32, 4, 50_000),
            (61, 256, 64, None, 100_000),
            (61, 256, 64, 8, 100_000),
        ):
            instance = AffinityInstance(family(layers, experts, tokens), gpus, node, 1.0, 9.0 if node else 1.0)
            name = f"{family.__name__} {layers} x {experts} on {gpus}" + (f", {node} a node" if node else "")
            solved(name, instance, seconds * (1 + (experts == 256)))
    for recipe in (Recipe(8192, 0.8, 0.0), Recipe(8192, 0.5, 0.5), Recipe(8192, 0.5, 0.9)):
        counts = transitions(synthetic(ModelOfSize(range(61), 256, 8), recipe).experts, 256)
        solved(recipe.name, AffinityInstance(counts, 64), 12 * seconds)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))

"""Affinity placement against the usual placement and alternating assignments: `python -m tests.benchmarks.bench_affinity`.

With a number: seconds for each instance of both methods (default 5; the largest instances get twice that, and at last a
minute each, for their gap at production size).

First made-up instances: hops saved under the linear placement, and the proven gap. Then the recordings in
`../shared/data`: plans made on half of the tokens, scored on the other half, as the share of hops kept on their GPU. Two
conventions: all k x k pairs of choices of neighbouring layers (linear placement: 1/8 on 8 GPUs), and only the first
choice of each layer. The latter is not the router's favourite in these recordings: five of six neighbouring choices rise
in expert id, so the first is mostly a low id and the linear placement alone keeps a third of these hops. The figures of
the field are those of the pairs.
"""

import sys
import time
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from engine.compare.synthetic import Recipe, synthetic
from engine.placement.affinity.kernel import AffinityInstance, affinity
from engine.placement.transitions import kept, transitions
from engine.result import Limits
from tests.benchmarks.shared import V2_LITE, columns
from tests.cases.placements import permutation_affinity, planted_affinity, topic_affinity
from tests.oracles.placing import check_affinity

RESULT = {"gap": "7.1%", "seconds": "7.1f", "status": "9"}


class ModelOfSize(NamedTuple):
    """The attributes of a model that the generator reads."""

    moe_layers: range
    experts: int
    experts_per_token: int


def linear(layers: int, experts: int, gpus: int) -> np.ndarray:
    return np.tile(np.arange(experts) // (experts // gpus), (layers, 1))


def made_up(seconds: float) -> None:
    formats = {"instance": "34", "linear": "11.0f", "alternating": "11.1%", "affinity": "9.1%", "staged": "9.1%"}
    row = columns(formats | RESULT)
    cases = [
        ("permutation", 12, 32, 8, None, 20_000),
        ("topic", 12, 32, 8, None, 20_000),
        ("permutation", 24, 64, 32, None, 50_000),
        ("topic", 24, 64, 32, None, 50_000),
        ("permutation", 24, 64, 32, 4, 50_000),
        ("permutation", 61, 256, 64, None, 400_000),
        ("permutation", 61, 256, 64, 8, 400_000),
    ]
    for kind, layers, experts, gpus, node, tokens in cases:
        family = permutation_affinity if kind == "permutation" else topic_affinity
        instance = AffinityInstance(family(layers, experts, tokens), gpus, node, 1.0, 9.0 if node else 1.0)
        limit = 2 * seconds if experts == 256 else seconds
        usual = instance.cost(linear(layers, experts, gpus))
        result = affinity(instance, Limits(limit))
        cost, _, _ = check_affinity(result.solution, instance.transitions, gpus, node, 1.0, instance.cost_node)
        assert abs(cost - result.objective) <= 1e-9 * cost
        opponent = instance.cost(alternating(instance.transitions, gpus, limit)[0]) / usual - 1
        stages = affinity(instance, Limits(limit, exact=False), staged=True).objective / usual - 1 if node else np.nan
        name = f"{kind} {layers} x {experts} on {gpus}" + (f" in {gpus // node} nodes" if node else "")
        row(name, usual, opponent, cost / usual - 1, stages, result.gap, result.runtime, result.status)


def production(seconds: float) -> None:
    """61 layers of 256 experts on 64 GPUs, by the studio's generator too: the share kept, and its bound."""
    row = columns({"61 x 256 on 64": "34.34", "linear": "7.4f", "affinity": "9.4f", "at most": "9.4f"} | RESULT)
    shape, made = ModelOfSize(range(61), 256, 8), {"permutation": permutation_affinity(61, 256, 400_000)}
    made["topic"] = topic_affinity(61, 256, 100_000)
    for recipe in (Recipe(8192, 0.8, 0.0), Recipe(8192, 0.5, 0.5), Recipe(8192, 0.5, 0.9)):
        made[recipe.name] = transitions(synthetic(shape, recipe).experts, 256)
    for name, counts in made.items():
        instance = AffinityInstance(counts, 64)
        result = affinity(instance, Limits(seconds))
        least = min(result.bound, check_affinity(result.solution, counts, 64)[0])
        shares = [kept(place, counts) for place in (linear(61, 256, 64), result.solution)]
        row(name[:34], *shares, 1 - least / counts.sum(), result.gap, result.runtime, result.status)


def planted(seconds: float) -> None:
    recovered, proven, longest, cases = 0, 0, 0.0, 0
    shapes = ((12, 32, 8, 20_000), (12, 32, 16, 20_000), (24, 64, 32, 50_000), (24, 64, 8, 50_000))
    for layers, experts, gpus, tokens in shapes:
        for strength in (0.15, 0.3, 0.5):
            counts, place = planted_affinity(layers, experts, gpus, tokens, strength)
            instance = AffinityInstance(counts, gpus)
            result = affinity(instance, Limits(seconds))
            cases += 1
            recovered += result.objective <= instance.cost(place)
            proven += result.status == "OPTIMAL"
            longest = max(longest, result.runtime)
    print(f"planted placements: {recovered} of {cases} recovered, {proven} proven, at most {longest:.1f} s", flush=True)


def recorded(seconds: float) -> None:
    if not V2_LITE.is_file():
        print("the recordings are not here")
        return
    formats = {"recording, split": "22", "planned on": "12", "linear": "7.4f", "alternating": "11.4f"}
    row = columns(formats | {"affinity": "9.4f", "in sample": "9.4f", "gap": "6.1%"})
    with np.load(V2_LITE) as archive:
        recordings = {name: archive[name].astype(np.int16) for name in archive.files}
    for name, experts in recordings.items():
        tokens = len(experts)
        orders = {"halves": np.arange(tokens), "at random": np.random.default_rng(0).permutation(tokens)}
        for split, order in orders.items():
            ours, theirs = experts[order[: tokens // 2]], experts[order[tokens // 2 :]]
            for convention, first in (("pairs", False), ("first choice", True)):
                plan_on, score_on = (transitions(half, 64, first) for half in (ours, theirs))
                result = affinity(AffinityInstance(plan_on, 8), Limits(seconds))
                opponent, _ = alternating(plan_on, 8, seconds)
                shares = [kept(place, score_on) for place in (linear(26, 64, 8), opponent, result.solution)]
                row(f"{name}, {split}", convention, *shares, kept(result.solution, plan_on), result.gap)


def alternating(counts: np.ndarray, gpus: int, seconds: float, seed: int = 0) -> tuple[np.ndarray, int]:
    """(best placement int64[layer, expert], number of starts) for counts float64[layer - 1, expert, expert]."""
    rng = np.random.default_rng(seed)
    layers, experts = len(counts) + 1, counts.shape[1]
    best, most, starts, began = None, -1.0, 0, time.perf_counter()

    def placed(affinity: np.ndarray) -> np.ndarray:
        """Exact for one layer; affinity: float64[expert, gpu]."""
        return linear_sum_assignment(np.repeat(-affinity, experts // gpus, axis=1))[1] // (experts // gpus)

    def pull(place: np.ndarray, layer: int, others: list[int]) -> np.ndarray:
        total = np.zeros((experts, gpus))
        for other in others:
            count = counts[layer] if other > layer else counts[other].T
            np.add.at(total.T, place[other], count.T)
        return total

    while best is None or time.perf_counter() - began < seconds:
        starts += 1
        place = np.empty((layers, experts), dtype=np.int64)
        first = int(rng.integers(layers))
        place[first] = rng.permutation(experts) % gpus
        for layer in range(first + 1, layers):
            place[layer] = placed(pull(place, layer, [layer - 1]))
        for layer in range(first - 1, -1, -1):
            place[layer] = placed(pull(place, layer, [layer + 1]))
        last = -1.0
        while True:
            for layer in [*range(0, layers, 2), *range(1, layers, 2)]:
                beside = [other for other in (layer - 1, layer + 1) if 0 <= other < layers]
                place[layer] = placed(pull(place, layer, beside))
            same = place[:-1, :, None] == place[1:, None, :]
            now = float(counts[same].sum())
            if now <= last:
                break
            last = now
        if last > most:
            best, most = place.copy(), last
    return best, starts


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    made_up(seconds)
    planted(seconds)
    recorded(seconds)
    production(60.0)


if __name__ == "__main__":
    main()

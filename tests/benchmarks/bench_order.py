"""Matched and two-tier orders: distance from the bound, phases, seconds. Run `python -m tests.benchmarks.bench_order`."""

import numpy as np

from engine.communication.algorithm1 import algorithm1
from engine.communication.order import order
from engine.communication.two_tier import two_tier
from engine.network import Network
from tests.benchmarks.shared import columns, timed

KINDS = ("uniform", "zipf", "tokens")
SIZES = (8, 40, 64, 128, 256, 512)
LARGEST_PRINTED_RULE = 64
BANDWIDTH = 50e9
NODES, GPUS_PER_NODE, LINK_BANDWIDTH = (8, 40, 128), 8, 450e9


def instance(n: int, kind: str) -> np.ndarray:
    """float64[n, n] bytes: all pairs alike, receivers with Zipf popularity, or rows of tokens dealt out at random."""
    rng = np.random.default_rng(n)
    if kind == "tokens":
        return rng.multinomial(4096 * n, np.full(n * n, 1 / n**2)).reshape(n, n) * 7168.0
    traffic = rng.random((n, n)) * 1e6
    if kind == "zipf":
        traffic /= np.arange(1, n + 1)
    return traffic


def main() -> None:
    formats = {"n": "4", "kind": "8", "makespan/bound - 1": "18.1e", "phases": "7", "seconds": "8.4f"}
    row = columns(formats | {"Algorithm 1: ratio": "18.3f", "s": "7.3f"})
    for n in SIZES:
        rate = np.full(n, BANDWIDTH)
        for kind in KINDS:
            traffic = instance(n, kind)
            result, seconds = timed(order, traffic, rate, rate)
            rule = algorithm1(traffic, rate, rate) if n <= LARGEST_PRINTED_RULE else None
            printed = (rule.objective / rule.bound, rule.runtime) if rule else ("", "")
            row(n, kind, result.objective / result.bound - 1, result.solution.phases, seconds, *printed)
    # Two-tier orders on H100 nodes, with the seconds that the busiest single port needs.
    formats = {"GPUs": "4", "kind": "8", "two-tier/bound": "14.4f", "busiest port/bound": "18.4f"}
    row = columns(formats | {"phases": "7", "seconds": "8.4f"}, "")
    for nodes in NODES:
        gpus = nodes * GPUS_PER_NODE
        rate, node = np.full(gpus, BANDWIDTH), np.repeat(np.arange(nodes), GPUS_PER_NODE)
        network = Network(rate, rate, np.full(gpus, LINK_BANDWIDTH), node, 0.0, np.zeros(gpus))
        for kind in KINDS:
            traffic = instance(gpus, kind)
            result = two_tier(traffic, network)
            ratios = result.objective / result.bound, network.bound(traffic) / result.bound
            row(gpus, kind, *ratios, result.solution.phases, result.runtime)


if __name__ == "__main__":
    main()

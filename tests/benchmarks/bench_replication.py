"""Time and balancedness of replication: `python -m tests.benchmarks.bench_replication`."""

import numpy as np

from engine.formats import read_workload
from engine.placement.replication import ReplicationInstance, balancedness, replicate
from engine.placement.replication.eplb import eplb
from engine.result import Limits
from tests.benchmarks.shared import DATA, columns, timed

LOADS = DATA / "deepseek-r1-loads"
SLOTS, GPUS = 288, 32
WAYS = (("eplb", "equal"), ("best", "equal"), ("eplb", "free"), ("best", "free"))


def zipf(experts: int, layers: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, experts + 1)
    return np.stack([rng.permutation(popularity * rng.uniform(0.7, 1.3, experts)) for _ in range(layers)])


def main() -> None:
    """Made-up loads, and those of DeepSeek-R1 where they are here."""
    formats = {"load": "28", "": "5", "split": "5", "least": "6.4f", "mean": "6.4f", "gap of max / mean": "17.4f"}
    row = columns(formats | {"seconds": "7.3f", "status": "9"}, "balancedness over layers")
    cases = [
        (f"40 Zipf layers, {experts} on {gpus}", zipf(experts, 40, seed=0), gpus * slots, gpus)
        for experts, gpus, slots in ((16, 16, 2), (16, 16, 4), (64, 16, 5), (256, 64, 5))
    ]
    cases += [(path.stem, read_workload(path).load, SLOTS, GPUS) for path in sorted(LOADS.glob("*.json"))]
    for name, load, slots, gpus in cases:
        for algorithm, split in WAYS:
            instance = ReplicationInstance(load[None], slots, gpus, split)
            result = replicate(instance, Limits(exact=False), algorithm=algorithm)
            balance = balancedness(result.solution, instance)
            gap = result.bound / result.objective - 1
            row(name, algorithm, split, balance.min(), balance.mean(), gap, result.runtime, result.status)
        print(f"{name:28} EPLB's algorithm alone, without scoring: {timed(eplb, load, slots, gpus)[1]:.4f} s")


if __name__ == "__main__":
    main()

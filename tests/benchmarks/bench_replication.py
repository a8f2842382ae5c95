"""Time and balancedness of replication, and the worth of plans on other workloads:
`python -m tests.benchmarks.bench_replication`."""

import numpy as np

from engine.formats import read_workload
from engine.network import Network
from engine.placement.migration import moved, transfers
from engine.placement.replication import ReplicationInstance, balancedness, replicate
from engine.placement.replication.eplb import eplb
from engine.result import Limits
from tests.benchmarks.shared import DATA, columns, timed

LOADS = DATA / "deepseek-r1-loads"
SLOTS, GPUS, NODES = 288, 32, 4
EXPERT_BYTES = 44_040_192
"""One DeepSeek-R1 expert in FP8: three matrices of 7168 x 2048."""


def zipf(experts: int, layers: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, experts + 1)
    return np.stack([rng.permutation(popularity * rng.uniform(0.7, 1.3, experts)) for _ in range(layers)])


def synthetic() -> None:
    print("synthetic, 40 Zipf layers: mean over layers of max / mean, and seconds")
    for experts, gpus, slots_of_gpu in ((16, 16, 2), (16, 16, 4), (64, 16, 5), (256, 64, 5)):
        loads = zipf(experts, 40, seed=0)[None]
        row = []
        for algorithm, split in (("eplb", "equal"), ("best", "equal"), ("eplb", "free"), ("best", "free")):
            instance = ReplicationInstance(loads, gpus * slots_of_gpu, gpus, split)
            result = replicate(instance, Limits(exact=False), algorithm=algorithm)
            ratio = (1 / balancedness(result.solution, instance)).mean()
            row.append(f"{algorithm} {split} {ratio:.4f} {result.runtime:.3f} s")
        print(f"  {experts:3} on {gpus:2}, {slots_of_gpu} slots: " + ", ".join(row), flush=True)


def recorded(loads: dict[str, np.ndarray]) -> None:
    formats = {"balancedness over layers": "22", "": "10", "split": "5", "least": "6.4f", "mean": "6.4f"}
    formats |= {"gap of max / mean": "17.4f", "seconds": "7.3f", "status": "9"}
    row = columns(formats, f"DeepSeek-R1, {SLOTS} slots on {GPUS} GPUs")
    for name, load in loads.items():
        for algorithm, split in (("eplb", "equal"), ("best", "equal"), ("best", "free")):
            instance = ReplicationInstance(load[None], SLOTS, GPUS, split)
            result = replicate(instance, algorithm=algorithm)
            mean = balancedness(result.solution, instance).mean()
            gap = result.bound / result.objective - 1
            row(name, algorithm, split, result.objective, mean, gap, result.runtime, result.status)
        print(f"{name:22} EPLB's algorithm alone, without scoring: {timed(eplb, load, SLOTS, GPUS)[1]:.4f} s")


def elsewhere(loads: dict[str, np.ndarray]) -> None:
    """Plans scored on every workload, the ones they were made from and the others."""
    every = np.stack(list(loads.values()))
    scored = ReplicationInstance(every, SLOTS, GPUS)
    sources = [(name, load[None]) for name, load in loads.items()] + [("all", every)]
    sources += [(f"all but {name}", np.delete(every, index, axis=0)) for index, name in enumerate(loads)]
    print("planned on (rows), scored on (columns): mean / least balancedness over layers")
    print(" " * 36 + "  ".join(f"{name[:14]:>14}" for name in loads))
    for name, source in sources:
        for algorithm in ("eplb", "best"):
            result = replicate(ReplicationInstance(source, SLOTS, GPUS), algorithm=algorithm)
            balance = balancedness(result.solution, scored)
            cells = "  ".join(f"{row.mean():.3f} / {row.min():.3f}".rjust(14) for row in balance)
            print(f"  {name:28} {algorithm:4} {cells}  {result.runtime:.2f} s", flush=True)


def migration(loads: dict[str, np.ndarray]) -> None:
    names = list(loads)[:2]
    held = []
    for name in names:
        placed = replicate(ReplicationInstance(loads[name][None], SLOTS, GPUS)).solution
        here = np.zeros((*loads[name].shape, GPUS), dtype=bool)
        here[np.arange(len(placed))[:, None], placed, np.arange(SLOTS) // (SLOTS // GPUS)] = True
        held.append(here)
    rate = np.full(GPUS, 50e9)
    node = np.repeat(np.arange(NODES), GPUS // NODES)
    network = Network(rate, rate, 9 * rate, node, 5e-6, np.full(GPUS, 2e-6))
    print(f"from the plan of {names[0]} to that of {names[1]}: copies, seconds, gap, seconds to compute")
    sent, took = timed(transfers, *held, EXPERT_BYTES, network)
    print(f"  {moved(*held).sum():6} {sent.seconds:.4f} {sent.seconds / sent.bound - 1:.1e} {took:.3f} s")


def main() -> None:
    synthetic()
    if not LOADS.is_dir():
        print("the recorded loads are not here: the rest is left out")
        return
    loads = {path.stem: read_workload(path).load for path in sorted(LOADS.glob("*.json"))}
    recorded(loads)
    elsewhere(loads)
    migration(loads)


if __name__ == "__main__":
    main()

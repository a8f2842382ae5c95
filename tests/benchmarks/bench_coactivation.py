"""Experts that fire together on one GPU or node: `python -m tests.benchmarks.bench_coactivation [RECORDING.npz] [SECONDS]`.

The recording has routing int[token, layer, choice] under the name of each task (DeepSeek-V2-Lite: 26 layers, top-6 of 64). A
plan is made on the first half of a task's tokens and scored on the second, on 8 GPUs and on 4 nodes of 2: its savings
against contiguous blocks of experts, in rows and in rows into the busiest GPU (node), with the load of the most loaded GPU /
mean, all in the mean over layers, for the worst of three seeds. SECONDS: of work on one core for a plan of all layers, all of
it search (default 3); the clock does not end it, so that a busy machine changes no figure, and the seconds shown are those of
the processor. The gap is of one plan more, with three times the work, a good part of it for the bound. Rows are
counted as they are sent, where token t comes from GPU t mod 8.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.placement.coactivation import CoactivationInstance, coactivation, served, with_copies
from engine.result import Limits
from tests.benchmarks.shared import V2_LITE, columns

GPUS, SEEDS = 8, (0, 1, 2)
PORT_WEIGHT, PATIENCE = 0.3, 30


def hosts_of(instance: CoactivationInstance, gpu_of_expert: np.ndarray) -> list[np.ndarray]:
    """The GPU int[token, choice] that serves each choice, layer by layer."""
    return [place[experts] for place, experts in zip(gpu_of_expert, instance.experts, strict=True)]


def rows_into(instance: CoactivationInstance, hosts: list[np.ndarray]) -> np.ndarray:
    """Rows into every GPU (node) from others: int64[layer, group]."""
    visited = np.zeros((len(hosts), len(hosts[0]), instance.groups + 1), dtype=bool)
    np.put_along_axis(visited, np.array(hosts) // instance.group_size, True, axis=2)
    visited[:, np.arange(len(hosts[0])), instance.home_group] = False
    return visited[:, :, : instance.groups].sum(axis=1)


def saved(instance: CoactivationInstance, hosts: list[np.ndarray]) -> tuple[float, float, float]:
    """(rows saved, busiest port saved, load max / mean) against contiguous blocks, shares."""
    blocks = np.arange(instance.expert_count) // (instance.expert_count // instance.gpus)
    ours, usual = rows_into(instance, hosts), rows_into(instance, hosts_of(instance, np.tile(blocks, (instance.layers, 1))))
    loads = [np.bincount(gpu.ravel(), minlength=instance.gpus) for gpu in hosts]
    busiest = 1 - ours.max(axis=1).sum() / usual.max(axis=1).sum()
    return 1 - ours.sum() / usual.sum(), busiest, float(np.mean([load.max() / load.mean() for load in loads]))


def recorded(path: Path, seconds: float) -> None:
    formats = {"task, travel": "34", "cap": "4", "port": "5", "rows saved": "11.1%", "busiest": "8.1%"}
    row = columns(formats | {"load": "6.2f", "in sample": "10.1%", "seconds": "8.1f", "gap": "6.1%"})
    with np.load(path) as archive:
        tasks = {name: archive[name].astype(np.int16).transpose(1, 0, 2) for name in archive.files}
    for name, experts in tasks.items():
        for travel, per_node in (("gpu", None), ("node", 2)):
            for cap, port_weight in ((None, 0.0), (1.1, 0.0), (1.1, PORT_WEIGHT)):
                for label, *figures in compare(experts, (GPUS, per_node, travel, cap), port_weight, seconds):
                    row(label or f"{name}, {travel}", cap or "-", port_weight, *figures)


def compare(experts: np.ndarray, shape: tuple, port_weight: float, seconds: float) -> Iterator[tuple[str, ...]]:
    """The figures of plans of three seeds for the first half of the tokens, scored on the second; with a weight of the busiest
    port also those with a spare slot."""
    half = experts.shape[1] // 2
    source = np.arange(experts.shape[1]) % GPUS
    plan_on = CoactivationInstance(experts[:, :half], source[:half], *shape, 64)
    score_on = CoactivationInstance(experts[:, half:], source[half:], *shape[:3], None, 64)
    held_out, in_sample, longest = [], [], 0.0
    for seed in SEEDS:
        start = time.process_time()
        result = coactivation(
            plan_on, Limits(seconds, wall=PATIENCE * seconds, seed=seed, exact=False), port_weight=port_weight
        )
        longest = max(longest, time.process_time() - start)
        held_out.append(saved(score_on, hosts_of(score_on, result.solution)))
        in_sample.append(saved(plan_on, hosts_of(plan_on, result.solution))[0])
    proven = coactivation(plan_on, Limits(3 * seconds, wall=3 * PATIENCE * seconds), port_weight=port_weight)
    yield "", *min(held_out), min(in_sample), longest, proven.gap
    if port_weight:
        holds = with_copies(plan_on, result.solution, 1)
        hosts = [served(score_on, layer, holds[layer])[0] for layer in range(score_on.layers)]
        yield "  with one spare slot per GPU", *saved(score_on, hosts), "", "", ""


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else V2_LITE
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 3.0
    instance = CoactivationInstance(np.zeros((1, 1, 1), dtype=np.int16), np.zeros(1, dtype=np.int64), 2)
    coactivation(instance)  # compiled code is loaded before the clock starts
    recorded(path, seconds)


if __name__ == "__main__":
    main()

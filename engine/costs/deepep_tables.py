"""DeepEP's exchanges as they were measured, from the package aiconfigurator-core, by the bytes of their busiest port.

What is known of the tables (`wideep_deepep_normal_perf`, `wideep_deepep_ll_perf` of SGLang 0.5.6): nodes of eight GPUs;
tokens per GPU; times in µs, of the normal kernels for several numbers of SMs (the best counts) and apart from "notify", in
which GPUs wait for each other. Those of H100 and H200 are the same numbers: one measurement. Rows are not recorded, but how
DeepEP's own benchmark routes is public (tests/test_internode.py and test_low_latency.py): random scores, 8 of 256 experts; with
the normal kernels of at most four nodes, those with the highest scores.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd

from engine.costs.silicon_tables import newest
from engine.model import MoEModel
from engine.plan import Travel, TravelUnit

GPUS_PER_NODE = 8
WIDTH, EXPERTS, EXPERTS_PER_TOKEN, MOST_NODES_PER_TOKEN = 7168, 256, 8, 4
MICROSECONDS = 1e-6
FILES: dict[TravelUnit, tuple[str, dict[str, str]]] = {
    "node": (
        "wideep_deepep_normal_perf.parquet",
        {"dispatch": "dispatch_transmit_us", "combine": "combine_transmit_us"},
    ),
    "copies": ("wideep_deepep_ll_perf.parquet", {"dispatch": "dispatch_avg_t_us", "combine": "combine_avg_t_us"}),
}
"""By what gets a row of a token: the normal kernels and those for low latency."""
SAMPLED_TOKENS = 20_000


class Exchange(NamedTuple):
    """One series of measurements. unit, kind: as of `Network.carrying`; tokens: float64[point] a GPU, ascending; size:
    float64[point] bytes of the busiest port, to the fabric or with one node to its links; seconds: float64[point]"""

    unit: TravelUnit
    kind: str
    nodes: int
    tokens: np.ndarray
    size: np.ndarray
    seconds: np.ndarray


def travel_of(unit: TravelUnit) -> Travel:
    """How tokens travelled in the measurements."""
    return Travel(unit=unit, dispatch="fp8", combine="bf16")


@lru_cache
def measured_exchanges(folder: str) -> tuple[Exchange, ...]:
    """All series of a machine; empty where it has none over several nodes. Raises InputError when the package is absent."""
    series = []
    for unit, (name, columns) in FILES.items():
        model = benchmark_model()
        row_bytes = dict(zip(columns, travel_of(unit).row_bytes(model), strict=True))
        for file in newest(folder, "comm/sglang", name):
            table = pd.read_parquet(file)
            wide = (table.hidden_size == WIDTH) & (table.num_topk == EXPERTS_PER_TOKEN) & (table.num_experts == EXPERTS)
            if (table := table[wide]).node_num.nunique() < 2:
                continue
            for kind, column in columns.items():
                for nodes, points in table.groupby("node_num"):
                    best = points.groupby("num_token")[column].min()
                    tokens = best.index.to_numpy(np.float64)
                    size = tokens * rows_of_token(int(nodes), unit) * row_bytes[kind]
                    series.append(Exchange(unit, kind, int(nodes), tokens, size, best.to_numpy() * MICROSECONDS))
            break
    return tuple(series)


@lru_cache
def rows_of_token(nodes: int, unit: TravelUnit) -> float:
    """Rows that a token of DeepEP's benchmark sends over its GPU's port to the fabric, or with one node over its links, in
    the mean of many tokens."""
    chosen = benchmark_experts(nodes, unit)
    gpu = chosen // (EXPERTS // (nodes * GPUS_PER_NODE))
    # All GPUs are alike: the sender is the first.
    places = gpu if nodes == 1 else gpu // GPUS_PER_NODE
    away = np.sort(np.where(places > 0, places, 0), axis=1)
    if unit == "copies":
        return float((away > 0).sum(axis=1).mean())
    first = np.diff(away, axis=1, prepend=0) > 0
    return float(first.sum(axis=1).mean())


def benchmark_experts(nodes: int, unit: TravelUnit) -> np.ndarray:
    """int64[token, k]: the experts of tokens that are routed as DeepEP's benchmarks do."""
    scores = np.abs(np.random.default_rng(0).standard_normal((SAMPLED_TOKENS, EXPERTS))) + 1
    if unit == "node" and nodes > MOST_NODES_PER_TOKEN:
        groups = scores.reshape(SAMPLED_TOKENS, nodes, -1)
        best = np.argsort(-groups.max(axis=2), axis=1)[:, :MOST_NODES_PER_TOKEN]
        allowed = np.zeros((SAMPLED_TOKENS, nodes), dtype=bool)
        np.put_along_axis(allowed, best, True, axis=1)
        scores = np.where(allowed[:, :, None], groups, 0.0).reshape(SAMPLED_TOKENS, EXPERTS)
    return np.argpartition(-scores, EXPERTS_PER_TOKEN, axis=1)[:, :EXPERTS_PER_TOKEN]


def benchmark_model() -> MoEModel:
    """What of a model the benchmarks have."""
    return MoEModel(
        name="DeepEP's benchmark",
        layers=1,
        experts=EXPERTS,
        experts_per_token=EXPERTS_PER_TOKEN,
        d_model=WIDTH,
        d_ff=2048,
    )

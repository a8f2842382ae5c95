"""The paper's reading of traffic, to be tried in place of ours: a GPU's tokens go with its expert, and are as many.

Our systems place experts under tokens that stay where they are, as many on each GPU. In the paper the sends and receives of a
GPU are one pair of numbers that goes where its expert goes (§5.1, §6.2), and its proofs hold where both are alike (Case I).
So here every GPU holds as many tokens as its expert is chosen by, their experts drawn by popularity alone, and a placement
moves both. Aurora's placement is then Theorem 5.1's for one model, and the best matching of bytes for two.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from engine.catalogue import cluster_presets
from engine.placement.baselines import random_assignment, sorted_assignment
from engine.placement.colocation import colocate_heterogeneous, pair_weight
from engine.problem import Problem
from engine.reproduce.aurora.setting import PRESETS, alone, together
from engine.result import Provenance, never
from engine.simulate import simulate
from engine.systems.aurora_colocated import best_orders
from engine.systems.base import silent
from engine.systems.baselines import in_order
from engine.systems.pieces import best_order, to_placement
from engine.timeline import Timeline
from engine.workload import RoutingTrace, TrafficMatrix

TOKEN = 768 * 2.0
"""Bytes of one: 768 numbers of 16 bits."""
Rows = Sequence[np.ndarray]
"""int64[expert] of each model: the GPU of the expert and of its tokens."""
Traces = Sequence[RoutingTrace]
"""One layer of each model; of several that each model's traffic is the mean of, see `follow`."""


def aurora_rows(traces: Traces, cluster: str) -> Rows:
    """Aurora's placement."""
    rate = cluster_presets()[cluster].cluster.values("send_bandwidth")
    if len(traces) == 1:
        return (sorted_assignment(traces[0].load[0], rate, np.ones(len(rate), dtype=np.int64)),)
    both = []
    for trace in traces:
        away = _tokens([trace]) * ~np.eye(len(rate), dtype=bool)
        both += [away.sum(axis=1), away.sum(axis=0)]
    chosen = colocate_heterogeneous(pair_weight(*both)[None] / rate[:, None, None]).solution
    return tuple(np.argsort(chosen[:, model]) for model in (0, 1))


def random_rows(traces: Traces, seed: int) -> Rows:
    """Random GPUs for the experts of each model."""
    experts = traces[0].num_experts
    slots = np.ones(experts, dtype=np.int64)
    return tuple(random_assignment(experts, slots, 2 * seed + model) for model in range(len(traces)))


def packed_rows(traces: Traces, seed: int | None) -> Rows:
    """Lina's packing: the most popular expert of a model with its least popular. seed: of random GPUs; None: every second"""
    gpus = np.arange(traces[0].num_experts)
    ranked = gpus if seed is None else np.random.default_rng(seed).permutation(gpus)
    rows = []
    for trace, mine in zip(traces, (ranked[0::2], ranked[1::2]), strict=True):
        row = np.empty(len(gpus), dtype=np.int64)
        row[np.argsort(-trace.load[0], kind="stable")] = np.r_[mine, mine[::-1]]
        rows.append(row)
    return rows


def follow(
    traces: Traces,
    cluster: str,
    rows: Rows,
    order: Literal["best", "matched", "sjf"],
    served: Sequence[Sequence[RoutingTrace]] | None = None,
) -> Timeline:
    """The timeline with experts and their tokens there, in an order as Aurora's ("best") or a baseline's.

    traces: for which the order is made
    served: of each model the layers whose mean is then served; None: those of `traces`
    """
    planned = _problem([[trace] for trace in traces], cluster, rows)
    sides = [planned] if planned.second is None else [planned, planned.second]
    placements = [to_placement(row[None], side) for row, side in zip(rows, sides, strict=True)]
    if order != "best":
        plan = in_order(placements, planned, never, order).plan("followed", Provenance(optimiser=""))
    elif len(sides) == 1:
        plan = best_order(placements[0], planned, "best", never, silent).plan
    else:
        plan = best_orders(placements, planned, "best", never, silent).plan
    return simulate(plan, planned if served is None else _problem(served, cluster, rows))


def _tokens(layers: Sequence[RoutingTrace]) -> np.ndarray:
    """float64[expert whose GPU holds them, expert that they choose]: tokens, the mean of these layers."""
    loads = [trace.load[0] for trace in layers]
    return np.mean([np.outer(load, load) / load.sum() for load in loads], axis=0)


def _problem(served: Sequence[Sequence[RoutingTrace]], cluster: str, rows: Rows) -> Problem:
    """One model or two, with tokens where the rows have them."""
    workloads = []
    for layers, row in zip(served, rows, strict=True):
        held = np.zeros((1, len(row), len(row)))
        np.add.at(held[0], row, _tokens(layers))
        workloads.append(TrafficMatrix(f"{layers[0].name}, tokens with their experts", held * TOKEN, TOKEN))
    return alone(workloads[0], cluster, next(iter(PRESETS))) if len(workloads) == 1 else together(*workloads, cluster)

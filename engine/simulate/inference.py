"""Inference of MoE layers: gate → dispatch → expert FFN → combine → aggregate, layer after layer.

Every step waits until all GPUs have finished the one before: computation and communication do not overlap (Aurora §2.2,
equation 3). Only the MoE part of a layer is simulated; attention, dense layers and shared experts cost every plan the
same and are left out.
"""

import numpy as np
import pandas as pd

from engine.plan import Placement, Plan
from engine.problem import Problem
from engine.simulate.network import Flows, all_to_all
from engine.timeline import COLUMNS, KINDS, STREAMS, Timeline


def simulate(plan: Plan, problem: Problem) -> Timeline:
    """The predicted timeline of a plan. Raises InputError when the plan does not fit the problem."""
    problem.check_plan(plan)
    order, traffic = plan.send_order, problem.traffic(plan.placement)
    compute = compute_seconds(plan.placement, problem)
    log = EventLog()
    now = 0.0
    for layer in range(problem.workload.layers):
        scheduled = order.mode != "concurrent"
        dispatch = all_to_all(order.mode, order.dispatch[layer] if scheduled else None, traffic[layer], problem.network)
        combine = all_to_all(order.mode, order.combine[layer] if scheduled else None, traffic[layer].T, problem.network)
        now = log.compute("gate", layer, compute["gate"][layer], now)
        now = log.network("dispatch", layer, dispatch, now)
        now = log.compute("ffn", layer, compute["ffn"][layer], now)
        now = log.network("combine", layer, combine, now)
        now = log.compute("aggregate", layer, compute["aggregate"][layer], now)
    return Timeline(log.frame(), problem.cluster.gpu_names, "simulated", problem.cost.source)


def compute_seconds(placement: Placement, problem: Problem) -> dict[str, np.ndarray]:
    """float64[layer, gpu] seconds of `gate`, `ffn` and `aggregate` under a placement."""
    cost, model = problem.cost, problem.model
    tokens = np.einsum("lre,leg->lge", problem.demand, placement.share)
    held = problem.tokens_of_rank
    seconds = {kind: np.empty(held.shape) for kind in ("gate", "ffn", "aggregate")}
    for rank, gpu in enumerate(problem.cluster.gpus):
        seconds["gate"][:, rank] = cost.gate(gpu, held[:, rank], model)
        seconds["ffn"][:, rank] = cost.expert_ffn(gpu, tokens[:, rank, :], model).sum(axis=1)
        seconds["aggregate"][:, rank] = cost.aggregate(gpu, held[:, rank], model)
    return {kind: cost.together(step) for kind, step in seconds.items()}


def bound_of_layers(placement: Placement, problem: Problem) -> np.ndarray:
    """float64[layer]: seconds below which no send order can bring this placement: the steps' own maxima, with every
    all-to-all at the time of its busiest port and one start-up."""
    compute = sum(step.max(axis=1) for step in compute_seconds(placement, problem).values())
    network = [problem.network.bound(one) + problem.network.bound(one.T) for one in problem.traffic(placement)]
    return compute + np.array(network)


def bound_of_placement(placement: Placement, problem: Problem) -> float:
    """The bound of all layers together, see `bound_of_layers`."""
    return float(bound_of_layers(placement, problem).sum())


class EventLog:
    """Collects events as columns; every method returns when its step is over on all GPUs."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def compute(self, kind: str, layer: int, seconds: np.ndarray, now: float) -> float:
        """A computation on every GPU. seconds: float64[gpu]."""
        gpu = np.flatnonzero(seconds > 0)
        nobody, nothing = np.full(len(gpu), -1), np.zeros(len(gpu))
        self._add("compute", kind, layer, gpu, np.full(len(gpu), now), now + seconds[gpu], nobody, nothing)
        return now + float(seconds.max())

    def network(self, kind: str, layer: int, flows: Flows, now: float) -> float:
        """The sends of an all-to-all, on the lane of their sender."""
        self._add("network", kind, layer, flows.src, now + flows.start, now + flows.end, flows.dst, flows.bytes)
        return now + flows.seconds

    def _add(self, stream: str, kind: str, layer: int, resource, start, end, peer, size) -> None:
        count = len(resource)
        self._parts.append(
            {
                "resource": resource, "stream": np.full(count, STREAMS.index(stream)), "start": start, "end": end,
                "kind": np.full(count, KINDS.index(kind)), "layer": np.full(count, layer), "peer": peer, "bytes": size,
            }
        )  # fmt: skip

    def frame(self) -> pd.DataFrame:
        """All events, with the columns of `Timeline.events`."""
        columns = {name: np.concatenate([part[name] for part in self._parts]) for name in COLUMNS}
        columns["stream"] = pd.Categorical.from_codes(columns["stream"], categories=list(STREAMS))
        columns["kind"] = pd.Categorical.from_codes(columns["kind"], categories=list(KINDS))
        return pd.DataFrame(columns)

"""Two colocated models: while one computes, the other sends (Aurora §6.1, figure 7 and table 2), GPU by GPU.

Every GPU computes one thing at a time, in the order of table 2: the gate of a for the first layer, then in every layer
the gate of b, the experts of a, the experts of b, the aggregation of a, that of b, and the gate of a for the next layer.
The all-to-alls of both models share one network and may overlap, each in an order of its own, or all in one (a joint order).
An all-to-all starts when every GPU has finished its input, and the next computation waits until it has ended everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from engine.network import Network
from engine.plan import Plan, SendOrder
from engine.result import Advance, Stop, never, unwatched
from engine.simulate.events import EventLog, too_many
from engine.simulate.fabric import Fabric, Lockstep
from engine.simulate.work import Load, Work
from engine.timeline import Timeline

Compute = Mapping[str, NDArray[np.float64]]
"""float64[layer, gpu] seconds of `gate`, `ffn` and `aggregate` of one model."""

Traffic = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Dispatch and combine of one model, float64[layer, src, dst] bytes each, diagonals ignored."""


InTurn = frozenset[tuple[str, int]]
"""All-to-alls, as ("dispatch" or "combine", 0 or 1 for model a or b), that do not start before the one before them has ended:
the dispatch of b behind that of a, then the combine of a, then that of b."""


def simulate_colocated(
    plan: Plan, loads: tuple[Load, ...], stop: Stop = never, advance: Advance = unwatched, in_turn: InTurn = frozenset()
) -> Timeline:
    """The predicted timeline of a plan for two models, which must fit the problem.

    loads: see `loads_of`
    in_turn: all-to-alls that wait for the one before them; default: all-to-alls that meet overlap
    """
    works, problem = [load.work for load in loads], loads[0].problem
    orders = plan.send_order, plan.send_order_b
    log = EventLog(problem.network, too_many(*(traffic for work in works for traffic in (work.dispatch, work.combine))))
    watched = {"stop": stop, "advance": advance}
    colocated_timeline(*_compute_and_traffic(*works), *orders, problem.network, log, in_turn=in_turn, **watched)
    return log.timeline(problem, plan.travel)


def sends_of_colocated(plan: Plan, loads: tuple[Load, ...], before: Timeline, first: int, last: int) -> pd.DataFrame:
    """The events of layers first … last with every send, columns as in `Timeline.events`.

    loads: see `loads_of`
    before: the layers before them
    """
    works, network = [load.work for load in loads], loads[0].problem.network
    orders = plan.send_order, plan.send_order_b
    # float64[gpu]: seconds at which every GPU is free after whole layers: the end of its own last computation, but not before
    # the inputs of the aggregations of a and b, which end a layer also on a GPU that has nothing to aggregate
    events = before.events
    feeds = events["kind"] != "aggregate"
    lane = np.full(len(before.resources), events.loc[feeds, "end"].max() if feeds.any() else 0.0)
    own = events[events["stream"] == "compute"]
    np.maximum.at(lane, own["resource"].to_numpy(), own["end"].to_numpy())
    stretch = range(first, last + 1), lane
    return colocated_timeline(*_compute_and_traffic(*works), *orders, network, EventLog(), *stretch)


def bound_of_colocated(loads: tuple[Load, ...], first: int, last: int) -> float:
    """Seconds below which no send orders can bring the placements of a plan for two models in layers first … last, both
    included."""
    works = (load.work.stretch(first, last) for load in loads)
    return colocated_bound(*_compute_and_traffic(*works), loads[0].problem.network)


def _compute_and_traffic(a: Work, b: Work) -> tuple[Compute, Compute, Traffic, Traffic]:
    return a.compute, b.compute, (a.dispatch, a.combine), (b.dispatch, b.combine)


def colocated_timeline(
    compute_a: Compute,
    compute_b: Compute,
    traffic_a: Traffic,
    traffic_b: Traffic,
    order_a: SendOrder,
    order_b: SendOrder,
    network: Network,
    log: EventLog | None = None,
    stretch: range | None = None,
    free: NDArray[np.float64] | None = None,
    stop: Stop = never,
    advance: Advance = unwatched,
    in_turn: InTurn = frozenset(),
) -> pd.DataFrame:
    """The events of two models on one cluster, with the columns of `Timeline.events`; `model` is 0 for a, 1 for b.

    Both models must have as many layers. Raises InputError as `Fabric` and its `release` do.

    log: collects the events
    stretch: the layers to simulate; None: all
    free: float64[gpu] seconds from which on GPUs are free; None: 0
    in_turn: see `simulate_colocated`
    """
    layers = _layers(compute_a, compute_b, traffic_a, traffic_b)
    compute, traffic, order = (compute_a, compute_b), (traffic_a, traffic_b), (order_a, order_b)
    fabric, log = Fabric(network), log or EventLog()
    lane = np.zeros(network.gpus) if free is None else free

    def run(kind: str, layer: int, model: int, ready: float) -> float:
        """Compute on every GPU, from when it is free, but not before `ready`; the end on the last GPU."""
        nonlocal lane
        seconds, start = compute[model][kind][layer], np.maximum(lane, ready)
        lane = start + seconds
        return log.compute(kind, layer, start, seconds, model)

    def send(kind: str, layer: int, model: int, start: float, before: str | None = None) -> str:
        """Release an all-to-all; its name on the fabric. before: that of the one before it in this layer"""
        if (kind, model) in in_turn:
            start = max(start, fabric.finish(before))
        name = f"{kind} of model {'ab'[model]} in layer {layer}"
        which, mine = ("dispatch", "combine").index(kind), order[model]
        schedule = None if mine.mode == "concurrent" else getattr(mine, kind)[layer]
        fabric.release(name, start, mine.mode, schedule, traffic[model][which][layer])
        return name

    def arrival(name: str, kind: str, layer: int, model: int) -> float:
        """Simulate until an all-to-all has ended; when that is."""
        end = fabric.finish(name)
        log.network(kind, layer, 0.0, fabric.flows(name), model)
        return end

    stretch = stretch or range(layers)
    for layer in stretch:
        if order_a.mode == "joint":  # its phases are counted through a layer, and no all-to-all outlives one
            fabric = Lockstep(network)
        fabric.hurry[:] = stop()
        # Every release comes before the network is simulated up to it: each of the four starts after computation that
        # follows all ends asked for so far.
        dispatch_a = send("dispatch", layer, 0, run("gate", layer, 0, 0.0))
        dispatch_b = send("dispatch", layer, 1, run("gate", layer, 1, 0.0), dispatch_a)
        ffn_a = run("ffn", layer, 0, arrival(dispatch_a, "dispatch", layer, 0))
        combine_a = send("combine", layer, 0, ffn_a, dispatch_b)
        ffn_b = run("ffn", layer, 1, arrival(dispatch_b, "dispatch", layer, 1))
        combine_b = send("combine", layer, 1, ffn_b, combine_a)
        run("aggregate", layer, 0, arrival(combine_a, "combine", layer, 0))
        run("aggregate", layer, 1, arrival(combine_b, "combine", layer, 1))
        advance((layer + 1 - stretch.start) / len(stretch))
    return log.frame()


def colocated_bound(compute_a: Compute, compute_b: Compute, traffic_a: Traffic, traffic_b: Traffic, network: Network) -> float:
    """Seconds below which no send orders of the two models can bring these placements. Arguments as above.

    The recursion of table 2, GPU by GPU, with lower bounds of all times. Why each term is one, on any network:

    * The order of computation is fixed. So a GPU's next computation starts no earlier than its last one ends, and an
      all-to-all no earlier than the latest GPU that feeds it. These maxima and sums grow with their arguments: lower
      bounds put in give a lower bound.
    * An all-to-all lasts as long as its busiest port needs for its bytes, and one start-up (`Network.bound`).
    * Table 2 lets the dispatch of b end at |N^a + N^b|, which supposes that the network serves a first. Another
      interleaving ends the dispatch of b earlier and that of a later. In any of them the later of the two ends lies no
      earlier: of the all-to-alls released from some moment on, the last to end does so after that moment, one start-up,
      and the busiest port's time for all their bytes. So such a joint term bounds only the step that waits for all its
      members: F^b for both dispatches, as it follows F^a on every GPU; A^a for these and the combine of a; A^b for all
      four.
    * Table 2 also lets the combine of a end at |N^a + N^b + C^a|, as if the network never idled before, though C^a
      cannot start before F^a ends on all GPUs. Its release time covers that, alone and in the joint terms.
    """
    layers = _layers(compute_a, compute_b, traffic_a, traffic_b)
    lane = np.zeros(network.gpus)
    for layer in range(layers):
        released: list[tuple[float, NDArray[np.float64]]] = []

        def run(kind: str, compute: Compute, ready: float, layer: int = layer) -> float:
            nonlocal lane
            lane = np.maximum(lane, ready) + compute[kind][layer]
            return float(lane.max())

        def send(traffic: Traffic, which: int, start: float, layer: int = layer, released: list = released) -> float:
            released.append((start, traffic[which][layer]))
            return start + network.bound(traffic[which][layer])

        def all_of(upto: int, released: list = released) -> float:
            """When the last of the first `upto` all-to-alls has ended at the earliest."""
            moments = [start for start, _ in released[:upto]]
            return max(
                moment + network.bound(sum(traffic for start, traffic in released[:upto] if start >= moment))
                for moment in moments
            )

        dispatched_a = send(traffic_a, 0, run("gate", compute_a, 0.0))
        dispatched_b = send(traffic_b, 0, run("gate", compute_b, 0.0))
        combined_a = send(traffic_a, 1, run("ffn", compute_a, dispatched_a))
        combined_b = send(traffic_b, 1, run("ffn", compute_b, max(dispatched_b, all_of(2))))
        run("aggregate", compute_a, max(combined_a, all_of(3)))
        run("aggregate", compute_b, max(combined_b, all_of(4)))
    return float(lane.max())


@dataclass(frozen=True)
class ExpertSeconds:
    """The seconds of one model on every GPU.

    gate, aggregate: float64[gpu]
    ffn: float64[gpu, expert], the expert's computation on that GPU
    send, receive: float64[gpu, expert], the expert's share of one all-to-all on that GPU
    """

    gate: NDArray[np.float64]
    aggregate: NDArray[np.float64]
    ffn: NDArray[np.float64]
    send: NDArray[np.float64]
    receive: NDArray[np.float64]


def layer_weight(a: ExpertSeconds, b: ExpertSeconds) -> NDArray[np.float64]:
    """float64[gpu, expert of a, expert of b] seconds of one layer on a GPU with these two experts, as if it were alone.

    Table 2 for one GPU, the cost of the 3-D matching of Aurora section 7. An all-to-all takes the longer of the GPU's
    sending and receiving, two that overlap the longer of both sums, and combines follow both dispatches. None starts
    before the computation that feeds it has ended, which table 2 itself leaves out.
    """
    alone_a, alone_b = _pair(np.maximum(a.send, a.receive), np.maximum(b.send, b.receive))
    (send_a, send_b), (receive_a, receive_b) = _pair(a.send, b.send), _pair(a.receive, b.receive)
    ffn_a, ffn_b = _pair(a.ffn, b.ffn)
    gate_a, gate_b, aggregate_a, aggregate_b = (
        np.asarray(step)[:, None, None] for step in (a.gate, b.gate, a.aggregate, b.aggregate)
    )
    together = np.maximum(send_a + send_b, receive_a + receive_b)
    end_ffn_a = np.maximum(gate_b, alone_a) + ffn_a
    combine_a = np.maximum(end_ffn_a, np.maximum(together, gate_b + alone_b))
    end_ffn_b = combine_a + ffn_b
    end_combine_a = combine_a + alone_a
    end_combine_b = np.maximum(combine_a + together, end_ffn_b + alone_b)
    end_aggregate_a = np.maximum(end_ffn_b, end_combine_a) + aggregate_a
    return np.maximum(end_aggregate_a, end_combine_b) + aggregate_b + gate_a


def _pair(of_a: NDArray[np.float64], of_b: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64[gpu, expert] each, made to meet as [gpu, expert of a, expert of b]."""
    return np.asarray(of_a)[:, :, None], np.asarray(of_b)[:, None, :]


def _layers(compute_a: Compute, compute_b: Compute, traffic_a: Traffic, traffic_b: Traffic) -> int:
    """The number of layers, the same for both models."""
    counts = {len(rows) for rows in (*compute_a.values(), *compute_b.values(), *traffic_a, *traffic_b)}
    assert len(counts) == 1, f"colocated models must have as many layers, not {sorted(counts)}"
    return counts.pop()

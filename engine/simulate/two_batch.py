"""Two-batch overlap: one model twice, each on half of a step's tokens, so that one batch computes while the other's tokens
travel (DeepSeek-V3 §3.4; SGLang's two-batch overlap).

Every GPU has a stream of computation and one of communication, and either takes turns: what comes before the dispatch (of the
first batch, then of the second), then the experts (first, second), and so on in the next layer; dispatches (first, second),
then combines. Unlike two models of one layer after another (`engine.simulate.colocated`) nobody waits for the combine of the
second batch but that batch itself, so it travels under the attention of the first; and exchanges never meet on the network. One
starts when every GPU has finished what feeds it, and what waits for it waits until it has ended everywhere.
"""

import numpy as np

from engine.network import Network
from engine.plan import SendOrder
from engine.result import Stop, never
from engine.simulate.events import EventLog
from engine.simulate.exchanges import exchanges
from engine.simulate.flows import Flows
from engine.simulate.inference import bounds_of_exchanges
from engine.simulate.work import Work

BATCHES = (0, 1)


def log_two_batches(
    log: EventLog, work: Work, beside: float, order: SendOrder, network: Network, stop: Stop = never
) -> None:
    """Log the MoE layers of both batches; `model` of an event is the batch.

    work: of one batch; beside: seconds that every GPU computes for one batch before the router of each layer (attention,
    normalisation, shared experts).
    """
    lane, sent, before = np.zeros(network.gpus), 0.0, np.full(network.gpus, beside)
    combined = [0.0, 0.0]

    def run(kind: str, layer: int, batch: int, seconds: np.ndarray, ready: float = 0.0) -> float:
        """Compute on every GPU, from when it is free, but not before `ready`; the end on the last GPU."""
        nonlocal lane
        start = np.maximum(lane, ready)
        lane = start + seconds
        return log.compute(kind, layer, start, seconds, batch)

    def send(kind: str, layer: int, batch: int, flows: Flows, ready: float) -> float:
        """Exchange once those before it have ended, but not before `ready`; the end on the last GPU."""
        nonlocal sent
        sent = log.network(kind, layer, max(sent, ready), flows, batch)
        return sent

    layers = range(len(work.dispatch))
    for layer, (dispatch, combine) in zip(layers, exchanges(work, order, network, layers, stop), strict=True):
        dispatched = []
        for batch in BATCHES:
            if layer:
                run("aggregate", layer - 1, batch, work.compute["aggregate"][layer - 1], combined[batch])
            run("dense", layer, batch, before)
            fed = run("gate", layer, batch, work.compute["gate"][layer])
            dispatched.append(send("dispatch", layer, batch, dispatch, fed))
        for batch in BATCHES:
            fed = run("ffn", layer, batch, work.compute["ffn"][layer], dispatched[batch])
            combined[batch] = send("combine", layer, batch, combine, fed)
    for batch in BATCHES:
        run("aggregate", layers[-1], batch, work.compute["aggregate"][-1], combined[batch])


def bound_of_two_batches(work: Work, beside: float, network: Network) -> float:
    """Seconds below which no send order brings both batches. Arguments as above.

    The longest of three: every GPU's own computation, which takes turns on it; one batch alone, whose steps wait for one
    another, each exchange at the time of its busiest port; and all exchanges of both, which take turns, after the first
    computation that feeds any.
    """
    steps = work.compute
    carried = sum(bounds_of_exchanges(work, network, kind, Network.relayed_bound) for kind in ("dispatch", "combine"))
    computed = 2 * (beside * len(work.dispatch) + sum(step.sum(axis=0) for step in steps.values()))
    fed = (beside + steps["gate"]).max(axis=1)
    alone = (fed + steps["ffn"].max(axis=1) + steps["aggregate"].max(axis=1) + carried).sum()
    return float(max(computed.max(), alone, fed[0] + 2 * carried.sum() + steps["aggregate"][-1].max()))

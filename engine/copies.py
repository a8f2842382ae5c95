"""Which copy of an expert serves each token: the copies in turn, or those with which it touches fewest GPUs or nodes."""

import numpy as np

from engine.communication.travel import Stops
from engine.plan import Placement, Travel


def serving_gpus(
    placement: Placement, layer: int, experts: np.ndarray, travel: Travel, source: np.ndarray, stops: Stops
) -> np.ndarray:
    """int64[token, k]: the GPU that serves every choice of a layer's tokens, -1 where there is none.

    experts: int[token, k], -1 = none; source: int[token], the GPU that a token is sent from; stops: the nodes, for tokens that
    travel node by node. Where all GPUs are in one node its rows are all alike, and GPUs are what is touched.
    """
    if travel.replicas is None or placement.single:
        return placement.hosts(layer, experts)
    # Here, because a rank whose tokens do not choose starts half a second sooner without what compiles it.
    from engine.placement.coactivation import chosen_copies

    group = stops.of_gpu if travel.unit == "node" and stops.count > 1 else np.arange(placement.gpus)
    return chosen_copies(experts, group[source], placement.share[layer] > 0, group)

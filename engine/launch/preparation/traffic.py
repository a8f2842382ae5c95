"""What the ranks of a launch will send."""

import numpy as np

from engine.communication.travel import Stops, rows_of_tokens
from engine.copies import serving_gpus
from engine.model import MoEModel
from engine.network import Network
from engine.plan import Placement, Travel
from engine.workload import RoutingTrace


def sent_bytes(
    trace: RoutingTrace, model: MoEModel, placement: Placement, travel: Travel | None, network: Network
) -> tuple[np.ndarray, np.ndarray]:
    """float64[layer, src, dst] bytes of the dispatches and of the combines of a model with vanilla execution. network: of the
    ranks"""
    travel, ranks = travel or Travel(), network.gpus
    if travel.unit == "copies":
        rows = trace.demand(ranks) @ placement.share
    else:
        source, stops = trace.rank_of_token(ranks), Stops(network.domain)
        hosts = (
            serving_gpus(placement, layer, trace.experts[:, layer], travel, source, stops)
            for layer in range(trace.layers)
        )
        rows = np.array([rows_of_tokens(of_layer, source, stops, travel.unit) for of_layer in hosts])
    out, back = travel.row_bytes(model)
    return rows * out, rows.transpose(0, 2, 1) * back

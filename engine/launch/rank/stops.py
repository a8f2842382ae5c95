"""All layers on one process, with the rounding of outputs that are summed up on their way back."""

import torch

from engine.launch.rank.layer import Weights, ffn, gate
from engine.launch.rank.wire import Wire
from engine.model import MoEModel


def reference_with_stops(
    model: MoEModel,
    weights: Weights,
    x: torch.Tensor,
    wires: tuple[Wire, Wire],
    experts: torch.Tensor,
    hosts: torch.Tensor,
    source: torch.Tensor,
    stop_of_rank: torch.Tensor,
) -> torch.Tensor:
    """As `layer.reference`, but what the experts of a rank make of a token is summed up and rounded, and so is what the ranks
    of another stop than the token's own make of it together. Nothing is sent, and every choice of a token counts once.

    wires: of dispatch and combine; experts: int64[token, layer, k]; hosts: int64[layer, token, k], the rank of each choice;
    source: int64[token]; stop_of_rank: int64[rank]
    """
    out, back = wires
    for layer in range(experts.shape[1]):
        chosen = experts[:, layer]
        normal, weight = gate(x, weights.router[layer], chosen)
        normal, total = out.rounded(normal), x.to(torch.float32, copy=True)
        for stop in stop_of_rank.unique().tolist():
            together = torch.zeros_like(total)
            for rank in torch.nonzero(stop_of_rank == stop).flatten().tolist():
                together += back.rounded(_of_rank(layer, normal, weight, chosen, hosts[layer] == rank, model, weights))
            foreign = (stop_of_rank[source] != stop)[:, None]
            total += torch.where(foreign, back.rounded(together), together)
        x = total.to(x.dtype)
    return x


def _of_rank(
    layer: int,
    normal: torch.Tensor,
    weight: torch.Tensor,
    chosen: torch.Tensor,
    here: torch.Tensor,
    model: MoEModel,
    weights: Weights,
) -> torch.Tensor:
    """float32[token, d_model]: the weighted outputs of the choices (bool[token, k]) of one rank."""
    total = torch.zeros(normal.shape, dtype=torch.float32, device=normal.device)
    for expert in chosen[here].unique().tolist():
        token, choice = torch.nonzero((chosen == expert) & here, as_tuple=True)
        out = ffn(normal[token], *weights.expert(layer, expert), model.ffn_matrices == 3)
        total.index_add_(0, token, out.float() * weight[token, choice].float()[:, None])
    return total

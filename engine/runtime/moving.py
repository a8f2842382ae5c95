"""A plan exchanged for another one while a model runs: between two steps the weights of experts move between ranks.

A rank gets every expert that it lacks whole, from the rank that `engine.placement.migration` chooses among those that have
it, so what moves is what a move is priced at. Layer goes after layer, and each rank goes on by itself: beyond the larger of
its two plans it never holds more than one layer's experts.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from engine.errors import InputError
from engine.placement.migration import transfers
from engine.plan import Placement, Plan
from engine.runtime.apply import say_not_followed
from engine.runtime.exchange.links import Links, Tiers
from engine.runtime.fit import check_fit
from engine.runtime.layer import PlannedExperts
from engine.runtime.layer_plan import LayerPlan, layer_plans
from engine.runtime.memory import check_memory
from engine.runtime.ranks import all_or_none, ranks_of


class Moved(NamedTuple):
    """Weights that the ranks have sent each other.

    copies: experts of a layer on a rank that did not have them
    bytes: of all of them
    seconds: from when all ranks were ready to send until all had what they need
    """

    copies: int
    bytes: int
    seconds: float


def exchange_plan(model: nn.Module, plan: Plan, *, tiers: Tiers | None = None) -> Moved:
    """Take a model under a plan to another one, with its answers and its cache of attention as they were. Every rank of the
    group calls it, between the same two steps. Parameters of experts are new tensors afterwards, without gradients.

    model: as returned by `apply_plan` or `load_planned`
    plan: of the same layers, experts and ranks
    tiers: as for `apply_plan`; also the rates of the ports, by which senders are chosen. Default: all ports are alike

    Raises InputError on all ranks, before anything has moved, if the plan is not one of this model and group or the weights do
    not fit. If a rank ends meanwhile, the others raise.
    """
    name = type(model).__name__
    layers = [module for module in model.modules() if isinstance(module, PlannedExperts)]
    layers.sort(key=lambda layer: layer.way.layer)
    if not layers:
        raise InputError(f"{name} runs under no plan yet: apply_plan or load_planned give it the first one")
    now, exchange = layers[0].way.placement, layers[0].exchange
    group, ranks, rank = ranks_of(exchange.group)
    device = next(layers[0].experts.parameters()).device
    with all_or_none(group, device, "taken the plan"):
        check_fit(plan, name, now.model_layers, [now.experts] * len(now.model_layers))
        ways = layer_plans(plan, ranks, rank, tiers)
    digest = int(plan.id[:12], 16)
    if int(exchange.sum(torch.tensor(digest, device=device))) != ranks * digest:
        raise InputError("the ranks were given different plans: all of them need the same one")
    size = np.array([sum(part.itemsize * part.shape[1:].numel() for part in layer.experts.parameters()) for layer in layers])
    check_memory(_peak(now, plan.placement, size), group, device)
    source = torch.zeros((now.layers, now.experts, ranks), dtype=torch.int64, device=device)
    if rank == 0:
        say_not_followed(plan)
        network = (Links(np.ones(ranks)) if tiers is None else tiers).network
        held = now.share > 0, plan.placement.share > 0
        source += torch.from_numpy(transfers(*held, float(size.mean()), network).source).to(device)
    source = exchange.sum(source).cpu().numpy()
    begin = time.perf_counter()
    try:
        with torch.inference_mode(False), torch.no_grad():
            sent = _move(layers, ways, source)
        total = int(exchange.sum(torch.tensor(sent, device=device)))
    except RuntimeError as error:
        raise InputError(f"the exchange of plans broke off, and {name} is under neither of the two: {error}") from None
    return Moved(int((source >= 0).sum()), total, time.perf_counter() - begin)


def _peak(now: Placement, new: Placement, size: np.ndarray) -> np.ndarray:
    """int64[rank]: most bytes at once on top of those in use. size: int64[layer] bytes of an expert"""
    before, after = (size[:, None] * (placement.share > 0).sum(axis=1) for placement in (now, new))
    return ((after - before).cumsum(axis=0) + before).max(axis=0)


def _move(layers: Sequence[PlannedExperts], ways: Sequence[LayerPlan], source: np.ndarray) -> int:
    """Give every layer the experts that it holds in another plan; returns the bytes that this rank has sent.

    source: int64[layer, expert, rank]; the rank that sends a copy, -1 where none is sent
    """
    most = max(sum(_bytes(old, way) for old in layer.experts.parameters()) for layer, way in zip(layers, ways, strict=True))
    on_way: deque[tuple[int, Callable[[], None]]] = deque()
    sent = under_way = 0

    def finish() -> None:
        """Wait for the first one; no name keeps its old tensor afterwards."""
        nonlocal under_way
        under_way -= on_way[0][0]
        on_way.popleft()[1]()

    for layer, way, senders in zip(layers, ways, source, strict=True):
        for name in [name for name, _ in layer.experts.named_parameters()]:
            size = _bytes(getattr(layer.experts, name), way)
            while on_way and under_way + size > most:
                finish()
            leaving, last = _begin(layer, way, senders, name)
            on_way.append((size, last))
            under_way, sent, last = under_way + size, sent + leaving, None
    while on_way:
        finish()
    for layer, way in zip(layers, ways, strict=True):
        layer.way = layer.exchange.way = way
    return sent


def _begin(layer: PlannedExperts, way: LayerPlan, senders: np.ndarray, name: str) -> tuple[int, Callable[[], None]]:
    """Begin to exchange a parameter of a layer's experts: the bytes that leave, and the function that waits for what comes and
    puts it in its place. senders: int64[expert, rank]"""
    held, new = ({expert: slot for slot, expert in enumerate(each.held)} for each in (layer.way, way))
    old = getattr(layer.experts, name)
    then = old.new_empty((len(new), *old.shape[1:]))
    leaves, comes = np.argwhere(senders == way.rank).tolist(), np.flatnonzero(senders[:, way.rank] >= 0).tolist()
    leaving = [(old[held[expert]][None], rank) for expert, rank in leaves]
    arrived = layer.exchange.pass_on(leaving, [(then[new[expert]][None], int(senders[expert, way.rank])) for expert in comes])
    for expert in held.keys() & new.keys():
        then[new[expert]].copy_(old[held[expert]])

    def finish() -> None:
        arrived()
        setattr(layer.experts, name, nn.Parameter(then, old.requires_grad))

    return sum(tensor.nbytes for tensor, _ in leaving), finish


def _bytes(old: torch.Tensor, way: LayerPlan) -> int:
    """The bytes of a parameter under the plan that comes."""
    return len(way.held) * old.itemsize * old.shape[1:].numel()

"""One MoE layer of a plan as a rank runs it: its experts, the copy that serves each choice, the order and travel of rows.

A live rank knows only its own tokens, so copies of an expert take turns over the tokens of each rank, as
`engine.runtime.exchange.routes.route` deals them. The rules "fewest" and "lp" are those of `engine.communication.travel`, over
the tokens of the rank, and for "lp" with the loads of all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from engine.communication.travel import Stops, serving_gpus
from engine.errors import InputError
from engine.network import Network
from engine.plan import OrderMode, Placement, Plan, Schedule, Travel
from engine.runtime.exchange.links import Tiers


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One layer of a plan on one rank.

    placement: of all layers; its GPUs are the ranks
    layer: MoE layer, from 0
    rank: this one
    mode: the order of sends; "joint" is none of one model
    dispatch, combine: the schedules of an order that has some
    travel: rows and number formats; the usual one sends a row a copy in the format of the tokens
    network: the nodes of the ranks and the rates of their ports, for two-tier orders and `node` travel
    degree: parts that the tokens are cut into, so that experts compute on one while another travels
    ahead: parts whose dispatch begins before the first combine does
    """

    placement: Placement
    layer: int
    rank: int
    mode: OrderMode = "concurrent"
    dispatch: Schedule | None = None
    combine: Schedule | None = None
    travel: Travel = field(default_factory=Travel)
    network: Network | None = None
    degree: int = 1
    ahead: int = 1

    @property
    def ranks(self) -> int:
        return self.placement.gpus

    @property
    def model_layer(self) -> int:
        """The number of the layer among all layers of the model."""
        return self.placement.model_layers[self.layer]

    @property
    def experts(self) -> int:
        """Logical experts of the layer."""
        return self.placement.experts

    @cached_property
    def experts_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The experts that every rank holds in the order of its slots; one in two slots of a rank is held once."""
        return tuple(tuple(dict.fromkeys(held)) for held in self.placement.experts_of_gpu[self.layer])

    @property
    def held(self) -> tuple[int, ...]:
        """The experts of this rank, in the order of the slots."""
        return self.experts_of_rank[self.rank]

    @cached_property
    def slots_of_rank(self) -> list[int]:
        """Slots of every rank; numbered rank after rank they are the slots that `slots` names."""
        return [len(held) for held in self.experts_of_rank]

    @cached_property
    def stops(self) -> Stops:
        """The nodes of the ranks; each is its own if none are known."""
        return Stops(np.arange(self.ranks) if self.network is None else self.network.domain)

    @cached_property
    def slot_at(self) -> np.ndarray:
        """int64[rank, expert]: the slot of an expert on a rank, -1 where it is not."""
        table = np.full((self.ranks, self.experts), -1)
        first = 0
        for rank, held in enumerate(self.experts_of_rank):
            table[rank, list(held)] = np.arange(first, first + len(held))
            first += len(held)
        return table

    def slots(self, chosen: torch.Tensor, loads: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """int64[token, k]: the slot that serves each choice of this rank's tokens, -1 where there is none. Raises InputError if
        a token chose an expert that the layer does not have.

        chosen: int64[token, k], -1 = none
        loads: sums up int64[expert] over all ranks
        """
        if chosen.numel():
            least, most = (int(bound) for bound in chosen.aminmax())
            if least < -1 or most >= self.experts:
                wrong = least if least < -1 else most
                raise InputError(
                    f"layer {self.model_layer}: a token chose expert {wrong}, and the plan knows 0 … {self.experts - 1}"
                )
        if self.travel.replicas in ("fewest", "lp") and not self.placement.single:
            return self._carefully(chosen, loads)
        flat = chosen.reshape(-1) + 1
        first, copies, fixed = self._tables(chosen.device)
        slot = first.index_select(0, flat)
        if fixed is not None:
            turn = _turns(flat, self.experts + 1) % copies.index_select(0, flat)
            in_turn = self._by_expert(chosen.device).index_select(0, (slot + turn).clamp(min=0))
            slot = torch.where(fixed.index_select(0, flat), slot, in_turn)
        return slot.view(chosen.shape)

    def _carefully(self, chosen: torch.Tensor, loads: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`slots` by a rule that looks at a token's other choices, or at the loads of the layer."""
        experts, source, load = chosen.cpu().numpy(), np.full(len(chosen), self.rank), None
        if self.travel.replicas == "lp":
            own = torch.bincount(chosen.reshape(-1) + 1, minlength=self.experts + 1)[1:]
            load = loads(own).cpu().numpy().astype(np.float64)
        hosts = serving_gpus(self.placement, self.layer, experts, self.travel, source, self.stops, load)
        return torch.from_numpy(np.where(hosts >= 0, self.slot_at[hosts, experts], -1)).to(chosen.device)

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """By expert + 1, on a device: the slot (int64) of an expert that has but one for this rank, else the first of its
        entries in `_by_expert`; its copies (int64); and where it has but one (bool), None if all have."""
        if device not in self._on_device:
            held = self.slot_at >= 0
            copies = held.sum(axis=0)
            near = np.where(copies == 1, held.argmax(axis=0), -1)
            if self.travel.replicas in ("nearest-static", "nearest-dynamic", "fixed") and not self.placement.single:
                from engine.placement.dispatch_rules import choices_of_ranks  # compiles, which the usual rule needs not

                near = choices_of_ranks(self.placement, self.travel, self.layer, copies.astype(np.float64))[0][self.rank]
            first = np.where(near >= 0, self.slot_at[near, np.arange(self.experts)], np.cumsum(copies) - copies)
            fixed = None if (near >= 0).all() else torch.from_numpy(np.r_[True, near >= 0]).to(device)
            first, copies = (torch.from_numpy(np.r_[fill, part]).to(device) for fill, part in ((-1, first), (1, copies)))
            self._on_device[device] = first, copies, fixed
        return self._on_device[device]

    def _by_expert(self, device: torch.device) -> torch.Tensor:
        """int64[copy]: the slots of all copies, expert by expert in the order of ranks."""
        key = "copies", device
        if key not in self._on_device:
            slots = self.slot_at.T
            self._on_device[key] = torch.from_numpy(slots[slots >= 0]).to(device)
        return self._on_device[key]

    @cached_property
    def _on_device(self) -> dict:
        return {}


def _turns(group: torch.Tensor, groups: int) -> torch.Tensor:
    """int64[entry]: how many entries of the same group (int64[entry]) come before each."""
    order = group.argsort(stable=True)
    counts = torch.bincount(group, minlength=groups)
    first = (counts.cumsum(0) - counts).index_select(0, group.index_select(0, order))
    return torch.empty_like(group).index_copy_(0, order, torch.arange(len(group), device=group.device) - first)


def layer_plans(plan: Plan, ranks: int, rank: int, tiers: Tiers | None = None) -> list[LayerPlan]:
    """The MoE layers of a plan (of its first model) on a rank, in order. Raises InputError if they cannot run on these ranks.

    ranks: of the process group; rank r is the plan's GPU r
    tiers: the nodes of the ranks, which two-tier orders and `node` travel need
    """
    placement, order, travel = plan.placement, plan.send_order.alone, plan.travel or Travel()
    if placement.gpus != ranks:
        raise InputError(f"the plan is for {placement.gpus} GPUs, and the process group has {ranks} ranks: start one a GPU")
    if tiers is None and (order.mode == "two-tier" or travel.unit == "node"):
        needs = "a two-tier order" if order.mode == "two-tier" else "tokens that travel once to every node"
        raise InputError(f"the plan has {needs}: say which ranks share a node")
    if tiers is not None and len(tiers.node) != ranks:
        raise InputError(f"the nodes of {len(tiers.node)} ranks are given, and there are {ranks}")
    if travel.unit == "node" and order.mode != "concurrent":
        raise InputError("rows that travel once to every node go as they come: the plan's order needs another travel")
    pipeline, network = plan.pipeline, None if tiers is None else tiers.network
    ways = []
    for layer in range(placement.layers):
        schedules = (None, None) if order.mode == "concurrent" else (order.dispatch[layer], order.combine[layer])
        degree = 1 if pipeline is None else pipeline.forward[layer]
        ahead = min(degree, 2) if pipeline is not None and pipeline.order == "interleaved" else degree
        ways.append(LayerPlan(placement, layer, rank, order.mode, *schedules, travel, network, degree, ahead))
    return ways

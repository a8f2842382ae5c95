"""Memory of the weights on every rank, predicted from a model without numbers, and the check that the machines have it."""

import platform
import zlib
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn

from engine.errors import InputError
from engine.plan import Placement
from engine.runtime.adapters.families import Family
from engine.runtime.exchange.recorder import communication_device
from engine.runtime.fit import WeightMemory, Weights
from engine.runtime.ranks import among_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GIB = 2.0**30
USABLE = 0.95
"""Usable share of the free memory, before any token is computed."""


def weights_of(model: nn.Module, adapter: Family) -> Weights:
    """The sizes of a model's weights. model: with all experts in its blocks, on any device, the "meta" one too"""
    blocks = adapter.blocks(model)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}  # tied ones once
    routed = [adapter.parameters(block) for block in blocks]
    shared = tensors.keys() - {id(parameter) for parameters in routed for parameter in parameters}
    counts = [adapter.experts(block) for block in blocks]
    expert = [sum(parameter.nbytes for parameter in own) // count for own, count in zip(routed, counts, strict=True)]
    sizes = [tensors[key].nbytes for key in shared]
    # An expert is read parameter by parameter; converted, each is there in both number formats.
    slices = [parameter[0].nbytes for parameters in routed for parameter in parameters]
    return Weights(
        layers=[block.layer for block in blocks],
        experts=counts,
        shared=sum(sizes),
        expert=expert,
        largest=max(sizes + slices, default=0),
    )


def weight_memory(model: nn.Module, adapter: Family, placement: Placement | None) -> WeightMemory:
    """The memory of a model's weights under a placement, see `Weights.memory`."""
    return weights_of(model, adapter).memory(placement)


def cache_numbers(config: "PreTrainedConfig") -> int:
    """Numbers that attention keeps of a token in one layer: keys and values. DeepSeek's are kept as they are computed with, not
    as the latent vectors that they are made of (transformers 5.23)."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        return heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * width * (getattr(config, "num_key_value_heads", None) or heads)


def check_memory(peak: np.ndarray, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Raise InputError unless all ranks have room for their weights: the ranks of one host together in its memory, each rank
    on a GPU in that. It says so on all ranks, so that none waits for another.

    peak: int64[rank]; most bytes at once, on top of those in use
    """
    rank = 0 if group is None else dist.get_rank(group)
    need = int(peak[rank])
    if device.type == "cuda":
        where, room, place = "of its GPU", torch.cuda.mem_get_info(device)[0], rank
    else:
        where, room, place = "of the host", psutil.virtual_memory().available, zlib.crc32(platform.node().encode())
    carrier = device if group is None else communication_device(device, group)
    own = torch.tensor([need, room, place], dtype=torch.int64, device=carrier)
    every = [torch.empty_like(own) for _ in range(1 if group is None else dist.get_world_size(group))]
    if group is None:
        every = [own]
    else:
        with among_ranks():
            dist.all_gather(every, own, group=group)
    table = torch.stack(every).cpu().numpy()
    for place in np.unique(table[:, 2]):
        there = np.flatnonzero(table[:, 2] == place)
        total, free = table[there, 0].sum(), USABLE * table[there, 1].min()
        if total > free:
            ranks = f"rank {there[0]} needs" if len(there) == 1 else f"ranks {', '.join(map(str, there))} need"
            raise InputError(
                f"the weights do not fit: {ranks} {total / GIB:.2f} GiB, and {free / GIB:.2f} GiB {where} may be used "
                f"({USABLE:.0%} of the free memory); take more ranks, fewer replicas or a shorter number format"
            )

"""A permutation of experts for Megatron-Core and DeepSpeed, which have no file of placements: their ranks hold contiguous
blocks of experts, so a placement is a checkpoint with its experts in another order.

JSON, `perm[MoE layer][expert]` = the position that the expert takes. Rank r of G holds the positions r · E/G … (r+1) · E/G − 1.
"""

import json

import numpy as np

from engine.formats.placements.export import Written, even_slots, refuse_replicas
from engine.formats.placements.plan_source import Deployed, PlanSource, even_placement, whole_numbers_of
from engine.model import MoEModel
from engine.plan import Placement


def write(placement: Placement, model: MoEModel, name: str) -> Written:
    """The permutation.

    Can not carry: replicas, different numbers of experts on the GPUs, which model layer an MoE layer is, and of a plan anything
    but its placement. Raises InputError for such placements.
    """
    refuse_replicas(placement, "Megatron-Core")
    slots = even_slots(placement, model, "Megatron-Core")
    # The order within a GPU is free: ascending, groups that lie on one GPU stay whole.
    slots = np.sort(slots.reshape(placement.layers, placement.gpus, -1)).reshape(slots.shape)
    position = np.argsort(slots, axis=1)
    size = model.experts // (model.expert_groups or model.experts)
    groups = (slots // size).reshape(placement.layers, -1, size)
    torn = int((groups != groups[:, :, :1]).any(axis=(1, 2)).sum())
    notes: tuple[str, ...] = ()
    if model.expert_groups and torn:
        notes = (
            f"{torn} of {placement.layers} layers mix the {model.expert_groups} groups of experts that the router chooses "
            "among first, so that tokens choose other experts than before: keep groups whole, or do not use this permutation",
        )
    return Written(
        json.dumps(position.tolist()).encode(),
        (f"--expert-model-parallel-size {placement.gpus}",),
        (
            "Megatron-Core reads no placement: move the experts of the checkpoint, expert e of MoE layer l to position "
            f"{name}[l][e], and the rows of that layer's router (weight, and bias, expert_bias and qb_beta where it has them) "
            "with them",
            *notes,
        ),
    )


def read(source: PlanSource, content: list) -> Deployed:
    """Every layer's positions, back as the experts in contiguous blocks of positions."""
    layers, experts = len(source.model.moe_layers), source.model.experts
    if len(content) != layers:
        raise source.fault(f"has {len(content)} rows; {source.model.name} has {layers} MoE layers")
    rows = []
    for layer, row in enumerate(content):
        positions = whole_numbers_of(source, row, f"layer {layer}")
        if sorted(positions) != list(range(experts)):
            raise source.fault(f"is no permutation of 0 … {experts - 1}, the positions of {experts} experts", f"layer {layer}")
        rows.append(np.argsort(positions).tolist())
    places = [f"layer {layer}" for layer in range(layers)]
    return Deployed(even_placement(source, rows, places), "permutation of experts (Megatron-Core)")

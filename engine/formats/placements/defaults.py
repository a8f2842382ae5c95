"""Where engines put experts when nobody says: vLLM's `--expert-placement-strategy` without a balancer."""

import numpy as np

from engine.formats.placements.plan_source import Deployed
from engine.model import MoEModel
from engine.placement.baselines import linear_assignment, round_robin_assignment
from engine.plan import Placement

WORDS = {"linear": "linear", "round-robin": "round-robin", "round_robin": "round-robin"}
"""What a person may write in place of a file; vLLM spells the second with an underscore."""


def default_layout(word: str, model: MoEModel, gpus: int) -> Deployed:
    """One copy of every expert, the same in all layers: contiguous blocks, or dealt out one by one. The first GPUs hold one
    more where the experts do not divide: 30 on 8 are 4, 4, 4, 4, 4, 4, 3, 3 (vllm #21497)."""
    slots = np.full(gpus, model.experts // gpus)
    slots[: model.experts % gpus] += 1
    assign = {"linear": linear_assignment, "round-robin": round_robin_assignment}[WORDS[word]]
    row = assign(model.experts, slots)
    placement = Placement.from_gpu_of_expert(np.tile(row, (len(model.moe_layers), 1)), gpus, model.moe_layers)
    return Deployed(placement, f"{WORDS[word]} layout of the {model.experts} experts")

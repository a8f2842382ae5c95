"""Which experts the tokens of a step take, on every rank: replayed, so that all ranks know all sizes and exchange none."""

from dataclasses import dataclass

import numpy as np

from engine.launch.rank.instructions import Tokens
from engine.model import MoEModel
from engine.overlap.capacity import kept
from engine.training import TrainingStep


@dataclass(frozen=True, eq=False)
class Choice:
    """One MoE layer. experts: int64[rank, token, k], below 0 for none; kept: bool[rank, token, k], False where the expert's
    capacity was used up; capacity: rows of a rank's buffer for an expert, None for as many as come."""

    experts: np.ndarray
    kept: np.ndarray
    capacity: int | None


def choices(model: MoEModel, step: TrainingStep, ranks: int, recorded: Tokens | None) -> list[Choice]:
    """The choice of every MoE layer.

    Balanced: expert after expert, so that every rank gives each as many tokens as any other, give or take one. Recorded: every
    rank's recorded tokens in their order, evenly spaced or repeated to as many as the step has; a rank without any
    routes like a balanced one. Dropped is what the capacity does not hold, token by token in the order of the batch, or
    all first choices before any second ones where the gate looks at the whole batch.
    """
    layers, tokens, k = len(model.moe_layers), step.tokens, model.experts_per_token
    copy = np.arange(ranks * tokens * k).reshape(ranks, tokens, k)
    experts = np.repeat((copy % model.experts)[:, None], layers, axis=1)
    if step.routing == "recorded" and recorded is not None:
        for rank in range(ranks):
            own = np.flatnonzero(recorded.source == rank)
            if len(own):
                replayed = own[np.arange(tokens) * len(own) // tokens]
                experts[rank] = recorded.experts[replayed].transpose(1, 0, 2)
    capacity = int(step.capacity(model)) if step.capacity_factor else None
    service = "choice" if step.gate == "batch-prioritised" else "token"
    choices_of_layers: list[Choice] = []
    for layer in range(layers):
        own = experts[:, layer]
        if choices_of_layers and np.array_equal(own, choices_of_layers[-1].experts):
            choices_of_layers.append(choices_of_layers[-1])
            continue
        limit = tokens * k if capacity is None else capacity
        mask = np.stack([kept(of_rank, model.experts, limit, service) & (of_rank >= 0) for of_rank in own])
        choices_of_layers.append(Choice(own, mask, capacity))
    return choices_of_layers

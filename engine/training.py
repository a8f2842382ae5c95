"""A training step, as far as a plan depends on it beyond the model: the sequences of every GPU and the routing of tokens."""

import math
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from engine.model import MoEModel
from engine.schema import Frozen
from engine.workload import ExpertLoad, RoutingTrace, Workload

Gate = Literal["switch", "top-k", "random", "hash", "batch-prioritised"]
"""The rule by which tokens choose experts. All but batch-prioritised (Riquelme et al., 2021) decide token by token, so that a
batch may be cut before the gate (Lancet §2.3); with top-k every token takes all its experts before the next one does.
Batch-prioritised serves the first choices of the whole batch before any second one, and of these the tokens with the largest
scores first (see `served_in_words`)."""


class TrainingStep(Frozen):
    """One step of data- and expert-parallel training: everything but the experts is replicated on every GPU, each of which
    holds sequences of its own (Lancet §2.1).

    capacity_factor: an expert takes at most this many times its fair share of a GPU's tokens; 0 = all that choose it
    routing: "balanced": every expert is chosen equally often, the aim of a balance loss; "recorded": as in the open recording,
        scaled to the tokens of the step
    """

    batch: int = Field(ge=1, le=1_000_000, description="sequences on each GPU")
    sequence_length: int = Field(ge=1, le=10_000_000)
    heads: int = Field(ge=1, le=4096)
    dense_d_ff: int = Field(ge=1, le=1_000_000, description="inner width of the FFN of dense layers")
    vocabulary: int = Field(default=50257, ge=1, le=10_000_000)
    tied_embeddings: bool = Field(default=True, description="input and output embedding are one matrix, as in GPT-2")
    gate: Gate = "switch"
    capacity_factor: float = Field(default=1.0, ge=0, le=1000)
    routing: Literal["balanced", "recorded"] = "balanced"

    @model_validator(mode="after")
    def _consistent(self) -> "TrainingStep":
        if 0 < self.capacity_factor < 1:
            raise ValueError("capacity_factor below 1 drops tokens even when all experts are equally popular; use 1 or 0")
        return self

    @property
    def tokens(self) -> int:
        """Tokens that every GPU holds."""
        return self.batch * self.sequence_length

    def capacity(self, model: MoEModel) -> float:
        """Token copies that one GPU may send to one expert; infinite without a capacity factor."""
        if not self.capacity_factor:
            return math.inf
        return float(math.ceil(self.capacity_factor * self.tokens * model.experts_per_token / model.experts))


def served_in_words(step: TrainingStep, workload: Workload) -> str | None:
    """The order in which a batch-prioritised gate serves recorded tokens, as a clause; None where nothing depends on it."""
    counts = step.gate == "batch-prioritised" and step.routing == "recorded" and step.capacity_factor
    if not counts or not isinstance(workload, RoutingTrace):
        return None
    if workload.importance is not None:
        return "the gate serves the tokens with the largest recorded scores first"
    lacks = "has no gate scores" if workload.scores is None else "has gate weights that add up to the same for every token"
    return f"{workload.name} {lacks}, so that the gate serves tokens in the order of the batch, not by their importance"


def usual_step(model: MoEModel, gpus: int) -> TrainingStep:
    """An assumed step for a model of known sizes: its batch spread over the GPUs, heads of 64, dense FFNs as wide as all
    experts that a token visits. A person corrects it."""
    return TrainingStep(
        batch=max(1, model.batch // gpus),
        sequence_length=model.sequence_length,
        heads=max(1, model.d_model // 64),
        dense_d_ff=model.d_ff * model.experts_per_token + model.shared_width,
        gate="switch" if model.experts_per_token == 1 else "top-k",
    )


def balanced_load(model: MoEModel) -> ExpertLoad:
    """The expert loads that a balance loss aims at, for planning without a recording. Its name says that it is an
    assumption."""
    load = np.ones((len(model.moe_layers), model.experts))
    return ExpertLoad("balanced routing (assumed)", load, model.moe_layers)

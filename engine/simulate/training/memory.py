"""What a training step keeps in every GPU's memory."""

import numpy as np

from engine.model import MoEModel
from engine.overlap.transformer import transformer_step
from engine.plan import Placement
from engine.problem import Problem


def bytes_per_parameter(model: MoEModel) -> float:
    """Weight and gradient in the model's numbers, and for SGD with momentum a momentum in 32 bits, beside a copy of the
    weight in 32 bits where the model's numbers are shorter."""
    number = model.bytes_per_number
    return 2 * number + 4 + (4 if number < 4 else 0)


def step_state_bytes(problem: Problem, placement: Placement) -> np.ndarray:
    """float64[gpu]: weights, gradients and momentum; activations, which depend on what is recomputed, are not counted."""
    model = problem.model
    graph = problem.graph or transformer_step(model, problem.step, len(problem.cluster.gpus))
    dense = sum(operator.parameters for operator in graph.of_phase("forward") if operator.kind != "experts")
    if problem.graph is None and problem.step.tied_embeddings:
        dense -= problem.step.vocabulary * model.d_model
    experts = placement.slots.sum(axis=0) * model.bytes_per_expert / model.bytes_per_number
    return (experts + dense) * bytes_per_parameter(model)

"""Attention under context-coherent execution: it runs where a token is, so the GPU that carries most tokens decides.

Attention at home costs every plan the same and is left out of all timelines. Where tokens are carried, what it takes longer
than that is not: it is an event of its own before the gate.
"""

import numpy as np

from engine.problem import Problem
from engine.workload import RoutingTrace


def attention_excess(problem: Problem, tokens: np.ndarray) -> np.ndarray:
    """float64[layer, gpu]: seconds before the gate of every MoE layer for which a GPU still runs attention when all would be
    done with the tokens at home, in that layer and the dense ones before it. 0 where a GPU is done sooner.

    tokens: float64[layer, gpu], the tokens that every GPU carries; those of the first layer are at home
    """
    cost, keys = problem.cost, keys_of_token(problem.workload, problem.model.sequence_length)
    of_gpu = [
        cost.attention(gpu, mine, keys, problem.model) for gpu, mine in zip(problem.cluster.gpus, tokens.T, strict=True)
    ]
    seconds = cost.together(np.stack(of_gpu, axis=1))
    between = np.diff(problem.model.moe_layers, prepend=-1)
    return np.maximum(seconds - seconds[0].max(), 0.0) * between[:, None]


def keys_of_token(trace: RoutingTrace, sequence_length: int) -> int:
    """Tokens that a token looks back on in the mean, itself included. sequence_length: of a recording without sequences"""
    length = np.array([sequence_length], dtype=np.float64)
    if trace.sequence is not None and trace.tokens:
        length = np.unique(trace.sequence, return_counts=True)[1].astype(np.float64)
    return max(1, round((length * (length + 1) / 2).sum() / length.sum()))

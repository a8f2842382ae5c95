"""Traffic that is not as it was recorded.

Aurora's Q4 (§8.2) takes the first layer's traffic and adds that of three other layers of the same recording, so that up to
75 % of the traffic is another layer's. Here every layer gets its own three others, drawn at random, and any share.
"""

from dataclasses import replace
from typing import Literal

import numpy as np

from engine.errors import InputError
from engine.goal import Goal
from engine.problem import Problem
from engine.units import share
from engine.workload import TrafficMatrix

Noise = Literal["layers", "experts"]

NOISES: dict[Noise, str] = {
    "layers": "other layers' traffic (Aurora Q4)",
    "experts": "the same traffic, experts shuffled",
}
OTHER_LAYERS = 3


def noisy(problem: Problem, level: float, seed: int = 0, noise: Noise | None = None) -> Problem:
    """The problem with `level` (0 … 1) of every layer's tokens going elsewhere; every rank sends as many as before.

    noise: "layers": where up to three other layers, drawn by `seed`, send theirs; "experts": where the layer's own would go
    if its experts changed their places at random; None: layers where there are several. The workload becomes a matrix of
    (source rank, expert), without single tokens. Level 0 is the problem itself. Raises InputError for a level or noise that
    cannot be.
    """
    if not 0 <= level <= 1:
        raise InputError(f"imprecision: {level:g} is not between 0 and 1")
    kind = noise or ("layers" if problem.workload.layers > 1 else "experts")
    if kind == "layers" and problem.workload.layers < 2:
        raise InputError(
            f"{problem.workload.name} has one layer, so that no other one can be its noise; shuffle experts"
        )
    if level == 0:
        return problem
    first = _noisy_model(problem, level, np.random.default_rng(seed), kind)
    if problem.goal is not Goal.TWO_MODELS:
        return first
    return replace(first, second=_noisy_model(problem.second, level, np.random.default_rng([seed, 1]), kind))


def _noisy_model(problem: Problem, level: float, rng: np.random.Generator, kind: Noise) -> Problem:
    demand = problem.demand
    layers, _, experts = demand.shape
    noise = np.empty_like(demand)
    for layer in range(layers):
        if kind == "layers":
            others = np.delete(np.arange(layers), layer)
            drawn = rng.permutation(others)[:OTHER_LAYERS]
            noise[layer] = demand[drawn].mean(axis=0)
        else:
            noise[layer] = demand[layer][:, rng.permutation(experts)]
    sent, elsewhere = demand.sum(axis=2, keepdims=True), noise.sum(axis=2, keepdims=True)
    # A rank that sends nothing in the other layers goes on sending as recorded.
    scaled = np.where(elsewhere > 0, noise * sent / np.where(elsewhere > 0, elsewhere, 1.0), demand)
    mixed, size = (1 - level) * demand + level * scaled, problem.model.bytes_per_token
    name = f"{problem.workload.name}, {share(level)} imprecise"
    return replace(problem, workload=TrafficMatrix(name, mixed * size, size), others=())

"""Instances of the placement kernels: random ones, and planted ones with a known best placement."""

import numpy as np

from engine.placement.assignment import AssignmentInstance
from engine.placement.joint.instance import JointInstance, equal_slots


def permutation_affinity(layers: int, experts: int, tokens: int, strength: float = 0.6, seed: int = 0) -> np.ndarray:
    """Counts float64[layer - 1, expert, expert] of random walks: with probability `strength` a token follows one of
    three random permutations of the experts (drawn for every layer, chances 0.5, 0.3, 0.2), else it goes anywhere."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((layers - 1, experts, experts))
    here = rng.integers(0, experts, tokens)
    for count in counts:
        ways = np.stack([rng.permutation(experts) for _ in range(3)])
        way = rng.choice(3, tokens, p=[0.5, 0.3, 0.2])
        there = np.where(rng.random(tokens) < strength, ways[way, here], rng.integers(0, experts, tokens))
        np.add.at(count, (here, there), 1)
        here = there
    return counts


def topic_affinity(layers: int, experts: int, tokens: int, topics: int = 16, seed: int = 0) -> np.ndarray:
    """Counts as above: a token keeps its topic, and every topic has its own skewed popularity of experts in each layer."""
    rng = np.random.default_rng(seed)
    topic = rng.integers(0, topics, tokens)
    walk = []
    for _ in range(layers):
        chance = rng.dirichlet(np.full(experts, 0.3), topics).cumsum(axis=1)
        walk.append(np.minimum((rng.random(tokens)[:, None] > chance[topic]).sum(axis=1), experts - 1))
    return counts_of(np.array(walk).T, experts)


def planted_affinity(
    layers: int, experts: int, gpus: int, tokens: int, strength: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(counts, the planted placement int64[layer, expert]): with probability `strength` a token stays on its GPU."""
    rng = np.random.default_rng(seed)
    place = np.array([rng.permutation(experts) % gpus for _ in range(layers)])
    held = np.argsort(place, axis=1, kind="stable").reshape(layers, gpus, -1)
    walk = [rng.integers(0, experts, tokens)]
    for layer in range(1, layers):
        mate = held[layer, place[layer - 1, walk[-1]], rng.integers(0, experts // gpus, tokens)]
        walk.append(np.where(rng.random(tokens) < strength, mate, rng.integers(0, experts, tokens)))
    return counts_of(np.array(walk).T, experts), place


def counts_of(walk: np.ndarray, experts: int) -> np.ndarray:
    """Counts float64[layer - 1, expert, expert] of walks int[token, layer]."""
    counts = np.zeros((walk.shape[1] - 1, experts, experts))
    for layer, count in enumerate(counts):
        np.add.at(count, (walk[:, layer], walk[:, layer + 1]), 1)
    return counts


def random_tokens(layers: int, tokens: int, experts: int, choices: int, seed: int, missing: float = 0.0) -> np.ndarray:
    """Experts int16[layer, token, choice], different ones by chance; each choice is none (-1) with the chance `missing`."""
    rng = np.random.default_rng(seed)
    chosen = rng.random((layers, tokens, experts)).argsort(axis=2)[:, :, :choices]
    return np.where(rng.random(chosen.shape) < missing, -1, chosen).astype(np.int16)


def topic_tokens(tokens: int, experts: int, choices: int, seed: int = 0, topics: int = 100) -> np.ndarray:
    """Experts int16[token, choice]: every token has one of some topics, the first ones most often, and every topic 3 x choices
    experts that it prefers; besides, some experts are more popular than others."""
    rng = np.random.default_rng(seed)
    favourites = np.array([rng.permutation(experts)[: 3 * choices] for _ in range(topics)])
    topic = np.minimum(rng.zipf(1.6, tokens) - 1, topics - 1)
    score = rng.gumbel(size=(tokens, experts)) + np.log(rng.dirichlet(np.full(experts, 5.0)))
    np.put_along_axis(score, favourites[topic], np.take_along_axis(score, favourites[topic], axis=1) + 3.0, axis=1)
    return np.argpartition(-score, choices, axis=1)[:, :choices].astype(np.int16)


def planted_tokens(
    tokens: int, experts: int, gpus: int, choices: int, stray: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(experts int16[token, choice], the planted placement int64[expert]): a token's experts are on one GPU, but each of them
    anywhere with the chance `stray`."""
    rng = np.random.default_rng(seed)
    place = rng.permutation(experts) % gpus
    held = np.argsort(place, kind="stable").reshape(gpus, -1)
    own = np.array([rng.permutation(held[gpu])[:choices] for gpu in rng.integers(0, gpus, tokens)])
    chosen = np.where(rng.random(own.shape) < stray, rng.integers(0, experts, own.shape), own)
    return chosen.astype(np.int16), place


SPEEDS = (1.0, 0.8, 0.5, 0.4)


def numbers(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Small whole numbers ("integer"), any ("float"), or of widely different sizes with many zeros ("skewed")."""
    if kind == "integer":
        return rng.integers(0, rng.integers(2, 30), shape).astype(np.float64)
    if kind == "float":
        return rng.random(shape)
    return np.exp(2 * rng.standard_normal(shape)) * rng.integers(0, 2, shape)


def routing(gpus: int, experts: int, seed: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens float64[gpu, expert] and the relative speed float64[gpu] of a random mixed cluster."""
    rng = np.random.default_rng(seed)
    return numbers(rng, kind, (gpus, experts)), rng.choice(SPEEDS, gpus)


def mixed_instance(tokens: np.ndarray, speed: np.ndarray, computation: float = 1.0) -> AssignmentInstance:
    return AssignmentInstance.from_tokens(tokens, computation * tokens.sum(axis=0) / speed[:, None], speed, speed)


def random_instance(
    slots: tuple[int, ...], layers: int, workloads: int, seed: int, kind: str = "counts", **options
) -> JointInstance:
    """Skewed loads, and transitions of which many are zero; `empty` has layers and workloads without any token."""
    rng = np.random.default_rng(seed)
    experts = sum(slots)
    shape = (workloads, layers - 1, experts, experts)
    transitions = rng.integers(0, 12, shape) * rng.integers(0, 2, shape).astype(np.float64)
    load = rng.integers(1, 40, (workloads, layers, experts)).astype(np.float64)
    if kind == "floats":
        transitions, load = transitions * rng.random(shape), load * rng.random(load.shape)
    elif kind == "empty":
        transitions[0], load[0, 0] = 0, 0
    return JointInstance(transitions, load, np.array(slots), **options)


def random_start(instance: JointInstance, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    linear = np.repeat(np.arange(instance.gpus), instance.slots)
    return np.stack([rng.permutation(linear) for _ in range(instance.layers)])


def recorded_like(layers: int = 6, experts: int = 16, workloads: int = 1, seed: int = 0) -> JointInstance:
    """Traffic with affinity along hidden groups, on 4 GPUs."""
    rng = np.random.default_rng(seed)
    tokens = 3000
    load = np.zeros((workloads, layers, experts))
    transitions = np.zeros((workloads, layers - 1, experts, experts))
    names = [rng.permutation(experts) for _ in range(layers)]
    for workload in range(workloads):
        topic = rng.choice(experts, tokens, p=rng.dirichlet(np.full(experts, 2.0)))
        path = [np.where(rng.random(tokens) < 0.6, topic, rng.integers(experts, size=tokens)) for _ in range(layers)]
        path = [name[chosen] for name, chosen in zip(names, path, strict=True)]
        for layer in range(layers):
            load[workload, layer] = np.bincount(path[layer], minlength=experts)
            if layer:
                np.add.at(transitions[workload, layer - 1], (path[layer - 1], path[layer]), 1.0)
    return JointInstance(transitions, load, equal_slots(experts, 4))

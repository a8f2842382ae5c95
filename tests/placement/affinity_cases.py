"""Made-up transitions between layers for the tests and benchmarks of the affinity placement."""

import numpy as np


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

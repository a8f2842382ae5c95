"""Made-up routing for the tests and benchmarks of co-activation."""

import numpy as np


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

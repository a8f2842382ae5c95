"""How likely a token has an expert somewhere, where only loads were recorded and no tokens.

Each token has k different experts. Of all ways to choose them that give every expert its recorded load, the one that assumes
least is conditional Poisson sampling (Chen, Dempster & Liu 1994): sets of k experts are drawn with a probability proportional
to the product of their weights, and the weights are found from the loads. Real experts fire together, so real tokens meet
fewer GPUs: what is computed here is an estimate, and mostly one from above.
"""

import numpy as np

LIKELIEST = 1 - 1e-6
"""An expert that every token has would need an infinite weight."""
CLOSE, MOST_ROUNDS = 1e-6, 60


def touched_by_chance(load: np.ndarray, k: int, share: np.ndarray) -> np.ndarray:
    """float64[…, place]: the probability that a token has at least one of its k experts at a place.

    load: float64[…, expert] token copies; share: float64[…, expert, place], how likely a token that chose the expert is served
    there. Where nothing is loaded nothing is likely.
    """
    shape = np.broadcast_shapes(load.shape[:-1], share.shape[:-2])
    weight = _weights(_inclusion(load, k), k)
    whole = _symmetric(weight, k)[..., k]
    elsewhere = np.broadcast_to(weight[..., None], (*shape, *share.shape[-2:])) * (1 - share)
    missed = _symmetric(np.moveaxis(elsewhere, -1, -2), k)[..., k] / np.where(whole > 0, whole, 1.0)[..., None]
    return np.where((whole > 0)[..., None], np.clip(1 - missed, 0.0, 1.0), 0.0)


def _inclusion(load: np.ndarray, k: int) -> np.ndarray:
    """float64[…, expert]: the probability that a token has the expert; k in all, none above `LIKELIEST`."""
    total = load.sum(axis=-1, keepdims=True)
    likely = k * load / np.where(total > 0, total, 1.0)
    for _ in range(k):  # an expert that would be chosen twice leaves the rest to the others
        over = likely > LIKELIEST
        if not over.any():
            break
        rest = np.where(over, 0.0, likely)
        left = rest.sum(axis=-1, keepdims=True)
        room = k - over.sum(axis=-1, keepdims=True) * LIKELIEST
        likely = np.where(over, LIKELIEST, rest * np.maximum(room, 0.0) / np.where(left > 0, left, 1.0))
    return np.minimum(likely, LIKELIEST)


def _weights(inclusion: np.ndarray, k: int) -> np.ndarray:
    """float64[…, expert]: weights under which the experts are included with these probabilities."""
    weight = inclusion / (1 - inclusion)
    for _ in range(MOST_ROUNDS):
        present = _included(weight, k)
        if np.abs(present - inclusion).max(initial=0.0) < CLOSE:
            break
        # By the ratio of probabilities the error vanishes at once for k = 1, by that of odds for experts that hardly depend on
        # one another; half-way between the two it halves at least.
        room = np.maximum(1 - present, 1 - LIKELIEST)
        factor = inclusion / np.where(present > 0, present, 1.0) * np.sqrt(room / (1 - inclusion))
        weight = weight * np.where(inclusion > 0, factor, 0.0)
    return weight


def _included(weight: np.ndarray, k: int) -> np.ndarray:
    """float64[…, expert]: the probability of every expert to be among the k."""
    before = _running(weight, k)
    after = _running(weight[..., ::-1], k)[..., ::-1, :]
    # Without expert e: k - 1 others, j of them before it and k - 1 - j after it
    without = (before[..., :-1, :k] * after[..., 1:, :k][..., ::-1]).sum(axis=-1)
    whole = before[..., -1, k]
    return weight * without / np.where(whole > 0, whole, 1.0)[..., None]


def _running(weight: np.ndarray, k: int) -> np.ndarray:
    """float64[…, expert + 1, k + 1]: elementary symmetric polynomials of the first so many weights."""
    experts = weight.shape[-1]
    sums = np.zeros((experts + 1, *weight.shape[:-1], k + 1))
    sums[0, ..., 0] = 1.0
    for expert in range(experts):
        sums[expert + 1] = sums[expert]
        sums[expert + 1, ..., 1:] += weight[..., expert, None] * sums[expert, ..., :-1]
    return np.moveaxis(sums, 0, -2)


def _symmetric(weight: np.ndarray, k: int) -> np.ndarray:
    """float64[…, k + 1]: elementary symmetric polynomials of all weights (float64[…, expert])."""
    sums = np.zeros((*weight.shape[:-1], k + 1))
    sums[..., 0] = 1.0
    for expert in range(weight.shape[-1]):
        sums[..., 1:] += weight[..., expert, None] * sums[..., :-1]
    return sums

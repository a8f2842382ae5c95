"""A synthetic routing log: popularity by a power law, and a chosen strength of affinity between layers.

A stand-in until something was recorded, and a way to see a plan's gain from skew and from affinity apart. Real routing is
richer than two numbers; every such log is called synthetic in its name.
"""

from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.model import MoEModel
from engine.workload import RoutingTrace

MOST_TOKENS = 200_000
MOST_CHOICES = 50_000_000
"""Tokens × layers × experts per token that a browser session can carry."""
MOST_SKEW = 3.0
MOST_STEPS = 240
USUAL_STEPS = 12
SEQUENCE = 128
"""Most tokens of one sequence, which share a source rank."""
SEQUENCES = 512
"""So many a log has as soon as it has as many tokens: tokens of its own for each GPU of a large cluster."""
CHUNK = 8192


@dataclass(frozen=True)
class Recipe:
    """skew: exponent s of popularity ∝ rank^-s (0: all alike; Zipf's law: about 1); affinity: the probability that a token
    goes on to the experts that follow its own (0: layers are independent; 1: the first layer decides all others); drift: how
    far popularity wanders from one of the `steps` to the next (0: not at all; 1: every step has ranks of its own)."""

    tokens: int
    skew: float
    affinity: float
    seed: int = 0
    drift: float = 0.0
    steps: int = USUAL_STEPS

    def __post_init__(self) -> None:
        check_range("tokens", self.tokens, 1, MOST_TOKENS)
        check_range("skew", self.skew, 0, MOST_SKEW)
        check_range("affinity", self.affinity, 0, 1)
        check_range("seed", self.seed, 0, 2**31 - 1)
        check_range("drift", self.drift, 0, 1)
        if self.drift:
            check_range("steps", self.steps, 1, min(MOST_STEPS, self.tokens))

    @property
    def name(self) -> str:
        """The name of its recording."""
        seed = f", seed {self.seed}" if self.seed else ""
        drift = f", drift {self.drift:g} in {self.steps} steps" if self.drift else ""
        return f"synthetic, skew {self.skew:g}, affinity {self.affinity:g}{drift}, {self.tokens:,} tokens{seed}"

    def draw(self, model: MoEModel) -> RoutingTrace:
        """The recording, see `synthetic`."""
        return synthetic(model, self)


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Raises InputError for a number of a recipe out of its range, and for nan."""
    if not low <= value <= high:
        raise InputError(f"synthetic workload: {name} {value:g} is not between {low:g} and {high:,.0f}")


def check_choices(tokens: int, layers: int, k: int) -> None:
    """Raises InputError for a log that would be too large."""
    if tokens * layers * k > MOST_CHOICES:
        raise InputError(
            f"synthetic workload: {tokens:,} tokens of {layers} layers with {k} experts each are more than "
            f"{MOST_CHOICES:,} choices; ask for at most {MOST_CHOICES // (layers * k):,} tokens"
        )


def popularity(experts: int, skew: float) -> np.ndarray:
    """float64[rank]: share of single choices that goes to the expert of every rank, the most popular first."""
    weight = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    return weight / weight.sum()


def expert_of_rank(layers: int, experts: int, seed: int) -> np.ndarray:
    """int64[layer, rank]: which expert has which rank. Ranks are dealt anew in every layer; an expert is followed by the
    expert of its rank in the next layer."""
    rng = np.random.default_rng([seed, 0])
    return np.stack([rng.permutation(experts) for _ in range(layers)])


def names_of_steps(layers: int, experts: int, recipe: Recipe) -> np.ndarray:
    """int64[step, layer, rank]: `expert_of_rank` of every step, one without drift. Each expert has a normal score, which from
    step to step keeps √(1 - drift²) of itself and gains `drift` of a fresh one; experts rank by their scores."""
    names, rng = [expert_of_rank(layers, experts, recipe.seed)], np.random.default_rng([recipe.seed, 2])
    score = np.empty((layers, experts))
    np.put_along_axis(score, names[0], -np.sort(-rng.normal(size=(layers, experts))), axis=1)
    for _ in range(1, recipe.steps if recipe.drift else 1):
        score = np.sqrt(1 - recipe.drift**2) * score + recipe.drift * rng.normal(size=score.shape)
        names.append(np.argsort(-score, axis=1))
    return np.stack(names)


def synthetic(model: MoEModel, recipe: Recipe) -> RoutingTrace:
    """A routing log of the model's MoE layers, experts and experts per token, by the recipe; the same seed, the same log.

    Every token's experts in a layer are distinct. In the first layer they are drawn by popularity, one after another without
    the ones taken; further on a token follows its experts with probability `affinity` and else draws again, so that the
    popularity of ranks is the same in every layer whatever the affinity. With drift, steps follow one another in equal parts
    of the tokens. Sequences have at most 128 tokens, see `sequence_length`, all of one step. Raises InputError for a log that
    would be too large.
    """
    layers, experts, k = len(model.moe_layers), model.experts, model.experts_per_token
    check_choices(recipe.tokens, layers, k)
    rng, names = np.random.default_rng([recipe.seed, 1]), names_of_steps(layers, experts, recipe)
    step = step_of_token(recipe.tokens, len(names))
    share = popularity(experts, recipe.skew)
    chosen = np.empty((recipe.tokens, layers, k), dtype=np.int16)
    ranks = _draw(rng, share, recipe.tokens, k)
    for layer in range(layers):
        if layer:
            again = rng.random(recipe.tokens) >= recipe.affinity
            ranks[again] = _draw(rng, share, int(again.sum()), k)
        chosen[:, layer] = names[step[:, None], layer, ranks]
    return RoutingTrace(recipe.name, chosen, experts, sequences_of_steps(step))


def sequence_length(tokens: int) -> int:
    """Tokens of a sequence in a log of so many: few enough for `SEQUENCES` of them, and 1 … `SEQUENCE`."""
    return min(max(tokens // SEQUENCES, 1), SEQUENCE)


def step_of_token(tokens: int, steps: int) -> np.ndarray:
    """int64[token], ascending."""
    return np.arange(tokens) * steps // tokens


def sequences_of_steps(step_of: np.ndarray) -> np.ndarray:
    """int32[token]: sequences of `sequence_length` tokens, a new one with every step. step_of: int64[token], ascending"""
    within = np.arange(len(step_of)) - np.searchsorted(step_of, step_of)
    return (np.cumsum(within % sequence_length(len(step_of)) == 0) - 1).astype(np.int32)


def _draw(rng: np.random.Generator, share: np.ndarray, tokens: int, k: int) -> np.ndarray:
    """int64[token, k]: distinct ranks by popularity, the k largest of Gumbel-perturbed logarithms (Vieira, 2014), which
    are draws one after another without replacement."""
    if k == 1:
        return rng.choice(len(share), (tokens, 1), p=share)
    weight, drawn = np.log(share), np.empty((tokens, k), dtype=np.int64)
    for first in range(0, tokens, CHUNK):
        keys = weight + rng.gumbel(size=(min(CHUNK, tokens - first), len(share)))
        top = np.argpartition(-keys, k - 1, axis=1)[:, :k]
        order = np.argsort(-np.take_along_axis(keys, top, axis=1), axis=1)
        drawn[first : first + CHUNK] = np.take_along_axis(top, order, axis=1)
    return drawn


def planted_placement(layers: int, experts: int, gpus: int, seed: int) -> np.ndarray:
    """int64[layer, expert]: the GPU of every expert when ranks are dealt to GPUs back and forth, the same in every layer:
    tokens that follow their experts never leave their GPU, and GPUs are about as popular as each other."""
    turn = np.arange(experts) % (2 * gpus)
    gpu_of_rank = np.where(turn < gpus, turn, 2 * gpus - 1 - turn)
    place = np.empty((layers, experts), dtype=np.int64)
    np.put_along_axis(place, expert_of_rank(layers, experts, seed), np.tile(gpu_of_rank, (layers, 1)), axis=1)
    return place

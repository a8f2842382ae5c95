"""The imbalance workloads W0 to W7 of the token-imbalance benchmark for Megatron-LM (pull request #7488, September 2026, open).

Each isolates one reason why expert parallelism runs unevenly. Distributions and parameters are those of `routing_for_step` in
its `benchmarks/moe/token_imbalance/benchmark.py` (commit f5c5024): every set of k distinct experts of a pool is equally
likely. Two differences: NumPy draws here, so that distributions are the same but tokens are not; and every MoE layer of the
model has a draw of its own in place of the benchmark's one layer.

Two of them are less than their descriptions in that commit, and here too. W1 and W2 have the same hot experts, the first
quarter; their GPU is a matter of the placement. W4 is to have uneven numbers of tokens on its source ranks, but no code there
makes them uneven: it draws uniformly, and ranks have as many tokens as each other.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.compare.synthetic import (
    MOST_STEPS,
    MOST_TOKENS,
    USUAL_STEPS,
    check_choices,
    check_range,
    sequences_of_steps,
    step_of_token,
)
from engine.errors import InputError
from engine.model import MoEModel
from engine.workload import RoutingTrace

HOT_STEPS = 3
"""Steps for which the hot experts of W6 stay where they are: after `USUAL_STEPS` it has been through all experts, where a
quarter is hot at a time, and W7 has had three bursts."""
BURST_EVERY = 4

NONE, ALL = (False,) * 4, (True,) * 4
THREE_OF_FOUR = (False, True, True, True)
EVERY_OTHER = (True, False, True, False)


@dataclass(frozen=True)
class Preset:
    """One of the workloads.

    name: its identifier in the benchmark
    isolates: the variable that it is for
    text: its tokens' behaviour, in words
    by_step: True if its steps differ
    """

    name: str
    isolates: str
    text: str
    by_step: bool = False


PRESETS = {
    "w0": Preset("W0_balanced", "a fully balanced control", "tokens go round-robin over all experts"),
    "w1": Preset(
        "W1_hot_expert_set", "the heat of experts", "three of four tokens choose among the first quarter of the experts"
    ),
    "w2": Preset(
        "W2_hot_rank",
        "the place of hot experts, at the heat of W1",
        "three of four tokens choose among the first quarter of the experts, which contiguous blocks put on a few GPUs",
    ),
    "w3": Preset(
        "W3_spread_hot_experts", "heat that is spread over the layout", "three of four tokens choose among every other expert"
    ),
    "w4": Preset(
        "W4_source_ragged",
        "skew before the dispatch",
        "tokens choose among all experts; ragged sources are named but not made in the pull request, nor here",
    ),
    "w5": Preset("W5_zero_expert_rank", "experts and ranks without load", "tokens choose among the second half of the experts"),
    "w6": Preset(
        "W6_rotating_hotspot",
        "a plan that has grown stale",
        "three of four tokens choose among a quarter of the experts, the next quarter after every three steps",
        by_step=True,
    ),
    "w7": Preset(
        "W7_burst",
        "bursts that hide in steady figures",
        "tokens choose among all experts; in every fourth step half of them among the first quarter",
        by_step=True,
    ),
}


@dataclass(frozen=True)
class ImbalanceRecipe:
    """workload: a key of `PRESETS`; steps: into which the tokens are divided evenly, one after another, where steps differ."""

    workload: str
    tokens: int
    steps: int = USUAL_STEPS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.workload not in PRESETS:
            raise InputError(f"synthetic workload: no preset {self.workload!r}; there are {', '.join(PRESETS)}")
        check_range("tokens", self.tokens, 1, MOST_TOKENS)
        check_range("steps", self.steps, 1, min(MOST_STEPS, self.tokens))
        check_range("seed", self.seed, 0, 2**31 - 1)

    @property
    def preset(self) -> Preset:
        return PRESETS[self.workload]

    @property
    def name(self) -> str:
        """The name of its recording."""
        steps = f" in {self.steps} steps" if self.preset.by_step else ""
        seed = f", seed {self.seed}" if self.seed else ""
        return f"synthetic {self.preset.name}, {self.tokens:,} tokens{steps}{seed}"

    def draw(self, model: MoEModel) -> RoutingTrace:
        """The recording, see `imbalanced`."""
        return imbalanced(model, self)


def imbalanced(model: MoEModel, recipe: ImbalanceRecipe) -> RoutingTrace:
    """A routing log of the model's MoE layers, experts and experts per token, by the preset; the same seed, the same log.

    Every token's experts in a layer are distinct and, but for W0, in random order. Sequences have up to 128 tokens of one step
    (`sequence_length`). Raises InputError for a log that would be too large, and for W5 where half the experts are fewer than a
    token chooses.
    """
    layers, experts, k = len(model.moe_layers), model.experts, model.experts_per_token
    check_choices(recipe.tokens, layers, k)
    steps = recipe.steps if recipe.preset.by_step else 1
    step_of = step_of_token(recipe.tokens, steps)
    first_of_step = np.searchsorted(step_of, np.arange(steps + 1))
    chosen = np.empty((recipe.tokens, layers, k), dtype=np.int16)
    for step, (first, end) in enumerate(pairwise(first_of_step)):
        for layer in range(layers):
            rng = np.random.default_rng([recipe.seed, int(recipe.workload[1:]), step, layer])
            chosen[first:end, layer] = _choices(recipe.workload, rng, end - first, experts, k, step)
    return RoutingTrace(recipe.name, chosen, experts, sequences_of_steps(step_of))


def load_of_steps(trace: RoutingTrace, steps: int) -> np.ndarray:
    """float64[step, layer, expert]: as `RoutingTrace.load`, of every step of a recording that was made in so many."""
    step, loads = step_of_token(trace.tokens, steps)[:, None], np.empty((steps, trace.layers, trace.num_experts))
    for layer in range(trace.layers):
        key = step * trace.num_experts + trace.experts[:, layer]
        counts = np.bincount(key.ravel(), minlength=steps * trace.num_experts)
        loads[:, layer] = counts.reshape(steps, trace.num_experts)
    return loads


def _choices(workload: str, rng: np.random.Generator, tokens: int, experts: int, k: int, step: int) -> np.ndarray:
    """int64[token, k]: the experts that the tokens of a step choose in a layer."""
    if workload == "w0":
        return (np.arange(tokens * k) % experts).reshape(tokens, k)
    pool, of_four = hot_pool(workload, experts, k, step)
    hot = np.resize(of_four, tokens)
    chosen = np.empty((tokens, k), dtype=np.int64)
    chosen[hot] = pool[_subsets(rng, int(hot.sum()), len(pool), k)]
    chosen[~hot] = _subsets(rng, int((~hot).sum()), experts, k)
    return chosen


def hot_pool(workload: str, experts: int, k: int, step: int) -> tuple[np.ndarray, tuple[bool, bool, bool, bool]]:
    """The experts int64[expert] among which some tokens of a step choose, and which of every four tokens do; the others choose
    among all. Of the random presets, W1 to W7."""
    quarter = np.arange(max(k, experts // 4))
    match workload:
        case "w1" | "w2":
            return quarter, THREE_OF_FOUR
        case "w3":
            spread = np.unique(2 * np.arange(max(k, experts // 2)) % experts)
            return (spread if len(spread) >= k else np.arange(experts)), THREE_OF_FOUR
        case "w5":
            live = np.arange(experts // 2, experts)
            if len(live) < k:
                raise InputError(
                    f"synthetic workload: {PRESETS['w5'].name} leaves {len(live)} of {experts} experts to choose from, "
                    f"fewer than the {k} that a token chooses"
                )
            return live, ALL
        case "w6":
            return (step // HOT_STEPS * len(quarter) + quarter) % experts, THREE_OF_FOUR
        case "w7" if step % BURST_EVERY == BURST_EVERY - 1:
            return quarter, EVERY_OTHER
    return np.arange(experts), NONE


def _subsets(rng: np.random.Generator, count: int, size: int, k: int) -> np.ndarray:
    """int64[row, k]: k distinct numbers below size, every set equally likely (Floyd's algorithm, Communications of the ACM
    30(9), 1987), in random order."""
    drawn = np.empty((count, k), dtype=np.int64)
    for place, highest in enumerate(range(size - k, size)):
        number = rng.integers(0, highest + 1, count)
        taken = (drawn[:, :place] == number[:, None]).any(axis=1)
        drawn[:, place] = np.where(taken, highest, number)
    return rng.permuted(drawn, axis=1)

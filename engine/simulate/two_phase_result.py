"""What the simulation of Lina's two-phase scheduling found, batch by batch, and its figures."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.errors import InputError

SCHEMES = ("ideal", "baseline", "lina", "without_estimation", "without_fine_tuning")
"""ideal: every device gets an equal part of every layer, and nothing is scheduled
baseline: experts stay where they are, in contiguous blocks
lina: both phases; without_estimation: scheduled from the actual choices at every layer, while everybody waits
without_fine_tuning: the first phase only"""

TAIL = 95
PAPER_SLOTS = 4
"""Experts on one device in a layer, at most, in the paper (§7.1), whose models have one expert for every device."""


@dataclass(frozen=True)
class TwoPhaseOptions:
    """Settings of Lina's scheduler and of the machine it runs on. Raises InputError for values that make no sense.

    path_length, top_k, max_experts_per_device: Lina's, with the paper's defaults (sections 5.2 and 7.1). The first
        layer with a schedule of its own is number `path_length`, counted from 0. max_experts_per_device 0: see `device_slots`
    batch_tokens: recorded tokens in a batch, in the order of the recording; an incomplete last batch is left out
    copies: how many tokens of the batch each recorded token stands for, to reach a batch as large as a service has
    schedule_seconds, check_seconds: what the scheduler takes to make a hosting and make it known, and to find that
        none is needed. The defaults are what the paper measured on its testbed (section 7.3.1), not laws of nature
    host_bandwidth: bytes/s from host memory to each device, over which expert weights are swapped in; the default is
        assumed (PCIe 4.0 x16 less its overheads)
    other_seconds: the part of a layer without experts (attention and the like), which every scheme has and which hides
        the first phase too
    check, check_experts: phase two compares that many of the most popular experts, as a set or also in their order.
        The paper compares the first 2 · k, with the gate's k of 1, and does not say which of the two it means
    packing: "lina" (equation 1, first-fit decreasing) or "best" (the largest load least, see `replicate_devices`)
    renormalise: whether the truncated estimates are scaled to 1 before equation 1. To the letter they are not, and
        then the devices of the missing part stay idle or nearly so
    network: an all-to-all takes as long as its busiest port ("bound"), or as sends that all start at once ("concurrent")
    """

    path_length: int = 3
    top_k: int = 1
    max_experts_per_device: int = 0
    batch_tokens: int = 2048
    copies: float = 1.0
    schedule_seconds: float = 6.2e-3
    check_seconds: float = 1.45e-3
    host_bandwidth: float = 25e9
    other_seconds: float = 0.0
    check: Literal["set", "order"] = "set"
    check_experts: int = 2
    packing: Literal["lina", "best"] = "lina"
    renormalise: bool = True
    network: Literal["bound", "concurrent"] = "bound"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("path_length", "top_k", "batch_tokens", "check_experts"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)}; wanted at least 1")
        if self.max_experts_per_device < 0:
            raise InputError(f"max_experts_per_device: {self.max_experts_per_device}; wanted at least 0")
        for name in ("copies", "host_bandwidth"):
            if not 0 < getattr(self, name) < np.inf:
                raise InputError(f"{name}: {getattr(self, name)}; wanted a positive number")
        for name in ("schedule_seconds", "check_seconds", "other_seconds"):
            if not 0 <= getattr(self, name) < np.inf:
                raise InputError(f"{name}: {getattr(self, name)}; wanted seconds, at least 0")
        choices = {"check": ("set", "order"), "packing": ("lina", "best"), "network": ("bound", "concurrent")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InputError(f"{name}: '{getattr(self, name)}' is not one of {', '.join(known)}")


@dataclass(frozen=True, eq=False)
class SchemeSeconds:
    """One scheme, float64[batch, layer] seconds each.

    layer: the MoE layer from gate to aggregation, waiting for the scheduler included
    all_to_all: dispatch and combine; waiting: for the scheduler and for expert weights
    """

    layer: np.ndarray
    all_to_all: np.ndarray
    waiting: np.ndarray


@dataclass(frozen=True)
class Figures:
    """Medians and 95th percentiles of one scheme as multiples of the same figure of the ideal.

    inference: the whole batch; layer, all_to_all: the layers that Lina schedules, all batches together
    waiting: mean seconds per batch spent waiting for the scheduler, in seconds
    """

    median_inference: float
    tail_inference: float
    median_layer: float
    tail_layer: float
    median_all_to_all: float
    tail_all_to_all: float
    waiting: float


@dataclass(frozen=True, eq=False)
class TwoPhaseResult:
    """schemes: by name, see SCHEMES. The arrays of the estimation are bool[batch, layer], False in layers before
    `options.path_length`.

    fine_tuned: whether the second phase of Lina made a new hosting
    same_set, same_order: whether the `check_experts` most popular experts were predicted, in any order or in theirs
    wrong_rank: int64[batch, layer], how many experts the estimate puts at another rank of popularity
    """

    options: TwoPhaseOptions
    cost_source: str
    schemes: dict[str, SchemeSeconds]
    fine_tuned: np.ndarray
    same_set: np.ndarray
    same_order: np.ndarray
    wrong_rank: np.ndarray

    @property
    def batches(self) -> int:
        return self.fine_tuned.shape[0]

    @property
    def first_layer(self) -> int:
        """The first layer that Lina schedules."""
        return self.options.path_length

    def inference_seconds(self, scheme: str) -> np.ndarray:
        """float64[batch]: seconds of a whole batch."""
        layers = self.schemes[scheme].layer
        return layers.sum(axis=1) + layers.shape[1] * self.options.other_seconds

    def figures(self, scheme: str) -> Figures:
        """The scheme's figures over the ideal's (1 where both are 0)."""
        mine, ideal = self.schemes[scheme], self.schemes["ideal"]
        pairs = [(self.inference_seconds(scheme), self.inference_seconds("ideal"))]
        pairs += [
            (getattr(mine, part)[:, self.first_layer :], getattr(ideal, part)[:, self.first_layer :])
            for part in ("layer", "all_to_all")
        ]
        ratios = [_ratio(np.percentile(a, q), np.percentile(b, q)) for a, b in pairs for q in (50, TAIL)]
        return Figures(*ratios, waiting=float(mine.waiting.sum(axis=1).mean()))

    @property
    def fine_tuning_rate(self) -> float:
        """Share of the scheduled layers of all batches that were scheduled again."""
        return float(self.fine_tuned[:, self.first_layer :].mean())

    def accuracy_of_layer(self, check: Literal["set", "order"] = "set") -> np.ndarray:
        """float64[layer]: share of batches with a right estimate, as the check has it; nan in layers without one."""
        right = (self.same_set if check == "set" else self.same_order).mean(axis=0)
        right[: self.first_layer] = np.nan
        return right

    def accuracy(self, check: Literal["set", "order"] = "set") -> float:
        """Share of right estimates over all scheduled layers and batches."""
        return float(self.accuracy_of_layer(check)[self.first_layer :].mean())


def _ratio(mine: float, other: float) -> float:
    if other > 0:
        return float(mine / other)
    return 1.0 if mine == other else float("inf")

"""Lina's scheduler at run time (sections 5.2 and 6.2): its settings, its rules and the price of its work. The simulation of its
two phases and the ranks of a launch decide by these same rules.

Before a layer its experts are hosted for a popularity that is estimated from those that the batch's tokens have just been to.
After the gate the most popular ones are compared; if they are others, all are hosted again for the real choices.
Every device keeps the weights of its experts of the linear placement; all others come from its host's memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any, Literal, NamedTuple

import numpy as np

from engine.errors import InputError
from engine.placement.baselines import linear_assignment
from engine.placement.devices.kernel import DevicesInstance, replicate_devices
from engine.placement.devices.search import Hosting, pack_devices
from engine.placement.popularity import PathProfile, most_popular, profile_paths
from engine.plan import Reaction
from engine.problem import Problem
from engine.result import Limits
from engine.workload import RoutingTrace

DIGITS = 12
"""Decimals of a popularity that count: a sum of parts in another order differs in later ones."""

PAPER_SLOTS = 4
"""Limit of experts on one device in a layer in the paper (§7.1), with one expert for every device."""
PAPER_SCHEDULE, PAPER_CHECK = 6.2e-3, 1.45e-3
"""Seconds to schedule and to check as the paper measured them on its testbed (§7.3.1), Python and PyTorch included."""
HOST_BANDWIDTH = 25e9
"""Bytes/s between host memory and a device over a link of its own, assumed: PCIe 4.0 x16 less its overheads."""
HOST_START_UP = 10e-6
"""Seconds until a copy between a device and its host begins, assumed."""
HOST_STEP = 10e-9
"""Seconds of a step of the scheduler on a processor, assumed: a comparison of the sort, or a look at a device."""


@dataclass(frozen=True)
class TwoPhaseOptions:
    """Settings of Lina's scheduler and of the machine it runs on. Raises InputError for values that make no sense.

    path_length, top_k, max_experts_per_device: Lina's, with the paper's defaults (sections 5.2 and 7.1). The first
        layer with a schedule of its own is number `path_length`, counted from 0. max_experts_per_device 0: see `device_slots`
    batch_tokens: recorded tokens in a batch, in the order of the recording; an incomplete last batch is left out
    copies: tokens of the batch for each recorded token, to reach a batch as large as a service has
    schedule_seconds: time of the scheduler to make a hosting and make it known; None: what it takes on the problem's cluster,
        see `reaction_seconds`
    check_seconds: its time to find that none is needed; likewise
    choices: experts that a token is sent to, the first of its recorded ones
    host_bandwidth: bytes/s from host memory to each device, over which expert weights are swapped in
    other_seconds: the part of a layer without experts (attention and the like), which every scheme has and which hides
        the first phase too
    check, check_experts: phase two compares that many of the most popular experts, as a set or also in their order.
        The paper compares the first 2 · k, k being `choices`, and does not say which of the two it means
    start: hosting of the layers before `path_length`, which have no estimate: "blocks", as in the paper, or "popularity", that
        of the profile, as a plan holds it
    packing: "lina" (equation 1, first-fit decreasing) or "best" (the largest load least, see `replicate_devices`)
    renormalise: True if the truncated estimates are scaled to 1 before equation 1. To the letter they are not, and
        then the devices of the missing part stay idle or nearly so
    network: an all-to-all takes as long as its busiest port ("bound"), or as sends that all start at once ("concurrent")
    """

    path_length: int = 3
    top_k: int = 1
    max_experts_per_device: int = 0
    batch_tokens: int = 2048
    copies: float = 1.0
    schedule_seconds: float | None = None
    check_seconds: float | None = None
    host_bandwidth: float = HOST_BANDWIDTH
    other_seconds: float = 0.0
    check: Literal["set", "order"] = "set"
    check_experts: int = 2
    choices: int = 1
    start: Literal["blocks", "popularity"] = "blocks"
    packing: Literal["lina", "best"] = "lina"
    renormalise: bool = True
    network: Literal["bound", "concurrent"] = "bound"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("path_length", "top_k", "batch_tokens", "check_experts", "choices"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: {getattr(self, name)}; wanted at least 1")
        if self.max_experts_per_device < 0:
            raise InputError(f"max_experts_per_device: {self.max_experts_per_device}; wanted at least 0")
        for name in ("copies", "host_bandwidth"):
            if not 0 < getattr(self, name) < np.inf:
                raise InputError(f"{name}: {getattr(self, name)}; wanted a positive number")
        for name in ("schedule_seconds", "check_seconds", "other_seconds"):
            seconds = getattr(self, name)
            if not (seconds is None and name != "other_seconds") and not 0 <= seconds < np.inf:
                raise InputError(f"{name}: {seconds}; wanted seconds, at least 0")
        choices = {
            "check": ("set", "order"),
            "packing": ("lina", "best"),
            "start": ("blocks", "popularity"),
            "network": ("bound", "concurrent"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InputError(f"{name}: '{getattr(self, name)}' is not one of {', '.join(known)}")


def options_of(reaction: Reaction, choices: int, batch_tokens: int, **more: Any) -> TwoPhaseOptions:
    """The settings of a plan's scheduler, which starts from the plan's placement.

    choices: experts of a token
    batch_tokens: recorded tokens that it schedules at once
    more: other fields
    """
    settings = reaction.model_dump(exclude={"batch", "packing"}) | {"packing": reaction.packing or "lina"}
    return TwoPhaseOptions(**settings, choices=choices, batch_tokens=batch_tokens, start="popularity", **more)


def device_slots(problem: Problem, wanted: int = 0) -> int:
    """Experts that a device hosts in a layer, at most: as many as are wanted, or with 0 the paper's, or twice an even share if
    that is more; never more than the memory of the smallest device holds. Raises InputError where that is less than an even
    share."""
    experts, even_share = problem.workload.num_experts, -(-problem.workload.num_experts // len(problem.cluster.gpus))
    fits = problem.expert_slots_of_gpu()
    tight = int(fits.argmin())
    if fits[tight] < even_share:
        raise InputError(
            f"{experts} experts per layer do not fit: {problem.cluster.gpu_names[tight]} has memory for {fits[tight]} per "
            f"layer, all GPUs together for {fits.sum()}; add GPUs or memory, or use a smaller dtype"
        )
    return min(wanted or max(PAPER_SLOTS, 2 * even_share), int(fits[tight]))


def counting_seconds(problem: Problem, options: TwoPhaseOptions) -> float:
    """Seconds until the host of device 0 has sorted the experts by their popularity. Every device counts its tokens' choices
    and sends the counts there."""
    devices, experts, network = len(problem.cluster.gpus), problem.workload.num_experts, problem.network
    counts, words = 8.0 * experts, 8.0 * options.choices * options.batch_tokens * options.copies / devices
    counted = max(float(problem.cost.memory_pass(gpu, words)) for gpu in set(problem.cluster.gpus))
    gather = np.zeros((devices, devices))
    gather[1:, 0] = counts
    looked = HOST_STEP * experts * log2(max(experts, 2))
    return counted + network.bound(gather) + HOST_START_UP + devices * counts / options.host_bandwidth + looked


def reaction_seconds(problem: Problem, options: TwoPhaseOptions) -> tuple[float, float]:
    """Seconds to schedule a layer, check included, and to check alone, on the problem's cluster (§6.2).

    Once the choices are counted (`counting_seconds`) the host of device 0 answers with a word, or looks for a device for each
    expert and answers with the experts of every device.
    """
    devices, experts, network = len(problem.cluster.gpus), problem.workload.num_experts, problem.network
    slots = options.max_experts_per_device or device_slots(problem)
    to_host = counting_seconds(problem, options)

    def answered(size: float) -> float:
        there = np.zeros((devices, devices))
        there[0, 1:] = size
        return HOST_START_UP + devices * size / options.host_bandwidth + network.bound(there)

    return to_host + HOST_STEP * experts * devices + answered(4.0 * devices * slots), to_host + answered(8.0)


def with_reaction(problem: Problem, options: TwoPhaseOptions) -> TwoPhaseOptions:
    """The options with the seconds of the problem's cluster where none are given."""
    schedule, check = reaction_seconds(problem, options)
    given = options.schedule_seconds, options.check_seconds
    return replace(
        options,
        schedule_seconds=schedule if given[0] is None else given[0],
        check_seconds=check if given[1] is None else given[1],
    )


class Decision(NamedTuple):
    """The scheduler's decision on a layer and batch.

    predicted: the hosting of phase one; None: the layer has no estimate
    hosting: the one that the layer runs with
    off: True if the estimate was off, so that phase two made it
    """

    predicted: Hosting | None
    hosting: Hosting
    off: bool


class Scheduler:
    """The rules of Lina's scheduler for a number of devices, with the experts that followed the paths of a recording.

    kept: the experts that every device has the weights of at any time
    """

    def __init__(self, options: TwoPhaseOptions, profile: RoutingTrace, devices: int) -> None:
        """options: with the limit of experts on a device, not 0"""
        self.options, self.devices, self.experts = options, devices, profile.num_experts
        self.paths = _profile(profile, options)
        held = self.experts // devices + (np.arange(devices) < self.experts % devices)
        home = linear_assignment(self.experts, held)
        self.kept: Hosting = tuple(tuple(np.flatnonzero(home == device).tolist()) for device in range(devices))

    def expected(self, first_choices: np.ndarray, layer: int) -> np.ndarray:
        """float64[expert]: the tokens that a part of a batch is expected to send to each expert of a layer, top-k of its path
        each.

        first_choices: int64[token, layer before it]
        """
        path = first_choices[:, layer - self.options.path_length : layer]
        if not len(path):
            return np.zeros(self.experts)
        return len(path) * self.paths.estimate(path, layer - 1, self.options.top_k)

    def estimate(self, parts: Sequence[np.ndarray], tokens: int) -> np.ndarray:
        """float64[expert]: the estimated popularity, at most 1 in all. parts: `expected` of the parts of a batch of so many
        tokens"""
        return np.round(np.sum(parts, axis=0) / tokens, DIGITS)

    def compared(self, estimate: np.ndarray, load: np.ndarray) -> tuple[bool, bool, int]:
        """Quality of an estimate float64[expert] of the actual load float64[expert]: True if it has the most popular experts
        right as a set, as many as phase two compares, True if in order, and the number of all experts that it puts at another
        rank."""
        ranked, actual = most_popular(estimate, len(load)), most_popular(load, len(load))
        top = self.options.check_experts
        same_order = bool((ranked[:top] == actual[:top]).all())
        return set(ranked[:top]) == set(actual[:top]), same_order, int((ranked != actual).sum())

    def off(self, estimate: np.ndarray, load: np.ndarray) -> bool:
        """True if phase two finds an estimate float64[expert] off, by the actual load float64[expert]."""
        same_set, same_order, _ = self.compared(estimate, load)
        return not (same_set if self.options.check == "set" else same_order)

    def hosting(self, popularity: np.ndarray, seed: int, renormalise: bool = True) -> Hosting:
        """The hosting for a popularity float64[expert]; estimates are at most 1 in all, counts are anything."""
        options, total = self.options, popularity.sum()
        share = np.round(popularity / total if renormalise and total > 0 else popularity, DIGITS)
        if options.packing == "lina":
            return pack_devices(share * self.devices, self.devices, options.max_experts_per_device, seed)
        instance = DevicesInstance(share, self.devices, options.max_experts_per_device)
        return replicate_devices(instance, Limits(seed=seed, exact=False), kicks=0).solution

    def missing(self, device: int, hosting: Hosting, already: Hosting | None = None) -> list[int]:
        """The experts of a hosting that a device has no weights of, if it has those of the hosting `already` too."""
        return sorted(set(hosting[device]) - set(self.kept[device]) - set(already[device] if already else ()))

    def decisions(self, experts: np.ndarray, start: Sequence[Hosting]) -> list[Decision]:
        """The decisions on every layer for one batch.

        experts: int[token, layer, k]; -1 = none
        start: the hosting of every layer without an estimate
        """
        decided, first = [], experts[:, :, 0].astype(np.int64)
        for layer in range(experts.shape[1]):
            if layer < self.options.path_length:
                decided.append(Decision(None, start[layer], False))
                continue
            estimate = self.estimate([self.expected(first, layer)], len(experts))
            chosen = experts[:, layer, : self.options.choices]
            load = np.bincount(chosen[chosen >= 0], minlength=self.experts)
            predicted = self.hosting(estimate, self.options.seed + layer, self.options.renormalise)
            off = self.off(estimate, load)
            hosting = self.hosting(load, self.options.seed + layer) if off else predicted
            decided.append(Decision(predicted, hosting, off))
        return decided


def _profile(profile: RoutingTrace, options: TwoPhaseOptions) -> PathProfile:
    """The experts that followed paths of first choices, all choices of the layer after a path counted alike."""
    first, length = profile.experts[:, :, 0], options.path_length
    if options.choices == 1:
        return profile_paths(first, profile.num_experts, length)
    layers = {}
    for end in range(length - 1, profile.layers - 1):
        after = profile.experts[:, end + 1, : options.choices].T
        rows = np.concatenate([np.column_stack([first[:, end + 1 - length : end + 1], choice]) for choice in after])
        layers[end] = profile_paths(rows, profile.num_experts, length).layers[length - 1]
    return PathProfile(length, profile.num_experts, layers)

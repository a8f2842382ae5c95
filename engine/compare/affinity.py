"""Two questions on a plan made by affinity: how many recorded tokens does it need, and does it hold on other text?

ExFlow sections V-G (figure 13) and V-H (Table III). Every recording is cut into two halves: plans are made from one and
scored on the other, so that no plan is judged by tokens it has seen. The score is the share of hops between consecutive
layers that stay on their GPU. All hops cost the same; nodes are ignored.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.compare.held_out import halves, sample
from engine.errors import InputError
from engine.parallel import reported
from engine.placement.affinity.bounds import spectral_limits
from engine.placement.affinity.kernel import AffinityInstance, affinity
from engine.placement.robust import score_matrix
from engine.placement.transitions import kept, transitions
from engine.result import Limits, Stop, never
from engine.schema import Amounts
from engine.systems.base import Report, silent
from engine.workload import RoutingTrace

FIRST_SIZE, SIZE_STEPS, LAST_STEP = 100, (1, 3), 0.7
"""Default sizes: 100, 300, 1 000, 3 000, … below this part of the half, and the whole half."""
SEEDS = 3
LEAST_SECONDS, MOST_SECONDS, SECONDS_PER_ENTRY = 0.3, 10.0, 1e-5
CLOCK = 10.0
"""Times the seconds of work that a search is given after which the clock ends it."""
SORTED = 0.75


@dataclass(frozen=True, eq=False)
class KeepLimits:
    """hops: float64[layer - 1], those between each layer and the next that equally large groups can keep at most."""

    hops: Amounts


@dataclass(frozen=True)
class SamplePoint:
    """A plan made from `tokens` tokens, drawn with `seed`: the share of held-out hops that it keeps on their GPU."""

    tokens: int
    seed: int
    kept: float


@dataclass(frozen=True)
class TokensEnough:
    """The kept share by the tokens that a plan is made from.

    unit: held out and drawn whole, "sequences" or "tokens"; tokens, held_out: of the two halves.
    linear: share that contiguous blocks of experts keep on the held-out half; ceiling: that of a plan made from the
    held-out half itself, None until it is known; limit: no placement keeps more of it (proven).
    complete: True once all points are there.
    """

    gpus: int
    first_choice: bool
    unit: str
    tokens: int
    held_out: int
    linear: float
    limit: float
    ceiling: float | None = None
    points: tuple[SamplePoint, ...] = ()
    complete: bool = False

    def mean_by_size(self) -> dict[int, float]:
        """Mean kept share of every size that has points, smallest first."""
        sizes = sorted({point.tokens for point in self.points})
        return {size: float(np.mean([point.kept for point in self.points if point.tokens == size])) for size in sizes}

    def gain(self, size: int) -> float | None:
        """The gain of plans of this size over linear blocks, as a part of that of all tokens; None while unknown and if all
        tokens gain nothing."""
        means = self.mean_by_size()
        if size not in means or self.tokens not in means or means[self.tokens] <= self.linear:
            return None
        return (means[size] - self.linear) / (means[self.tokens] - self.linear)

    def enough(self, part: float = 0.95) -> int | None:
        """The smallest size from which on plans gain at least `part` of the gain of all tokens; None while unknown."""
        gains = {size: self.gain(size) for size in self.mean_by_size()}
        if not self.complete or None in gains.values():
            return None
        short = [size for size, gain in gains.items() if gain < part]
        return min((size for size in gains if size > max(short, default=0)), default=None)


@dataclass(frozen=True)
class OutOfDistribution:
    """Plans made on each recording, scored on the held-out half of each.

    kept: [plan][recording], the share of hops kept; as many rows as plans have been made so far. linear: [recording],
    that of contiguous blocks. tokens, held_out: [recording], of the two halves. A column is scored on one set of tokens,
    so its values compare plans; values of a row also differ by how much affinity a recording has.
    """

    gpus: int
    first_choice: bool
    names: tuple[str, ...]
    tokens: tuple[int, ...]
    held_out: tuple[int, ...]
    linear: tuple[float, ...]
    kept: tuple[tuple[float, ...], ...] = ()

    @property
    def complete(self) -> bool:
        return len(self.kept) == len(self.names)

    def matrix(self) -> NDArray[np.float64]:
        """float64[plan, recording]; NaN in the rows that are still to come."""
        matrix = np.full((len(self.names), len(self.names)), np.nan)
        matrix[: len(self.kept)] = np.array(self.kept).reshape(-1, len(self.names))
        return matrix

    def row_normalised(self) -> NDArray[np.float64]:
        """Every row as a ratio to the plan's own recording, as in ExFlow's Table III; NaN where that keeps nothing."""
        return _ratio(self.matrix(), self.matrix().diagonal()[:, None])

    def against_own(self) -> NDArray[np.float64]:
        """Every column as a ratio to the plan made for that recording: the loss by planning on another one."""
        return _ratio(self.matrix(), self.matrix().diagonal()[None, :])


def _ratio(value: NDArray[np.float64], base: NDArray[np.float64]) -> NDArray[np.float64]:
    base = np.broadcast_to(base, value.shape)
    return np.divide(value, base, out=np.full(value.shape, np.nan), where=base > 0)


def tokens_enough(
    trace: RoutingTrace,
    gpus: int,
    sizes: Sequence[int] | None = None,
    seeds: int = SEEDS,
    first_choice: bool = True,
    time_limit: float | None = None,
    stop: Stop = never,
    report: Report = silent,
    on_point: Callable[[TokensEnough], None] | None = None,
) -> TokensEnough:
    """Plans from samples of one half of a recording, scored on the other (ExFlow figure 13).

    sizes: tokens of the samples, at most those of the half; default: see `default_sizes`. A sample is made of whole
        sequences in random order, the last one cut to the size, or of single tokens where no sequences are known.
    seeds: samples of each size; there is only one of the whole half. time_limit: seconds of search a plan on an ordinary
        processor, by default according to the size of the problem.
    on_point: called after every plan with the study so far.

    The plans are made side by side. Once `stop` answers True, the study so far is returned. Raises InputError for a recording
    without hops or too short to be halved, and if the experts cannot be spread equally over the GPUs.
    """
    plan_on, score_on, unit = halves(trace)
    counts = _counts(score_on, first_choice)
    instance = AffinityInstance(counts, gpus)
    time_limit = time_limit or seconds_of_plan(trace)
    whole = plan_on.tokens
    wanted = sorted({min(int(size), whole) for size in sizes or default_sizes(whole)})
    if wanted[0] < 1 or seeds < 1:
        raise InputError("every sample needs a size of at least one token, and every size at least one seed")
    curve = TokensEnough(
        gpus, first_choice, unit, whole, score_on.tokens, linear=kept(_linear(instance), counts), limit=keep_limit(counts, gpus)
    )
    # The ceiling and the whole half first, then one sample of each size: the shape of the curve is seen long before its spread.
    samples = [None] + [(whole, 0)] * (whole in wanted)
    samples += [(size, seed) for seed in range(seeds) for size in wanted if size < whole]
    titles = [f"planning from {f'{each[0]:,} tokens' if each else 'the held-out half itself'}" for each in samples]
    common = (plan_on, instance, first_choice, time_limit, samples)
    for index, share in reported(_kept_by_sample, common, titles, stop, report):
        if samples[index] is None:
            curve = replace(curve, ceiling=share)
        else:
            curve = replace(curve, points=(*curve.points, SamplePoint(*samples[index], share)))
        known = (curve.ceiling is not None) + len(curve.points)
        curve = replace(curve, complete=known == len(samples))
        if on_point:
            on_point(curve)
    return curve


def _kept_by_sample(common: tuple, index: int, stop: Stop, report: Report) -> float | None:
    """Share of held-out hops that the plan of a sample keeps, or that of the held-out half itself; None when stopped."""
    plan_on, held_out, first_choice, time_limit, samples = common
    instance, seed = held_out, 0
    if samples[index] is not None:
        size, seed = samples[index]
        counts = transitions(sample(plan_on, size, seed), held_out.experts, first_choice)
        instance = AffinityInstance(counts, held_out.gpus)
    place = _plan(instance, time_limit, seed, stop)
    return None if stop() else kept(place, held_out.transitions)


def out_of_distribution(
    traces: Sequence[RoutingTrace],
    gpus: int,
    first_choice: bool = True,
    time_limit: float | None = None,
    seed: int = 0,
    stop: Stop = never,
    report: Report = silent,
    on_point: Callable[[OutOfDistribution], None] | None = None,
) -> OutOfDistribution:
    """A plan from one half of every recording, scored on the other half of every recording (ExFlow Table III).

    time_limit, stop, report, on_point: as for `tokens_enough`; a point is a row. Raises InputError as it does, and if the
    recordings differ in layers or experts.
    """
    if not traces:
        raise InputError("out_of_distribution: wanted at least one recording")
    shape = (traces[0].layers, traces[0].num_experts)
    for trace in traces[1:]:
        if (trace.layers, trace.num_experts) != shape:
            raise InputError(
                f"{trace.name} has {trace.layers} layers of {trace.num_experts} experts, {traces[0].name} has "
                f"{shape[0]} of {shape[1]}: one plan can serve only recordings of one model"
            )
    parts = [halves(trace) for trace in traces]
    counts = [_counts(score_on, first_choice) for _, score_on, _ in parts]
    plans = [AffinityInstance(_counts(plan_on, first_choice), gpus) for plan_on, _, _ in parts]
    table = OutOfDistribution(
        gpus,
        first_choice,
        tuple(trace.name for trace in traces),
        tuple(plan_on.tokens for plan_on, _, _ in parts),
        tuple(score_on.tokens for _, score_on, _ in parts),
        tuple(kept(_linear(plans[0]), count) for count in counts),
    )
    time_limit = time_limit or seconds_of_plan(traces[0])
    common, titles = (plans, counts, time_limit, seed), [f"planning on {trace.name}" for trace in traces]
    for index, row in reported(_kept_on_recordings, common, titles, stop, report):
        if index > len(table.kept):  # rows after one that a stop left out would be taken for it
            break
        table = replace(table, kept=(*table.kept, row))
        if on_point:
            on_point(table)
    return table


def _kept_on_recordings(common: tuple, index: int, stop: Stop, report: Report) -> tuple[float, ...] | None:
    """Share of the held-out hops of every recording that the plan made on one of them keeps; None when stopped."""
    plans, counts, time_limit, seed = common
    place = _plan(plans[index], time_limit, seed, stop)
    return None if stop() else tuple(kept(place, count) for count in counts)


def default_sizes(tokens: int) -> list[int]:
    """100, 300, 1 000, 3 000, … and all of `tokens`."""
    sizes, power = [], FIRST_SIZE
    while power < LAST_STEP * tokens:
        sizes += [step * power for step in SIZE_STEPS if step * power < LAST_STEP * tokens]
        power *= 10
    return [*sizes, tokens]


def seconds_of_plan(trace: RoutingTrace) -> float:
    """Seconds of search after which plans of this size hardly improve on held-out tokens."""
    entries = (trace.layers - 1) * trace.num_experts**2
    return float(np.clip(SECONDS_PER_ENTRY * entries, LEAST_SECONDS, MOST_SECONDS))


def keep_limit(counts: NDArray[np.float64], groups: int) -> float:
    """No placement with equally many experts on each of `groups` GPUs (or nodes) keeps a larger share of the hops.

    counts: float64[layer - 1, expert, expert]; the experts must be a multiple of the groups.
    """
    total = counts.sum()
    return float(spectral_limits(counts, groups).sum() / total) if total else 1.0


def kept_by_pair(share: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[layer - 1]: the share of hops kept between each layer and the next; NaN where there are none.

    share: float64[layer, expert, gpu] of `Placement.share`, with replicas the expected share (see `score_matrix`); counts:
    float64[layer - 1, expert, expert].
    """
    load = np.ones((2, share.shape[1]))
    return np.array(
        [
            score_matrix([share[layer : layer + 2]], [load], [count[None]]).kept_share[0, 0] if count.any() else np.nan
            for layer, count in enumerate(counts)
        ]
    )


def sorted_choices(trace: RoutingTrace) -> bool:
    """True if a token's choices seem to be sorted by expert id: then the first is not the router's favourite."""
    if trace.k < 2:
        return False
    here, there = trace.experts[:, :, :-1], trace.experts[:, :, 1:]
    both = (here >= 0) & (there >= 0)
    return bool(both.any() and (there > here)[both].mean() > SORTED)


def _plan(instance: AffinityInstance, time_limit: float, seed: int, stop: Stop) -> NDArray[np.int64]:
    """gpu_of_expert int64[layer, expert], the same however busy the processors are with other plans."""
    wall_limit = CLOCK * time_limit
    return affinity(instance, Limits(time_limit, wall=wall_limit, seed=seed, exact=False), stop).solution


def _counts(trace: RoutingTrace, first_choice: bool) -> NDArray[np.float64]:
    counts = transitions(trace.experts, trace.num_experts, first_choice)
    if not counts.any():
        why = "it has a single layer" if trace.layers == 1 else "no token has choices in two consecutive layers"
        raise InputError(f"{trace.name} has no hops between layers: {why}")
    return counts


def _linear(instance: AffinityInstance) -> NDArray[np.int64]:
    row = np.arange(instance.experts) // (instance.experts // instance.gpus)
    return np.tile(row, (instance.layers, 1))

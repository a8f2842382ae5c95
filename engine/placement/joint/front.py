"""The front between affinity and balance: placements of which none is better than another in both.

Weighted sums find its corners (Cohon's non-inferior set estimation): first both ends, then always where the front known
so far has its longest gap, with the weight that counts the two ends of the gap alike. Every search begins from the best
placement any search found so far, and everything found on the way competes for a place.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.placement.joint.instance import JointFigures, JointInstance
from engine.placement.joint.kernel import Workloads, place_jointly
from engine.result import Floats, Ints, Limits, Status, Stop, never

END = 0.005
"""The ends count the other aim this much: of placements equal in one aim, the better in the other."""
KICKS_PER_EXPERT, LEAST_KICKS = 0.08, 30
USUAL_SECONDS = 20.0
"""Seconds of work on a front, unless a person says otherwise."""
SAME, EQUAL = 1e-9, 1e-6


@dataclass(frozen=True)
class FrontPoint:
    """One placement of a front.

    gpu_of_expert: int64[layer, expert]
    weight: the weight of affinity it was found with (see `place_jointly`)
    hop_cost_share, kept_share, balancedness: over the workloads the worst or the mean, as asked for
    figures: the same and the imbalance on every workload
    moves: (layer, expert) pairs on another GPU than in `start`; 0 without one
    """

    gpu_of_expert: Ints
    weight: float
    hop_cost_share: float
    kept_share: float
    balancedness: float
    figures: JointFigures
    moves: int

    def beats(self, other: "FrontPoint") -> bool:
        """True if it is as good in hops and in balance and better in one of them; round-off is neither."""
        hops = other.hop_cost_share - self.hop_cost_share
        balance = self.balancedness - other.balancedness
        return min(hops, balance) >= -SAME and max(hops, balance) > SAME


def front(
    instance: JointInstance,
    limits: Limits = Limits(USUAL_SECONDS),
    stop: Stop = never,
    report: Callable[[FrontPoint], None] | None = None,
    *,
    points: int = 9,
    workloads: Workloads = "worst",
    start: Ints | None = None,
    max_moves: int | None = None,
    kicks: int | None = None,
    initial: tuple[Ints, ...] = (),
) -> list[FrontPoint]:
    """At most `points` placements from fewest hops to best balance, none beaten by another in hop cost share and
    balancedness; with `start` and max_moves all of them within the moves.

    The options are those of `place_jointly`, for one search a point.

    limits: of all searches together, as much work for each and the wall seconds shared out among those to come
    report: called after every search with the best point for its weight, if it is a new one; later ones may beat it, so a
        page shows those that `beats` leaves
    kicks: None: 0.08 a (layer, expert) pair, at least 30, and twice that at both ends
    initial: placements int64[layer, expert] that every search may begin from

    At least one point is returned, and when `stop` answers True those found so far. Raises InputError if an option is out of
    range (see `place_jointly`).
    """
    if points < 1:
        raise InputError(f"points: {points}; wanted at least 1")
    deadline = time.perf_counter() + limits.wall_seconds
    archive = _Archive(instance, workloads, start)
    if kicks is None:
        kicks = max(LEAST_KICKS, int(KICKS_PER_EXPERT * instance.layers * instance.experts))
    # The ends first: points between are looked for relative to them.
    weights = [1 - END, END] if points > 1 else [0.5]
    tried: list[float] = []
    announced: list[FrontPoint] = []
    while len(tried) < points:
        weight = weights[len(tried)] if len(tried) < len(weights) else archive.next_weight(tried)
        if weight is None:
            break
        left = (deadline - time.perf_counter()) / (points - len(tried))
        if tried and (left <= 0 or stop()):
            break
        result = place_jointly(
            instance,
            Limits(limits.seconds / points, wall=max(left, 0.0), seed=limits.seed + len(tried)),
            stop,
            weight=weight,
            workloads=workloads,
            start=start,
            max_moves=max_moves,
            initial=initial if not tried else (*initial, archive.best(weight).gpu_of_expert),
            kicks=kicks * (2 if len(tried) < len(weights) else 1),
            on_placement=lambda place, weight=weight: archive.add(place, weight),
        )
        archive.add(result.solution, weight)
        tried.append(weight)
        best = archive.best(weight)
        if report and not any(best is point for point in announced):
            announced.append(best)
            report(best)
        if result.status is Status.CANCELLED:
            break
    return archive.thinned(points, tried)


class _Archive:
    """All placements met that none beats."""

    def __init__(self, instance: JointInstance, workloads: Workloads, start: Ints | None) -> None:
        self.instance, self.start = instance, start
        self.worst = workloads == "worst"
        self.points: list[FrontPoint] = []

    def add(self, place: Ints, weight: float) -> None:
        figures = self.instance.figures(place)
        most, least = (np.max, np.min) if self.worst else (np.mean, np.mean)
        point = FrontPoint(
            gpu_of_expert=place,
            weight=weight,
            hop_cost_share=float(most(figures.hop_cost_share)),
            kept_share=float(least(figures.kept_share)),
            balancedness=float(least(figures.balancedness)),
            figures=figures,
            moves=0 if self.start is None else int((place != self.start).sum()),
        )
        for other in self.points:
            alike = abs(other.hop_cost_share - point.hop_cost_share) + abs(other.balancedness - point.balancedness)
            if alike <= 2 * SAME or other.beats(point):
                return
        self.points = [other for other in self.points if not point.beats(other)] + [point]
        self.points.sort(key=lambda kept: kept.hop_cost_share)

    def best(self, weight: float) -> FrontPoint:
        """The point with the best weighted objective; of equals the one with the fewest hops, for a search goes more
        easily from affinity towards balance than back."""
        hops, imbalance = self._axes()
        objective = weight * hops + (1 - weight) * imbalance
        return self.points[int(np.flatnonzero(objective <= objective.min() + EQUAL)[0])]

    def next_weight(self, tried: list[float]) -> float | None:
        """The weight across the longest gap between the corners known, unlike all tried; None if there is none."""
        corners = sorted({id(point): point for point in map(self.best, tried)}.values(), key=lambda p: p.hop_cost_share)
        hops, imbalance = self._axes(corners)
        width, height = np.diff(hops), -np.diff(imbalance)
        reach = max(np.ptp(hops), SAME), max(np.ptp(imbalance), SAME)
        for gap in np.argsort(-np.hypot(width / reach[0], height / reach[1]), kind="stable"):
            if width[gap] <= SAME or height[gap] <= SAME:
                continue
            weight = float(height[gap] / (height[gap] + width[gap]))
            if min(abs(weight - other) for other in tried) > 1e-3:
                return weight
        # No gap with an untried weight: halve the widest range of weights, as points off the corners may turn up there.
        known = np.sort([0.0, *tried, 1.0])
        widest = int(np.diff(known).argmax())
        return float(known[widest : widest + 2].mean()) if np.diff(known)[widest] > 0.02 else None

    def thinned(self, points: int, tried: list[float]) -> list[FrontPoint]:
        """At most `points` of the archive: the best of every weight tried, then those farthest from any chosen."""
        chosen = list({id(point): point for point in map(self.best, tried)}.values())
        every = np.array([[point.hop_cost_share, point.balancedness] for point in self.points])
        every = every / np.maximum(np.ptp(every, axis=0), SAME)
        place_of = {id(point): index for index, point in enumerate(self.points)}
        while len(chosen) < min(points, len(self.points)):
            picked = every[[place_of[id(point)] for point in chosen]]
            distance = np.hypot(*(every[:, None] - picked).transpose(2, 0, 1)).min(axis=1)
            chosen.append(self.points[int(distance.argmax())])
        return sorted(chosen, key=lambda point: point.hop_cost_share)

    def _axes(self, points: list[FrontPoint] | None = None) -> tuple[Floats, Floats]:
        """float64[point] each: hop cost share / its value under a blind placement, and imbalance."""
        points = self.points if points is None else points
        most = np.max if self.worst else np.mean
        hops = np.array([point.hop_cost_share for point in points]) / self.instance.random_hop_cost_share
        return hops, np.array([float(most(point.figures.imbalance)) for point in points])

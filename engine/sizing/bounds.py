"""Clusters that cannot meet a target, by proof: from memory, from the work of all over the speed of all, and from linear
programmes that divide experts among types of GPUs.

Every proof holds for a cluster and for all that have no more nodes of any type, however tokens are dealt to their GPUs, each of
which has the same mix of them: a larger cluster could leave nodes idle, so more nodes never raise a bound.

Rows between domains (the GPUs that links connect, or single ones) depend on the deal. If the domain with the largest share of
the tokens has more than `above` and no more than `up_to` of them, at least 1 - `up_to` of the rows of an expert come from
elsewhere, wherever it is; to experts anywhere but there at least `above`; and that domain sends `above` of the rows of all
experts that it does not have. Some case of `CASES` holds, so the least of their bounds is one.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.network import Network
from engine.result import Floats, Ints
from engine.sizing.inputs import Catalogue, Vector

EDGES = (0.0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1.0)
CASES = tuple(pairwise(EDGES))
"""(above, up to) the largest share of the tokens that a domain has."""
ROUNDING = 1 - 1e-9
PLACES = 160
"""Shares of the tokens at which the time of a GPU outside its experts is taken."""


@dataclass(frozen=True, eq=False)
class Work:
    """The work of a pass or step, apart from any cluster.

    load: float64[layer, expert] token copies
    sizes: bytes of a row in dispatch and combine; None: rows between GPUs do not count, since copies share them
    expert_bytes: of one expert in all layers
    """

    load: Floats
    sizes: tuple[float, float] | None
    expert_bytes: float


@dataclass(frozen=True, eq=False)
class Kinds:
    """The GPUs of a catalogue, those of a node type that are equal as one kind.

    kind_of: int64[kind] node types; per_node: int64[kind] GPUs of a node
    room: float64[kind] bytes for experts and sequences
    seconds: float64[layer, expert, kind] of all copies of an expert
    domain: int64[kind], of equal domains; per_type: int64[domain], how many a node has
    out, into: float64[domain] bytes/s of all ports of one
    start: float64[type] seconds of a transfer's start
    share: float64[place], rising to 1; beside: float64[place, kind], seconds outside the experts of a GPU with that share of
        the tokens, rising
    sequence_bytes: of all sequences together
    """

    kind_of: Ints
    per_node: Ints
    room: Floats
    seconds: Floats
    domain: Ints
    per_type: Ints
    out: Floats
    into: Floats
    start: Floats
    share: Floats
    beside: Floats
    sequence_bytes: float


class Prices(NamedTuple):
    """Prices of the loads of one layer in a case, for kinds and then for the kinds of the domain with most tokens.

    there, back: float64[domain + 1] of what enters (leaves) the domains of a kind in dispatch and combine, that one last
    sent, returned: of what leaves (enters) that domain for experts elsewhere
    ffn: float64[kind + kind], slot: float64[kind + kind] seconds

    there and sent, back and returned, and ffn add up to 1 at most; none is negative.
    """

    there: Floats
    back: Floats
    sent: float
    returned: float
    ffn: Floats
    slot: Floats


@dataclass(frozen=True, eq=False)
class Exclusion:
    """A cluster with its proof: it and every smaller one take at least `seconds`.

    rung: memory, fluid or experts by type
    prices: of every case, by the place in CASES and the domain; without them only what needs none is proven
    recording: the number of the one that takes so long
    """

    vector: Vector
    seconds: float
    rung: str
    prices: dict[tuple[int, int], Prices]
    recording: int = 0


def kinds_of(
    catalogue: Catalogue,
    network_of: Callable[[Vector], Network],
    room: Callable[[object], float],
    seconds: Callable[[object], Floats],
    beside: Callable[[object, Floats], Floats],
    shares: Floats,
    sequence_bytes: float,
) -> Kinds:
    """The GPUs of a catalogue.

    network_of: of a cluster
    room: bytes of a GPU for experts and sequences
    seconds: float64[layer, expert] of an expert on a GPU
    beside: seconds of a GPU outside its experts with each of these shares of the tokens
    shares: float64[place]
    sequence_bytes: of all sequences
    """
    rows, domains = [], []
    for number, offer in enumerate(catalogue.nodes):
        node = offer.drawn
        one = network_of(tuple(int(place == number) for place in range(len(catalogue.nodes))))
        linked = bool(node.link_bandwidth) and len(node.gpus) > 1
        if linked:
            domains.append((1, one.send.sum(), one.receive.sum()))
        for gpu in dict.fromkeys(node.gpus):
            mine = [place for place, other in enumerate(node.gpus) if other == gpu]
            if not linked:
                domains.append((len(mine), one.send[mine[0]], one.receive[mine[0]]))
            rows.append((number, len(mine), len(domains) - 1, gpu))
    gpus = [row[3] for row in rows]
    per_type, out, into = map(np.array, zip(*domains, strict=True))
    return Kinds(
        *(np.array([row[place] for row in rows]) for place in (0, 1)),
        np.array([room(gpu) for gpu in gpus]),
        np.stack([seconds(gpu) for gpu in gpus], axis=2),
        np.array([row[2] for row in rows]),
        per_type,
        out.astype(float),
        into.astype(float),
        np.array([offer.start_up for offer in catalogue.nodes]),
        shares,
        np.minimum.accumulate(np.stack([beside(gpu, shares) for gpu in gpus], axis=1)[::-1], axis=0)[::-1],
        sequence_bytes,
    )


class Bounds:
    """Bounds of clusters, and those that are excluded: the largest ones alone, which stand for all smaller ones."""

    def __init__(self, work: Sequence[Work], kinds: Sequence[Kinds]) -> None:
        """work, kinds: of every recording; the slowest counts"""
        self.of = [_Bound(*pair) for pair in zip(work, kinds, strict=True)]
        self.excluded: list[Exclusion] = []

    def known(self, vector: Vector) -> float:
        """Seconds that no plan of a cluster is below, by what is excluded so far."""
        return max((each.seconds for each in self.excluded if _within(vector, each.vector)), default=0.0)

    def least(self, vector: Vector, priced: bool = True) -> float:
        """Seconds that no plan of a cluster is below. priced: False to take the speed of all GPUs alone, in a fiftieth of the
        time"""
        return max(self.known(vector), *(of.seconds(vector, of.found) if priced else of.fluid(vector) for of in self.of))

    def likely_price(self, target: float, catalogue: Catalogue) -> float:
        """A guess, for reports, at the price at which clusters meet a target: that of the cheapest of one type that is twice as
        fast as the speed of all GPUs asks for; else of all nodes."""
        offers = catalogue.nodes
        prices = [sum(offer.price * offer.most for offer in offers)]
        for place, offer in enumerate(offers):

            def meets(count: int, place: int = place) -> bool:
                return self.least(tuple(count * (each == place) for each in range(len(offers))), priced=False) <= target / 2

            count = 1 + bisect_left(range(1, offer.most + 1), True, key=meets)
            prices += [count * offer.price] if count <= offer.most else []
        return max(min(prices), 1e-9)

    def exclude(self, vector: Vector, target: float, most: Vector) -> bool:
        """True if no plan of a cluster meets a target in seconds: then it is excluded, with as many larger ones as the same
        proof covers.

        most: nodes that there may be of every type
        """
        if self.known(vector) > target:
            return True
        proofs = ((number, of.proof(vector, target)) for number, of in enumerate(self.of))
        number, proof = next((each for each in proofs if each[1] is not None), (0, None))
        if proof is None:
            return False
        of, (rung, seconds, prices), grown = self.of[number], proof, True
        while grown:
            grown = False
            for place, limit in enumerate(most):
                larger = (*vector[:place], vector[place] + 1, *vector[place + 1 :])
                if larger[place] <= limit and (there := of.seconds(larger, prices, target)) > target:
                    vector, seconds, grown = larger, there, True
        covered = [each for each in self.excluded if each.seconds <= seconds and _within(each.vector, vector)]
        kept = [each for each in self.excluded if each not in covered]
        self.excluded = [*kept, Exclusion(vector, seconds, rung, prices, number)]
        return True


def _within(vector: Vector, larger: Vector) -> bool:
    return all(a <= b for a, b in zip(vector, larger, strict=True))


class _Bound:
    """The bounds of one recording.

    found: the newest prices of every case
    open: clusters with the bound of their weakest case, which no larger cluster's exceeds
    """

    def __init__(self, work: Work, kinds: Kinds) -> None:
        self.work, self.kinds, self.experts = work, kinds, work.load.shape[1]
        self.found: dict[tuple[int, int], Prices] = {}
        self.open: list[tuple[Vector, float]] = []
        self.weakest: tuple[int, int] | None = None

    @cached_property
    def _work(self) -> Floats:
        """float64[kind]: seconds of all experts on one GPU."""
        return self.kinds.seconds.sum(axis=(0, 1))

    @cached_property
    def _twice(self) -> Floats:
        """float64[layer, expert, kind + kind] seconds."""
        return np.tile(self.kinds.seconds, 2)

    @cached_property
    def _times(self) -> Floats:
        """float64[time]: of every kind at every place, ascending."""
        return np.unique(self.kinds.beside)

    @cached_property
    def _within(self) -> Floats:
        """float64[time, kind]: the share of the tokens that a GPU can have at most to end before a time."""
        kinds = self.kinds
        done = [np.searchsorted(kinds.beside[:, kind], self._times, side="left") for kind in range(len(kinds.room))]
        shares = np.stack([kinds.share[np.minimum(place, len(kinds.share) - 1)] for place in done], axis=1)
        return np.minimum(shares, np.maximum(kinds.room, 0) / max(kinds.sequence_bytes, 1e-9))

    def gpus(self, vector: Vector) -> Ints:
        """int64[kind]"""
        return np.array(vector)[self.kinds.kind_of] * self.kinds.per_node

    def fits(self, vector: Vector) -> bool:
        """True if experts and sequences fit the memory of all GPUs together."""
        room, gpus, work = np.maximum(self.kinds.room, 0.0), self.gpus(vector), self.work
        slots = np.minimum(room // work.expert_bytes, self.experts)
        needed = self.experts * work.expert_bytes + self.kinds.sequence_bytes
        return bool(gpus @ slots >= self.experts and gpus @ room >= needed)

    def cases(self, vector: Vector) -> list[tuple[int, int]]:
        """The cases that can be: places in CASES, each with the domain that has most tokens, -1 where none stands out."""
        nodes = np.array(vector)[self._type_of_domain]
        domains = np.flatnonzero(nodes)
        fewest = 1 / float((nodes * self.kinds.per_type).sum())
        some = [place for place, (_, up_to) in enumerate(CASES) if up_to >= fewest]
        if self.work.sizes is None:
            return [(len(CASES) - 1, -1)]
        return [(place, domain) for place in some for domain in ([-1] if place == 0 else domains.tolist())]

    @cached_property
    def _type_of_domain(self) -> Ints:
        """int64[domain]"""
        return np.array([self.kinds.kind_of[np.flatnonzero(self.kinds.domain == at)[0]] for at in range(len(self.kinds.out))])

    def _rows(self, vector: Vector, place: int, special: int) -> tuple[Floats, Floats, Ints, Floats]:
        """(float64[2, domain + 1] seconds of a copy at the ports in dispatch and combine; float64[2], of a copy that the
        special domain sends and gets back; int64[kind + kind] GPUs; float64[domain + 1] seconds of a copy at the ports of the
        one domain that has its expert), the special domain's last; inf and 0 where there is none."""
        kinds, (above, up_to) = self.kinds, CASES[place]
        domains = np.array(vector)[self._type_of_domain] * kinds.per_type
        alone = np.zeros(len(domains), dtype=np.int64)
        gpus = self.gpus(vector)
        inside = np.zeros(len(gpus), dtype=np.int64)
        if special >= 0:
            alone[special] = 1
            mine = kinds.domain == special
            inside[mine] = kinds.per_node[mine] // kinds.per_type[special]
        there, back = self.work.sizes or (0.0, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            elsewhere = max(1 - up_to, above)
            each = np.stack([there / kinds.into, back / kinds.out]) * elsewhere
            ports = each / (domains - alone)
            own = np.array([[there / kinds.into[special]], [back / kinds.out[special]]]) * (1 - up_to)
            sent = np.array([there / kinds.out[special], back / kinds.into[special]]) * above
        if self.work.sizes is None:
            ports[:], own[:], sent[:], each[:] = 0.0, 0.0, 0.0, 0.0
        of_one = np.append(each.sum(axis=0), own.sum())
        return np.column_stack([ports, own]), sent * (special >= 0), np.concatenate([gpus - inside, inside]), of_one

    def proof(self, vector: Vector, target: float) -> tuple[str, float, dict[tuple[int, int], Prices]] | None:
        """(rung, seconds that no plan of a cluster is below, prices) above a target; None: not proven. Every case is tried
        without prices, with those of other clusters, and with its own."""
        if not self.fits(vector):
            return "memory", np.inf, {}
        if any(seconds <= target and _within(each, vector) for each, seconds in self.open):
            return None
        before, prices, least = self.before(vector), {}, np.inf
        for case in sorted(self.cases(vector), key=lambda case: case != self.weakest):
            seconds = before + self.case(vector, *case, None)
            if seconds <= target and case in self.found:
                prices[case] = self.found[case]
                seconds = before + self.case(vector, *case, prices[case])
            if seconds <= target:
                prices[case] = self.found[case] = self.prices(vector, *case)
                seconds = before + self.case(vector, *case, prices[case])
            least = min(least, seconds)
            if least * ROUNDING <= target:
                self.weakest = case
                self.open.append((vector, least * ROUNDING))
                return None
        return "experts by type" if prices else "fluid", least * ROUNDING, prices

    def seconds(self, vector: Vector, prices: dict[tuple[int, int], Prices], enough: float = 0.0) -> float:
        """Seconds that no plan of a cluster is below, by prices (weak duality: any prove a bound); without prices for a case
        only the FFNs count in it. enough: with less than this in a case, that is the answer"""
        if not self.fits(vector):
            return np.inf
        before, least = self.before(vector), np.inf
        for case in sorted(self.cases(vector), key=lambda case: case != self.weakest):
            least = min(least, before + self.case(vector, *case, prices.get(case)))
            if least <= enough:
                break
        return least * ROUNDING

    def fluid(self, vector: Vector) -> float:
        """Seconds that no plan of a cluster is below, whatever travels."""
        if not self.fits(vector):
            return np.inf
        gpus, seconds = self.gpus(vector), self.kinds.seconds
        each = gpus / self._work
        shared = (seconds / (self._work * each.sum()))[:, :, gpus > 0].min(axis=2).sum(axis=1)
        hottest = seconds[:, :, gpus > 0].min(axis=2).max(axis=1)
        return (self.before(vector) + float(np.maximum(shared, hottest).sum())) * ROUNDING

    def before(self, vector: Vector) -> float:
        """Seconds before which no deal of the tokens has ended outside the experts."""
        within = np.append(self._within @ self.gpus(vector) >= 1 - 1e-12, True).argmax()
        return float(self._times[within - 1]) if within else 0.0

    def case(self, vector: Vector, place: int, special: int, prices: Prices | None) -> float:
        """Seconds of all layers that no plan is below in a case, without what lies outside the experts and exchanges.

        place, special: as in `cases`
        prices: any; None: FFNs and the hottest expert count alone
        """
        here = self.gpus(vector)
        hottest = self.kinds.seconds[:, :, here > 0].min(axis=2).max(axis=1)
        kinds, load = self.kinds, self.work.load
        ports, sent, gpus, alone = self._rows(vector, place, special)
        have = gpus > 0
        column = np.concatenate([kinds.domain, np.full(len(kinds.domain), ports.shape[1] - 1)])[have]
        where = (load[:, :, None] * alone[column] + self._twice[:, :, have]).min(axis=2).max(axis=1)
        if prices is None:
            speed = 1 / self._work
            ffn, slot, travel, always = np.tile(speed / (here @ speed), 2), np.zeros(len(gpus)), 0.0, 0.0
        else:
            per_copy = np.where(np.isfinite(ports), ports, 0.0)
            always = prices.sent * sent[0] + prices.returned * sent[1]
            travel = (prices.there * per_copy[0] + prices.back * per_copy[1])[column]
            travel = travel - always * (np.flatnonzero(have) >= len(kinds.domain))
            ffn, slot = prices.ffn / gpus.clip(min=1), prices.slot
        slots = np.minimum(np.maximum(kinds.room, 0) // self.work.expert_bytes, self.experts)
        cells = self._twice[:, :, have] * ffn[have] + load[:, :, None] * travel + slot[have]
        paid = always * load.sum(axis=1) - float((slot * np.tile(slots, 2) * gpus).sum())
        work = cells.min(axis=2).sum(axis=1) + paid
        apart = (load[:, :, None] * travel + slot[have]).min(axis=2).sum(axis=1) + paid + hottest
        start = 0.0
        if self.work.sizes is not None and CASES[place][1] <= 1 / 2:  # some rows leave every domain
            start = 2 * float(kinds.start[np.array(vector) > 0].min())
        return float((np.maximum(np.maximum(work, apart), where) + start * (load > 0).any(axis=1)).sum())

    def prices(self, vector: Vector, place: int, special: int) -> Prices:
        """Prices at which `seconds` is large in a case: the dual of a linear programme that divides the experts of a mean
        layer, by popularity, among kinds."""
        from scipy.optimize import linprog

        kinds, experts = self.kinds, self.experts
        ports, sent, gpus, _ = self._rows(vector, place, special)
        have = np.flatnonzero(gpus > 0)
        order = np.argsort(-self.work.load, axis=1, kind="stable")
        load = np.take_along_axis(self.work.load, order, axis=1).mean(axis=0)
        seconds = np.tile(np.take_along_axis(kinds.seconds, order[:, :, None], axis=1).mean(axis=0), 2)[:, have]
        column = np.concatenate([kinds.domain, np.full(len(kinds.domain), ports.shape[1] - 1)])[have]
        used, width = np.unique(column), experts * len(have) + 3
        slots = np.minimum(np.maximum(kinds.room, 0) // self.work.expert_bytes, experts)
        scale = float((seconds.min(axis=1)).sum()) or 1.0
        rows, limits = [], []

        def add(cells: Floats, time: int | None, limit: float = 0.0) -> None:
            row = np.zeros(width)
            row[:-3] = cells.ravel()
            if time is not None:
                row[:-3] /= scale
                row[time - 3] = -1.0
            rows.append(row)
            limits.append(limit)

        for exchange in (0, 1):
            for one in used:
                add(load[:, None] * ports[exchange, one] * (column == one), exchange)
            outside = have >= len(kinds.domain)
            add(-load[:, None] * sent[exchange] * outside, exchange, -sent[exchange] * float(load.sum()) / scale)
        for place_in, kind in enumerate(have):
            add(seconds * (np.arange(len(have)) == place_in) / gpus[kind], 2)
        for place_in, kind in enumerate(have):
            add(
                np.broadcast_to(np.arange(len(have)) == place_in, seconds.shape),
                None,
                float(slots[kind % len(slots)] * gpus[kind]),
            )
        whole = np.zeros((experts, width))
        for expert in range(experts):
            whole[expert, expert * len(have) : (expert + 1) * len(have)] = 1.0
        cost = np.zeros(width)
        cost[-3:] = 1.0
        answer = linprog(cost, np.array(rows), limits, whole, np.ones(experts), method="highs")
        there, back = np.zeros((2, ports.shape[1]))
        ffn, slot = np.zeros((2, len(gpus)))
        if answer.x is None:
            return Prices(there, back, 0.0, 0.0, ffn, slot)
        dual = np.maximum(-answer.ineqlin.marginals, 0.0)
        count = len(used)
        parts = [dual[: count + 1], dual[count + 1 : 2 * count + 2], dual[2 * count + 2 : 2 * count + 2 + len(have)]]
        parts = [part / max(float(part.sum()), 1.0) for part in parts]
        there[used], back[used], ffn[have] = parts[0][:-1], parts[1][:-1], parts[2]
        slot[have] = dual[2 * count + 2 + len(have) :] * scale
        return Prices(there, back, float(parts[0][-1]), float(parts[1][-1]), ffn, slot)

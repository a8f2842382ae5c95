"""The search for the cheapest deployments: tables of all candidates of a group, and the fronts between price and time of a
token.

Users ask in a closed loop, so tokens/s follow from the times by Little's law: all users over the seconds of a whole answer.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np

from engine.catalogue.packaged import every_gpu_type, machine_size
from engine.result import Floats, Ints, Stop, never
from engine.serving.deployment import Demand, Deployment, Ranks
from engine.serving.forecast import Stack, fitted, forecast, held_against, machine_of, times, work
from engine.serving.parts import Machine, measured_between, multiplies, others_ahead
from engine.sizing.deployments import (
    WHY,
    Found,
    Group,
    LeftOut,
    Point,
    Question,
    Why,
    counted_as,
    decision,
    divisions,
    formats_of,
    measured_groups,
    newest_version,
)
from engine.systems.base import Report, silent

LADDER = sorted({int(2**power * step) for power in range(14) for step in (1, 1.5)})
"""Users of a server that are tried, and as many as it has room for."""
MOST_USERS, MOST_TENSOR, MOST_OF_SERVER = 8192, 16, 32
"""Users of a server, GPUs that share the attention of a sequence, and GPUs of a server: engines were measured with no more."""
MOST_ACROSS = 64
"""GPUs of a server of several machines: DeepEP's exchanges were measured between eight of eight GPUs."""
MOST_SERVERS = 8
"""Servers of one deployment that take prompts, and as many that generate."""


@dataclass(frozen=True, eq=False)
class Table:
    """Deployments of a group with one kind of server that generates.

    prefills: kinds of servers that only take prompts; empty: none do
    users: int64[row] of all servers together; servers: int64[row] that generate
    prefill, takers: int64[row]; place of the kind, and number, of servers that take prompts; 0 where there are none
    first, token: float64[row] seconds
    busy: float64[row] share of their time in which prompts keep the servers that only take them
    """

    group: Group
    decode: Ranks
    prefills: tuple[Ranks, ...]
    users: Ints
    servers: Ints
    prefill: Ints
    takers: Ints
    first: Floats
    token: Floats
    busy: Floats

    @property
    def gpus(self) -> Ints:
        """int64[row]: of one replica."""
        of_prefill = np.array([ranks.gpus for ranks in self.prefills] or [0])
        return self.servers * self.decode.gpus + self.takers * of_prefill[self.prefill]

    def rate(self, output: int) -> Floats:
        """float64[row]: tokens/s generated. output: tokens of an answer"""
        return self.users * output / (self.first + (output - 1) * self.token)

    def deployment(self, row: int, checkpoint: str) -> Deployment:
        decode = self.decode.model_copy(update={"servers": int(self.servers[row])})
        if not self.prefills:
            return self.group.deployment(checkpoint, decode, None)
        prefill = self.prefills[self.prefill[row]].model_copy(update={"servers": int(self.takers[row])})
        return self.group.deployment(checkpoint, decode, prefill)


def front(price: Floats, seconds: Floats) -> Ints:
    """int64[place]: the rows that no other beats in both, the cheapest first; one of equal ones."""
    order = np.lexsort((seconds, price))
    fastest = np.minimum.accumulate(seconds[order])
    return order[np.r_[True, seconds[order][1:] < fastest[:-1]]] if len(order) else order


def cheapest(question: Question, stop: Stop = never, report: Report = silent) -> Iterator[Found]:
    """The deployments that meet the target and that no other beats in both price and time of a token, after every group.

    The price is that of a million tokens or, for a rate or users in all, that of an hour. Raises InputError for a target that
    is none, and for a checkpoint whose number format is not known.
    """
    search = Search(question)
    groups = list(search.groups())
    for done, group in enumerate(groups):
        report(done / len(groups), f"{group.engine} on {group.gpu}, {group.mode}, {group.precision}")
        for table in search.tables(group):
            search.add(table)
            if stop():
                break
        yield search.found()
        if stop():
            return
    if not groups:
        yield search.found()


class _Kept(NamedTuple):
    """A row of a table that may be on the front. price: what is compared"""

    price: float
    token: float
    table: Table
    row: int


class Search:
    """The rows that are kept, and candidates left out, while groups are tried."""

    def __init__(self, question: Question) -> None:
        self.question, self.target = question, question.limits
        self.formats = question.formats or formats_of(question.checkpoint, question.model)
        self.checkpoint = counted_as(question)
        self.counts: Counter[tuple[str, Why]] = Counter()
        self.nearest: dict[tuple[str, Why], float] = {}
        self.kept: dict[str, list[_Kept]] = {gpu: [] for gpu in question.prices}
        self.tried = 0

    def groups(self) -> Iterator[Group]:
        """The groups to try; counts the others."""
        question, measured = self.question, measured_groups()
        engines = question.engines or tuple(sorted({engine for engine, _, _ in measured}))
        pairs = sorted({(engine, mode) for engine, _, mode in measured if engine in engines})
        for gpu in question.prices:
            able = [precision for precision in self.formats if multiplies(precision, every_gpu_type()[gpu])]
            self.counts[gpu, "number format"] += len(self.formats) - len(able)
            for engine, mode in pairs:
                if (engine, gpu, mode) not in measured and not question.extrapolate:
                    self.counts[gpu, "not measured"] += 1
                    continue
                for precision in able:
                    yield Group(engine, newest_version(engine, mode), gpu, mode, precision)

    def tables(self, group: Group) -> Iterator[Table]:
        """The deployments of a group, a table for every kind of server that generates; counts servers that cannot be."""
        question, demand = self.question, self._demand(1)
        on = machine_of(group.gpu, group.precision, question.model, question.sizes)
        largest = min(machine_size(group.gpu), question.most, question.most if question.extrapolate else MOST_OF_SERVER)
        sizes = {2**power for power in range(largest.bit_length())} | {largest}
        if (size := machine_size(group.gpu)) > 1:
            sizes |= {size * 2**power for power in range(1, 12) if size * 2**power <= min(question.most, MOST_ACROSS)}
        servers = [each for gpus in sorted(sizes) for each in divisions(question.model, question.sizes, group.precision, gpus)]
        servers = [each for each in servers if each.tensor <= MOST_TENSOR or question.extrapolate]
        fitting = [each for each in servers if on.most_sequences(each, demand) >= each.data]
        able = [each for each in fitting if not self.target.token or on.least_read(each.gpus) <= self.target.token]
        self.counts[group.gpu, "memory"] += len(servers) - len(fitting)
        self.counts[group.gpu, "bound"] += len(fitting) - len(able)
        for decode in able:
            room = min(int(on.most_sequences(decode, demand)), MOST_USERS)
            ladder = np.array(sorted({*(users for users in LADDER if decode.data <= users <= room), room}), dtype=np.int64)
            if group.mode == "agg":
                yield self._whole(group, decode, ladder)
            else:
                yield self._split(group, on, decode, tuple(fitting), ladder)

    def _demand(self, users: int) -> Demand:
        return Demand(prompt=self.question.prompt, output=self.question.output, users=users)

    def _stack(self, group: Group, decode: Ranks, prefill: Ranks | None, ladder: Ints) -> Stack:
        deployment = group.deployment(self.checkpoint, decode, prefill)
        model, sizes = self.question.model, self.question.sizes
        return Stack.of([work(deployment, self._demand(users), model, sizes) for users in ladder.tolist()])

    def _whole(self, group: Group, decode: Ranks, ladder: Ints) -> Table:
        """One server that takes prompts and generates, a row for every number of users."""
        factors = fitted().of(group.deployment(self.checkpoint, decode, None))[None]
        timed, none = times(self._stack(group, decode, None, ladder), factors), np.zeros(len(ladder), dtype=np.int64)
        return Table(group, decode, (), ladder, none + 1, none, none, timed.first, timed.token, none.astype(np.float64))

    def _split(self, group: Group, on: Machine, decode: Ranks, prefills: tuple[Ranks, ...], ladder: Ints) -> Table:
        """Some servers that take prompts and some that generate, a row for all numbers of both and of users."""
        pairs = [(p, d) for p in range(1, MOST_SERVERS + 1) for d in range(1, MOST_SERVERS + 1) if gcd(p, d) == 1]
        takers, servers = np.array(pairs).T
        rung, kind, pair = (each.ravel() for each in np.indices((len(ladder), len(prefills), len(pairs))))
        of_prefill, data = (np.array([getattr(ranks, name) for ranks in prefills]) for name in ("gpus", "data"))
        there = servers[pair] * decode.gpus + takers[pair] * of_prefill[kind] <= self.question.most
        rung, kind, pair = rung[there], kind[there], pair[there]
        takers, servers = takers[pair], servers[pair]
        users, one = ladder[rung] * servers, self._stack(group, decode, prefills[0], ladder)
        prompts = np.array([on.prompt(ranks, self.question.prompt) for ranks in prefills])
        rest = {name: each[rung] for name, each in one.rest.items()}
        rest |= {"users": users.astype(np.float64), "ahead": others_ahead(users, takers * data[kind])}
        factors = fitted().of(group.deployment(self.checkpoint, decode, prefills[0]))[None]
        timed = times(Stack(one.decode[rung], prompts[kind], rest), factors)
        taken = timed.of_first[:, : prompts.shape[1]].sum(axis=1)
        answers = users / (timed.first + (self.question.output - 1) * timed.token)
        busy = answers * taken / (takers * data[kind])
        return Table(group, decode, prefills, users, servers, kind, takers, timed.first, timed.token, busy)

    def add(self, table: Table) -> None:
        """Keep the front of a table's deployments that meet the target, and count the others by the first limit they miss."""
        target, gpu = self.target, table.group.gpu
        price, hour = self._prices(table)
        gpus = table.gpus * self.replicas(table)
        limits: tuple[tuple[Why, Floats, float | None], ...] = (
            ("token", table.token, target.token),
            ("first token", table.first, target.first_token),
            ("prompts", table.busy, 1.0),
            ("GPUs", gpus, self.question.most),
            ("price", hour, target.price),
        )
        met = np.ones(len(table.token), dtype=bool)
        for why, value, most in limits:
            if most is not None and (over := met & (value > most)).any():
                self.counts[gpu, why] += int(over.sum())
                if why in ("token", "first token"):
                    self.nearest[gpu, why] = min(float(value[over].min()), self.nearest.get((gpu, why), np.inf))
                met &= ~over
        self.tried += len(met)
        rows = np.flatnonzero(met)
        rows = rows[front(price[rows], table.token[rows])]
        kept = self.kept[gpu] + [_Kept(float(price[row]), float(table.token[row]), table, int(row)) for row in rows]
        self.kept[gpu] = _front_of(kept)

    def replicas(self, table: Table) -> Ints:
        """int64[row]: replicas that make the demanded rate and have room for all users."""
        needed = np.ones(len(table.token), dtype=np.int64)
        if self.target.rate is not None:
            needed = np.ceil(self.target.rate / table.rate(self.question.output)).astype(np.int64)
        return needed if self.target.users is None else np.maximum(needed, -(-self.target.users // table.users))

    def _prices(self, table: Table) -> tuple[Floats, Floats]:
        """float64[row], twice: the price that is compared, and that of all replicas an hour."""
        one = table.gpus * self.question.prices[table.group.gpu]
        hour = one * self.replicas(table)
        return hour if self.target.in_all else one / table.rate(self.question.output), hour

    def found(self) -> Found:
        """The answer so far."""
        kept = [each for rows in self.kept.values() for each in rows]
        best = {(id(each.table), each.row) for each in _front_of(kept)}
        points = [self._point(each, (id(each.table), each.row) in best) for each in sorted(kept, key=lambda each: each.price)]
        left_out = [
            LeftOut(gpu=gpu, why=why, count=self.counts[gpu, why], nearest=self.nearest.get((gpu, why)))
            for gpu in self.question.prices
            for why in WHY
            if self.counts[gpu, why]
        ]
        return Found(
            decision=decision(points, self.target, self.question.currency) if points else "",
            points=tuple(points),
            left_out=tuple(left_out),
            tried=self.tried,
            token=self.target.token,
            notes=tuple(self._notes()),
        )

    def _point(self, kept: _Kept, best: bool) -> Point:
        table, row, question = kept.table, kept.row, self.question
        deployment, demand = table.deployment(row, self.checkpoint), self._demand(int(table.users[row]))
        predicted = forecast(deployment, demand, question.model, question.sizes)
        replicas = int(self.replicas(table)[row])
        gpus, rate = replicas * deployment.gpus, replicas * float(table.rate(question.output)[row])
        hour = gpus * question.prices[deployment.gpu]
        return Point(
            deployment=deployment,
            demand=demand,
            replicas=replicas,
            gpus=gpus,
            first_token=predicted.first_token,
            token=predicted.token,
            low=predicted.low,
            high=predicted.high,
            rate=rate,
            hour=hour,
            million=hour / rate / 3600 * 1e6,
            best=best,
            held=held_against(deployment),
            parts=dict(predicted.parts),
        )

    def _notes(self) -> Iterator[str]:
        question = self.question
        if not question.formats:
            yield f"weights are {self.formats[0]} as the checkpoint's; name formats for other checkpoints of the model"
        if self.checkpoint != question.checkpoint:
            yield f"{question.checkpoint} counts as measured: it has the sizes of {self.checkpoint}"
        elif question.checkpoint not in fitted().checkpoints:
            yield f"{question.checkpoint} was never measured, so intervals are wider"
        unheld = (each.table.group.gpu for rows in self.kept.values() for each in rows if not _held(each))
        for gpu in dict.fromkeys(unheld):
            by = "DeepEP's as measured" if measured_between(gpu, machine_size(gpu)) else "by the catalogue's network"
            said = "servers of more machines than any measured have wider intervals"
            yield f"{gpu}: {said}; their exchanges between machines are {by}"
        if question.extrapolate:
            yield "engines, modes and GPU types that were never measured together are in it, with wider intervals"


def _held(kept: _Kept) -> bool:
    return held_against(kept.table.deployment(kept.row, "any"))


def _front_of(kept: list[_Kept]) -> list[_Kept]:
    places = front(np.array([each.price for each in kept]), np.array([each.token for each in kept]))
    return [kept[place] for place in places]

"""The experts of every token of a step, and the rows of its all-to-alls in the buffers of the token's and of the
expert's rank. Experts are replayed, so that all ranks know all sizes; those of real tokens only are exchanged all the
same where the program says so, as they would be by a gate that decides while the step runs.

At home rows are ordered by the expert's rank, expert and slot; at the host by expert, source and slot, so that every
expert's rows are contiguous. In transit they are ordered by rank, expert and slot. The slots of a source for an expert
hold its tokens in the order of the batch; in a buffer that is filled up, the empty slots lie evenly between them. Thus
both ways of cutting give parts of about equal size, and each part is a run of slots: equal runs (a cut along the
capacity, as Tutel and PipeMoE do), or the tokens of some sequences (Lancet's irregular cut, figure 5).

An expert takes at most `capacity` tokens of a batch, first come, first served (Lancet §2.3, figure 5). When a batch is
cut into parts, capacity passing gives a part the room left by the parts before it (`route_parts` of the simulation),
and the same tokens are dropped. That is exact only if the order of service is the order of the parts: token by token, each
taking all its experts. A gate that serves the first choices of the whole batch before any second choice (GShard), or tokens by
their importance (batch-prioritised routing), serves later parts before it is done with earlier ones; no capacity that is passed
forwards tells a part how much they will take, so such a gate has to see the whole batch (`operator_axes.GATES`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import InputError
from engine.launch.rank.instructions import Tokens
from engine.launch.step.operators import Share
from engine.model import MoEModel
from engine.training import TrainingStep

Service = Literal["token", "choice"]
"""token: a token takes all its experts before the next one does
choice: all first choices, then all second ones"""


def kept(
    experts: NDArray[np.integer],
    num_experts: int,
    capacity: int | NDArray[np.int64],
    service: Service = "token",
    importance: NDArray[np.floating] | None = None,
) -> NDArray[np.bool_]:
    """bool[token, choice], true if the expert takes the token in an uncut batch. Raises InputError for bad input.

    experts: integers [token, choice], the experts of a token in order of choice, below 0 for none
    capacity: tokens, one number or int64[expert]
    importance: float[token]; tokens are served from the largest down, equal ones in the order of the batch; None: all in the
        order of the batch
    """
    if importance is not None:
        order = np.argsort(-np.asarray(importance), kind="stable")
        mask = np.empty(np.shape(experts), dtype=bool)
        mask[order] = kept(np.asarray(experts)[order], num_experts, capacity, service)
        return mask
    experts = np.asarray(experts)
    if experts.ndim != 2 or not np.issubdtype(experts.dtype, np.integer):
        raise InputError(f"experts: {experts.dtype} of shape {experts.shape}; wanted integers [token, choice]")
    if experts.size and experts.max() >= num_experts:
        raise InputError(f"experts: expert {experts.max()} of {num_experts}")
    experts = np.maximum(experts.astype(np.int64), -1)
    # In the order of service, stably sorted by expert: the place within an expert's run is the number of earlier tokens.
    ordered = experts.T if service == "choice" else experts
    served = ordered.ravel()
    by_expert = np.argsort(served, kind="stable")
    counts = np.bincount(served + 1, minlength=num_experts + 1)
    place = np.empty(len(served), dtype=np.int64)
    place[by_expert] = np.arange(len(served)) - np.repeat(np.cumsum(counts) - counts, counts)
    limit = np.append(np.broadcast_to(capacity, num_experts), 0)
    mask = (place < limit[served]).reshape(ordered.shape)
    return mask.T if service == "choice" else mask


@dataclass(frozen=True, eq=False)
class Choice:
    """The choices of one MoE layer.

    experts: int64[rank, token, k], below 0 for none
    kept: bool[rank, token, k], False if the expert's capacity was used up
    capacity: rows of a rank's buffer for an expert, None if unlimited
    """

    experts: np.ndarray
    kept: np.ndarray
    capacity: int | None


def choices(model: MoEModel, step: TrainingStep, ranks: int, recorded: Tokens | None) -> list[Choice]:
    """The choice of every MoE layer.

    Balanced: expert after expert, so that every rank gives each as many tokens as any other, give or take one.
        Recorded: every rank's recorded tokens in their order, evenly spaced or repeated to the number of the step; a
        rank without any routes like a balanced one. Tokens beyond the capacity are dropped, token by token in the order
        of the batch, or if the gate looks at the whole batch all first choices before any second ones, and of these the
        most important ones first where the gate's scores were recorded.
    """
    layers, tokens, k = len(model.moe_layers), step.tokens, model.experts_per_token
    copy = np.arange(ranks * tokens * k).reshape(ranks, tokens, k)
    experts = np.repeat((copy % model.experts)[:, None], layers, axis=1)
    importance = np.zeros((ranks, layers, tokens))
    if step.routing == "recorded" and recorded is not None:
        for rank in range(ranks):
            own = np.flatnonzero(recorded.source == rank)
            if len(own):
                replayed = own[np.arange(tokens) * len(own) // tokens]
                experts[rank] = recorded.experts[replayed].transpose(1, 0, 2)
                if recorded.importance is not None:
                    importance[rank] = recorded.importance[replayed].T
    capacity = int(step.capacity(model)) if step.capacity_factor else None
    whole = step.gate == "batch-prioritised"
    limit = tokens * k if capacity is None else capacity
    choices_of_layers: list[Choice] = []
    for layer in range(layers):
        own, before = experts[:, layer], choices_of_layers[-1] if choices_of_layers else None
        order = importance[:, layer] if whole else [None] * ranks
        mask = np.stack(
            [
                kept(of_rank, model.experts, limit, "choice" if whole else "token", first) & (of_rank >= 0)
                for of_rank, first in zip(own, order, strict=True)
            ]
        )
        alike = before is not None and np.array_equal(own, before.experts) and np.array_equal(mask, before.kept)
        choices_of_layers.append(before if alike else Choice(own, mask, capacity))
    return choices_of_layers


class Cut(Protocol):
    """A division of a tensor's rows into parts."""

    count: int

    def part(self, whole: Tensor, index: int) -> Tensor: ...

    def whole(self, parts: Sequence[Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Slices:
    """Contiguous parts. bounds: rows, [part + 1]."""

    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def part(self, whole: Tensor, index: int) -> Tensor:
        return whole[self.bounds[index] : self.bounds[index + 1]] if self.count > 1 else whole

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)) if self.count > 1 else parts[0]


class Rows:
    """Parts with rows anywhere. rows: int64 of each part, every row of the whole in one of them."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self.rows, self.count = tuple(rows), len(rows)
        self.inverse = torch.argsort(torch.cat(self.rows))

    def part(self, whole: Tensor, index: int) -> Tensor:
        return whole.index_select(0, self.rows[index])

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).index_select(0, self.inverse)


class Value:
    """An operator's result, part by part. A reader under the same cut gets the parts as they are; for a reader of the
    whole or of another cut it is put together first, once."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._cut: Cut | None = None
        self._parts: dict[int, Tensor | Callable[[], Tensor]] = {}
        self._whole: Tensor | None = None

    def put(self, cut: Cut, index: int, part: Tensor | Callable[[], Tensor]) -> None:
        """Set a part, or a function that makes it when it is first read."""
        self._cut = cut
        self._parts[index] = part

    def room(self, cut: Slices, index: int, like: Tensor, width: int) -> Tensor:
        """Uninitialised memory for a part of a matrix, next to the other parts, so that nothing has to be moved later."""
        if cut.count == 1:
            part = like.new_empty((len(like), width))
            self.put(cut, index, part)
            return part
        if self._whole is None:
            self._whole = like.new_empty((cut.bounds[-1], width))
        self.put(cut, index, cut.part(self._whole, index))
        return self._parts[index]

    def has(self, cut: Cut, index: int) -> bool:
        """True if there is anything to get a part from."""
        return self._whole is not None or (cut == self._cut and index in self._parts)

    def get(self, cut: Cut, index: int) -> Tensor:
        """A part of the value under some cut."""
        if cut != self._cut or not self._parts:
            return cut.part(self.whole(), index)
        part = self._parts[index]
        if not isinstance(part, Tensor):
            part = self._parts[index] = part()
        return part

    def whole(self) -> Tensor:
        """All parts as one tensor."""
        if self._whole is None:
            self._whole = self._cut.whole([self.get(self._cut, index) for index in range(self._cut.count)])
            self._parts.clear()
        return self._whole


@dataclass(frozen=True, eq=False)
class Parts:
    """The rows of an exchange in parts; every list has an item for each part.

    home, host: the cuts of the rows of the two sides
    sent, received: rows to and from every rank of the group in a dispatch (a combine has them the other way round)
    sent_sizes, received_sizes: int64[expert of every rank], int64[source · own expert]: the same, for each expert
    to_host: position in transit of each row at the host
    to_transit: the inverse
    rows: the division of the host's rows among its experts
    tokens: first token and last + 1
    token_of_row, padding: at home, the token in each row counted from the part's first, and the rows without
    row_of_copy, kept: int64[token, k], the row of each copy of its tokens, and true if there is one; only if parts have
        tokens of their own
    """

    home: Rows | Slices
    host: Rows | Slices
    sent: list[list[int]]
    received: list[list[int]]
    sent_sizes: list[Tensor]
    received_sizes: list[Tensor]
    to_host: list[Tensor]
    to_transit: list[Tensor]
    rows: list[Share]
    tokens: list[tuple[int, int]]
    token_of_row: list[Tensor]
    padding: list[Tensor]
    row_of_copy: list[Tensor]
    kept: list[Tensor]


class Layout:
    """The exchange of one MoE layer, seen by one rank.

    choice: all ranks' choices
    group: the ranks among which tokens are exchanged, which hold every expert once
    hosted: the experts of each of them, ascending
    rank: this one
    filled: true if buffers are filled up to the capacity
    """

    def __init__(
        self,
        choice: Choice,
        group: list[int],
        hosted: list[list[int]],
        rank: int,
        filled: bool,
        sequences: int,
        device: torch.device,
    ) -> None:
        self.hosted, self.me, self.device = hosted, group.index(rank), device
        self.experts, self.kept = choice.experts[group], choice.kept[group]
        self.tokens, self.k = self.experts.shape[1:]
        self.sequences, self.width = sequences, sum(map(len, hosted))
        self.real = self._counts(slice(None))
        """int64[source, expert]: rows with a token."""
        fill = filled and choice.capacity is not None
        self.slots = np.full_like(self.real, choice.capacity) if fill else self.real
        """int64[source, expert]: rows."""
        self._known: dict[tuple[str, int], Parts] = {}

    def parts(self, along: str, count: int) -> Parts:
        """The exchange in `count` parts. along: "capacity" or "batch"; all the same for one part."""
        along = along if count > 1 else "batch"
        if (along, count) not in self._known:
            self._known[along, count] = self._parts(along, count)
        return self._known[along, count]

    def _counts(self, tokens: slice) -> np.ndarray:
        """int64[source, expert]: kept copies of some tokens."""
        counts = np.zeros((len(self.experts), self.width), dtype=np.int64)
        for source, (experts, kept) in enumerate(zip(self.experts[:, tokens], self.kept[:, tokens], strict=True)):
            counts[source] = np.bincount(experts[kept], minlength=self.width)
        return counts

    def _place(self, token: np.ndarray) -> np.ndarray:
        """The slot of the nth token of a source for an expert."""
        return token * self.slots // np.maximum(self.real, 1)

    def token_bounds(self, count: int) -> list[int]:
        """Whole sequences in parts that differ by at most one."""
        length = self.tokens // self.sequences
        return [part * self.sequences // count * length for part in range(count + 1)]

    def _bounds(self, along: str, count: int) -> np.ndarray:
        """int64[part + 1, source, expert]: slots."""
        equal = np.arange(count + 1)[:, None, None] * self.slots // count
        if along == "capacity":
            return equal
        bounds = self.token_bounds(count)
        runs = [self._counts(slice(first, last)) for first, last in pairwise(bounds)]
        before = np.concatenate([np.zeros_like(equal[:1]), np.cumsum(runs, axis=0)])
        # After the last token of the parts so far, and not after the first one of the parts to come.
        least = np.where(before > 0, self._place(before - 1) + 1, 0)
        most = np.where(before < self.real, self._place(before), self.slots)
        return np.clip(equal, least, most)

    @cached_property
    def _home(self) -> np.ndarray:
        """int64[expert]: the first row of every expert at home."""
        order = [expert for experts in self.hosted for expert in experts]
        first = np.empty(self.width, dtype=np.int64)
        first[order] = _starts(self.slots[self.me, order])
        return first

    @cached_property
    def _copies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(row of every copy at home int64[token, k], token of every row, copy of every row int64[row]), 0 if there is none."""
        experts, kept = self.experts[self.me], self.kept[self.me]
        flat = np.flatnonzero(kept.ravel())
        expert = experts.ravel()[flat]
        by_expert = np.argsort(expert, kind="stable")
        nth = np.empty(len(flat), dtype=np.int64)
        nth[by_expert] = np.arange(len(flat)) - _starts(self.real[self.me])[expert[by_expert]]
        slots, real = self.slots[self.me][expert], self.real[self.me][expert]
        row = self._home[expert] + nth * slots // real
        row_of_copy = np.zeros(kept.size, dtype=np.int64)
        row_of_copy[flat] = row
        copy_of_row = np.full(int(self.slots[self.me].sum()), -1, dtype=np.int64)
        copy_of_row[row] = flat
        return row_of_copy.reshape(kept.shape), np.where(copy_of_row < 0, -1, copy_of_row // self.k), copy_of_row

    @cached_property
    def copy_of_row(self) -> Tensor:
        """int64[row] at home: token · k + choice; 0 if the row is empty."""
        return self._tensor(np.maximum(self._copies[2], 0))

    @cached_property
    def chosen(self) -> Tensor:
        """int64[token, k]: the experts that this rank's tokens take, below 0 for none."""
        return self._tensor(self.experts[self.me])

    def _parts(self, along: str, count: int) -> Parts:
        me, own = self.me, np.array(self.hosted[self.me], dtype=np.int64)
        order = np.array([expert for experts in self.hosted for expert in experts], dtype=np.int64)
        bounds = self._bounds(along, count)
        row_of_copy, token_of_row, _ = self._copies
        split = self.token_bounds(count) if along == "batch" else None
        host_first = _starts(self.slots[:, own].T.ravel()).reshape(len(own), len(self.slots))  # [own expert, source]
        place = np.zeros(max(1, len(token_of_row)), dtype=np.int64)
        columns: dict[str, list] = {field.name: [] for field in fields(Parts)}
        for part in range(count):
            begin, size = bounds[part], bounds[part + 1] - bounds[part]
            home = _runs(self._home[order] + begin[me, order], size[me, order])
            place[home] = np.arange(len(home))
            here = size[:, own]  # [source, own expert]
            in_transit = _starts(here.ravel()).reshape(here.shape)
            to_host = _runs(in_transit.T.ravel(), here.T.ravel())
            first, last = (split[part], split[part + 1]) if split else (0, self.tokens)
            token = token_of_row[home]
            columns["home"].append(self._tensor(home))
            columns["host"].append(self._tensor(_runs((host_first + begin[:, own].T).ravel(), here.T.ravel())))
            columns["sent"].append([int(size[me, experts].sum()) for experts in self.hosted])
            columns["received"].append(here.sum(axis=1).tolist())
            columns["sent_sizes"].append(self._tensor(size[me, order]))
            columns["received_sizes"].append(self._tensor(here.ravel()))
            columns["to_host"].append(self._tensor(to_host))
            columns["to_transit"].append(self._tensor(np.argsort(to_host)))
            counts = here.sum(axis=0)
            columns["rows"].append(Share(counts.tolist(), self._tensor(np.cumsum(counts, dtype=np.int32))))
            columns["tokens"].append((first, last))
            columns["token_of_row"].append(self._tensor(np.maximum(token - first, 0)))
            columns["padding"].append(self._tensor(np.flatnonzero(token < 0)))
            if split:
                columns["row_of_copy"].append(self._tensor(place[row_of_copy[first:last]]))
                columns["kept"].append(self._tensor(self.kept[me, first:last]))
        if count == 1:
            home, host = (Slices((0, len(columns[side][0]))) for side in ("home", "host"))
        else:
            home, host = Rows(columns["home"]), Rows(columns["host"])
        return Parts(**(columns | {"home": home, "host": host}))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _starts(lengths: np.ndarray) -> np.ndarray:
    """int64: starts of contiguous runs of these lengths."""
    return np.cumsum(lengths) - lengths


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: the numbers start, start + 1, … of every run, one run after another."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(int(lengths.sum()))

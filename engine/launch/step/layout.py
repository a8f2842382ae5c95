"""Where the rows of an all-to-all lie: in the buffers of the rank that owns the tokens and of the rank that has the expert.

At home rows are ordered by the expert's rank, expert and slot; at the host by expert, source and slot, so that every expert's
rows lie together. In transit they are ordered by rank, expert and slot. The slots of a source for an expert hold its
tokens in the order of the batch; where a buffer is filled up, the empty slots lie evenly between them. Thus both ways of
cutting give parts of about equal size, and each part is a run of slots: equal runs (a cut along the capacity, as Tutel
and PipeMoE do), or the tokens of some sequences (Lancet's irregular cut, figure 5). As tokens were dropped from the whole
batch, a part has what the parts before it left room for: capacity is passed on.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.launch.step.experts import Share
from engine.launch.step.routing import Choice
from engine.launch.step.values import Rows, Slices


@dataclass(frozen=True, eq=False)
class Parts:
    """The rows of an exchange in parts.

    home, host: how the rows of the two sides are cut; sent, received: rows of every part to and from every rank of the
        group in a dispatch (a combine has them the other way round)
    to_host: of every part, where each row at the host lies in transit; to_transit: the inverse
    rows: of every part, how the host's experts share its rows
    tokens: of every part, the tokens that go into it: first, last + 1
    token_of_row, padding: of every part at home, the token in each row counted from the part's first, and the rows without
    row_of_copy, kept: of every part, the row in it of its tokens' copies, int64[token, k], and whether they have one;
        only where parts have tokens of their own
    """

    home: Rows | Slices
    host: Rows | Slices
    sent: list[list[int]]
    received: list[list[int]]
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

    choice: all ranks' choices; group: the ranks among which tokens are exchanged, which hold every expert once; hosted:
    the experts of each of them, ascending; rank: this one; filled: whether buffers are filled up to the capacity.
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
        # Behind the last token of the parts so far, and not behind the first one of the parts to come.
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
        """(row of every copy at home int64[token, k], token of every row, copy of every row int64[row]), 0 where there is
        none."""
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
        """int64[row] at home: token · k + choice; 0 where the row is empty."""
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
        columns: dict[str, list] = {
            name: []
            for name in (
                "home",
                "host",
                "sent",
                "received",
                "to_host",
                "to_transit",
                "rows",
                "tokens",
                "token_of_row",
                "padding",
                "row_of_copy",
                "kept",
            )
        }
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
    """int64: where runs of these lengths begin when they lie one after another."""
    return np.cumsum(lengths) - lengths


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: the numbers start, start + 1, … of every run, one run after another."""
    return np.repeat(starts - _starts(lengths), lengths) + np.arange(int(lengths.sum()))

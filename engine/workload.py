"""The workload: a recorded routing trace, expert loads or traffic matrices.

All reduce to one tensor of (source rank, expert) token counts per layer, which is all that planning needs. A recording also has
its origin, and findings on whether it can be trusted.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from engine.errors import InputError, one_line
from engine.schema import Frozen

Severity = Literal["ok", "warning", "error"]


class Finding(Frozen):
    """One sentence on a recording.

    severity: "error": plans made on it would be wrong; "warning": they may be
    code: names the check, for scripts
    message: made one line, as names out of a file may be part of it
    rows: first token concerned and the one after the last
    layers: MoE layers, as in the workload
    remedy: the function in `engine.formats.remedies` that follows the advice; None where a person must
    """

    severity: Severity
    code: str = Field(pattern="^[a-z][a-z0-9-]*$")
    message: Annotated[str, BeforeValidator(lambda text: one_line(text) if isinstance(text, str) else text)]
    rows: tuple[int, int] | None = None
    layers: tuple[int, ...] = ()
    remedy: str | None = None


class Origin(Frozen):
    """The origin of a recording: its format, and its reader's findings, which the numbers alone no longer show."""

    format: str
    findings: tuple[Finding, ...] = ()


SAME_SUM = 2e-3
"""Relative difference of sums of scores that rounding to 16 bits makes."""
PREFILL, DECODE = 0, 1
"""Phases of serving that a token may have been routed in."""


def digest_of(*parts: np.ndarray | str | int | None) -> str:
    """SHA-256 over the bytes, dtypes and shapes of the parts."""
    hasher = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            hasher.update(f"{part.dtype}{part.shape}".encode())
            hasher.update(np.ascontiguousarray(part).data)
        else:
            hasher.update(f"|{part}|".encode())
    return hasher.hexdigest()


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The experts that every token chose.

    experts: int16[token, layer, k]; -1 = no choice (padding); layers are MoE layers
    num_experts: logical experts per layer
    sequence: int32[token] or None; the sequence of each token
    source_rank: int32[token] or None; the rank that held the token when it was recorded
    phase: int8[token] or None; `PREFILL` or `DECODE`
    model_layers: the model layer of every MoE layer; None where the recording does not say
    scores: float32[token, layer, k] or None; the gate's score of every choice, as recorded. Those of other choices than
        `experts` has, which has since lost layers or choices, are forgotten
    origin: its format and findings; not part of the digest
    """

    name: str
    experts: np.ndarray
    num_experts: int
    sequence: np.ndarray | None = None
    source_rank: np.ndarray | None = None
    phase: np.ndarray | None = None
    model_layers: tuple[int, ...] | None = None
    origin: Origin | None = None
    scores: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.scores is not None and self.scores.shape != self.experts.shape:
            object.__setattr__(self, "scores", None)

    @property
    def tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def layers(self) -> int:
        return self.experts.shape[1]

    @property
    def k(self) -> int:
        return self.experts.shape[2]

    @cached_property
    def digest(self) -> str:
        said = (self.phase, self.model_layers and str(self.model_layers), self.scores)
        known = [part for part in said if part is not None]
        return digest_of("trace", self.experts, self.num_experts, self.sequence, self.source_rank, *known)

    @cached_property
    def load(self) -> np.ndarray:
        """Token copies that every expert receives: float64[layer, expert]."""
        return self._count(1)[:, 0, :]

    @cached_property
    def importance(self) -> np.ndarray | None:
        """float64[token, layer]: the sum of the gate's scores of a token's choices, by which batch-prioritised routing serves
        (Riquelme et al. 2021, Lancet §2.3). None without scores, and if they add up to the same for every token of a layer, as
        weights do that were divided by their sum: those say nothing of it."""
        if self.scores is None or not self.tokens:
            return None
        total = np.where(self.experts >= 0, self.scores, 0.0).sum(axis=2, dtype=np.float64)
        some = total[(self.experts >= 0).all(axis=(1, 2))]
        return total if len(some) and (np.ptp(some, axis=0) > SAME_SUM * np.abs(some).max(axis=0)).all() else None

    def rank_of_token(self, ranks: int) -> np.ndarray:
        """The source rank of each token when the tokens live on `ranks` ranks: int64[token].

        Recorded ranks are used when there are any (the recording must name fewer than `ranks`); otherwise sequences go
        round-robin to ranks, and without sequences every token counts as one.
        """
        if self.source_rank is not None:
            highest = int(self.source_rank.max(initial=0))
            if highest >= ranks:
                raise InputError(
                    f"{self.name}: tokens come from source rank {highest}, but the cluster has only {ranks} GPUs "
                    f"(ranks 0 … {ranks - 1}); add GPUs or drop the source_rank column"
                )
            return self.source_rank.astype(np.int64)
        unit = np.arange(self.tokens) if self.sequence is None else np.unique(self.sequence, return_inverse=True)[1]
        return unit % ranks

    @cached_property
    def sources(self) -> int:
        """The number of ranks that it can give tokens of their own: recorded ranks, else sequences, else tokens."""
        for known in (self.source_rank, self.sequence):
            if known is not None:
                return len(np.unique(known))
        return self.tokens

    def demand(self, ranks: int) -> np.ndarray:
        """Token copies from every source rank for every expert: float64[layer, rank, expert], read-only.

        It is kept until it is asked for with another number of ranks: problems that differ in costs alone share it.
        """
        counted_ranks, counts = vars(self).get("_counted", (None, None))
        if counted_ranks != ranks:
            counts = self._count(ranks)
            counts.flags.writeable = False
            vars(self)["_counted"] = ranks, counts
        return counts

    def _count(self, ranks: int) -> np.ndarray:
        rank = np.broadcast_to(self.rank_of_token(ranks)[:, None], (self.tokens, self.k)) if ranks > 1 else 0
        counts = np.empty((self.layers, ranks, self.num_experts))
        for layer in range(self.layers):
            chosen = self.experts[:, layer, :].astype(np.int64)
            key = np.where(chosen >= 0, rank * self.num_experts + chosen, ranks * self.num_experts)
            flat = np.bincount(key.ravel(), minlength=ranks * self.num_experts + 1)
            counts[layer] = flat[:-1].reshape(ranks, self.num_experts)
        return counts

    def halves(self) -> tuple["RoutingTrace", "RoutingTrace"]:
        """The recording in two parts, whole sequences in order where it has them: one to plan on, one to score on."""
        if self.sequence is None or len(np.unique(self.sequence)) < 2:
            first = np.arange(self.tokens) < self.tokens // 2
        else:
            order = np.unique(self.sequence, return_inverse=True)[1]
            first = order < (order.max() + 1) // 2
        return self.part(np.flatnonzero(first)), self.part(np.flatnonzero(~first))

    def spread(self, tokens: int) -> "RoutingTrace":
        """At most `tokens` tokens of the recording, evenly spaced, so that all sequences and ranks keep their share."""
        return self.part(np.arange(min(tokens, self.tokens)) * self.tokens // max(min(tokens, self.tokens), 1))

    def from_ranks(self, share: np.ndarray) -> "RoutingTrace":
        """The same tokens, every rank with its share of them, strewn over the recording. share: float64[rank], adds up to 1"""
        place = (np.arange(self.tokens) + 0.5) * (np.sqrt(5) - 1) / 2 % 1
        rank = np.searchsorted(np.cumsum(share)[:-1], place, side="right")
        return replace(self, source_rank=rank.astype(np.int32))

    def part(self, tokens: np.ndarray) -> "RoutingTrace":
        """These tokens (int64[...], or bool[token]) of the recording, in this order."""
        columns = {name: getattr(self, name) for name in ("experts", "sequence", "source_rank", "phase", "scores")}
        return replace(self, **{name: column[tokens] for name, column in columns.items() if column is not None})


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """The number of token copies that every expert received.

    load: float64[layer, expert]; layers are MoE layers
    model_layers: the model layer of every row (dense layers left out)
    by_source: float64[rank, layer, expert] or None; the same, by the rank that held the tokens; adds up to `load`
    by_step: float64[step, layer, expert] or None; the same, by passes of the model or spans of time in their order; adds up
        to `load`
    origin: its format and findings; not part of the digest
    """

    name: str
    load: np.ndarray
    model_layers: tuple[int, ...]
    by_source: np.ndarray | None = None
    by_step: np.ndarray | None = None
    origin: Origin | None = None

    k: ClassVar[None] = None

    @property
    def layers(self) -> int:
        return self.load.shape[0]

    @property
    def num_experts(self) -> int:
        return self.load.shape[1]

    @cached_property
    def digest(self) -> str:
        known = [part for part in (self.by_source, self.by_step) if part is not None]
        return digest_of("load", self.load, str(self.model_layers), *known)

    def from_ranks(self, share: np.ndarray) -> "ExpertLoad":
        """The same loads, of which every rank sends its share. share: float64[rank], adds up to 1"""
        return replace(self, by_source=share[:, None, None] * self.load, by_step=None)

    def demand(self, ranks: int) -> np.ndarray:
        """Token copies from every source rank for every expert: float64[layer, rank, expert].

        As recorded if that was on so many ranks; else every rank is taken to send an equal share.
        """
        if self.by_source is not None and len(self.by_source) == ranks:
            return self.by_source.transpose(1, 0, 2)
        return np.repeat(self.load[:, None, :] / ranks, ranks, axis=1)


@dataclass(frozen=True, eq=False)
class TrafficMatrix:
    """Bytes of the dispatch all-to-all. Column j is the traffic for expert j, which was recorded on GPU j (Aurora's inputs,
    §4): as many experts as ranks.

    bytes: float64[layer, src, dst] bytes; the diagonal is local work, never traffic
    bytes_per_token: bytes of one token copy
    origin: its format and findings; not part of the digest
    """

    name: str
    bytes: np.ndarray
    bytes_per_token: float
    origin: Origin | None = None

    k: ClassVar[None] = None

    @property
    def layers(self) -> int:
        return self.bytes.shape[0]

    @property
    def num_experts(self) -> int:
        return self.bytes.shape[2]

    @cached_property
    def digest(self) -> str:
        return digest_of("traffic", self.bytes, str(self.bytes_per_token))

    @cached_property
    def load(self) -> np.ndarray:
        """Token copies that every expert receives: float64[layer, expert]."""
        return self.bytes.sum(axis=1) / self.bytes_per_token

    def demand(self, ranks: int) -> np.ndarray:
        """Token copies from every source rank for every expert: float64[layer, rank, expert].

        Raises InputError unless `ranks` is the matrix's size.
        """
        if ranks != self.bytes.shape[1]:
            raise InputError(
                f"{self.name}: a traffic matrix between {self.bytes.shape[1]} ranks cannot be laid on {ranks} GPUs; "
                f"use a cluster of {self.bytes.shape[1]} GPUs"
            )
        return self.bytes / self.bytes_per_token


SELDOM = 1e-8
"""The part of a layer below which a mixture leaves out what its first recording lacks altogether."""


@dataclass(frozen=True, eq=False)
class MixedTraffic(TrafficMatrix):
    """Traffic of tokens that are known, each of which counts for more or less than one: rows that experts share are counted.

    parts: recordings of as many layers and experts, that of no noise first, each with float64[layer, rank], by which the tokens
        of a rank count; together they have these bytes
    """

    parts: tuple[tuple[RoutingTrace, np.ndarray], ...] = ()

    @cached_property
    def digest(self) -> str:
        known = [part for trace, weight in self.parts for part in (trace.digest, weight)]
        return digest_of("mixed", self.bytes, str(self.bytes_per_token), *known)


def without_seldom(mixed: np.ndarray, recorded: np.ndarray) -> np.ndarray:
    """float64[layer, …]: counts of a mixture without the `SELDOM` ones: with a millionth of a token an expert or a pair of GPUs
    would take its whole start-up time.

    recorded: float64[layer, …] counts of the first recording alone
    """
    least = SELDOM * mixed.sum(axis=tuple(range(1, mixed.ndim)), keepdims=True)
    return np.where((recorded == 0) & (mixed < least), 0.0, mixed)


Workload = RoutingTrace | ExpertLoad | TrafficMatrix

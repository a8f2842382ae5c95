"""Sums over TensorRT-LLM's counts: a rank's file is read once and let go, for together they are larger than memory."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from engine.formats.step_spans import split_steps
from engine.formats.tensorrt_llm.files import Counts, RankFile, read_counts

MOST_NUMBERS = 2**25
"""Sums of all ranks that are held at once: 256 MB."""


@dataclass(frozen=True)
class Sums:
    """layers: int64[layer], the model layers counted; iterations: how many; ranks: those whose files there are

    by_rank: float64[rank, layer, id]; by_span: float64[span, layer, id], spans of equal numbers of iterations in their order;
    layers_of_rank, digest_of_rank: what each rank recorded, and a digest of its counts
    """

    layers: np.ndarray
    iterations: int
    ranks: tuple[int, ...]
    by_rank: np.ndarray
    by_span: np.ndarray
    layers_of_rank: tuple[frozenset[int], ...]
    digest_of_rank: tuple[bytes, ...]


def add_up(files: Mapping[int, RankFile], ids: int | None) -> Sums:
    """The sums over the files of ranks. ids: how many are counted, None: as many as the first file has. Raises InputError."""
    iterations = np.unique(np.concatenate([file.iteration for file in files.values()]))
    layers = np.unique(np.concatenate([file.layer for file in files.values()]))
    by_rank, by_span, digests = np.empty(0), np.empty(0), []
    for place, file in enumerate(files.values()):
        counts = read_counts(file.source, ids)
        if not place:
            ids = counts.copies.shape[1]
            if len(files) > MOST_NUMBERS // (len(layers) * ids):
                raise file.source.fault(
                    f"{len(files)} ranks with {len(layers)} layers of {ids} ids are more than can be held; give fewer ranks"
                )
            spans = split_steps(iterations, len(layers) * ids)
            span_of_iteration = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
            by_rank = np.zeros((len(files), len(layers), ids))
            by_span = np.zeros((len(spans), len(layers), ids))
        layer = np.searchsorted(layers, counts.layer)
        _add(by_rank[place], layer, counts.copies)
        span = span_of_iteration[np.searchsorted(iterations, counts.iteration)]
        _add(by_span.reshape(-1, ids), span * len(layers) + layer, counts.copies)
        digests.append(_digest(counts))
    sets = tuple(frozenset(file.layer.tolist()) for file in files.values())
    return Sums(layers, len(iterations), tuple(files), by_rank, by_span, sets, tuple(digests))


def _add(into: np.ndarray, row: np.ndarray, copies: np.ndarray) -> None:
    """Add records (int64[record, id]) to the rows (int64[record]) of float64[row, id]."""
    order = np.argsort(row, kind="stable")
    rows, starts = np.unique(row[order], return_index=True)
    into[rows] += np.add.reduceat(copies[order], starts, axis=0)


def _digest(counts: Counts) -> bytes:
    order = np.lexsort((counts.layer, counts.iteration))
    hasher = hashlib.blake2b(digest_size=16)
    for part in (counts.iteration, counts.layer, counts.copies):
        hasher.update(np.ascontiguousarray(part[order]))
    return hasher.digest()

"""The recorder's counts of April 2025: `expert_distribution_rank{r}_timestamp{t}.csv` with the columns `layer_id,
expert_id, count`, one file a rank, rows of zero left out, decoder layers counted from 0 (SGLang #4435, #5275). Each rank
counts the choices of its own tokens, all ranks the same where they hold the same (tensor parallelism).
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from engine.formats.arrays import MAX_EXPERTS, MAX_LAYERS, MAX_RANKS, MAX_SPLIT, expert_load
from engine.formats.format import Format, Glance
from engine.formats.sglang.dumps import MAX_MAP, MOST_MTP_LAYERS, find_copies, find_missing, moe_rows, recording_of
from engine.formats.source import Source
from engine.formats.tables import CsvTable
from engine.workload import ExpertLoad, Origin

NAME = "sglang-counts-csv"
COLUMNS = ("layer_id", "expert_id", "count")
_FILE_OF_RANK = re.compile(r"expert_distribution_rank(?P<rank>\d+)_timestamp(?P<time>\d+(?:\.\d+)?)\.csv")


def read_counts(sources: Sequence[Source]) -> ExpertLoad:
    """The loads, by rank if the names of several files say which. Raises InputError."""
    rows_of = [(source, _rank(source), _read_rows(source)) for source in sources]
    layers, experts = (max(int(rows[:, at].max()) + 1 for _, _, rows in rows_of) for at in (0, 1))
    model = sources[0].model  # experts that nobody chose are not in the files
    if model and 0 <= layers - model.layers <= MOST_MTP_LAYERS and experts <= model.experts:
        experts = model.experts
    experts = max(experts, sources[0].num_experts or 0)
    if layers * experts > MAX_MAP:
        raise sources[0].fault(f"{layers} layers of {experts} experts are too many")
    kept: dict[int | None, np.ndarray] = {}
    copies, total = [], np.zeros((layers, experts))
    for source, rank, rows in rows_of:
        if rank in kept:
            raise source.fault("is a second file of its rank; give the files of one recording")
        if any(np.array_equal(rows, other) for other in kept.values()):
            copies.append(rank)
            continue
        kept[rank] = rows
        np.add.at(total, (rows[:, 0], rows[:, 1]), rows[:, 2])
    by_source = None if copies else _by_rank(kept, total.shape)
    moe, findings = moe_rows(sources[0], total.any(axis=1), experts)
    workload = expert_load(
        sources[0], total[moe], tuple(moe.tolist()), by_source=None if by_source is None else by_source[:, moe]
    )
    ranks = [rank for rank in (*kept, *copies) if rank is not None]
    findings = (*find_copies(len(kept), copies), *find_missing(ranks), *findings)
    return replace(workload, origin=Origin(format=NAME, findings=findings))


def _rank(source: Source) -> int | None:
    """The rank that the file's name says, None if it says none."""
    match = _FILE_OF_RANK.fullmatch(source.path.name)
    rank = int(match["rank"]) if match else None
    if rank is not None and rank >= MAX_RANKS:
        raise source.fault(f"is of rank {rank}; there are at most {MAX_RANKS} ranks")
    return rank


def _read_rows(source: Source) -> np.ndarray:
    """Layer, expert and count of every row, int64[row, 3], by layer and expert."""
    header = tuple(Glance(source.path).columns)
    table = CsvTable(source, header, len(header))
    positions = [header.index(name) for name in COLUMNS]
    rows = np.column_stack(table.read(dict.fromkeys(positions, pa.int64())))
    for at, (name, limit) in enumerate(zip(COLUMNS, (MAX_LAYERS, MAX_EXPERTS, 2**53), strict=True)):
        faulty = (rows[:, at] < 0) | (rows[:, at] >= limit)
        if faulty.any():
            row = int(faulty.argmax())
            raise source.fault(f"{name} {rows[row, at]} is out of range 0 … {limit - 1}", table.place(row))
    return rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]


def _by_rank(kept: dict[int | None, np.ndarray], shape: tuple[int, ...]) -> np.ndarray | None:
    """The loads by rank, float64[rank, layer, expert]; None for a single file, for names without ranks, and for more numbers
    than are kept apart."""
    if len(kept) < 2 or None in kept or (max(kept) + 1) * np.prod(shape) > MAX_SPLIT:
        return None
    by_source = np.zeros((max(kept) + 1, *shape))
    for rank, rows in kept.items():
        np.add.at(by_source[rank], (rows[:, 0], rows[:, 1]), rows[:, 2])
    return by_source


def _tells(glance: Glance) -> bool:
    return set(COLUMNS) <= set(glance.columns)


_of_ranks = partial(recording_of, pattern=_FILE_OF_RANK)
FORMATS = (Format(NAME, "SGLang's expert counts of 2025", "loads", _tells, read_counts, _of_ranks),)

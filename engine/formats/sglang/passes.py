"""The recorder's counts of every pass (`.pt`, mode `per_pass`), one file a rank: `global_physical_count` int[decoder
layer, slot].

A rank counts the choices of its own tokens over all slots; only in DeepEP's low-latency mode it counts what its own slots
receive, and zero for all others, so that the ranks' sum is right and a single rank is not.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.finding import Origin
from engine.formats import torch_files
from engine.formats.arrays import MAX_SPLIT, expert_load
from engine.formats.format import Format
from engine.formats.glance import Glance
from engine.formats.sglang import dumps
from engine.formats.sglang.dumps import Dump
from engine.formats.sglang.layers import moe_rows
from engine.formats.source import Source
from engine.formats.step_spans import split_steps
from engine.workload import ExpertLoad

NAME = "sglang-passes"
COUNT = "global_physical_count"


def read_passes(sources: Sequence[Source]) -> ExpertLoad:
    """Loads by span of passes and, where ranks counted their own tokens, by rank. Raises InputError."""
    read: list[Dump] = []
    copies, digests, loads, slots_used = [], set(), {}, {}
    spans, by_step = np.empty(0), None
    for dump in dumps.read_ranks(sources):
        spans = spans if read else _spans(dump)
        physical = _count(dump, spans)
        digest = dump.digest(COUNT) if len(sources) > 1 else b""
        read.append(replace(dump, records=[]))
        if physical.any() and digest in digests:
            copies.append(dump.rank)
            continue
        digests.add(digest)
        slots_used[dump.rank] = physical.any(axis=(0, 1))
        logical = _fold(physical, dump.logical_of_slot)
        by_step = logical if by_step is None else by_step + logical
        loads[dump.rank] = logical.sum(axis=0)
    by_source = None if copies or _of_own_slots(sources[0], slots_used) else _by_rank(loads)
    load = by_step.sum(axis=0)
    rows, findings = moe_rows(sources[0], load.any(axis=1), load.shape[1])
    workload = expert_load(
        sources[0],
        load[rows],
        tuple(rows.tolist()),
        by_source=None if by_source is None else by_source[:, rows],
        by_step=by_step[:, rows] if len(by_step) > 1 else None,
    )
    findings = (
        *dumps.find_in_maps(read),
        *dumps.find_copies(len(loads), copies),
        *dumps.find_missing([*loads, *copies]),
        *findings,
    )
    return replace(workload, origin=Origin(format=NAME, findings=findings))


def _spans(dump: Dump) -> np.ndarray:
    """int64[span]: the first pass of every span of equally many passes. Ranks pass in step, so those of one serve for all."""
    passes = np.unique([record["forward_pass_id"] for record in dump.records])
    return np.array([span[0] for span in split_steps(passes, dump.logical_of_slot.size)])


def _count(dump: Dump, spans: np.ndarray) -> np.ndarray:
    """float64[span, decoder layer, slot]"""
    physical = np.zeros((len(spans), *dump.logical_of_slot.shape))
    for record in dump.records:
        place = f"{dump.place(record)}, {COUNT}"
        counts = torch_files.array_of(dump.source.path, record.get(COUNT), place)
        if counts.shape != dump.logical_of_slot.shape or counts.dtype.kind not in "iu":
            raise dump.source.fault(
                f"must be whole numbers {list(dump.logical_of_slot.shape)}, not {counts.dtype} {list(counts.shape)}",
                place,
            )
        if counts.min() < 0:
            raise dump.source.fault(f"counts are at least 0, not {counts.min()}", place)
        span = np.searchsorted(spans, record["forward_pass_id"], side="right") - 1
        physical[max(int(span), 0)] += counts
    return physical


def _fold(physical: np.ndarray, logical_of_slot: np.ndarray) -> np.ndarray:
    """float64[span, decoder layer, expert] from float64[span, decoder layer, slot]."""
    layers, experts = len(logical_of_slot), int(logical_of_slot.max()) + 1
    key = (np.arange(layers)[:, None] * experts + logical_of_slot).ravel()
    folded = [np.bincount(key, span.ravel(), layers * experts).reshape(layers, experts) for span in physical]
    return np.stack(folded)


def _of_own_slots(source: Source, slots_used: dict[int, np.ndarray]) -> bool:
    """Whether every rank counted its own slots alone; raises InputError where it did and ranks are missing.

    slots_used: by rank, bool[slot]
    """
    slots, highest = len(next(iter(slots_used.values()))), max(slots_used)
    if not any(used.any() for used in slots_used.values()):
        return False
    for ranks in range(max(highest + 1, 2), slots + 1):
        if slots % ranks:
            continue
        blocks = [(rank, used.reshape(ranks, -1).any(axis=1)) for rank, used in slots_used.items()]
        if all(np.array_equal(np.flatnonzero(block), [rank]) or not block.any() for rank, block in blocks):
            if missing := set(range(ranks)) - set(slots_used):
                more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                raise source.fault(
                    "every rank counted its own slots alone (DeepEP's low-latency mode), so the files of all are needed; "
                    f"that of rank {min(missing)} is missing{more}"
                )
            return True
    return False


def _by_rank(loads: dict[int, np.ndarray]) -> np.ndarray | None:
    """float64[rank, decoder layer, expert], None for a single rank, or for more numbers than are kept apart."""
    load = next(iter(loads.values()))
    if len(loads) < 2 or (max(loads) + 1) * load.size > MAX_SPLIT:
        return None
    by_source = np.zeros((max(loads) + 1, *load.shape))
    for rank, load in loads.items():
        by_source[rank] = load
    return by_source


def _tells(glance: Glance) -> bool:
    return b"global_physical_count" in glance.pickled or (
        b"records" in glance.pickled and b"last_physical_to_logical_map" in glance.pickled
    )


FORMATS = (
    Format(NAME, "SGLang's counts of every pass", "loads", _tells, read_passes, recording_of=dumps.recording_of),
)

"""Loads that every rank wrote in a file of its own: of its own experts alone, side by side one recording, or of all experts
with no tokens at those of others, together one.

Nothing in such files says whose they are. They are taken for ranks where their names differ in numbers alone and as many files
as there are, of so many experts each, make the experts of the open model; a recording of another model has other experts. The
forms of the files may differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from engine.errors import InputError
from engine.formats.arrays import expert_load
from engine.formats.format import Format
from engine.formats.source import Source, in_order, ok, one_clear_line
from engine.formats.tables import read_csv
from engine.model import MoEModel
from engine.workload import ExpertLoad, Origin, Workload

NAME = "ranks-side-by-side"
KINDS = {"csv", "parquet", "records", "bare-list", "named-lists", "npy", "npz", "torch-loads", "sglang-statistics"}
"""Formats whose files may hold the loads of one rank."""
MOST_RANKS = 512
_Read = Callable[[Sequence[Source]], Workload]


def of_ranks(files: Sequence[tuple[Format, Path]], model: MoEModel | None) -> Format | None:
    """The format of files as one recording, None if they are not the ranks' of one; where some ranks' are missing, one that
    refuses them with their number. files: with the format of each alone"""
    if model is None or len(files) < 2:
        return None
    reads = {path: _read_table if format.name == "csv" else format.read for format, path in files}
    together = partial(
        replace, files[0][0], name=NAME, title="the loads of each rank's own experts", kind="loads", recording_of=None
    )
    ranks = len(files)
    if _fit(files[:1], reads, model, 1) and (loads := _fit(files, reads, model, 1)) and _apart(loads):
        return together(read=partial(_summed, reads=reads))
    if model.experts % ranks == 0 and model.experts > ranks and _fit(files[:1], reads, model, ranks):
        return together(read=partial(_side_by_side, reads=reads))
    for whole in range(ranks + 1, min(MOST_RANKS, model.experts // 2) + 1):
        if model.experts % whole == 0 and _fit(files[:1], reads, model, whole) and _fit(files, reads, model, whole):
            return together(read=partial(_refuse, ranks=whole))
    return None


def _read_table(sources: Sequence[Source]) -> Workload:
    return read_csv(sources[0], is_loads=True)


def _fit(
    files: Sequence[tuple[Format, Path]], reads: dict[Path, _Read], model: MoEModel, ranks: int
) -> list[ExpertLoad] | None:
    """The loads in files of one of so many ranks each, None if one has no such."""
    try:
        with one_clear_line(files[0][1]):
            return [_own(Source(path, path.stem, model=model), ranks, reads[path]) for _, path in files]
    except InputError:
        return None


def _apart(files: Sequence[ExpertLoad]) -> bool:
    """True if no expert has tokens in two files, and none has all that have any."""
    chosen = np.array([loads.load.any(axis=0) for loads in files])
    return bool((chosen.sum(axis=0) <= 1).all() and (chosen.any(axis=1) & ~chosen.all(axis=1)).all())


def _own(source: Source, ranks: int, read: _Read) -> ExpertLoad:
    """The loads of one rank's experts; raises InputError unless there are as many as a rank has."""
    experts = source.model.experts // ranks
    narrow = source.model.model_copy(update={"experts": experts, "zero_experts": None})
    loads = read([replace(source, model=narrow, num_experts=experts)])
    if not isinstance(loads, ExpertLoad) or loads.num_experts != experts:
        raise source.fault(f"has no loads of {experts} experts, as one of {ranks} ranks of {source.model.name} has")
    return loads


def _stacked(ranks: Sequence[ExpertLoad]) -> tuple[np.ndarray, tuple[int, ...]]:
    """(float64[layer, rank, expert of the file], the layers). A layer that a rank leaves out sent it nothing."""
    layers = sorted({layer for loads in ranks for layer in loads.model_layers})
    load = np.zeros((len(layers), len(ranks), ranks[0].num_experts))
    for rank, loads in enumerate(ranks):
        load[np.searchsorted(layers, loads.model_layers), rank] = loads.load
    return load, tuple(layers)


def _side_by_side(sources: Sequence[Source], reads: dict[Path, _Read]) -> ExpertLoad:
    """The loads of all ranks, in the order of the numbers in their names."""
    ordered = in_order(sources)
    load, layers = _stacked([_own(source, len(ordered), reads[source.path]) for source in ordered])
    first = ordered[0].path.name
    first = f"{ordered[0].path.parent.name}/{first}" if first == ordered[1].path.name else first
    said = ok(
        NAME,
        f"{len(ordered)} files of {load.shape[2]} experts each are side by side the {ordered[0].model.experts} of "
        f"{ordered[0].model.name}, in the order of the numbers in their names: {first} has the first. Each is "
        "taken to have consecutive experts, as engines place them unless they are told to deal them out in turn.",
    )
    together = expert_load(ordered[0], load.reshape(len(layers), -1), layers)
    return replace(together, origin=Origin(format=NAME, findings=(said,)))


def _summed(sources: Sequence[Source], reads: dict[Path, _Read]) -> ExpertLoad:
    """The loads of all files together, no expert of which has tokens in two."""
    ordered = in_order(sources)
    load, layers = _stacked([_own(source, 1, reads[source.path]) for source in ordered])
    said = ok(
        NAME,
        f"{len(ordered)} files have tokens at different experts of the {ordered[0].model.experts} of {ordered[0].model.name}, "
        "as where each rank counts its own: together they are one recording.",
    )
    return replace(expert_load(ordered[0], load.sum(axis=1), layers), origin=Origin(format=NAME, findings=(said,)))


def _refuse(sources: Sequence[Source], ranks: int) -> ExpertLoad:
    """Always raise InputError, which says how many ranks' files are missing."""
    own = sources[0].model.experts // ranks
    raise sources[0].fault(
        f"{len(sources)} files of {own} experts each, of {ranks} ranks that make the {sources[0].model.experts} of "
        f"{sources[0].model.name}: give the files of all ranks"
    )

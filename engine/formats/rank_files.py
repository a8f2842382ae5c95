"""Loads that every rank wrote of its own experts alone, a file a rank: side by side they are one recording.

Nothing in such files says whose they are. They are taken for ranks where their names differ in numbers alone and as many files
as there are, of so many experts each, make the experts of the open model; a recording of another model has other experts.
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
KINDS = ("csv", "parquet", "bare-list", "npy", "torch-loads")
"""Formats whose files may hold the loads of one rank."""
_Read = Callable[[Sequence[Source]], Workload]


def of_ranks(format: Format, paths: Sequence[Path], model: MoEModel | None) -> Format | None:
    """The format of files as one recording, None if they are not the ranks' of one. format: of each of the files"""
    if model is None or len(paths) < 2 or model.experts % len(paths) or model.experts == len(paths):
        return None
    read = _read_table if format.name == "csv" else format.read
    try:
        with one_clear_line(paths[0]):
            _own(Source(paths[0], paths[0].stem, model=model), len(paths), read)
    except InputError:
        return None
    return replace(
        format, name=NAME, title="the loads of each rank's own experts", kind="loads", read=partial(_read, read=read)
    )


def _read_table(sources: Sequence[Source]) -> Workload:
    return read_csv(sources[0], is_loads=True)


def _own(source: Source, ranks: int, read: _Read) -> ExpertLoad:
    """The loads of one rank's experts; raises InputError unless there are as many as a rank has."""
    experts = source.model.experts // ranks
    narrow = source.model.model_copy(update={"experts": experts, "zero_experts": None})
    loads = read([replace(source, model=narrow, num_experts=experts)])
    if not isinstance(loads, ExpertLoad) or loads.num_experts != experts:
        raise source.fault(f"has no loads of {experts} experts, as one of {ranks} ranks of {source.model.name} has")
    return loads


def _read(sources: Sequence[Source], read: _Read) -> ExpertLoad:
    """The loads of all ranks, in the order of the numbers in their names. A layer that a rank leaves out sent it nothing."""
    ordered = in_order(sources)
    ranks = [_own(source, len(ordered), read) for source in ordered]
    layers = sorted({layer for loads in ranks for layer in loads.model_layers})
    load = np.zeros((len(layers), len(ranks), ranks[0].num_experts))
    for rank, loads in enumerate(ranks):
        load[np.searchsorted(layers, loads.model_layers), rank] = loads.load
    said = ok(
        NAME,
        f"{len(ranks)} files of {ranks[0].num_experts} experts each are side by side the {ordered[0].model.experts} of "
        f"{ordered[0].model.name}, in the order of the numbers in their names: {ordered[0].path.name} has the first.",
    )
    together = expert_load(ordered[0], load.reshape(len(layers), -1), tuple(layers))
    return replace(together, origin=Origin(format=NAME, findings=(said,)))

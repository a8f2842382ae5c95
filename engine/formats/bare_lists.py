"""A bare JSON list of token counts, `[layer][expert]`, as scripts save the counts of a recorder. Nothing in it explains its
numbers; a finding says that they are taken for counts."""

from dataclasses import replace

import numpy as np

from engine.formats.arrays import MAX_EXPERTS, MAX_LAYERS, Place, check_amounts, expert_load, model_layers_of, place_in
from engine.formats.format import Format, Glance, of_one_file
from engine.formats.number_lists import NUMBERS, array_of_lists
from engine.formats.source import Source, read_json, warning
from engine.workload import ExpertLoad, Origin

NAME = "bare-list"


def read_counts(source: Source) -> ExpertLoad:
    """Loads from lists of numbers, one for each layer. Rows of zeros only are dense layers and left out."""
    rows = read_json(source.path)
    counts = array_of_lists(rows, 2, NUMBERS)
    if counts is None:
        if array_of_lists(rows, 3, NUMBERS) is not None:
            raise source.fault(
                'lists of lists of lists may be counts of steps or choices of tokens; name them: {"logical_count": '
                '[step][layer][expert]} or {"routed_experts": [token][layer][k]}'
            )
        raise source.fault("a bare list must be numbers [layer][expert], as many in every layer")
    return loads_of_table(source, counts, NAME)


def loads_of_table(source: Source, counts: np.ndarray, format: str, place: Place | None = None) -> ExpertLoad:
    """Loads from numbers that nothing explains, with a finding that names the assumption. Raises InputError for a table that
    cannot be loads, and for one that is a placement by all appearance.

    counts: number[layer, expert]
    place: of a number in the file; by layer and expert unless given
    """
    layers, experts = counts.shape
    if layers > MAX_LAYERS or not 2 <= experts <= MAX_EXPERTS:
        raise source.fault(
            f"would be {layers} layers of {experts} experts; there are at most {MAX_LAYERS} and 2 … {MAX_EXPERTS}"
        )
    check_amounts(source, counts, "a count", place or place_in("layer", "expert"))
    if _is_placement(counts):
        raise source.fault(
            f"every row holds each number from 0 to {counts.max():g}: a placement, the expert in every slot; loads count tokens"
        )
    loads = expert_load(source, counts.astype(np.float64), model_layers_of(source, layers) or tuple(range(layers)))
    assumed = warning(
        "assumed-counts",
        f"The file says nothing of its numbers: its {layers} rows were taken for layers, its {experts} columns for logical "
        "experts, the numbers for token counts. If columns are slots or rows are steps, save them under a name.",
    )
    return replace(loads, origin=Origin(format=format, findings=(assumed,)))


def _is_placement(table: np.ndarray) -> bool:
    """True if every row holds each whole number from 0 to the largest one. table: number[layer, slot], none negative"""
    highest = table.max()
    if not 1 <= highest < table.shape[1] or (table != np.rint(table)).any():
        return False
    there = np.zeros((len(table), int(highest) + 1), bool)
    there[np.arange(len(table))[:, None], table.astype(np.int64)] = True
    return bool(there.all())


def _tells(glance: Glance) -> bool:
    return glance.first_line.startswith("[") and len(glance.shape) in (2, 3)


FORMATS = (Format(NAME, "a bare list of loads", "loads", _tells, of_one_file(read_counts)),)

"""Bare lists and arrays of token counts, as scripts save those of a recorder: [layer, expert], with the open model also [step,
layer, slot], as vLLM's window of loads is, and [layer, rank, expert of the rank], as vLLM-Ascend gathers them. Nothing in them
explains their numbers; a finding says that they are taken for counts."""

from dataclasses import replace

import numpy as np

from engine.formats.arrays import MAX_EXPERTS, MAX_K, MAX_LAYERS, Place, check_amounts, expert_load, model_layers_of, place_in
from engine.formats.format import Format, Glance, of_one_file
from engine.formats.number_lists import NUMBERS, array_of_lists
from engine.formats.source import Source, read_json, warning
from engine.formats.step_spans import sum_spans
from engine.workload import ExpertLoad, Origin

NAME = "bare-list"
MOST_EXPERTS = 1024
"""Twice as many as a layer of published models has."""
SAME_TOTAL = 0.01
"""Share by which layers that counted the same tokens may differ."""


def read_counts(source: Source) -> ExpertLoad:
    """Loads from lists of numbers, one for each layer. Rows of zeros only are dense layers and left out."""
    rows = read_json(source.path)
    counts = array_of_lists(rows, 2, NUMBERS)
    if counts is None:
        if (counts := array_of_lists(rows, 3, NUMBERS)) is not None:
            if loads := loads_of_array(source, counts, NAME):
                return loads
            raise source.fault(
                'lists of lists of lists may be counts of steps or choices of tokens; name them: {"logical_count": '
                '[step][layer][expert]} or {"routed_experts": [token][layer][k]}, or open the model'
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


def loads_of_array(source: Source, numbers: np.ndarray, format: str) -> ExpertLoad | None:
    """Loads from numbers of two or three axes, None if they are choices or traffic by all appearance. The open model's layers
    and experts tell; without a model, numbers that are no expert's id, or not in so few choices, and layers that count alike.

    Raises InputError for whole numbers that may be either.
    """
    model, shape, whole = source.model, numbers.shape, numbers.dtype.kind in "iu"
    if numbers.ndim not in (2, 3) or 0 in shape or numbers.min() < 0:
        return None
    of_model = () if model is None else (len(model.moe_layers), model.layers)
    experts, choices = (model.experts, model.router_choices) if model else (0, MAX_EXPERTS)
    telling = min(MAX_EXPERTS, max(numbers.size, MOST_EXPERTS))  # ids in a few choices are no larger
    is_routing = whole and numbers.max() < choices and shape[1] in of_model
    if numbers.ndim == 2:
        fits = shape[0] in of_model and shape[1] in (experts, choices)
        if shape[0] == shape[1] and (shape[0] > 1 or not whole) and not (fits and whole and numbers.max() >= shape[1]):
            return None
        if not fits and (is_routing or abs(shape[0] - shape[1]) == 1):
            return None
        if not whole or fits or numbers.max() >= MAX_EXPERTS or _counted_alike(numbers):
            return loads_of_table(source, numbers, format)
        if shape[0] >= shape[1] and numbers.max() < telling:
            return None
        raise source.fault(
            f"{list(shape)} whole numbers may be choices of {shape[0]} tokens in {shape[1]} layers or loads of {shape[0]} "
            "layers; give the model (--model), or save them as .npz: choices as 'experts' [tokens, layers, k], loads as "
            "'expert_load' [layers, experts]"
        )
    if is_routing and shape[2] == model.experts_per_token:
        return None
    if shape[1] in of_model and shape[2] >= experts and not (shape[1] == shape[2] and not whole):
        check_amounts(source, numbers, "a count", place_in("step", "layer", "slot"))
        loads, axes = loads_of_table(source, numbers.sum(axis=0, dtype=np.float64), format), "steps, layers and slots"
        by_step = sum_spans(numbers, np.arange(len(numbers)))[:, numbers.any(axis=(0, 2))]
        loads = replace(loads, by_step=by_step if len(by_step) > 1 else None)
    elif shape[0] in of_model and experts <= shape[1] * shape[2] < 2 * experts and (whole or shape[1] != shape[2]):
        loads, axes = loads_of_table(source, numbers.reshape(shape[0], -1), format), "layers, ranks and the experts of each"
    elif whole and not is_routing and (numbers.max() >= telling or shape[2] > MAX_K):
        raise source.fault(
            f"{list(shape)} numbers up to {numbers.max()} are counts, not choices: [steps, layers, slots] or [layers, ranks, "
            "experts of a rank]? Give the model that was recorded (--model), which tells"
        )
    else:
        return None
    said = warning("assumed-counts", f"The file says nothing of its numbers: their axes were taken for {axes}, as the model's.")
    return replace(loads, origin=Origin(format=format, findings=(said,)))


def _counted_alike(table: np.ndarray) -> bool:
    """True if layers that counted anything counted the same, as all see the same tokens. table: number[layer, expert]"""
    total = table.sum(axis=1, dtype=np.float64)
    total = total[total > 0]
    return 2 <= len(total) <= MAX_LAYERS and bool(np.ptp(total) <= SAME_TOTAL * total.max()) and table.max() > table.shape[1]


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

"""Bare lists and arrays of token counts, as scripts save those of a recorder: [layer, expert], with the open model also [step,
layer, slot], as vLLM's window of loads is, a ring, and [layer, rank, expert of the rank], as vLLM-Ascend gathers them, with its
policy 3 by step too: [step, layer, rank, expert of the rank]. Nothing in them explains their numbers; a finding says that they
are taken for counts.

Names do explain them: one of `LOADS` or `CHOICES` as a key, or a row for each layer under a key with its number, `"3"` or
`"layer_3"`, as a list or by expert. Lists may hold digits in texts, and files of `torch.save` tensors in place of lists."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.formats import arrays, torch_files
from engine.formats.format import Format, Glance, of_one_file
from engine.formats.number_lists import INTEGERS, NUMBERS, array_of_lists
from engine.formats.source import PARSER_ERRORS, Source, read_json, warning
from engine.formats.step_spans import empty_steps, steps_of_ring, sum_spans
from engine.workload import ExpertLoad, Origin, Workload

NAME = "bare-list"
NAMED = "named-lists"
LOADS = ("counts", "loads", "load", "expert_load", "expert_loads", "expert_count", "expert_counts", "expert_tokens")
LOADS += ("tokens_per_expert", "num_tokens_per_expert", "logical_counts")
CHOICES = ("experts", "topk_ids", "topk_indices", "expert_ids", "selected_experts")
_NUMBERED = re.compile(r"[A-Za-z_. -]*?(\d{1,6})([._ ][A-Za-z_. ]*)?")
MOST_EXPERTS = 1024
"""Twice as many as a layer of published models has."""
MOST_REPEATS, MOST_ROWS = 0.2, 1 << 16
"""Share of rows with a number twice from which they are no choices, and rows that are looked at."""
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


@dataclass(frozen=True)
class Named:
    """Numbers under a name.

    kind: `loads` or `choices`, as the name tells; `bare` without one
    layers: numbers of the layers if each has a key
    by_expert: True if experts have keys too, and those without tokens may be left out
    """

    kind: str
    numbers: np.ndarray
    layers: tuple[int, ...] | None = None
    by_expert: bool = False


def named_numbers(content: object) -> Named | None:
    """The numbers in JSON or a file of `torch.save`, None where no name tells. content: as parsed, with arrays for tensors"""
    if not isinstance(content, dict) or not content:
        return None
    if len(content) == 1 and isinstance(inner := next(iter(content.values())), dict) and (found := named_numbers(inner)):
        return found
    for kind, names in (("loads", LOADS), ("choices", CHOICES)):
        if name := next((name for name in names if name in content), None):
            numbers = _array(content[name])
            return None if numbers is None or numbers.ndim not in (2, 3) else Named(kind, numbers)
    keys = {key: found for key in content if (found := _id_of(key))}
    layers = sorted((int(found[1]), key) for key, found in keys.items())
    if len(keys) < len(content) or len({layer for layer, _ in layers}) < len(layers) or len(layers) > arrays.MAX_LAYERS:
        return None
    ids = [int(found[1]) for row in content.values() if isinstance(row, dict) for found in map(_id_of, row) if found]
    rows = [_row(content[key], max(ids, default=0) + 1) for _, key in layers]
    if any(row is None or row.ndim != 1 or row.shape != rows[0].shape for row in rows):
        return None
    return Named("loads", np.stack(rows), tuple(layer for layer, _ in layers), bool(ids))


def _id_of(key: object) -> re.Match | None:
    return _NUMBERED.fullmatch(str(key))


def _row(value: object, experts: int) -> np.ndarray | None:
    """The counts of a layer, number[expert], of a list or of one number for each expert with tokens by its id."""
    if not isinstance(value, dict):
        return _array(value)
    found, numbers = [_id_of(key) for key in value], _array(list(value.values()))
    if numbers is None or numbers.ndim != 1 or not all(found) or experts > arrays.MAX_EXPERTS:
        return None
    row, ids = np.zeros(experts, numbers.dtype), [int(each[1]) for each in found]
    row[ids] = numbers
    return row if len(set(ids)) == len(ids) else None


def _array(value: object) -> np.ndarray | None:
    """Lists of numbers, or of digits in texts, as an array; None for anything else."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list) and value and all(isinstance(part, np.ndarray) for part in value):
        return np.stack(value) if len({part.shape for part in value}) == 1 else None
    for depth in (1, 2, 3):
        for kinds in (INTEGERS, NUMBERS):
            if (numbers := array_of_lists(value, depth, kinds)) is not None:
                return numbers
    numbers = _of_texts(value)
    return None if numbers == value else _array(numbers)


def _of_texts(value: object) -> object:
    """The value with whole numbers for texts of digits."""
    if isinstance(value, list):
        return [_of_texts(part) for part in value]
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16 else value


def read_named(source: Source) -> Workload:
    """Loads or routing out of numbers under names, in JSON or a file of `torch.save`."""
    content = _content(source.path)
    named = named_numbers(content) or Named("bare", _array(content))
    if (numbers := named.numbers) is None:
        raise source.fault("holds no numbers of loads or routing under a name that is known; docs/formats.md lists the names")
    if named.kind == "choices":
        return arrays.routing_trace(source, numbers)
    if named.kind == "bare" or numbers.ndim == 3:
        if loads := loads_of_array(source, numbers, NAMED):
            return loads
        if named.kind == "bare" and numbers.dtype.kind in "iu" and numbers.ndim == 3:
            return arrays.routing_trace(source, numbers)
        raise source.fault(f"{list(numbers.shape)} numbers may be counts of steps or of ranks; give the model (--model)")
    return loads_of_named(source, named)


def loads_of_named(source: Source, named: Named) -> ExpertLoad:
    """Loads of numbers that a name tells to be some. Raises InputError."""
    numbers, layers = named.numbers, named.layers
    if numbers.dtype.kind not in "iuf" or 0 in numbers.shape:
        raise source.fault(f"must be numbers [layers, experts], not {numbers.dtype} {list(numbers.shape)}")
    if _is_placement(numbers):
        raise source.fault(_placement(numbers))
    experts = source.num_experts or (source.model.experts if source.model else 0)
    if named.by_expert and numbers.shape[1] < experts:
        numbers = np.pad(numbers, ((0, 0), (0, experts - numbers.shape[1])))
    numbered = arrays.model_layers_of(source, len(numbers)) if layers is None else arrays.model_layers_named(source, layers)
    loads = arrays.expert_load(source, numbers.astype(np.float64), numbered or layers or tuple(range(len(numbers))))
    return replace(loads, origin=Origin(format=NAMED))


def _content(path: Path) -> object:
    """The JSON in a file, or the content of one of `torch.save`, tensors as arrays."""
    if not Glance(path).is_torch:
        return read_json(path, arrays=True)
    import torch

    def converted(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return torch_files.array_of(path, value, "a tensor")
        if isinstance(value, dict):
            return {key: converted(part) for key, part in value.items()}
        return [converted(part) for part in value] if isinstance(value, list | tuple) else value

    return converted(torch_files.load(path))


def loads_of_table(source: Source, counts: np.ndarray, format: str, place: arrays.Place | None = None) -> ExpertLoad:
    """Loads from numbers that nothing explains, with a finding that names the assumption. Raises InputError for a table that
    cannot be loads, and for one that is a placement by all appearance.

    counts: number[layer, expert]
    place: of a number in the file; by layer and expert unless given
    """
    layers, experts = counts.shape
    if layers > arrays.MAX_LAYERS or not 2 <= experts <= arrays.MAX_EXPERTS:
        raise source.fault(
            f"would be {layers} layers of {experts} experts; there are at most {arrays.MAX_LAYERS} and 2 … {arrays.MAX_EXPERTS}"
        )
    arrays.check_amounts(source, counts, "a count", place or arrays.place_in("layer", "expert"))
    if _is_placement(counts):
        raise source.fault(_placement(counts))
    loads = arrays.expert_load(
        source, counts.astype(np.float64), arrays.model_layers_of(source, layers) or tuple(range(layers))
    )
    assumed = warning(
        "assumed-counts",
        f"The file says nothing of its numbers: its {layers} rows were taken for layers, its {experts} columns for logical "
        "experts, the numbers for token counts. If columns are slots or rows are steps, save them under a name.",
    )
    return replace(loads, origin=Origin(format=format, findings=(assumed,)))


def loads_of_array(source: Source, numbers: np.ndarray, format: str) -> ExpertLoad | None:
    """Loads from numbers of two to four axes, None if they are choices or traffic by all appearance. The open model's layers
    and experts tell; without a model, numbers that are no expert's id, or not in so few choices, and layers that count alike.

    Raises InputError for whole numbers that may be either.
    """
    model, shape, whole = source.model, numbers.shape, numbers.dtype.kind in "iu"
    of_model = () if model is None else (len(model.moe_layers), model.layers)
    experts, choices = (model.experts, model.router_choices) if model else (0, arrays.MAX_EXPERTS)
    if numbers.ndim == 4 and shape[1] in of_model and experts <= shape[2] * shape[3] < 2 * experts:
        numbers = numbers.reshape(*shape[:2], -1)
        shape = numbers.shape
    if numbers.ndim not in (2, 3) or 0 in shape or numbers.min() < 0:
        return None
    telling = min(arrays.MAX_EXPERTS, max(numbers.size, MOST_EXPERTS))  # ids in a few choices are no larger
    is_routing = whole and numbers.max() < choices and shape[1] in of_model
    if numbers.ndim == 2:
        fits = shape[0] in of_model and shape[1] in (experts, choices)
        if shape[0] == shape[1] and (shape[0] > 1 or not whole) and not (fits and whole and numbers.max() >= shape[1]):
            return None
        if not fits and shape[0] in (experts, choices) and shape[1] in of_model and model.experts_per_token > 1:
            raise source.fault(f"{list(shape)} numbers are [experts, layers] of {model.name}; save loads as [layers, experts]")
        if not fits and (is_routing or abs(shape[0] - shape[1]) == 1):
            return None
        if not whole or fits or numbers.max() >= arrays.MAX_EXPERTS or _counted_alike(numbers):
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
        arrays.check_amounts(source, numbers, "a count", arrays.place_in("step", "layer", "slot"))
        loads, axes = loads_of_table(source, numbers.sum(axis=0, dtype=np.float64), format), "steps, layers and slots"
        order, runs = steps_of_ring(numbers)
        by_step = sum_spans(numbers, order)[:, numbers.any(axis=(0, 2))]
        loads = replace(loads, by_step=by_step if len(by_step) > 1 else None)
        left_out = (empty_steps(len(numbers), len(order), runs),) if runs else ()
    elif shape[0] in of_model and experts <= shape[1] * shape[2] < 2 * experts and (whole or shape[1] != shape[2]):
        loads, axes = loads_of_table(source, numbers.reshape(shape[0], -1), format), "layers, ranks and the experts of each"
        left_out = ()
    elif whole and not is_routing and (numbers.max() >= telling or shape[2] > arrays.MAX_K or _repeats(numbers) > MOST_REPEATS):
        raise source.fault(
            f"{list(shape)} numbers up to {numbers.max()} are counts, not choices: [steps, layers, slots] or [layers, ranks, "
            "experts of a rank]? Give the model that was recorded (--model), which tells"
        )
    else:
        return None
    said = warning("assumed-counts", f"The file says nothing of its numbers: their axes were taken for {axes}, as the model's.")
    return replace(loads, origin=Origin(format=format, findings=(said, *left_out)))


def _repeats(numbers: np.ndarray) -> float:
    """Share of the rows along the last axis that have a number above 0 twice, as choices of a token never have."""
    ordered = np.sort(numbers.reshape(-1, numbers.shape[-1])[:MOST_ROWS], axis=1)
    return float(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] > 0)).any(axis=1).mean())


def _counted_alike(table: np.ndarray) -> bool:
    """True if layers that counted anything counted the same, as all see the same tokens. table: number[layer, expert]"""
    total = table.sum(axis=1, dtype=np.float64)
    total = total[total > 0]
    alike = 2 <= len(total) <= arrays.MAX_LAYERS and np.ptp(total) <= SAME_TOTAL * total.max()
    return bool(alike and table.max() > table.shape[1])


def _placement(table: np.ndarray) -> str:
    return f"every row holds each number from 0 to {table.max():g}: a placement, the expert in every slot; loads count tokens"


def _is_placement(table: np.ndarray) -> bool:
    """True if every row holds each whole number from 0 to the largest one. table: number[layer, slot], none negative"""
    highest = table.max()
    if not 1 <= highest < table.shape[1] or (table != np.rint(table)).any():
        return False
    there = np.zeros((len(table), int(highest) + 1), bool)
    there[np.arange(len(table))[:, None], table.astype(np.int64)] = True
    return bool(there.all())


def _is_named(glance: Glance) -> bool:
    content = glance.json
    if glance.is_torch and b"_rebuild_tensor_v2" in glance.pickled:
        try:
            content = _content(glance.path)
        except PARSER_ERRORS:
            return False
    if named_numbers(content) is not None:
        return True
    numbers = _array(content) if isinstance(content, list) else None
    return numbers is not None and numbers.ndim > 1


def _tells(glance: Glance) -> bool:
    return glance.first_line.startswith("[") and len(glance.shape) in (2, 3)


FORMATS = (Format(NAME, "a bare list of loads", "loads", _tells, of_one_file(read_counts)),)
NAMED_FORMATS = (Format(NAMED, "numbers of loads or routing", "loads", _is_named, of_one_file(read_named)),)
"""Recognised after all others, as names like `counts` are common."""

"""A plan's placement as a table that anybody reads: CSV with a row for every slot, any number of slots on any GPU."""

import csv
import io
from collections.abc import Iterator

import numpy as np

from engine.formats.arrays import MAX_RANKS
from engine.formats.placements.export import Written, check_model
from engine.formats.placements.plan_source import Deployed, PlanSource
from engine.formats.source import quoted
from engine.model import MoEModel
from engine.plan import Placement

HEADER = ("layer", "model_layer", "slot", "gpu", "expert", "copy", "copies")
"""`layer` counts MoE layers, `slot` a layer's slots, GPU after GPU, `copy` an expert's `copies` in the layer; all from 0."""

NEEDED = ("model_layer", "gpu", "expert")
MAX_ROWS = 250_000
"""Those of 61 layers with 4000 slots each."""


def write(placement: Placement, model: MoEModel, name: str) -> Written:
    """The table. Carries every placement whole; of a plan nothing but its placement."""
    check_model(placement, model)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(HEADER)
    for layer, row in enumerate(placement.experts_of_gpu):
        experts = np.array([expert for held in row for expert in held], dtype=np.int64)
        gpu = np.repeat(np.arange(placement.gpus), placement.slots[layer])
        copies = np.bincount(experts, minlength=placement.experts)
        order = np.argsort(experts, kind="stable")
        copy = np.empty(len(experts), dtype=np.int64)
        copy[order] = np.arange(len(experts)) - np.repeat(np.cumsum(copies) - copies, copies)
        slots = len(experts)
        columns = np.full(slots, layer), np.full(slots, placement.model_layers[layer]), np.arange(slots), gpu
        writer.writerows(np.column_stack([*columns, experts, copy, copies[experts]]).tolist())
    return Written(file.getvalue().encode())


def is_table(first_line: str) -> bool:
    """True if a file that begins with this line is such a table; its columns may come in any order, with others."""
    names = {cell.strip().strip('"') for cell in first_line.split(",")}
    return set(NEEDED) <= names


def read(source: PlanSource, text: str) -> Deployed:
    """Rows in any order; the slots of a GPU are in that of their rows."""
    rows = list(_rows(source, text))
    gpus = source.gpus or max((gpu for _, (_, gpu, _) in rows), default=0) + 1
    gpus = min(gpus, MAX_RANKS)
    held: list[list[list[int]]] = [[[] for _ in range(gpus)] for _ in source.model.moe_layers]
    at, experts = {layer: index for index, layer in enumerate(source.model.moe_layers)}, source.model.experts
    for place, (layer, gpu, expert) in rows:
        if layer not in at:
            raise source.fault(f"model layer {layer} is no MoE layer of {source.model.name}", place)
        if gpu >= gpus:
            raise source.fault(f"GPU {gpu} is out of range, GPUs are 0 … {gpus - 1}", place)
        if expert >= experts:
            raise source.fault(f"expert {expert} is out of range, experts are 0 … {experts - 1}", place)
        held[at[layer]][gpu].append(expert)
    for layer, row in zip(source.model.moe_layers, held, strict=True):
        if missing := set(range(experts)).difference(*row):
            raise source.fault(f"expert {min(missing)} is on no GPU", f"model layer {layer}")
    placement = Placement(
        experts=experts, experts_of_gpu=tuple(tuple(map(tuple, row)) for row in held), model_layers=source.model.moe_layers
    )
    return Deployed(placement, "table of slots")


def _rows(source: PlanSource, text: str) -> Iterator[tuple[str, list[int]]]:
    """(place, [model layer, GPU, expert]) of every row; raises InputError."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = [cell.strip() for cell in next(reader)]
    columns = [header.index(name) for name in NEEDED]
    for number, cells in enumerate(reader):
        if not cells:
            continue
        if number >= MAX_ROWS:
            raise source.fault(f"has more than {MAX_ROWS} rows")
        place = f"line {reader.line_num}"
        if len(cells) != len(header):
            raise source.fault(f"has {len(cells)} columns, the header {len(header)}", place)
        numbers = [cells[column].strip() for column in columns]
        for name, cell in zip(NEEDED, numbers, strict=True):
            if not (cell.isascii() and cell.isdigit() and len(cell) < 10):
                raise source.fault(f"{name} is {quoted(cell)}, not a whole number of at least 0", place)
        yield place, list(map(int, numbers))

"""ExFlow's placement table: CSV with the header `Expert,Node`, one row an expert of a layer.

Experts are numbered through the layers, id = layer * experts + expert, and `Node` is the GPU that holds the expert. There
are no replicas: every id appears once, and every GPU holds equally many experts of each layer.
"""

import csv
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import InputError
from engine.formats.arrays import MAX_LAYERS, MAX_RANKS
from engine.formats.placements.export import Written, even_slots, refuse_replicas
from engine.formats.placements.plan_source import Deployed, PlanSource
from engine.formats.source import fault, quoted
from engine.model import MoEModel
from engine.plan import Placement

HEADER = ("Expert", "Node")
FORMAT = "ExFlow placement"
MAX_ROWS = 1_000_000


def write(placement: Placement, model: MoEModel, name: str) -> Written:
    """The table.

    Can not carry: replicas, different numbers of experts on the GPUs, the order of the experts of a GPU, which model layer an
    MoE layer is, and of a plan anything but its placement. Raises InputError for such placements.
    """
    refuse_replicas(placement, "ExFlow")
    even_slots(placement, model, "ExFlow")
    gpu_of_expert = placement.gpu_of_expert.ravel().tolist()
    lines = [",".join(HEADER), *(f"{expert},{gpu}" for expert, gpu in enumerate(gpu_of_expert))]
    return Written(("\n".join(lines) + "\n").encode(), (), ("experts are numbered through the MoE layers",))


def is_table(first_line: str) -> bool:
    """True if a file that begins with this line is such a table."""
    return tuple(cell.strip() for cell in first_line.split(",")) == HEADER


def read(source: PlanSource, text: str) -> Deployed:
    """The placement of the model's MoE layers."""
    rows, model = read_table(source.path, text, source.model.experts, source.gpus), source.model
    if len(rows) != len(model.moe_layers):
        raise source.fault(
            f"has {len(rows)} layers of {model.experts} experts; {model.name} has {len(model.moe_layers)} MoE layers"
        )
    return Deployed(Placement.from_gpu_of_expert(rows, source.gpus or int(rows.max()) + 1, model.moe_layers), FORMAT)


def read_table(path: Path, text: str, experts: int, gpus: int | None = None) -> NDArray[np.int64]:
    """The GPU of every expert, int64[layer, expert], from a table with layers * experts rows in any order. Raises InputError
    that names the file, the line and the rule it breaks.

    path: the file's name in messages
    experts: of one layer, which the table does not say
    gpus: number of GPUs, by default the highest named + 1
    """
    if experts < 1:
        raise InputError(f"experts: a layer has at least one, not {experts}")
    rows = _rows(path, text, min(MAX_ROWS, experts * MAX_LAYERS))
    if len(rows) % experts:
        raise fault(path, f"has {len(rows)} rows, not whole layers of {experts} experts")
    ids, nodes, lines = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    count = int(nodes.max()) + 1 if gpus is None else gpus
    limit = min(count, MAX_RANKS)
    for name, column, end, rule in (
        ("Expert", ids, len(rows), f"with {len(rows)} rows ids are 0 … {len(rows) - 1}"),
        ("Node", nodes, limit, f"GPUs are 0 … {limit - 1}"),
    ):
        if column.max() >= end:
            row = int((column >= end).argmax())
            raise fault(path, f"{name} {column[row]} is out of range, {rule}", f"line {lines[row]}")
    order = np.argsort(ids, kind="stable")
    if (again := ids[order][1:] == ids[order][:-1]).any():
        row = int(order[1:][again].min())
        raise fault(path, f"a second row for expert {ids[row]}; there are no replicas here", f"line {lines[row]}")
    place = nodes[order].reshape(-1, experts)
    layers = len(place)
    held = np.zeros((layers, count), dtype=np.int64)
    np.add.at(held, (np.arange(layers)[:, None], place), 1)
    if (uneven := held * count != experts).any():
        layer, gpu = np.argwhere(uneven)[0]
        raise fault(
            path,
            f"GPU {gpu} holds {held[layer, gpu]} of {experts} experts; every one of the {count} GPUs needs equally many",
            f"layer {layer}",
        )
    return place


def _rows(path: Path, text: str, most: int) -> list[tuple[int, int, int]]:
    """(expert id, node, line) of every row under the header; blank lines are left out."""
    rows, header = [], None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    for cells in reader:
        cells = tuple(cell.strip() for cell in cells)
        if not any(cells):
            continue
        place = f"line {reader.line_num}"
        if header is None:
            header = cells
            if header != HEADER:
                raise fault(path, f"the header must be {','.join(HEADER)}, not {quoted(','.join(cells))}", place)
            continue
        if len(rows) == most:
            raise fault(path, f"has more than {most} rows")
        if len(cells) != len(HEADER):
            raise fault(path, f"has {len(cells)} columns, wanted Expert and Node", place)
        numbers = []
        for name, cell in zip(HEADER, cells, strict=True):
            if not (cell.isascii() and cell.isdigit() and len(cell) < 10):
                raise fault(path, f"{name} is {quoted(cell)}, not a whole number of at least 0", place)
            numbers.append(int(cell))
        rows.append((*numbers, reader.line_num))
    if not rows:
        raise fault(path, "has no rows; one is needed for every expert of every layer")
    return rows

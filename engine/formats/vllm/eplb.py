"""Expert loads that vLLM writes with the open pull request #41141 ("offline EPLB"), as JSON lines.

* `{"record_type": "eplb_load_stats", "version": 1, "step", "expert_load": [layer][slot], "p2l_map": [layer][slot]}`, one every
  so many steps, with `num_ranks` in the older form. Loads are of physical slots; the map with them says which expert each is.
* The newer form begins with one `{"record_type": "eplb_load_meta", "version", "model", "num_ranks", "num_groups", "num_nodes",
  "num_layers", "num_redundant_experts"}`.

Layers are MoE layers. Its own tools set markers of benchmark runs between the lines; lines of another type are left out.

The script of vLLM-Ascend (@182b75e) that makes static placements takes expert loads as a tensor [layer, expert] of counts,
saved by `torch.save` and nothing else with it. A window of loads, [step, layer, slot], and what Ascend gathers, [(step,) layer,
rank, expert of the rank], are saved so too.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from engine.formats.arrays import (
    MAX_LAYERS,
    check_amounts,
    expert_load,
    first,
    fold_slots,
    model_layers_of,
    place_in,
    routing_trace,
)
from engine.formats.bare_lists import loads_of_array, loads_of_table
from engine.formats.format import Format, Glance, of_one_file
from engine.formats.json_lines import records
from engine.formats.number_lists import NUMBERS, array_of_lists
from engine.formats.source import Source, ok, quoted, warning
from engine.formats.step_spans import StepSpans
from engine.formats.torch_files import array_of
from engine.formats.torch_files import load as load_torch_file
from engine.workload import ExpertLoad, Finding, Origin, RoutingTrace

NAME = "vllm-eplb-loads"
STATS, META = "eplb_load_stats", "eplb_load_meta"
_MARKERS = ("session_metadata", "bench_run_start")
TENSOR_NAME = "torch-loads"
_TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
_PROTOCOL_BYTES = 2


@dataclass
class _Seen:
    """The facts of the lines so far.

    meta: the line of metadata
    logical_of_slot: int64[layer, slot]; the map of the last line with loads
    moved: steps at which another map began
    layers_moved: layers in which it differed
    steps: of the lines with loads
    empty: number of lines with loads of 0
    others: number of lines by other types
    """

    meta: dict | None = None
    logical_of_slot: np.ndarray | None = None
    moved: list[object] = field(default_factory=list)
    layers_moved: set[int] = field(default_factory=set)
    steps: list[object] = field(default_factory=list)
    empty: int = 0
    others: Counter = field(default_factory=Counter)


def read_loads(source: Source) -> ExpertLoad:
    """Loads of experts, summed over all lines, with spans of time; each line is folded by its own map."""
    seen, spans, total = _Seen(), None, None
    for load in _folded(source, seen):
        if total is None:
            total, spans = np.zeros(load.shape), StepSpans(*load.shape)
        elif total.shape != load.shape:
            raise source.fault(
                f"has loads of {list(load.shape)} layers and experts, the lines before {list(total.shape)}; give one model's",
                f"step {seen.steps[-1]}",
            )
        total += load
        spans.add(load)
    if total is None:
        raise source.fault(f"holds no {STATS} line with any tokens" if seen.empty else f"holds no {STATS} line")
    numbers = model_layers_of(source, len(total)) or tuple(range(len(total)))
    loads = expert_load(source, total, tuple(range(len(total))))
    kept = list(loads.model_layers)
    by_step = spans.by_step
    return replace(
        loads,
        model_layers=tuple(numbers[layer] for layer in kept),
        by_step=None if by_step is None else by_step[:, kept],
        origin=Origin(format=NAME, findings=tuple(_findings(seen, kept))),
    )


def _folded(source: Source, seen: _Seen) -> Iterator[np.ndarray]:
    """The loads of every line that has any, float64[layer, expert]."""
    for number, record in records(source.path, arrays=True):
        place, kind = f"line {number}", record.get("record_type")
        if kind == META:
            if seen.meta is not None or seen.logical_of_slot is not None:
                raise source.fault(f"{META} stands once, as the first line; give the file of one recording", place)
            seen.meta = record
        elif kind == STATS:
            load = _fold(source, record, seen, place)
            seen.steps.append(record.get("step"))
            if load.any():
                yield load
            else:
                seen.empty += 1
        else:
            seen.others[str(kind)] += 1


def _fold(source: Source, record: dict, seen: _Seen, place: str) -> np.ndarray:
    """The loads of one line, float64[layer, expert]: those of all slots of an expert together."""
    step = record.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        raise source.fault(f"needs a whole number 'step', not {quoted(step)}", place)
    load = _table(source, record, "expert_load", place)
    check_amounts(source, load, "a load", place_in(f"{place}, expert_load, layer", "slot"))
    logical = _table(source, record, "p2l_map", place)
    if seen.logical_of_slot is None or not np.array_equal(logical, seen.logical_of_slot):
        _take_map(source, record, logical, seen, place)
    logical = seen.logical_of_slot
    if logical.shape != load.shape:
        raise source.fault(f"expert_load is {list(load.shape)}, p2l_map {list(logical.shape)}; both are [layers][slots]", place)
    return fold_slots(load, logical, int(logical.max()) + 1)


def _take_map(source: Source, record: dict, logical: np.ndarray, seen: _Seen, place: str) -> None:
    """Check a map that differs from the last line's and keep it. logical: float64[layer, slot]"""
    slots = logical.shape[1]
    faulty = (logical < 0) | (logical >= slots) | (logical != np.rint(logical))
    if faulty.any():
        layer, slot = first(faulty)
        raise source.fault(
            f"expert {logical[layer, slot]:g} is out of range, {slots} slots hold experts 0 … {slots - 1} at most",
            f"{place}, p2l_map, layer {layer}, slot {slot}",
        )
    logical = logical.astype(np.int64)
    experts, redundant = int(logical.max()) + 1, (seen.meta or {}).get("num_redundant_experts")
    if isinstance(redundant, int) and slots - redundant != experts:
        raise source.fault(
            f"p2l_map places {experts} experts on {slots} slots, but {META} says {redundant} of them are redundant", place
        )
    if seen.logical_of_slot is not None and seen.logical_of_slot.shape == logical.shape:
        seen.moved.append(record.get("step"))
        seen.layers_moved.update(np.flatnonzero((logical != seen.logical_of_slot).any(axis=1)).tolist())
    seen.logical_of_slot = logical


def _table(source: Source, record: dict, key: str, place: str) -> np.ndarray:
    """The lists under a key as float64[layer, slot]; raises InputError."""
    table = array_of_lists(record.get(key), 2, NUMBERS)
    if table is None or not table.size or len(table) > MAX_LAYERS:
        raise source.fault(
            f"needs '{key}', lists of numbers [layers][slots] with as many slots in every layer, at most {MAX_LAYERS} layers",
            place,
        )
    return table


def _findings(seen: _Seen, kept: list[int]) -> Iterator[Finding]:
    """The findings on all lines. kept: the recorded layer of each layer of the loads"""
    if seen.moved:
        times = f"{len(seen.moved)} times, first " if len(seen.moved) > 1 else ""
        yield warning(
            "balancer-moved",
            f"The balancer moved experts while this was recorded ({times}before step {seen.moved[0]}). Each line is folded "
            "by its own map, so the loads hold; but no single placement served them, and tokens may have been counted "
            "under the map before. Record with online rebalancing off.",
            layers=tuple(layer for layer, recorded in enumerate(kept) if recorded in seen.layers_moved),
        )
    if any(later <= earlier for earlier, later in zip(seen.steps, seen.steps[1:], strict=False)):
        yield warning(
            "steps-restart", "Steps do not rise from line to line: several runs are in one file; spans of time mix them."
        )
    if seen.others:
        kinds = ", ".join(f"{quoted(kind)} ({count})" for kind, count in seen.others.most_common(4))
        yield Finding(
            severity="ok" if set(seen.others) <= set(_MARKERS) else "warning",
            code="other-records",
            message=f"Lines of other types were left out: {kinds}.",
        )
    if seen.empty:
        yield ok("idle-steps", f"{seen.empty} lines without any tokens were left out.")


def _tells(glance: Glance) -> bool:
    return glance.record.get("record_type") in (STATS, META, *_MARKERS)


LOADS = Format(NAME, "vLLM's expert loads (PR #41141)", "loads", _tells, of_one_file(read_loads))


def read_tensor(source: Source) -> ExpertLoad | RoutingTrace:
    """Loads from number[layer, expert], or of more axes, see `bare_lists`; else routing from int[token, layer, k]. Rows of
    zeros are dense layers and left out."""
    counts = array_of(source.path, load_torch_file(source.path), "the tensor")
    if counts.ndim == 3 and counts.dtype.kind == "i" and counts.min(initial=0) == -1:
        raise source.fault(
            "-1 in numbers [layers, ranks, experts] is a map of experts to ranks, a placement: give it as the plan in use "
            "(--in-use), or open it on the Optimise page as what is deployed now"
        )
    if counts.ndim in (3, 4) and counts.dtype.kind in "iuf" and (loads := loads_of_array(source, counts, TENSOR_NAME)):
        return loads
    if counts.ndim == 3 and counts.dtype.kind in "iu" and 0 not in counts.shape:
        return routing_trace(source, counts)
    if counts.ndim != 2 or counts.dtype.kind not in "iuf" or 0 in counts.shape:
        raise source.fault(f"a tensor of loads is numbers [layers, experts], not {counts.dtype} {list(counts.shape)}")
    return loads_of_table(source, counts, TENSOR_NAME)


def _is_tensor(glance: Glance) -> bool:
    return glance.pickled[_PROTOCOL_BYTES:].startswith(_TENSOR)


TENSOR = Format(TENSOR_NAME, "a tensor of expert loads", "loads", _is_tensor, of_one_file(read_tensor))

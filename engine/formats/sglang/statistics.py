"""SGLang's expert statistics, `logical_count`: as its recorder dumps them (`.pt`, modes `stat` and `stat_approx`), and as JSON.

The recorder writes `rank`, `logical_count` int32[step, decoder layer, expert], summed over ranks, and
`average_utilization_rate_over_window` (srt/eplb/expert_distribution.py). Dense layers are rows of zeros. Steps are a ring
buffer, with rows of zeros where it was not filled, unless `--expert-distribution-recorder-buffer-size` is -1: then they are in
order. Physical slots were folded to experts by the map at the time of the dump, so a balancer that moved experts while
recording left wrong counts, which the file does not show.

Coupled balancers (UltraEP) add `logical_count_layout: "rank_layer_expert"`: the first axis is then the rank that sent the
tokens. KTransformers writes the same file. `--init-expert-location` takes `{"logical_count": …}` as JSON or `.pt`, with or
without steps.
"""

import zipfile
from dataclasses import replace

import numpy as np

from engine.formats import torch_files
from engine.formats.arrays import MAX_EXPERTS, MAX_LAYERS, MAX_RANKS, MAX_SPLIT, check_amounts, expert_load, place_in
from engine.formats.format import Format, Glance, of_one_file
from engine.formats.number_lists import NUMBERS, array_of_lists
from engine.formats.sglang.dumps import moe_rows
from engine.formats.source import Source, quoted, read_json_object, warning
from engine.formats.step_spans import empty_steps, steps_of_ring, sum_spans
from engine.workload import ExpertLoad, Finding, Origin

NAME = "sglang-statistics"
BY_RANK = "rank_layer_expert"
MAX_JSON_BYTES = 32 * 1024**2
MAX_TABLE = 2**22
"""Limit of the counts of one step; 61 layers of 256 experts are two hundred times fewer."""


def read_statistics(source: Source) -> ExpertLoad:
    """Loads from `logical_count`, number[layer, expert], [step, layer, expert] or, if the file says so, [rank, layer, expert].
    Raises InputError."""
    is_torch = zipfile.is_zipfile(source.path)
    data = torch_files.load(source.path) if is_torch else read_json_object(source.path, MAX_JSON_BYTES, arrays=True)
    if not isinstance(data, dict) or "logical_count" not in data:
        raise source.fault("expert statistics need a key 'logical_count'")
    rows = data["logical_count"]
    if is_torch:
        counts = torch_files.array_of(source.path, rows, "logical_count")
    else:
        tables = (array_of_lists(rows, depth, NUMBERS) for depth in (1, 2, 3))
        counts = next((table for table in tables if table is not None), None)
        if counts is None:
            raise source.fault("must be lists of numbers only, with rows that do not differ in length", "logical_count")
    if (layout := data.get("logical_count_layout")) not in (None, BY_RANK):
        raise source.fault(f"is {quoted(layout)}; only {BY_RANK!r} is known", "logical_count_layout")
    if counts.ndim not in ((3,) if layout else (2, 3)) or 0 in counts.shape:
        forms = "[ranks, layers, experts]" if layout else "[layers, experts] or [steps, layers, experts]"
        raise source.fault(f"must be {forms}, not {list(counts.shape)}", "logical_count")
    layers, experts = counts.shape[-2:]
    if layers > MAX_LAYERS or experts > MAX_EXPERTS or layers * experts > MAX_TABLE:
        raise source.fault(
            f"{layers} layers of {experts} experts are too many (at most {MAX_LAYERS} and {MAX_EXPERTS}, together {MAX_TABLE})",
            "logical_count",
        )
    if layout and (len(counts) > MAX_RANKS or counts.size > MAX_SPLIT):
        raise source.fault(f"{list(counts.shape)} are too many ranks (at most {MAX_RANKS})", "logical_count")
    axis = "rank" if layout else "step"
    check_amounts(source, counts, "a count", place_in(*(f"logical_count, {axis}", "layer", "expert")[3 - counts.ndim :]))
    findings, by_source, by_step = [], None, None
    if layout:
        by_source = counts.astype(np.float64)
    elif counts.ndim == 3 and len(counts) > 1:
        order, findings = _in_time(counts)
        by_step = sum_spans(counts, order)
    split = by_source if layout else by_step
    load = split.sum(axis=0) if split is not None else counts.reshape(counts.shape[-2:]).astype(np.float64)
    rows, layer_findings = moe_rows(source, load.any(axis=1), load.shape[1])
    workload = expert_load(
        source,
        load[rows],
        tuple(rows.tolist()),
        by_source=None if by_source is None else by_source[:, rows],
        by_step=None if by_step is None or len(by_step) < 2 else by_step[:, rows],
    )
    return replace(workload, origin=Origin(format=NAME, findings=(*findings, *layer_findings)))


def _in_time(counts: np.ndarray) -> tuple[np.ndarray, list[Finding]]:
    """(the steps with tokens, int64[...], the oldest first as far as can be told, findings on their order).

    counts: number[step, layer, expert]
    """
    steps, (order, runs) = len(counts), steps_of_ring(counts)
    if not runs:
        message = (
            f"All {steps} steps of the buffer are filled. A buffer of a fixed size is a ring whose oldest step may be anywhere "
            "in it; only with --expert-distribution-recorder-buffer-size -1 are steps in order. Totals are right "
            "either way; what is judged over time may begin in the middle of the recording."
        )
        return order, [warning("step-order", message)]
    return order, [empty_steps(steps, len(order), runs)] if len(order) < steps else []


def _tells(glance: Glance) -> bool:
    return b"logical_count" in glance.pickled or "logical_count" in glance.keys


FORMATS = (Format(NAME, "SGLang's expert statistics", "loads", _tells, of_one_file(read_statistics)),)

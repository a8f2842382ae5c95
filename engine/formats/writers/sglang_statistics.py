"""SGLang's expert statistics, `logical_count`, as JSON and as its recorder dumps them, `.pt` (srt/eplb/expert_distribution.py):
`--init-expert-location` takes either. Rows count all decoder layers; those of dense layers are zero."""

from pathlib import Path

import numpy as np
import torch

from engine.finite import json_text
from engine.formats.writers.writer import Writer, is_whole, layer_numbers, loads_of
from engine.model import MoEModel
from engine.workload import ExpertLoad, RoutingTrace

MOST_COUNT = 2**31 - 1
"""The recorder's tensor is int32."""


def write_json(workload: RoutingTrace | ExpertLoad, path: Path, model: MoEModel | None = None) -> tuple[str, ...]:
    """`{"logical_count": [layer][expert]}`, or [step][layer][expert] of loads by steps; without steps but with sources, by rank
    as coupled balancers write it (`"logical_count_layout": "rank_layer_expert"`).

    Cannot carry: tokens, and sources of loads that have steps. Raises InputError where it is not known which of the model's
    layers were recorded.
    """
    counts, layout, lost = _table(workload, model)
    rows = counts.astype(np.int64) if is_whole(counts) else counts
    path.write_text(json_text({"logical_count": rows.tolist()} | layout), encoding="utf-8")
    return lost


def write_torch(workload: RoutingTrace | ExpertLoad, path: Path, model: MoEModel | None = None) -> tuple[str, ...]:
    """The same as `rank`, `logical_count` int32[step, layer, expert] (int64 by rank, and where counts need it) and
    `average_utilization_rate_over_window`, which is None. Fractions are rounded."""
    counts, layout, lost = _table(workload, model)
    if not is_whole(counts):
        lost = (*lost, "the fractions of counts, which are rounded")
    kind = np.int64 if layout or counts.max() > MOST_COUNT else np.int32
    steps = np.rint(counts).astype(kind).reshape(-1, *counts.shape[-2:])
    content = {"rank": 0, "logical_count": torch.from_numpy(steps), "average_utilization_rate_over_window": None}
    torch.save(content | layout, path)
    return lost


def _table(
    workload: RoutingTrace | ExpertLoad, model: MoEModel | None
) -> tuple[np.ndarray, dict[str, str], tuple[str, ...]]:
    """float64[..., decoder layer, expert], what says how it is laid out, and what it does not say."""
    loads, lost = loads_of(workload, model)
    layers = layer_numbers(loads, model)
    counts, layout = loads.load, {}
    if loads.by_step is not None:
        counts = loads.by_step
        lost += () if loads.by_source is None else ("how much came from which rank",)
    elif loads.by_source is not None:
        counts, layout = loads.by_source, {"logical_count_layout": "rank_layer_expert"}
    table = np.zeros((*counts.shape[:-2], max(max(layers) + 1, model.layers if model else 0), counts.shape[-1]))
    table[..., layers, :] = counts
    return table, layout, lost


WRITERS = (
    Writer("sglang-statistics", ".json", "SGLang's statistics as JSON", (RoutingTrace, ExpertLoad), write_json),
    Writer("sglang-recorder", ".pt", "a dump of SGLang's recorder", (RoutingTrace, ExpertLoad), write_torch),
)

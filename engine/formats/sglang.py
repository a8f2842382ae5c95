"""SGLang's expert statistics as JSON: `{"logical_count": [[…experts] × layers]}`, or one such table a step."""

import numpy as np

from engine.formats.arrays import check_amounts, expert_load, place_in
from engine.formats.source import Source, quoted, read_json_object
from engine.workload import ExpertLoad


def read_statistics(source: Source) -> ExpertLoad:
    """Loads from `logical_count`, number[layer, expert] or [step, layer, expert], which is summed over steps. Rows
    count every decoder layer; those of zeros only are dense layers and left out."""
    data = read_json_object(source.path)
    if "logical_count" not in data:
        keys = ", ".join(quoted(key) for key in list(data)[:6]) or "nothing"
        raise source.fault(f"expert statistics need a key 'logical_count'; found {keys}")
    counts = _as_array(source, data["logical_count"])
    if counts.ndim not in (2, 3) or 0 in counts.shape:
        raise source.fault(
            f"must be [layers, experts] or [steps, layers, experts], not {list(counts.shape)}", "logical_count"
        )
    steps = counts.reshape(-1, *counts.shape[-2:])
    check_amounts(source, steps, "a count", place_in("logical_count, step", "layer", "expert"))
    return expert_load(source, steps.sum(axis=0), tuple(range(steps.shape[1])))


def _as_array(source: Source, rows: object) -> np.ndarray:
    """float64[...] from nested lists of numbers."""
    try:
        counts = np.asarray(rows)
    except ValueError:
        raise source.fault("the rows differ in length; each needs one count per expert", "logical_count") from None
    if counts.dtype.kind not in "iuf":
        raise source.fault("must be lists of numbers only", "logical_count")
    return counts.astype(np.float64)

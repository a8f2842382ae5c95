"""Loads as those of the tables' power-law rows: the busiest GPU of an expert-parallel group."""

import numpy as np
import pandas as pd

from engine.costs.fused_experts import kernel_rows, kernel_table
from engine.model import MoEModel

DRAWS = 20


def busiest_gpu(model: MoEModel, tokens: int, held: int, exponent: float, rng: np.random.Generator) -> np.ndarray:
    """float64[held]: token copies of each expert on the GPU that has most, when popularity is drawn from a bounded power law
    (as aiconfigurator's collector draws it: x^-exponent between 1 and 0.8 · tokens; between 0.01 and 2 for few tokens)."""
    copies = tokens * model.experts_per_token
    low, high = (1.0, 0.8 * tokens) if copies > model.experts else (0.01, 2.0)
    power = 1 - exponent
    drawn = ((high**power - low**power) * rng.random(model.experts) + low**power) ** (1 / power)
    groups = np.round(drawn / drawn.sum() * copies).reshape(-1, held)
    return groups[groups.sum(axis=1).argmax()]


def skew_errors(gpu_type: str, model: MoEModel, phase: str) -> pd.DataFrame:
    """Every power-law row of a model beside the mean of `DRAWS` loads of its law: columns exponent, held, tokens, measured and
    ours (seconds), error (relative)."""
    table, rows = kernel_table(gpu_type, model, phase), kernel_rows(gpu_type, model, phase)
    skewed = rows[rows.distribution.str.startswith("power_law_")]
    errors = []
    for row in skewed.itertuples():
        exponent, rng = float(row.distribution.removeprefix("power_law_")), np.random.default_rng(0)
        loads = [busiest_gpu(model, row.all_tokens, row.experts_held, exponent, rng) for _ in range(DRAWS)]
        ours = float(np.mean([table.seconds(load, row.experts_held).sum() for load in loads]))
        errors.append((exponent, row.experts_held, row.all_tokens, row.seconds, ours, ours / row.seconds - 1))
    return pd.DataFrame(errors, columns=["exponent", "held", "tokens", "measured", "ours", "error"])

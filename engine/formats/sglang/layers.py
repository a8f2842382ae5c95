"""Which rows of SGLang's tables are MoE layers: its recorders number all decoder layers, dense ones too."""

from collections.abc import Iterable

import numpy as np

from engine.finding import Finding
from engine.formats.source import Source

MOST_MTP_LAYERS = 4


def moe_rows(source: Source, used: np.ndarray, experts: int) -> tuple[np.ndarray, list[Finding]]:
    """int64[...]: the rows to keep, and what there is to say of the others. Without a model of these sizes, every row with
    tokens is an MoE layer; with one, rows that it has no experts in are left out.

    used: bool[decoder layer], whether a row has any tokens
    experts: logical experts per layer of the recording
    """
    model = source.model
    if model is None or model.experts != experts or not 0 <= len(used) - model.layers <= MOST_MTP_LAYERS:
        return np.flatnonzero(used), []
    expected = np.isin(np.arange(len(used)), model.moe_layers)
    extra = np.flatnonzero(used & ~expected)
    findings = []
    if (mtp := extra[extra >= model.layers]).size:
        findings.append(
            Finding(
                severity="ok",
                code="mtp-layer-left-out",
                message=(
                    f"{_rows(mtp)} left out: {model.name} has {model.layers} decoder layers, what follows them is its "
                    "MTP layer, which is placed by itself."
                ),
            )
        )
    if (dense := extra[extra < model.layers]).size:
        findings.append(
            Finding(
                severity="warning",
                code="counts-in-dense-layers",
                message=(
                    f"{_rows(dense)} left out: dense in {model.name}, yet with tokens. SGLang has counted passes of the MTP "
                    "layer in layer 0 (sglang #19812), so look whether it ran, or whether this is another model's recording."
                ),
            )
        )
    if (missing := np.flatnonzero(expected & ~used)).size:
        findings.append(
            Finding(
                severity="warning",
                code="layers-missing",
                message=(
                    f"{_rows(missing)} without any tokens, though {model.name} has experts there: the recorder missed "
                    "it; record again, or plan without it."
                ),
            )
        )
    return np.flatnonzero(used & expected), findings


def _rows(layers: Iterable[int]) -> str:
    """`Layer 3` or `Layers 3, 4 and 5`, by model layer."""
    *others, last = (str(layer) for layer in layers)
    return f"Layers {', '.join(others)} and {last}" if others else f"Layer {last}"

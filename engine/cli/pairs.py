"""What `detect --pairs` makes of logs of measured pairs: a cluster, and every pair beside it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine import formats, store
from engine.cli.text import table
from engine.costs.pair_cluster import PairCluster, draw_pairs
from engine.errors import InputError
from engine.formats.measured.nccl_pairs import read_pairs
from engine.units import bandwidth, share

LOGS = ("nccl-tests", "nccl-pairs")
"""Formats of logs: of one alone, and of those that are a set."""
WORST = 10
"""Pairs that are listed."""


def read(paths: Sequence[Path], name: str, default_type: str | None) -> PairCluster:
    """The cluster of the logs among these files, folders and archives, with notes on logs and cluster. Raises InputError."""
    with store.scratch() as folder:
        parts = formats.parts(paths, folder)
        logs = [path for part in parts if part.format.name in LOGS for path in part.paths]
        others = [part for part in parts if part.format.name not in LOGS]
        if not logs:
            raise InputError(f"{others[0].paths[0].name}: is {others[0].format.title}, not what nccl-tests prints")
        pairs, notes = read_pairs(logs)
    notes += [f"{part.paths[0].name} left out: it is {part.format.title}" for part in others]
    drawn = draw_pairs(pairs, name, default_type)
    return replace(drawn, notes=(*notes, *drawn.notes))


def describe(drawn: PairCluster) -> dict[str, Any]:
    """Every pair as measured and as the cluster has it, bytes/s; None where it was not measured."""
    matrices = {"measured": drawn.measured, "drawn": drawn.drawn}
    return {
        "gpus": list(drawn.names),
        **{name: np.where(np.isfinite(rate), rate, None).tolist() for name, rate in matrices.items()},
        "mean_error": drawn.mean_error,
        "worst": drawn.worst(WORST),
    }


def show(pairs: dict[str, Any]) -> str:
    """The pairs that the cluster meets worst, beside what was measured."""
    rows = []
    for first, second in pairs["worst"]:
        measured, drawn = (pairs[matrix][first][second] for matrix in ("measured", "drawn"))
        names = f"{pairs['gpus'][first]} and {pairs['gpus'][second]}"
        rows.append([names, bandwidth(measured), bandwidth(drawn), f"{100 * drawn / measured - 100:+z.1f} %"])
    title = f"pairs as measured and as drawn, mean difference {share(pairs['mean_error'])}; the largest differences"
    return f"{title}\n{table(['pair', 'measured', 'drawn', 'difference'], rows)}"

"""Megatron-Core: its router's traces, permuted experts, and the order in which its all-to-all dispatcher has tokens arrive."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from engine.formats import read_workload
from engine.formats.placements import write_placement
from engine.model import MoEModel
from engine.plan import Placement
from engine.runtime.exchange.routes import route
from tests.engines import megatron_ranks
from tests.engines.megatron_ranks import DENSE, EXPERTS, GROUPS, LAYERS, MICRO_BATCHES, RANKS, STEPS, TOKENS, WIDTH, K
from tests.engines.wheels import Row, wheel_of

MEGATRON = "megatron-core==0.19.2"
PYTHON = ("--python-version", "3.12")
"""That the wheel is for; the part used of it runs on 3.11 as well."""
MODEL = MoEModel(
    **{"name": "small", "layers": LAYERS, "dense_layers": tuple(range(DENSE)), "experts": EXPERTS, "experts_per_token": K},
    **{"expert_groups": GROUPS, "d_model": WIDTH, "d_ff": 8},
)
MOE = len(MODEL.moe_layers)
ROWS = STEPS * MICRO_BATCHES * TOKENS


def placements() -> dict[str, Placement]:
    """Experts on ranks: as they are, in whole groups, and across groups in the last layers."""
    draw, size = np.random.default_rng(0), EXPERTS // GROUPS
    groups = [draw.permutation(GROUPS) for _ in range(MOE)]
    whole = [np.concatenate([group * size + draw.permutation(size) for group in order]) for order in groups]
    slots = {"as it is": [np.arange(EXPERTS)] * MOE, "whole": whole, "mixed": [whole[0], *map(draw.permutation, whole[1:])]}
    held = np.full(RANKS, EXPERTS // RANKS)
    return {name: Placement.from_slots(np.array(rows), held, EXPERTS, MODEL.moe_layers) for name, rows in slots.items()}


def run(folder: Path, orders: dict[str, list]) -> list[dict[str, np.ndarray]]:
    """The findings of each rank; its traces lie in the folder."""
    wheel = folder / "megatron"
    wheel_of(MEGATRON, folder, *PYTHON).extractall(wheel)
    (folder / "orders.json").write_text(json.dumps(orders))
    command = [sys.executable, "-W", "ignore", megatron_ranks.__file__, str(wheel), str(folder)]
    here = os.environ | {"PYTHONPATH": str(Path(megatron_ranks.__file__).parents[2])}
    ranks = [subprocess.Popen([*command, str(rank)], env=here) for rank in range(RANKS)]
    try:
        failed = [rank for rank in ranks if rank.wait(timeout=300)]
    finally:
        for rank in ranks:
            rank.kill()
    if failed:
        raise SystemExit("the ranks of Megatron-Core failed; their messages are above")
    return [dict(np.load(folder / f"found{rank}.npz")) for rank in range(RANKS)]


def findings_of(folder: Path, name: str) -> str:
    return " ".join(finding.message for finding in read_workload(folder / name, model=MODEL).origin.findings)


def as_chosen(folder: Path, name: str, found: list[dict[str, np.ndarray]]) -> tuple[int, int]:
    """(rows, of all that routers chose, that our reading of a trace has as they chose them; all of them)"""
    trace = read_workload(folder / name, model=MODEL)
    same = 0
    for rank, own in enumerate(found):
        read = trace.experts[trace.source_rank == rank]
        chosen = np.moveaxis(own[name], 2, 3).reshape(-1, MOE, EXPERTS)
        if len(read) == len(chosen):
            masks = np.zeros_like(chosen)
            np.put_along_axis(masks, read.astype(np.int64), True, axis=2)
            same += int((masks == chosen).all(axis=2).sum())
    return same, RANKS * ROWS * MOE


def traces(folder: Path, found: list[dict[str, np.ndarray]]) -> list[Row]:
    rows = []
    for name, words in (
        ("plain", "softmax"),
        ("grouped", "sigmoid, groups, expert bias; sidecars"),
        ("recomputed", "activations recomputed"),
        ("replay", "by routing replay"),
    ):
        same, all_rows = as_chosen(folder, name, found)
        rows.append(Row(f"its trace of choices, {words}", MEGATRON, f"{same:,} of {all_rows:,}", same == all_rows))
    trace = read_workload(folder / "replay", model=MODEL)
    recorded = [own["recorded"].reshape(-1, MOE, K) for own in found]
    same = np.mean([(trace.experts[trace.source_rank == rank] == each).mean() for rank, each in enumerate(recorded)])
    rows.append(Row("RouterReplay's tensors, in their order", MEGATRON, f"{same:.1%} alike", bool(same == 1)))
    said = findings_of(folder, "plain")
    mtp = f"{RANKS * ROWS} rows of multi-token prediction" in said
    rows.append(Row("rows of MTP, left out", MEGATRON, f"{RANKS * ROWS:,}" if mtp else said, mtp))
    before_last = [own["capacity"][:-1].sum(axis=(3, 4)) < TOKENS * K for own in found]
    dropped, of = int(np.sum(before_last)), int(np.size(before_last))
    said = re.search(r"at least (\d+) of (\d+)", findings_of(folder, "capacity"))
    told = tuple(map(int, said.groups())) if said else (0, 0)
    words = f"{told[0]} of {told[1]}, in truth {dropped} of {of}"
    rows.append(Row("layers that a capacity left out", MEGATRON, words, told == (dropped, of)))
    left, noted = (np.concatenate([own[name] for own in found], axis=axis) for name, axis in (("left", 1), ("noted", 0)))
    masks = (noted[..., None] == np.arange(EXPERTS)).any(axis=2).swapaxes(0, 1)
    words = (
        f"{left.sum():,} of {noted.size:,} choices left; {'alike' if (same := np.array_equal(masks, left)) else 'not alike'}"
    )
    rows.append(Row("by our recorder, under a capacity", MEGATRON, words, same and int(left.sum()) < noted.size))
    same, all_rows = as_chosen(folder, "padded", found)
    named = "padded to a capacity" in findings_of(folder, "padded")
    rows.append(
        Row("padded to a capacity: an error", MEGATRON, f"{same:,} of {all_rows:,} rows right", named and same < all_rows)
    )
    return rows


def permuted(found: list[dict[str, np.ndarray]], notes: dict[str, str]) -> list[Row]:
    rows = []
    for name in ("whole", "mixed"):
        other = np.concatenate(
            [(own[f"{name}_chosen"] != own["as it is_chosen"]).any(axis=2) for own in found], axis=1
        )  # bool[layer, token]
        change = max(np.abs(own[f"{name}_outputs"] - own["as it is_outputs"]).max() for own in found)
        torn = re.search(rf"(\d+) of {MOE} layers mix", notes[name])
        layers = int(torn[1]) if torn else 0
        per_layer = other.sum(axis=1).tolist()
        words = f"tokens that choose otherwise {per_layer} of {other.shape[1]}, outputs differ by {change:.1g}; named {layers}"
        holds = layers == sum(map(bool, per_layer)) and (change < 1e-5) == (layers == 0) == (name == "whole")
        rows.append(Row(f"exported permutation, groups {name}", MEGATRON, words, holds))
    return rows


def dispatched(found: list[dict[str, np.ndarray]]) -> list[Row]:
    masks = np.concatenate([own["dispatch_mask"] for own in found])
    source, share = np.repeat(np.arange(RANKS), TOKENS), np.repeat(np.eye(RANKS), EXPERTS // RANKS, axis=0)
    ours = route(np.array([np.flatnonzero(mask) for mask in masks]), source, share)
    same = {"sent": [], "arrived": [], "served": []}
    for rank, own in enumerate(found):
        rows = {"sent": ours.outgoing(rank), "arrived": (arrived := ours.incoming(rank))}
        rows["served"] = arrived[np.argsort(ours.expert[arrived], kind="stable")]
        for name, row in rows.items():
            token = ours.token[row]
            same[name].append(np.array_equal(1000 * source[token] + token % TOKENS, own[f"dispatch_{name}"]))
    holds = {name: all(ranks) for name, ranks in same.items()}
    words = ", ".join(f"{name}: {'alike' if fine else 'not alike'}" for name, fine in holds.items())
    return [Row("rows of its all-to-all, in order", MEGATRON, words, all(holds.values()))]


def rows(folder: Path) -> list[Row]:
    """Rows of the table. folder: where the wheel is put."""
    exports = {name: write_placement("megatron", placement, MODEL) for name, placement in placements().items()}
    found = run(folder, {name: json.loads(export.files["plan.json"]) for name, export in exports.items()})
    notes = {name: " ".join(export.notes) for name, export in exports.items()}
    return [*traces(folder, found), *permuted(found, notes), *dispatched(found)]

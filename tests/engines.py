"""The engines' own code and ours compared, in a table: `make engines`.

Pinned wheels are downloaded into a temporary folder and read, not installed; single functions of theirs run, with their
settings stood in for. Nothing of it needs a GPU.
"""

import ast
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from engine.catalogue import model_presets
from engine.formats.placements import write_placement
from engine.placement.dispatch_rules import copy_of_rank
from engine.placement.replication import ReplicationInstance, replicate
from engine.placement.replication.by_rank import RankedInstance, replicate_by_rank
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.result import Provenance
from engine.timeline import Balance

SGLANG = "sglang==0.5.23"
LOCATION = (
    *("_compute_logical_to_all_physical_map", "_pad_nested_array", "compute_logical_to_rank_dispatch_physical_map"),
    *("_logical_to_all_physical_raw", "_compute_gpu_id_of_physical_expert", "_compute_node_id_of_physical_expert"),
    *("_find_nearest_expert", "_fair_choices"),
)
RANKS, NODES, SPARE = 32, 4, 32


def wheel_of(requirement: str, folder: Path) -> zipfile.ZipFile:
    """The wheel of a pinned package, as the package index has it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    subprocess.run([*command, requirement], check=True, stderr=subprocess.DEVNULL)
    name = requirement.partition("==")[0].replace("-", "_")
    return zipfile.ZipFile(next(folder.glob(f"{name}-*.whl")))


def functions_of(source: str, names: Iterable[str], **around: Any) -> dict[str, Callable]:
    """These functions of a module, compiled from its text without its imports. around: the names that they use."""
    wanted = set(names)
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    for node in tree.body:
        node.decorator_list, node.returns = [], None
        for argument in (*node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
    space = {"torch": torch, "random": random, **around}
    exec(compile(tree, "engine", "exec"), space)
    return {name: space[name] for name in wanted}


class SGLang:
    """SGLang's placement of experts by loads, and the copies that its ranks dispatch to."""

    def __init__(self, wheel: zipfile.ZipFile) -> None:
        def text(path: str) -> str:
            return wheel.read(f"sglang/srt/eplb/{path}").decode()

        self.exec = SimpleNamespace(moe=SimpleNamespace(moe_a2a_backend="deepep", ep_dispatch_algorithm="static"))
        self.parallel = SimpleNamespace(ep_size=RANKS, nnodes=NODES)
        around = {"get_exec": lambda: self.exec, "get_parallel": lambda: self.parallel}
        around |= {"_prefer_same_node_experts": lambda: True, "List": list, "Optional": Any}
        self.location = functions_of(text("expert_location.py"), LOCATION, **around)
        tree = ast.parse(source := text("eplb_algorithms/deepseek.py"))
        names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.eplb = functions_of(source, names)["rebalance_experts"]
        reduce = {"max": lambda counts: counts.amax(-1), "mean": lambda counts: counts.mean(-1)}
        einops = SimpleNamespace(reduce=lambda counts, _pattern, kind: reduce[kind](counts))
        name = "compute_utilization_rate"
        self.utilisation = functions_of(text("expert_distribution.py"), [name], einops=einops)[name]

    def copies(self, slots: np.ndarray, experts: int) -> np.ndarray:
        """int64[layer, rank, expert]: the GPU of the slot that each rank dispatches an expert's tokens to."""
        table = []
        for rank in range(RANKS):
            known = self.location["_compute_logical_to_all_physical_map"](
                physical_to_logical_map=torch.tensor(slots), num_logical_experts=experts, ep_size=RANKS, moe_ep_rank=rank
            )
            table.append(
                self.location["compute_logical_to_rank_dispatch_physical_map"](
                    logical_to_all_physical_map=known, ep_size=RANKS, num_physical_experts=slots.shape[1], ep_rank=rank
                ).numpy()
            )
        return np.stack(table, axis=1) // (slots.shape[1] // RANKS)


def loads_of(layers: int, experts: int) -> np.ndarray:
    """float64[layer, expert]: skewed loads, drawn."""
    return np.random.default_rng(0).lognormal(0.0, 1.0, (layers, experts)) * 1000


def even(table: np.ndarray, load: np.ndarray) -> np.ndarray:
    """float64[layer, gpu] loads under a table of copies, if every rank sends as much."""
    served = np.zeros((len(load), RANKS))
    for layer, rank in np.ndindex(table.shape[:2]):
        np.add.at(served[layer], table[layer, rank], load[layer] / RANKS)
    return served


def compare_sglang(folder: Path) -> list[tuple[str, str, str]]:
    """Rows of the table: the thing compared, ours and theirs, and how far they agree."""
    engine, model = SGLang(wheel_of(SGLANG, folder)), model_presets()["DeepSeek-R1"].model
    load, slots = loads_of(len(model.moe_layers), model.experts), np.full(RANKS, (model.experts + SPARE) // RANKS)
    rows = []
    demand = np.repeat(load[None, :, None] / RANKS, RANKS, axis=2)
    ranked = replicate_by_rank(RankedInstance(demand, slots, np.ones(RANKS), "nearest-static", RANKS // NODES))
    greedy = replicate(ReplicationInstance(load[None], int(slots.sum()), RANKS), algorithm="eplb")
    travel = Travel(replicas="nearest-static", ranks_per_node=RANKS // NODES)
    placement = Placement.from_slots(ranked.solution, slots, model.experts, model.moe_layers)
    parts = {"send_order": SendOrder(mode="concurrent"), "travel": travel, "provenance": Provenance(optimiser="test")}
    exported = write_placement("sglang", Plan(name="p", placement=placement, **parts), model).files["plan.json"]
    written = np.array(json.loads(exported)["physical_to_logical_map"])[list(model.moe_layers)]
    for name, map_of_slots in (("EPLB's plan", greedy.solution), ("the export of a plan for the rule", written)):
        placement = Placement.from_slots(map_of_slots, slots, model.experts, model.moe_layers)
        theirs = engine.copies(map_of_slots, model.experts)
        same = (theirs == copy_of_rank(placement, travel)).mean()
        served = even(theirs, load)
        balance = Balance.of(served, len(model.dense_layers))
        rows.append((f"copies of every rank, {name}", SGLANG, f"{same:.1%} alike; balancedness {balance.balancedness:.4f}"))
    theirs = engine.eplb(torch.tensor(load), int(slots.sum()), 1, 1, RANKS, False)[0].numpy()
    held = [np.sort(each.reshape(len(load), RANKS, -1)) for each in (theirs, greedy.solution)]
    rows.append(("EPLB, layers alike", SGLANG, f"{(held[0] == held[1]).all(axis=(1, 2)).sum()} of {len(load)}"))
    counts = np.concatenate([np.zeros((len(model.dense_layers), RANKS)), served])
    said = float(engine.utilisation(torch.tensor(counts)).mean())
    rows.append(("balancedness of its own log", SGLANG, f"{said:.6f}, ours {balance.of_engines['SGLang']:.6f}"))
    return rows


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as there:
        table = Table("Compared", "With", "Agreement")
        for row in compare_sglang(Path(there)):
            table.add_row(*row)
        Console().print(table)

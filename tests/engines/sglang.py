"""SGLang: its placements by loads, the copies that its ranks dispatch to, its balancedness."""

import ast
import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from engine.catalogue import model_presets
from engine.formats.placements import write_placement
from engine.placement.dispatch_rules import copy_of_rank
from engine.placement.replication import ReplicationInstance, replicate
from engine.placement.replication.by_rank import RankedInstance, replicate_by_rank
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.result import Provenance
from engine.timeline import Balance
from tests.engines.wheels import Row, functions_of, wheel_of

SGLANG = "sglang==0.5.23"
LOCATION = (
    *("_compute_logical_to_all_physical_map", "_pad_nested_array", "compute_logical_to_rank_dispatch_physical_map"),
    *("_logical_to_all_physical_raw", "_compute_gpu_id_of_physical_expert", "_compute_node_id_of_physical_expert"),
    *("_find_nearest_expert", "_fair_choices"),
)
RANKS, NODES, SPARE = 32, 4, 32


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


def rows(folder: Path) -> list[Row]:
    """Rows of the table. folder: where the wheel is put."""
    engine, model = SGLang(wheel_of(SGLANG, folder)), model_presets()["DeepSeek-R1"].model
    load, slots = loads_of(len(model.moe_layers), model.experts), np.full(RANKS, (model.experts + SPARE) // RANKS)
    found = []
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
        said = f"{same:.1%} alike; balancedness {balance.balancedness:.4f}"
        found.append(Row(f"copies of every rank, {name}", SGLANG, said, bool(same == 1)))
    theirs = engine.eplb(torch.tensor(load), int(slots.sum()), 1, 1, RANKS, False)[0].numpy()
    held = [np.sort(each.reshape(len(load), RANKS, -1)) for each in (theirs, greedy.solution)]
    alike = int((held[0] == held[1]).all(axis=(1, 2)).sum())
    found.append(Row("EPLB, layers alike (the others tie)", SGLANG, f"{alike} of {len(load)}", alike >= len(load) - 6))
    counts = np.concatenate([np.zeros((len(model.dense_layers), RANKS)), served])
    said = float(engine.utilisation(torch.tensor(counts)).mean())
    ours = balance.of_engines["SGLang"]
    found.append(Row("balancedness of its own log", SGLANG, f"{said:.6f}, ours {ours:.6f}", abs(said - ours) < 1e-6))
    return found

"""LMDeploy: the loads that it reads, its placement by them, and the copies that its tokens take."""

import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from engine.catalogue import model_presets
from engine.formats.writers import write_lmdeploy
from engine.placement.replication import ReplicationInstance, replicate
from engine.timeline import Balance
from engine.workload import ExpertLoad
from tests.engines.loads import placements_row, served
from tests.engines.wheels import Row, wheel_of

LMDEPLOY = "lmdeploy==0.18.0"
MODEL = model_presets()["DeepSeek-R1"].model
MOE = list(MODEL.moe_layers)
GROUPS = 4
"""Its default."""
CASES = ((32, 32, 8), (16, 32, 8), (64, 64, 64), (64, 64, 8))
"""Ranks, redundant experts and ranks a node."""


def module_of(wheel: zipfile.ZipFile, file: Path, redundant: int, ranks_per_node: int) -> ModuleType:
    """Its load balancer with the settings of environment variables stood in for. file: the loads"""
    settings = {"eplb_experts_statistic_file": str(file), "eplb_num_redundant_experts": redundant}
    stand_in, name = ModuleType("lmdeploy.pytorch.envs"), "lmdeploy.pytorch.nn.eplb"
    stand_in.__dict__.update(settings | {"eplb_num_groups": GROUPS, "eplb_ranks_per_node": ranks_per_node})
    module = ModuleType(name)
    sys.modules |= {stand_in.__name__: stand_in, name: module}  # its data classes look their module up
    exec(compile(wheel.read("lmdeploy/pytorch/nn/eplb.py"), "eplb", "exec"), module.__dict__)
    return module


def rows(folder: Path) -> list[Row]:
    """Rows of the table. folder: where the wheel is put."""
    wheel, file = wheel_of(LMDEPLOY, folder), folder / "lmdeploy.json"
    # Large counts, so that no two experts have the same one: which of them goes first is not the same everywhere.
    load = np.rint(np.random.default_rng(0).lognormal(0.0, 1.0, (len(MOE), MODEL.experts)) * 1e6)
    write_lmdeploy(ExpertLoad(name="drawn", load=load, model_layers=MODEL.moe_layers), file, MODEL)
    found = []
    for ranks, redundant, ranks_per_node in CASES:
        engine, seen, count = module_of(wheel, file, redundant, ranks_per_node), [], MODEL.experts + redundant
        balance = engine.rebalance_experts
        engine.rebalance_experts = lambda balance=balance, seen=seen, **named: seen.append(named) or balance(**named)
        metadata = engine.EPLBMetadata.init(ranks, MODEL.experts, MODEL.layers)
        if not found:
            read = seen[0]["weight"].numpy()
            same = np.array_equal(read[MOE], load.astype(np.float32)) and not read[list(MODEL.dense_layers)].any()
            found.append(Row("loads of convert --to lmdeploy, as it reads them", LMDEPLOY, "alike" if same else "not", same))
        theirs = metadata.physical_to_logical_map.numpy()[MOE]
        nodes = seen[0]["num_nodes"]
        ours = replicate(ReplicationInstance(load[None], count, ranks, nodes=nodes, groups=GROUPS), algorithm="eplb").solution
        balances = [Balance.of(served(slots, load, ranks), 0).balancedness for slots in (theirs, ours)]
        words = f"{ranks} ranks as {nodes} nodes, {GROUPS} groups"
        if GROUPS % nodes:  # its way otherwise
            in_order = bool((theirs[:, : MODEL.experts] == np.arange(MODEL.experts)).all())
            said = "balancedness {:.4f}, that of EPLB over all ranks {:.4f}".format(*balances)
            found.append(Row(f"no EPLB, experts in their order: {words}", LMDEPLOY, said, in_order))
            continue
        found.append(placements_row(f"EPLB, {words}", LMDEPLOY, ours, theirs, load, ranks))
    return [*found, copies(engine, metadata)]


def copies(engine: ModuleType, metadata: SimpleNamespace) -> Row:
    """The division of a layer's tokens over the copies of an expert, by its own function."""
    layer, draws = MOE[0], 100_000
    number = metadata.logical_to_all_physical_map_num_valid[layer]
    expert = int(number.argmax())
    engine.get_global_eplb_metadata = lambda: metadata
    info = engine.EPLBManager.get_dispatch_info(0, layer)
    torch.manual_seed(0)
    chosen = engine.EPLBManager.topk_ids_logical_to_physical(torch.full((draws, 1), expert), info)
    shares = np.unique(chosen.numpy(), return_counts=True)[1] / draws * int(number[expert])
    words = f"{number[expert]} copies of {shares.min():.3f} to {shares.max():.3f} of an equal share"
    return Row("copies share alike, drawn for every choice", LMDEPLOY, words, bool(np.abs(shares - 1).max() < 0.05))

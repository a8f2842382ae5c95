"""vLLM-Ascend: the maps that it loads and records, the copy that a rank has of an expert, its loads, its balancing policies."""

import functools
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

from engine.formats import read_workload
from engine.formats.placements import recognise, write_placement
from engine.formats.remedies import fold_slots
from engine.placement.dispatch_rules import copy_of_rank
from engine.placement.replication.by_rank import RankedInstance, replicate_by_rank
from engine.placement.replication.eplb import eplb
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.result import Provenance
from engine.timeline import Balance
from tests.engines.loads import LOAD, MODEL, RANKS, SLOTS, SPARE
from tests.engines.stand_ins import modules_of
from tests.engines.wheels import Row, wheel_of

ASCEND = "vllm-ascend==0.23.0"
"""27 MB."""
CORE = "vllm_ascend.eplb.core"
POLICIES = ("random", "default_eplb", "swift_balancer", "flashlb")
OWN = (
    *(f"{CORE}.eplb_utils", f"{CORE}.eplb_worker", "vllm_ascend.eplb.adaptor.vllm_adaptor", "vllm_ascend.eplb.eplb_updator"),
    *(f"{CORE}.policy.policy_abstract", *(f"{CORE}.policy.policy_{name}" for name in POLICIES)),
)
PARTS = {
    "send_order": SendOrder(mode="concurrent"),
    "travel": Travel(replicas="fixed"),
    "provenance": Provenance(optimiser="test"),
}
NEAR = (None, 0.002, 0.07, 0.002)
"""The most by which the balancedness of a policy differs from EPLB's: policy 2 moves one expert between two ranks at most."""
FEW = 6
"""Layers for its loops over every cell, which take seconds a layer."""


@functools.cache
def planned() -> np.ndarray:
    """int64[layer, slot]: our plan for its rule of copies."""
    demand = np.repeat(LOAD[None, :, None] / RANKS, RANKS, axis=2)
    instance = RankedInstance(demand, np.full(RANKS, SLOTS // RANKS), np.ones(RANKS), "fixed", RANKS)
    return replicate_by_rank(instance).solution


def placement_of(slots: np.ndarray) -> Placement:
    """The placement of int[layer, slot]."""
    return Placement.from_slots(slots, np.full(RANKS, SLOTS // RANKS), MODEL.experts, MODEL.moe_layers[: len(slots)])


def maps(utils: ModuleType, adaptor: ModuleType, folder: Path) -> list[Row]:
    """Our export in its loader, and in our reader its record and maps that are not in the order of their ids."""
    slots = planned()
    exported = write_placement("vllm-ascend", placement_of(slots), MODEL).files["plan.json"]
    content, rng, found = json.loads(exported), np.random.default_rng(2), []
    layers = len(content["layer_list"])
    held = np.array([placed(utils, exported, layer, folder) for layer in range(layers)])
    same = np.array_equal(held.reshape(layers, -1), slots)
    found.append(Row("map that it loads from our export", ASCEND, "the same slots" if same else "others", same))
    for layer in content["layer_list"]:
        rng.shuffle(layer["device_list"])
    rng.shuffle(content["layer_list"])
    mixed = json.dumps(content).encode()
    ours = recognise(Path("mixed.json"), mixed).deployed(MODEL, RANKS).placement
    theirs = [placed(utils, mixed, layer, folder).tolist() for layer in range(layers)]
    same = [[list(each) for each in row] for row in ours.experts_of_gpu] == theirs
    found.append(Row("map with its entries in another order", ASCEND, "by place, like ours" if same else "otherwise", same))
    record = folder / "record.json"
    adaptor.VllmEplbAdaptor._export_tensor_to_file(SimpleNamespace(rank_id=0), expert_maps(slots), str(record))
    same = recognise(record, record.read_bytes()).deployed(MODEL, RANKS).placement == placement_of(slots)
    found.append(Row("map that it records, read", ASCEND, "the same slots" if same else "others", same))
    return found


def placed(utils: ModuleType, content: bytes, layer: int, folder: Path) -> np.ndarray:
    """int[rank, slot]: the experts that its loader finds in a map."""
    (folder / "map.json").write_bytes(content)
    return utils.expert_file_to_tensor(folder / "map.json", layer)[0].numpy()


def expert_maps(slots: np.ndarray) -> torch.Tensor:
    """int[layer, rank, expert]: the slot of an expert on a rank, -1 where it has none, as it keeps its maps."""
    table = torch.full((len(slots), RANKS, MODEL.experts), -1)
    by_rank = torch.tensor(slots).reshape(len(slots), RANKS, -1)
    return table.scatter(2, by_rank, torch.arange(by_rank.shape[2]).expand_as(by_rank))


def copies(utils: ModuleType, folder: Path) -> list[Row]:
    """The copy of an expert that each rank has, and that of our rule `fixed`, which is for tensor parallelism of one rank."""
    placement, found = placement_of(planned()), []
    plan = Plan(name="p", placement=placement, **PARTS)
    export = write_placement("vllm-ascend", plan, MODEL)
    (folder / "plan.json").write_bytes(export.files["plan.json"])
    settings = SimpleNamespace(expert_map_path=folder / "plan.json", dynamic_eplb=False, num_redundant_experts=0)
    ours = copy_of_rank(placement, Travel(replicas="fixed"))[:FEW]
    for tensor_ranks in (1, 8):
        table = np.empty((FEW, RANKS, MODEL.experts), int)
        for layer, rank in np.ndindex(table.shape[:2]):
            sizes = SimpleNamespace(num_experts=MODEL.experts, ep_size=RANKS, ep_rank=rank)
            slots = utils.init_eplb_config(settings, layer, sizes, tp_size=tensor_ranks)[2]
            table[layer, rank] = slots.numpy() // (SLOTS // RANKS)
        same = float((ours == table).mean())
        said = any("--tensor-parallel-size 1" in note for note in export.notes)
        holds = same == 1 if tensor_ranks == 1 else said and same < 1
        text = ("all" if same == 1 else f"{same:.1%}") + (" alike, as the export says" if said and same < 1 else " alike")
        found.append(Row(f"copies of every rank, tensor parallel {tensor_ranks}", ASCEND, text, holds))
    return found


def loads(updator: ModuleType, adaptor: ModuleType, folder: Path) -> list[Row]:
    """The loads that it gathers, as our reader takes them, folded by the map that it records."""
    slots, found = planned(), []
    record, rng = folder / "record.json", np.random.default_rng(3)
    adaptor.VllmEplbAdaptor._export_tensor_to_file(SimpleNamespace(rank_id=0), expert_maps(slots), str(record))
    placement = recognise(record, record.read_bytes()).deployed(MODEL, None).placement
    for stages in (False, True):
        counts = rng.poisson(50, (*((5,) if stages else ()), len(slots), RANKS, SLOTS // RANKS))
        by_rank = np.moveaxis(counts, -2, 0)  # [rank, (step,) layer, slot]
        layers = [SimpleNamespace(moe_load=torch.tensor(by_rank[0][..., layer, :])) for layer in range(len(slots))]
        every = torch.tensor(np.moveaxis(by_rank, -2, 1)).transpose(0, 1)  # [layer, rank, (step,) slot]
        engine = object.__new__(updator.EplbUpdator)
        engine.adaptor, engine.multi_stage, engine.shared_dict = object.__new__(adaptor.VllmEplbAdaptor), stages, {}
        engine.adaptor.moe_layers = layers

        def gathered(own: torch.Tensor, dim: int, every: torch.Tensor = every) -> torch.Tensor:
            assert dim == 1 and torch.equal(own[:, 0], every[:, 0])
            return every

        engine.comm_group = SimpleNamespace(all_gather=gathered)
        load = engine.compute_and_set_moe_load()
        torch.save(load, folder / "loads.pt")
        read = fold_slots(read_workload(folder / "loads.pt", model=MODEL), placement)
        flat = counts.reshape(-1, len(slots), SLOTS)
        wanted = np.zeros((len(flat), len(slots), MODEL.experts))
        np.add.at(wanted, (slice(None), np.arange(len(slots))[:, None], slots), flat)
        holds = np.array_equal(read.load, wanted.sum(axis=0)) and (not stages or np.array_equal(read.by_step, wanted))
        found.append(Row(f"loads that it gathers {list(load.shape)}, read", ASCEND, "its counts" if holds else "others", holds))
    return found


def policies(modules: list[ModuleType], worker: ModuleType) -> list[Row]:
    """Its policies on loads of a placement: the imbalance that its log has, and ours of the same placement."""
    random, default, swift, flash = modules
    start = np.tile(np.r_[: MODEL.experts, :SPARE].reshape(-1, RANKS).T, (FEW, 1, 1))  # slot j of rank r: expert 32 j + r
    share = LOAD[:FEW] / np.array([np.bincount(row.ravel(), minlength=MODEL.experts) for row in start])
    load = torch.tensor(np.rint(share[np.arange(FEW)[:, None, None], start]).astype(np.int64))
    now, table, found = balance(start), torch.tensor(start), []
    ours = balance(eplb(LOAD[:FEW], SLOTS, RANKS))
    makers = (random.RandomLoadBalance, default.DefaultEplb, swift.SwiftBalanceEplb, flash.FlashLB)
    for number, make in enumerate(makers):
        given = load[None] if number == 3 else load
        placement = np.array(make().rebalance_experts(table.clone(), given)[2])
        hot = np.zeros((FEW, MODEL.experts))
        np.add.at(hot, (np.arange(FEW)[:, None, None], start), load.numpy())
        theirs = worker.EplbWorker._compute_imbalance(placement, hot, return_list=True)[2]
        said = Balance.of(served_by(placement, hot)).overload
        apart = float(np.abs(np.array(said) / theirs - 1).max())
        after = balance(placement)
        text = f"balancedness {now:.3f} to {after:.3f} (EPLB {ours:.3f}); imbalance as its log has it within {apart:.0e}"
        better = abs(after - ours) < NEAR[number] if number else abs(after - now) < 0.01  # it looks at no loads
        found.append(Row(f"policy {number}, {make.__name__}", ASCEND, text, apart < 1e-6 and better))
    return found


def served_by(placement: np.ndarray, load: np.ndarray) -> np.ndarray:
    """float64[layer, rank] of loads, float64[layer, expert], by int[layer, rank, slot]."""
    copies = np.array([np.bincount(row.ravel(), minlength=MODEL.experts) for row in placement])
    return (load / copies)[np.arange(len(load))[:, None, None], placement].sum(axis=2)


def balance(placement: np.ndarray) -> float:
    """The mean balancedness of a placement of the first layers."""
    return Balance.of(served_by(placement.reshape(len(placement), RANKS, -1), LOAD[: len(placement)])).balancedness


def rows(folder: Path) -> list[Row]:
    """Rows of the table. folder: where the wheel is put."""
    group = SimpleNamespace(world_size=RANKS)
    given = {"vllm_ascend__distributed__parallel_state": {"get_dynamic_eplb_group": lambda: group}}
    npu = SimpleNamespace(device_count=lambda: 8)
    with (
        patch.object(torch, "npu", npu, create=True),
        patch.object(torch.Tensor, "npu", lambda tensor: tensor, create=True),
        modules_of(wheel_of(ASCEND, folder), folder, OWN, **given) as (utils, worker, adaptor, updator, _, *four),
    ):
        found = [*maps(utils, adaptor, folder), *copies(utils, folder), *loads(updator, adaptor, folder)]
        return [*found, *policies(four, worker)]

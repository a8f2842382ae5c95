"""SGLang: its placements by loads, the maps that it loads, the copies that its ranks dispatch to, its balancedness."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

from engine.formats.placements import write_placement
from engine.placement.dispatch_rules import copy_of_rank, shares_of_ranks
from engine.placement.replication.by_rank import RankedInstance, replicate_by_rank
from engine.placement.replication.eplb import eplb
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.result import Provenance
from engine.timeline import Balance
from tests.engines.loads import GROUPS, LOAD, MODEL, NODES, RANKS, SLOTS, SPARE, placements_row
from tests.engines.stand_ins import modules_of
from tests.engines.wheels import Row, wheel_of

SGLANG = "sglang==0.5.23"
EPLB = "sglang.srt.eplb"
OWN = (
    *(f"{EPLB}.expert_location", f"{EPLB}.expert_location_dispatch", f"{EPLB}.lplb_solver", f"{EPLB}.expert_distribution"),
    *(f"{EPLB}.eplb_algorithms.deepseek", "sglang.test.kernels.lplb"),
)
HELD = SLOTS // RANKS
SINGLE = 0.02
"""Its linear programmes are solved in single precision, in five steps that square their numbers."""
DRAWN = 500
"""Tokens of every expert on a rank, whose copies are drawn."""
MOE = list(MODEL.moe_layers)
FEW = MOE[:16]
"""Layers in which copies are drawn, and linear programmes solved."""


class Server:
    """A server's settings, and its placements as its ranks load them."""

    def __init__(self) -> None:
        self.moe = SimpleNamespace(moe_a2a_backend="deepep", ep_num_redundant_experts=SPARE, ep_join_mode="none")
        sizes = SimpleNamespace(num_layers=MODEL.layers, num_logical_experts=MODEL.experts, num_groups=GROUPS)
        model = SimpleNamespace(get_model_config_for_expert_location=lambda config: sizes)
        parallel = SimpleNamespace(ep_size=RANKS, nnodes=NODES, elastic_ep_initial_size=None)
        reduce = {"max": lambda counts: counts.amax(-1), "mean": lambda counts: counts.mean(-1)}
        self.given = {
            "sglang__srt__runtime_context": {
                "get_exec": lambda: SimpleNamespace(moe=self.moe),
                "get_parallel": lambda: parallel,
                "get_device": lambda: SimpleNamespace(device="cpu"),
            },
            "sglang__srt__elastic_ep__elastic_ep": {"elastic_expanded_world_enabled": lambda: False},
            "sglang__srt__model_loader": {"get_model_architecture": lambda config: (model, None)},
            "sglang__kernels__ops__lplb": {
                "cuda_solver": SimpleNamespace(prep_lp_inputs=prepared, extract_log2phy_prob=extracted)
            },
            "einops": {"reduce": lambda counts, _pattern, kind: reduce[kind](counts)},
        }

    def loaded(self, location: ModuleType, algorithm: str, path: Path, ranks: int = RANKS) -> list:
        """The expert locations of the first ranks, from a file and under a dispatch algorithm."""
        self.moe.ep_dispatch_algorithm, self.moe.init_expert_location = algorithm, str(path)
        config = SimpleNamespace(hf_config=None)
        return [location.compute_initial_expert_location_metadata(config, rank) for rank in range(ranks)]


def prepared(
    equations: torch.Tensor, wanted: torch.Tensor, single: torch.Tensor, counts: torch.Tensor, *rest: torch.Tensor
) -> None:
    """The inputs of its linear programme, as the header of its kernel writes them in Python."""
    of_single, of_replicated, on_gpu, sums = rest
    part = counts / counts.sum().clamp(min=1)
    single[:] = part[of_single]
    wanted[:] = torch.cat([part[of_replicated], -(on_gpu @ single)])
    equations[:, -1] = wanted - sums


def extracted(share: torch.Tensor, point: torch.Tensor, single: torch.Tensor, *rest: torch.Tensor) -> None:
    """The shares of copies, as the header of its kernel writes them in Python."""
    slot_of_single, slot_of_copy, slots = rest
    of_slot = torch.zeros(len(slot_of_single) + len(slot_of_copy) + 1)
    of_slot[slot_of_copy] = point[: len(slot_of_copy)].clamp(min=0)
    of_slot[slot_of_single] = single
    share[:] = of_slot[slots % len(of_slot)]


def placement_of(slots: np.ndarray) -> Placement:
    """The placement of int[layer, slot]."""
    return Placement.from_slots(slots, np.full(RANKS, HELD), MODEL.experts, MODEL.moe_layers)


def travel(rule: str) -> Travel:
    """Our rule of copies."""
    return Travel(replicas=rule, ranks_per_node=RANKS // NODES)


def balance(served: np.ndarray) -> Balance:
    """The balance of loads, float64[layer, rank]."""
    return Balance.of(served, len(MODEL.dense_layers))


def served_by(share: np.ndarray) -> np.ndarray:
    """float64[layer, rank] loads where every rank sends as much. share: float64[layer, source rank, expert, rank]"""
    return np.einsum("le,lreg->lg", LOAD[: len(share)] / RANKS, share)


def static(server: Server, location: ModuleType, name: str, file: Path, placement: Placement) -> Row:
    """The table of the algorithm `static`."""
    ranks = server.loaded(location, "static", file)
    theirs = np.stack([each.logical_to_rank_dispatch_physical_map[MOE].numpy() for each in ranks], axis=1) // HELD
    same = (theirs == copy_of_rank(placement, travel("nearest-static"))).mean()
    even = balance(served_by(theirs[..., None] == np.arange(RANKS)))
    said = f"{'all' if same == 1 else f'{same:.4%}'} alike; balancedness {even.balancedness:.4f}"
    return Row(f"copies of every rank, static, {name}", SGLANG, said, bool(same == 1))


def dynamic(server: Server, modules: list[ModuleType], file: Path, placement: Placement) -> Row:
    """The copies that the algorithm `dynamic` draws."""
    location, dispatch, *_ = modules
    torch.manual_seed(0)
    tokens = torch.arange(MODEL.experts).repeat_interleave(DRAWN)[:, None]
    theirs = np.zeros((len(FEW), RANKS, MODEL.experts, RANKS))
    for rank, each in enumerate(server.loaded(location, "dynamic", file)):
        dispatch.get_global_expert_location_metadata = lambda each=each: each
        for row, layer in enumerate(FEW):
            slots = dispatch.topk_ids_logical_to_physical(tokens, dispatch.ExpertLocationDispatchInfo.init_new(layer))
            cell = tokens[:, 0] * RANKS + slots[:, 0] // HELD
            theirs[row, rank] = torch.bincount(cell, minlength=MODEL.experts * RANKS).reshape(-1, RANKS) / DRAWN
    ours = np.stack([shares_of_ranks(placement, travel("nearest-dynamic"), row, LOAD[row]) for row in range(len(FEW))])
    apart, same = float(np.abs(ours - theirs).max()), np.array_equal(ours > 0, theirs > 0)
    figures = [balance(served_by(share)).balancedness for share in (theirs, ours)]
    said = f"{'the same copies' if same else 'other copies'}; balancedness {figures[0]:.4f}, ours {figures[1]:.4f}"
    return Row("copies of every rank, dynamic, EPLB's plan", SGLANG, said, same and apart < 6 * np.sqrt(0.25 / DRAWN))


def programme(server: Server, modules: list[ModuleType], file: Path, placement: Placement) -> Row:
    """The shares of the algorithm `lp`: its own equations, its solver as its reference in PyTorch has it."""
    location, _, solver, _, _, reference = modules
    theirs, counted = np.zeros((len(FEW), RANKS, MODEL.experts, RANKS)), np.zeros((len(FEW), RANKS))
    cuda = server.given["sglang__kernels__ops__lplb"]["cuda_solver"]
    answers: dict[int, torch.Tensor] = {}
    for rank, each in enumerate(server.loaded(location, "lp", file)):
        for row, layer in enumerate(FEW):

            def solve(
                equations: torch.Tensor, wanted: torch.Tensor, cost: torch.Tensor, result: torch.Tensor, row: int = row
            ) -> None:
                if row not in answers:  # the same for every rank
                    answers[row] = reference.solve_ipm_torch_reference(equations, wanted, cost)
                result.copy_(answers[row])

            cuda.solve_ipm = solve
            slots = each.logical_to_all_physical_map[layer]
            valid = each.logical_to_all_physical_map_num_valid[layer]
            made = solver.LPLBSolver(each.physical_to_logical_map[layer], slots, RANKS, None, valid)
            share = made._solve(torch.tensor(LOAD[row], dtype=torch.float32)).double()
            share = (share / share.sum(dim=1, keepdim=True)).numpy()
            expert, copy = np.nonzero(slots.numpy() >= 0)
            np.add.at(theirs[row, rank], (expert, slots.numpy()[expert, copy] // HELD), share[expert, copy])
            if rank == 0:
                counted[row] = (made.B1 @ made._t1).numpy()
                np.add.at(counted[row], made.phy_replicated // HELD, made._x[: made.num_red_phy])
    ours = np.stack([shares_of_ranks(placement, travel("lp"), row, LOAD[row]) for row in range(len(FEW))])
    evens = [balance(each) for each in (served_by(theirs), served_by(ours), counted)]
    said = "balancedness {:.4f}, ours {:.4f}; {:.4f} if all divided so".format(*(each.balancedness for each in evens))
    apart = np.abs(np.array(evens[0].overload) / evens[1].overload - 1).max()
    said += f"; busiest rank of a layer within {apart:.1g}"
    return Row("copies of every rank, lp, EPLB's plan", SGLANG, said, bool(apart < SINGLE))


def rows(folder: Path) -> list[Row]:
    """Rows of the table. folder: where the wheel is put."""
    slots, demand = np.full(RANKS, HELD), np.repeat(LOAD[None, :, None] / RANKS, RANKS, axis=2)
    instance = RankedInstance(demand, slots, np.ones(RANKS), "nearest-static", RANKS // NODES, MODEL.moe_layers)
    ranked = replicate_by_rank(instance).solution
    planned, greedy = placement_of(ranked), eplb(LOAD, SLOTS, RANKS)
    parts = {"send_order": SendOrder(mode="concurrent"), "travel": travel("nearest-static")}
    plan = Plan(name="p", placement=planned, **parts, provenance=Provenance(optimiser="test"))
    every = np.tile(np.arange(SLOTS) % MODEL.experts, (MODEL.layers, 1))
    every[MOE] = greedy
    (folder / "eplb.json").write_text(json.dumps({"physical_to_logical_map": every.tolist()}))
    server, found = Server(), []
    with modules_of(wheel_of(SGLANG, folder), folder, OWN, **server.given) as modules:
        location, _, _, distribution, deepseek, _ = modules
        for ending in ("json", "pt"):
            file = folder / f"plan.{ending}"
            file.write_bytes(write_placement("sglang", plan, MODEL, file.name).files[file.name])
            theirs = server.loaded(location, "static", file, 1)[0].physical_to_logical_map[MOE].numpy()
            same = np.array_equal(theirs, ranked)
            found.append(Row(f"map that it loads from our .{ending}", SGLANG, "the same slots" if same else "others", same))
        found.append(static(server, location, "EPLB's plan", folder / "eplb.json", placement_of(greedy)))
        found.append(static(server, location, "the export of a plan for the rule", folder / "plan.json", planned))
        found.append(dynamic(server, modules, folder / "eplb.json", placement_of(greedy)))
        found.append(programme(server, modules, folder / "eplb.json", placement_of(greedy)))
        for name, groups in (("EPLB over all ranks", 1), ("EPLB node by node", GROUPS)):
            theirs = deepseek.rebalance_experts(torch.tensor(LOAD), SLOTS, groups, NODES, RANKS, groups > 1)[0].numpy()
            found.append(placements_row(name, SGLANG, eplb(LOAD, SLOTS, RANKS, NODES, groups), theirs))
        counts = served_by(copy_of_rank(planned, travel("nearest-static"))[..., None] == np.arange(RANKS))
        dense = np.zeros((len(MODEL.dense_layers), RANKS))
        said = float(distribution.compute_utilization_rate(torch.tensor(np.concatenate([dense, counts]))).mean())
        ours = balance(counts).of_engines["SGLang"]
        found.append(Row("balancedness of its own log", SGLANG, f"{said:.6f}, ours {ours:.6f}", abs(said - ours) < 1e-6))
    return found

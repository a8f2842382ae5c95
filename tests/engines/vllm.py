"""vLLM: its placements by loads, the copies that tokens take, its window of loads and balancedness, its answers with routing,
the maps in its log."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import numpy as np
import torch
from pydantic import ValidationError

from engine.formats import read_workload
from engine.formats.placements import recognise, write_placement
from engine.formats.remedies import fold_slots
from engine.placement.replication.eplb import eplb
from engine.plan import Placement
from engine.timeline import Balance
from tests.engines.loads import GROUPS, LOAD, MODEL, NODES, RANKS, SLOTS, SPARE, placements_row
from tests.engines.stand_ins import modules_of
from tests.engines.wheels import Row, wheel_of

VLLM = "vllm==0.33.0"
"""336 MB, of which some kilobytes are read."""
MOE, EPLB = "vllm.model_executor.layers.fused_moe", "vllm.distributed.eplb"
OWN = (
    *("vllm.config.fault_tolerance", "vllm.config.utils", "vllm.config.parallel", "vllm.utils.serial_utils"),
    *(f"{EPLB}.policy.abstract", f"{EPLB}.policy.default", f"{EPLB}.eplb_state"),
    *(f"{MOE}.routed_experts_capturer", f"{MOE}.expert_map_manager", f"{MOE}.router.base_router"),
)
PROMPT, GENERATED = 40, 9


class Log(MagicMock):
    """A logger that keeps its lines."""

    lines: ClassVar[list[str]] = []

    def info(self, text: str, *values: object) -> None:
        self.lines.append(text % values)

    info_once = info


class Pointer:
    """A tensor, from a place in it on, as a kernel of Triton has it."""

    def __init__(self, values: torch.Tensor, at: int | torch.Tensor = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, by: torch.Tensor) -> "Pointer":
        return Pointer(self.values, self.at + by)

    def load(self, mask: bool | torch.Tensor = True, other: int = 0) -> torch.Tensor:
        mask = torch.as_tensor(mask)
        return torch.where(mask, self.values.flatten()[torch.where(mask, self.at, 0)], other)

    def store(self, values: torch.Tensor, mask: torch.Tensor) -> None:
        self.values[self.at[mask]] = values[mask]

    def atomic_add(self, value: int, mask: torch.Tensor) -> None:
        self.values.index_add_(0, self.at[mask], torch.full_like(self.at[mask], value, dtype=self.values.dtype))


LANGUAGE = SimpleNamespace(constexpr=None, int64=torch.int64, arange=torch.arange, where=torch.where, maximum=torch.clamp)
vars(LANGUAGE).update(load=Pointer.load, store=Pointer.store, atomic_add=Pointer.atomic_add)
"""The operations of Triton that its kernel has."""


class Kernel:
    """A kernel of Triton, one program after another."""

    def __init__(self, program: Callable) -> None:
        self.program = program

    def __getitem__(self, grid: Callable) -> Callable:
        def run(*given: object, **settings: object) -> None:
            pointers = [Pointer(each) if isinstance(each, torch.Tensor) else each for each in given]
            for number in range(grid(settings)[0]):
                LANGUAGE.program_id = lambda axis, number=number: number
                self.program(*pointers, **settings)

        return run


def copies(router: ModuleType) -> Row:
    """The copies that tokens of a rank take, which depend on their place in its batch, and equal shares."""
    slots = eplb(LOAD[:1], SLOTS, RANKS, NODES, 1)[0]
    placement = Placement.from_slots(slots[None], np.full(RANKS, SLOTS // RANKS), MODEL.experts, MODEL.moe_layers[:1])
    number = np.bincount(slots, minlength=MODEL.experts)
    table = np.full((MODEL.experts, number.max()), -1)
    for expert in range(MODEL.experts):
        table[expert, : number[expert]] = np.flatnonzero(slots == expert)
    state, most = {"logical_to_physical_map": torch.tensor(table), "logical_replica_count": torch.tensor(number)}, []
    for tokens in (1, 8, 64, 4096):
        counts = torch.zeros(SLOTS, dtype=torch.int64)
        every = torch.arange(MODEL.experts).expand(tokens, -1)
        router.eplb_map_to_physical_and_record(every, expert_load_view=counts, record_enabled=torch.tensor(True), **state)
        served = np.zeros((MODEL.experts, RANKS))
        np.add.at(served, (slots, np.arange(SLOTS) // (SLOTS // RANKS)), counts.numpy() / tokens)
        most.append((served / np.where(placement.share[0] > 0, placement.share[0], 1)).max())
    said = "busiest copy {:.2f}, {:.2f}, {:.2f} and {:.2f} of an equal share".format(*most)
    holds = most[0] == number.max() and most[-1] < 1.01
    return Row("copies of 1, 8, 64, 4096 tokens in a rank's batch", VLLM, said, holds)


def placements(policy: ModuleType) -> list[Row]:
    """Its EPLB and ours, over all ranks and node by node."""
    found = []
    for name, groups in (("EPLB over all ranks", 1), ("EPLB node by node", GROUPS)):
        theirs = policy.DefaultEplbPolicy.rebalance_experts(torch.tensor(LOAD), SLOTS, groups, NODES, RANKS).numpy()
        found.append(placements_row(name, VLLM, eplb(LOAD, SLOTS, RANKS, NODES, groups), theirs))
    return found


def window(eplb_state: ModuleType, config: ModuleType, folder: Path) -> list[Row]:
    """Steps of its recorder: the window of loads as our reader takes it, and the balancedness of its log."""
    group = SimpleNamespace(size=lambda: RANKS, rank=lambda: 0)
    eplb_state.get_ep_group = lambda: SimpleNamespace(device_group=group)
    eplb_state.all_reduce = lambda tensor, group: None
    found = []
    for spare in (0, SPARE):
        experts, layers = MODEL.experts, len(MODEL.moe_layers)
        sizes = {"num_logical_experts": experts, "num_routed_experts": experts, "num_redundant_experts": spare}
        sizes |= {"num_physical_experts": experts + spare, "num_moe_layers": layers, "num_expert_groups": GROUPS}
        settings = config.EPLBConfig(window_size=6, step_interval=100, log_balancedness=True, communicator="torch_gloo")
        state = eplb_state.EplbState(
            MagicMock(eplb_config=settings, enable_elastic_ep=False, num_ubatches=0), torch.device("cpu")
        )
        state.add_model(MagicMock(**sizes, moe_layers=[], expert_weights=[[]]), MagicMock(compute_hash=lambda: "m"), "m")
        (model,) = state.model_states.values()
        counts = np.random.default_rng(spare).poisson(9, (4, layers, experts + spare))
        state.expert_rearrangement_step = 94  # it records in the window before it rearranges
        for step in counts:
            model.expert_load_pass += torch.tensor(step)
            state.step(log_stats=True)
        told = float(Log.lines[-1].partition("balancedness=")[2].split(",")[0])
        ours = Balance.of(counts[-1].reshape(layers, RANKS, -1).sum(axis=2).astype(float)).of_engines["vLLM"]
        said = f"{told}, ours {ours:.4f}"
        found.append(Row(f"balancedness of its log, {spare} spare slots", VLLM, said, abs(told - ours) <= 6e-5))
        torch.save(model.expert_load_window, folder / "window.pt")
        slots = model.physical_to_logical_map.numpy()
        placement = Placement.from_slots(slots, np.array([slots.shape[1]]), experts, MODEL.moe_layers)
        read = read_workload(folder / "window.pt", model=MODEL)
        read = fold_slots(read, placement) if spare else read
        wanted = np.zeros((len(counts), layers, experts))
        np.add.at(wanted, (slice(None), np.arange(layers)[:, None], slots), counts)
        shape, holds = list(model.expert_load_window.shape), np.array_equal(read.by_step, wanted)
        found.append(Row(f"window of loads {shape}, saved and read", VLLM, "its counts" if holds else "others", holds))
    return found


def answers(capturer: ModuleType, serial: ModuleType, folder: Path) -> list[Row]:
    """An answer with the routing that its capturer took and its server encodes, as our reader takes it."""
    found, rng = [], np.random.default_rng(1)
    for experts in (MODEL.experts, MODEL.experts + 128):
        model = MODEL.model_copy(update={"experts": experts})
        sizes = {"get_total_num_hidden_layers": model.layers, "get_num_experts": experts}
        sizes["get_num_experts_per_tok"] = model.experts_per_token
        config = MagicMock(**{f"model_config.{name}.return_value": size for name, size in sizes.items()})
        config.parallel_config = SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1)
        capturer.current_platform = SimpleNamespace(device_type="cpu")
        capturer.get_forward_context = lambda: SimpleNamespace(dp_metadata=None, batch_descriptor=None)
        capturer.dbo_current_ubatch_token_offset = lambda: 0
        taken = capturer.RoutedExpertsCapturer(64, config)
        tokens = PROMPT + GENERATED - 1
        chosen = np.argsort(rng.random((tokens, len(model.moe_layers), experts)))[:, :, : model.experts_per_token]
        for row, layer in enumerate(model.moe_layers):
            taken.capture(layer, torch.tensor(chosen[:, row]))
        rows = taken.snapshot_routing_data(tokens).numpy()
        choice = {"index": 0, "routed_experts": serial.numpy2base64(rows)}
        usage = {"prompt_tokens": PROMPT, "completion_tokens": GENERATED}
        (folder / "answer.json").write_text(json.dumps({"object": "chat.completion", "choices": [choice], "usage": usage}))
        read = read_workload(folder / "answer.json", model=model)
        holds = np.array_equal(read.experts, chosen) and int((read.phase == 0).sum()) == PROMPT
        found.append(Row(f"answer with routing, {rows.dtype} {list(rows.shape)}", VLLM, f"{len(read.experts)} tokens", holds))
    return found


def maps(manager: ModuleType, config: ModuleType, eplb_state: ModuleType) -> list[Row]:
    """Its placement at start: the slots in the lines that its ranks log, and its refusal of a file."""
    parallel = {"use_ep": True, "ep_size": RANKS, "use_all2all_kernels": True, "needs_round_robin_routing_tables": True}
    found = []
    for strategy, spare in (("linear", SPARE), ("round_robin", 0)):
        Log.lines.clear()
        for rank in range(RANKS):
            ranks = SimpleNamespace(**parallel, ep_rank=rank)
            manager.ExpertMapManager(64, 8, MODEL.experts + spare, spare, GROUPS, ranks, strategy, bool(spare))
        placed = recognise(Path("server.log"), "\n".join(Log.lines).encode()).deployed(MODEL, RANKS).placement
        slots = eplb_state.EplbState.build_initial_global_physical_to_logical_map(MODEL.experts, spare)
        by_rank = np.array(slots).reshape(RANKS, -1) if strategy == "linear" else np.array(slots).reshape(-1, RANKS).T
        holds = np.array_equal(np.array(placed.experts_of_gpu[0]), by_rank)
        said = "the same slots" if holds else "others"
        found.append(Row(f"map in its log, {strategy}, {spare} spare slots", VLLM, said, holds))
    slots = np.tile(np.r_[: MODEL.experts, :SPARE], (len(MODEL.moe_layers), 1))
    placement = Placement.from_slots(slots, np.full(RANKS, SLOTS // RANKS), MODEL.experts, MODEL.moe_layers)
    export = write_placement("vllm", placement, MODEL, "plan.jsonl")
    settings = json.loads(export.lines[-1].partition("'")[2].rstrip("'"))
    try:
        config.EPLBConfig(**settings)
        refused = []
    except ValidationError as error:
        refused = [each["loc"][0] for each in error.errors()]
    said = f"refuses {', '.join(refused)}" if refused else "takes them"
    holds = "initial_mapping_path" in refused and any("0.33.0 refuses" in note for note in export.notes)
    return [*found, Row("settings of the export for pull request #41141", VLLM, said, holds)]


def rows(folder: Path) -> list[Row]:
    """Rows of the table. folder: where the wheel is put."""
    given = {"vllm__logger": {"init_logger": lambda name: Log()}, "pybase64": {"b64encode": base64.b64encode}}
    triton = SimpleNamespace(jit=Kernel, cdiv=lambda size, block: -(-size // block))
    given |= {"vllm__triton_utils": {"triton": triton, "tl": LANGUAGE}}
    given |= {f"{MOE}.router.fused_moe_router": {"FusedMoERouter": object}}
    with modules_of(wheel_of(VLLM, folder), folder, OWN, **given) as modules:
        _, _, config, serial, _, policy, state, capturer, manager, router = modules
        found = [*placements(policy), copies(router), *window(state, config, folder)]
        return [*found, *answers(capturer, serial, folder), *maps(manager, config, state)]

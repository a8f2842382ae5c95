"""SGLang's recorder of expert distributions, in every mode: the files that its ranks write, as our readers take them."""

import enum
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, Optional, TypeVar
from unittest.mock import patch

import numpy as np
import torch

from engine.formats import read_workload
from engine.workload import DECODE, PREFILL
from tests.engines.loads import LOAD, MODEL
from tests.engines.sglang import SGLANG
from tests.engines.stand_ins import class_of, modules_of
from tests.engines.wheels import Row, wheel_of

RECORDER = "sglang.srt.eplb.expert_distribution"
RANKS, SLOTS, PASSES = 4, 288, 5
PROMPTS = (7, 4)
"""Tokens of the prompts of each rank; one of every sequence follows in each later pass."""


class Server:
    """A server's settings and its ranks' recorders.

    slots: int[decoder layer, slot]; the expert in every slot
    """

    def __init__(self, wheel: zipfile.ZipFile, folder: Path) -> None:
        def text(path: str) -> str:
            return wheel.read(f"sglang/srt/{path}").decode()

        self.folder, self.rank, self.sum = folder, 0, 0
        self.moe = SimpleNamespace(moe_a2a_backend="deepep", deepep_mode="normal", elastic_ep_backend=None)
        space = {"Generic": Generic, "T": TypeVar("T"), "contextmanager": contextmanager, "Optional": Optional}
        self.modes = class_of(text("model_executor/forward_batch_info.py"), "ForwardMode", IntEnum=enum.IntEnum, auto=enum.auto)
        self.given = {
            "sglang__srt__utils": {
                "Withable": class_of(text("utils/common.py"), "Withable", **space, __name__="engine"),
                "get_device": lambda: "cpu",
            },
            "sglang__srt__runtime_context": {
                "get_exec": lambda: SimpleNamespace(moe=self.moe, overlap=SimpleNamespace(enable_two_batch_overlap=False)),
                "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=16),
                "get_device": lambda: SimpleNamespace(device="cpu"),
                "get_platform": lambda: SimpleNamespace(is_hip=False),
                "reports_expert_balancedness": lambda: False,
            },
            "sglang__srt__environ": {
                "envs": SimpleNamespace(SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR=SimpleNamespace(get=lambda: str(folder)))
            },
        }
        rng = np.random.default_rng(4)
        spare = SLOTS - MODEL.experts
        drawn = [rng.permutation(np.r_[: MODEL.experts, rng.choice(MODEL.experts, spare, False)]) for _ in range(MODEL.layers)]
        self.slots = np.array(drawn)
        self.map = SimpleNamespace(num_layers=MODEL.layers, num_physical_experts=SLOTS, num_logical_experts=MODEL.experts)
        self.map.physical_to_logical_map, self.map.ep_size = torch.tensor(self.slots), RANKS
        self.map.num_local_physical_experts = SLOTS // RANKS

    def recorders(self, recorder: ModuleType, buffer: int = 8, **settings: str) -> list[Any]:
        """The recorders of all ranks under these settings, started."""
        vars(self.moe).update(settings, expert_distribution_recorder_buffer_size=buffer)
        made = [recorder.ExpertDistributionRecorder.init_new(self.map, rank) for rank in range(RANKS)]
        for each in made:
            each._accumulator._first_dump = False  # else it empties the cache of a GPU
            each.start_record()
        return made

    def tokens(self, number: int) -> tuple[np.ndarray, Any]:
        """(int[token, MoE layer, k] chosen slots, the batch) of a pass: prompts first, then a token of each sequence."""
        lengths = PROMPTS if number == 0 else (1,) * len(PROMPTS)
        before = [0 if number == 0 else prompt + number - 1 for prompt in PROMPTS]
        positions = np.concatenate([start + np.arange(length) for start, length in zip(before, lengths, strict=True)])
        rng = np.random.default_rng([number, self.rank])
        chosen = np.argsort(rng.random((len(positions), len(LOAD), SLOTS)))[:, :, : MODEL.experts_per_token]
        mode = self.modes.DECODE if number else self.modes.EXTEND
        batch = SimpleNamespace(input_ids=torch.tensor(positions + 100), positions=torch.tensor(positions), forward_mode=mode)
        batch.extend_seq_lens_cpu = None if number else list(PROMPTS)
        return chosen, batch

    def run(self, recorders: list[Any], hook: Callable[[Any, int, np.ndarray, list[np.ndarray]], None]) -> np.ndarray:
        """int[rank, pass, token, MoE layer, k] as a list of lists of chosen slots, after all passes. hook: what a layer tells
        the recorder: (recorder, rank, the rank's chosen slots, those of all ranks)"""
        found: list[list[np.ndarray]] = [[] for _ in recorders]
        for number in range(PASSES):
            batches = []
            for self.rank in range(RANKS):
                batches.append(self.tokens(number))
                found[self.rank].append(batches[-1][0])
            for rank, each in enumerate(recorders):
                with each.with_forward_pass(number, batches[rank][1]):
                    for row, layer in enumerate(MODEL.moe_layers):
                        with each.with_current_layer(layer):
                            hook(each, rank, batches[rank][0][:, row], [chosen[:, row] for chosen, _ in batches])
        return found

    def logical(self, chosen: np.ndarray) -> np.ndarray:
        """int[token, MoE layer, k]: experts of slots."""
        return self.slots[list(MODEL.moe_layers)][np.arange(len(LOAD))[:, None], chosen]

    def counts(self, chosen: np.ndarray) -> np.ndarray:
        """int[MoE layer, expert] of the chosen slots of a pass."""
        experts = self.logical(chosen)
        return np.stack([np.bincount(experts[:, layer].ravel(), minlength=MODEL.experts) for layer in range(len(LOAD))])


def select(recorder: Any, rank: int, own: np.ndarray, every: list[np.ndarray]) -> None:
    """The hook of the router: a rank's own choices."""
    recorder.on_select_experts(torch.tensor(own, dtype=torch.int32))


def received(rank: int, every: list[np.ndarray]) -> np.ndarray:
    """int[slot of the rank] choices that a rank's slots receive."""
    return np.bincount(np.concatenate(every).ravel(), minlength=SLOTS).reshape(RANKS, -1)[rank]


def normal(recorder: Any, rank: int, own: np.ndarray, every: list[np.ndarray]) -> None:
    """The hooks of DeepEP's normal kernels: what the rank receives, and the rows that it sends."""
    select(recorder, rank, own, every)
    sent = torch.tensor([(own // (SLOTS // RANKS) == other).any(axis=1).sum() for other in range(RANKS)])
    recorder.on_deepep_dispatch_normal(received(rank, every).tolist(), sent, None, torch.bincount(torch.tensor(own).ravel()))


def low_latency(recorder: Any, rank: int, own: np.ndarray, every: list[np.ndarray]) -> None:
    """The hook of DeepEP's low-latency kernels."""
    recorder.on_deepep_dispatch_low_latency(torch.tensor(received(rank, every), dtype=torch.int32))


def summed(recorders: list[Any]) -> None:
    """Let rank 0 write the file of all ranks, which are summed as their all-reduce would."""
    others: list[torch.Tensor] = []
    with patch.object(torch.distributed, "all_reduce", lambda counts, op: others.append(counts.clone())):
        for each in recorders[1:]:
            each.dump_record("object")
    with patch.object(torch.distributed, "all_reduce", lambda counts, op: counts.add_(sum(others))):
        recorders[0].dump_record("file")


def statistics(server: Server, recorder: ModuleType, folder: Path) -> list[Row]:
    """Modes `stat` and `stat_approx`: one file, summed over ranks; of a second recording, whose ring goes on where the first
    one ended, and of a buffer that grows."""
    found = []
    cases = ("stat", select, 8, 1), ("stat", select, 8, 2), ("stat", select, -1, 1), ("stat_approx", normal, 8, 1)
    for mode, hook, buffer, times in cases:
        ranks = server.recorders(recorder, buffer, expert_distribution_recorder_mode=mode)
        for time in range(times):
            chosen = server.run(ranks, hook)
            summed(ranks)
            (path,) = folder.glob("expert_distribution_recorder_*.pt")
            path = path.rename(folder / f"{time}.pt")
        read = read_workload(path, model=MODEL)
        wanted = np.array([sum(server.counts(rank[number]) for rank in chosen) for number in range(PASSES)])
        holds = np.array_equal(read.by_step, wanted) and np.array_equal(read.load, wanted.sum(axis=0))
        said = f"{PASSES} steps in order, {read.load.sum():,.0f} choices"
        found.append(Row(f"recorder, {mode}, buffer {buffer}, recording {times}", SGLANG, said, holds))
    return found


def details(server: Server, recorder: ModuleType, folder: Path) -> list[Row]:
    """Modes `per_pass` and `per_token`: a file a rank."""
    found = []
    modes = ("per_pass", "normal", select), ("per_pass", "low_latency", low_latency), ("per_token", "normal", normal)
    for mode, kernels, hook in modes:
        ranks = server.recorders(recorder, expert_distribution_recorder_mode=mode, deepep_mode=kernels)
        chosen = server.run(ranks, hook)
        for each in ranks:
            each.dump_record("file")
        paths = sorted(folder.glob("expert_distribution_recorder_*.pt"))
        read = read_workload(paths, model=MODEL)
        if mode == "per_pass":
            by_source = np.array([sum(map(server.counts, rank)) for rank in chosen])
            holds = np.array_equal(read.load, by_source.sum(axis=0)) and len(read.by_step) == PASSES
            holds &= (read.by_source is None) if kernels == "low_latency" else np.array_equal(read.by_source, by_source)
            said = "the sum of all ranks" if kernels == "low_latency" else "the choices of each rank"
        else:
            wanted = [server.logical(chosen[rank][number]) for number in range(PASSES) for rank in range(RANKS)]
            holds = np.array_equal(read.experts, np.concatenate(wanted)) and read.tokens == len(np.concatenate(wanted))
            holds &= len(np.unique(read.sequence)) == RANKS * len(PROMPTS)
            holds &= int((read.phase == PREFILL).sum()) == RANKS * sum(PROMPTS)
            holds &= int((read.phase == DECODE).sum()) == RANKS * len(PROMPTS) * (PASSES - 1)
            sent = read_workload(paths, model=MODEL, member="traffic").bytes
            last = [[np.any(rank[-1] // (SLOTS // RANKS) == to, axis=2).sum(axis=0) for to in range(RANKS)] for rank in chosen]
            holds &= np.array_equal(sent, np.array(last).transpose(2, 0, 1))  # of the last pass alone, as it keeps no more
            said = f"{read.tokens} tokens of {len(np.unique(read.sequence))} sequences, by rank and phase; rows sent"
        for path in paths:
            path.unlink()
        found.append(Row(f"recorder, {mode}, {kernels} kernels", SGLANG, said, bool(holds)))
    return found


def rows(folder: Path) -> list[Row]:
    """Rows of the table. folder: where the wheel is put."""
    wheel, there = wheel_of(SGLANG, folder), folder / "recorded"
    server = Server(wheel, there)
    with (
        modules_of(wheel, folder, (RECORDER,), **server.given) as (recorder,),
        patch.object(torch.distributed, "get_rank", lambda: 1),
    ):
        return [*statistics(server, recorder, there), *details(server, recorder, there)]

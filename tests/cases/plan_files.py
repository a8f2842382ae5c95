"""Models, placements and plan files of every engine, written by hand from their documented forms."""

import io
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from engine.model import MoEModel
from engine.plan import Placement
from tests.cases import checkers

NAMES = {"sglang": ("plan.json", "plan.pt"), "trtllm": ("plan.yaml",), "vllm": ("plan.jsonl",)}
NAMES |= {"vllm-ascend": ("plan.json",), "megatron": ("plan.json",), "exflow": ("plan.csv",), "csv": ("plan.csv",)}
SINGLE = ("megatron", "exflow")


def model_of(layers: int, dense: tuple[int, ...], experts: int) -> MoEModel:
    sizes = {"experts_per_token": 1, "d_model": 8, "d_ff": 8}
    return MoEModel(name="tiny", layers=layers, dense_layers=dense, experts=experts, **sizes)


TINY = model_of(3, (0,), 4)
"""A dense layer, then two MoE layers of four experts."""


def held_by(placement: Placement) -> list[list[list[int]]]:
    return [[list(held) for held in row] for row in placement.experts_of_gpu]


def placed(*rows: Any, model: MoEModel = TINY) -> Placement:
    """Return a placement. rows: int[MoE layer][GPU][slot] experts."""
    held = tuple(tuple(map(tuple, row)) for row in rows)
    return Placement(experts=model.experts, experts_of_gpu=held, model_layers=model.moe_layers)


EVEN = placed([[0, 1, 2], [3, 0, 1]], [[3, 2, 0], [2, 1, 3]])
"""A placement of `TINY` on two GPUs with two replicas a layer."""


@st.composite
def even_cases(draw: st.DrawFn, replicas: bool = True) -> tuple[MoEModel, Placement]:
    """A model with dense layers anywhere and an even placement on some GPUs, no expert twice on a GPU."""
    layers = draw(st.integers(1, 5))
    dense = tuple(sorted(draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))))
    gpus, each = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = draw(st.integers(each, gpus * each)) if replicas else gpus * each
    model, rng = model_of(layers, dense, experts), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return model, placed(*(_even_row(experts, gpus, each, rng) for _ in model.moe_layers), model=model)


def _even_row(experts: int, gpus: int, each: int, rng: np.random.Generator) -> list[list[int]]:
    """Copies dealt out in turn, so that those of an expert meet on no GPU, then GPUs and slots shuffled."""
    copies = np.arange(gpus * each) % experts
    names, order = rng.permutation(experts), np.argsort(copies, kind="stable")
    row = [names[copies[order[gpu::gpus]]].tolist() for gpu in range(gpus)]
    return [rng.permutation(row[gpu]).tolist() for gpu in rng.permutation(gpus)]


def check(target: str, content: bytes, model: MoEModel, gpus: int) -> checkers.Held:
    """The slots [MoE layer][GPU] that the engine's documented rules find in a file; see `checkers`."""
    layers, experts, moe = model.layers, model.experts, model.moe_layers
    if target == "sglang":
        return checkers.sglang(content, layers, model.dense_layers, experts, gpus)
    if target in ("trtllm", "csv"):
        return (checkers.table if target == "csv" else checkers.tensorrt_llm)(content, moe, experts, gpus)
    return getattr(checkers, target.replace("-", "_"))(content, len(moe), experts, gpus)


SGLANG = '{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], [3, 2, 0, 2, 1, 3]]}'
SGLANG_MTP = SGLANG.replace("]]}", "], [0, 1, 2, 3, 0, 1]]}")

TENSORRT_LLM = """\
num_slots: 6
layer_updates_per_iter: 0
initial_global_assignments:
  1: [0, 1, 2, 3, 0, 1]
  2:
""" + "".join(f"  - {expert}\n" for expert in (3, 2, 0, 2, 1, 3))
TENSORRT_LLM_MTP = TENSORRT_LLM + "  3: [0, 1, 2, 3, 0, 1]\n"
TENSORRT_LLM_ALIAS = """\
initial_global_assignments:
  1: &id001 [0, 1, 2, 3, 0, 1]
  2: [3, 2, 0, 2, 1, 3]
  3: *id001
layer_updates_per_iter: 0
num_slots: 6
"""

VLLM = (
    '{"record_type": "eplb_initial_mapping", "version": 1, "num_redundant_experts": 2, "num_slots": 6, '
    '"initial_global_assignments": {"0": [0, 1, 2, 3, 0, 1], "1": [3, 2, 0, 2, 1, 3]}}\n'
)

VLLM_MTP = VLLM.replace("]}}", '], "2": [0, 1, 2, 3, 0, 1]}}')
VLLM_META = '{"record_type": "eplb_load_meta", "version": 1, "model": "tiny", "num_ranks": 2, "num_layers": 2}\n'

VLLM_STATS = (
    '{"record_type": "eplb_load_stats", "version": 1, "step": 7, "num_ranks": 2, '
    '"expert_load": [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]], "p2l_map": [[0, 1, 2, 3, 2, 3], [0, 1, 2, 3, 2, 3]]}\n'
)

VLLM_LATER = VLLM_STATS.replace('"step": 7', '"step": 8').replace(
    "[[0, 1, 2, 3, 2, 3], [0, 1, 2, 3, 2, 3]]", "[[0, 1, 2, 3, 0, 1], [3, 2, 0, 2, 1, 3]]"
)

HYGON = (
    '{"version": 2, "model_maps": {'
    '"TinyForCausalLM": {"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [3, 2, 0, 2, 1, 3]]}, '
    '"TinyMTPModel": {"physical_to_logical_map": [[0, 1, 2, 3, 2, 3]]}}}'
)

HYGON_LEGACY = '{"physical_to_logical_map": [[0, 1, 2, 3, 0, 1], [3, 2, 0, 2, 1, 3]]}'
ASCEND = """{"moe_layer_count": 2, "layer_list": [
  {"layer_id": 0, "device_count": 2, "device_list": [
    {"device_id": 0, "device_expert": [0, 1, 2]}, {"device_id": 1, "device_expert": [3, 0, 1]}]},
  {"layer_id": 1, "device_count": 2, "device_list": [
    {"device_id": 0, "device_expert": [3, 2, 0]}, {"device_id": 1, "device_expert": [2, 1, 3]}]}]}"""

ASCEND_MTP = ASCEND.replace(
    "]}]}]}",
    ']}]}, {"layer_id": 2, "device_count": 2, "device_list": ['
    '{"device_id": 0, "device_expert": [0, 1, 2]}, {"device_id": 1, "device_expert": [3, 0, 1]}]}]}',
)

ROWS = [(1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 3, 0), (2, 2, 0), (2, 0, 0)]
ROWS += [(1, 3, 1), (1, 0, 1), (1, 1, 1), (2, 2, 1), (2, 1, 1), (2, 3, 1)]
TABLE = "model_layer,expert,gpu,what\n" + "".join(f"{layer},{expert},{gpu},\n" for layer, expert, gpu in ROWS)
TABLE = TABLE.replace("2,3,0,", "2,3,0,spare")


def rank_map(rank: int, held: list[int], ranks: int = 2, total: int = 4, said: str = "linear") -> str:
    """A line of vLLM's log; older versions do not say the strategy."""
    strategy = f"Expert placement strategy: {said}. " if said else ""
    pairs = ", ".join(f"{local}->{expert}" for local, expert in enumerate(held))
    about = f"Local/global number of experts: {len(held)}/{total}. Experts local to global index map: {pairs}."
    log = f"(EngineCore_DP{rank} pid=1) INFO 09-01 10:00:00 [layer.py:980] [EP Rank {rank}/{ranks}] Expert parallelism is on. "
    return f"{log}{strategy}{about}\n"


def saved_tensors(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def with_pickle(data: bytes, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """The archive with its `data.pkl` changed and all checksums right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for member in old.infolist():
            content = old.read(member)
            new.writestr(member.filename, change(content) if member.filename.endswith("data.pkl") else content)
    return file.getvalue()


PLAN = {"name": "p", "placement": EVEN.model_dump(mode="json"), "send_order": {"mode": "concurrent"}}
PLAN |= {"provenance": {"optimiser": "t"}}
"""A plan of the studio as its JSON."""

"""Models and placements that the tests of plan files share."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from engine.model import MoEModel
from engine.plan import Placement
from tests.formats.placements import checkers

NAMES = {
    "sglang": ("plan.json", "plan.pt"),
    "trtllm": ("plan.yaml",),
    "vllm": ("plan.jsonl",),
    "vllm-ascend": ("plan.json",),
    "megatron": ("plan.json",),
    "exflow": ("plan.csv",),
    "csv": ("plan.csv",),
}
SINGLE = ("megatron", "exflow")


def model_of(layers: int, dense: tuple[int, ...], experts: int) -> MoEModel:
    sizes = {"experts_per_token": 1, "d_model": 8, "d_ff": 8}
    return MoEModel(name="tiny", layers=layers, dense_layers=dense, experts=experts, **sizes)


TINY = model_of(3, (0,), 4)
"""A dense layer, then two MoE layers of four experts."""


def held_by(placement: Placement) -> list[list[list[int]]]:
    return [[list(held) for held in row] for row in placement.experts_of_gpu]


def placed(*rows: Any, model: MoEModel = TINY) -> Placement:
    """[MoE layer][gpu][slot]"""
    held = tuple(tuple(map(tuple, row)) for row in rows)
    return Placement(experts=model.experts, experts_of_gpu=held, model_layers=model.moe_layers)


EVEN = placed([[0, 1, 2], [3, 0, 1]], [[3, 2, 0], [2, 1, 3]])
"""Of `TINY` on two GPUs, two replicas a layer."""


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
    """What the engine's documented rules make of a file; see `checkers`."""
    layers, experts, moe = model.layers, model.experts, model.moe_layers
    match target:
        case "sglang":
            return checkers.sglang(content, layers, model.dense_layers, experts, gpus)
        case "trtllm":
            return checkers.tensorrt_llm(content, moe, experts, gpus)
        case "csv":
            return checkers.table(content, moe, experts, gpus)
    by_name = {"vllm": checkers.vllm, "vllm-ascend": checkers.vllm_ascend}
    by_name |= {"megatron": checkers.megatron, "exflow": checkers.exflow}
    return by_name[target](content, len(moe), experts, gpus)

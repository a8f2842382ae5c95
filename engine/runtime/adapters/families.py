"""The families of transformers 5.23 that a plan can run: each block calls `experts(x, chosen, weight)` after its own router, on
parameters that are stacked by expert (models/FAMILY/modeling_FAMILY.py). On disk most have a tensor per expert under the names
that the families were published with (conversion_mapping.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from engine.runtime.adapters.adapter import Adapter, Block
from engine.runtime.adapters.stack import CutStack, Gate, cut


def gated(hidden: Tensor, activation: Gate) -> Tensor:
    """[row, d_ff] of [row, 2 · d_ff]: the first half activated, times the second."""
    gate, up = hidden.chunk(2, dim=-1)
    return activation(gate) * up


def clamped(hidden: Tensor, alpha: float, limit: float) -> Tensor:
    """[row, d_ff] of [row, 2 · d_ff]: gpt-oss's SwiGLU, with the two halves interleaved and clamped (`GptOssExperts`)."""
    gate, up = hidden[..., ::2].clamp(max=limit), hidden[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


@dataclass(frozen=True)
class Family(Adapter):
    """A family of transformers.

    parts: for each parameter of `experts` that checkpoints have expert by expert the names of its pieces there, which one
        after another make an expert's rows
    renamed: the block's name in the module, and in checkpoints
    clamps: True for gpt-oss's arithmetic: clamped, with biases, matrices [expert, in, out]
    """

    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    renamed: tuple[str, str] | None = None
    clamps: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """The parameters of `experts`, [expert, …]."""
        matrices = "gate_up_proj", "down_proj"
        return tuple(f"{name}{end}" for end in ("", "_bias") for name in matrices) if self.clamps else matrices

    def is_block(self, module: nn.Module) -> bool:
        experts = getattr(module, "experts", None)
        return isinstance(experts, nn.Module) and all(hasattr(experts, name) for name in self.tensors)

    def experts(self, block: Block) -> int:
        return len(block.module.experts.gate_up_proj)

    def stack(self, block: Block, held: Sequence[int]) -> CutStack:
        experts = block.module.experts
        if self.clamps:
            gate = partial(clamped, alpha=experts.alpha, limit=experts.limit)
        else:
            gate = partial(gated, activation=experts.act_fn)
        return CutStack(cut(experts, self.tensors, held), "gate_up_proj", "down_proj", gate, self.clamps)

    def parameters(self, block: Block) -> list[nn.Parameter]:
        """The parameters of all experts of a block that is as the model has it."""
        return [getattr(block.module.experts, name) for name in self.tensors]

    def on_disk(self, name: str) -> tuple[str, ...]:
        """The names that a checkpoint may have a tensor of the model under, the usual one last."""
        return (name, name.replace(*self.renamed, 1)) if self.renamed else (name,)

    def pieces(self, block: Block, tensor: str, expert: int) -> tuple[tuple[str, ...], ...]:
        """The pieces, one after another, of an expert's rows of a parameter of `experts` in checkpoints that have it expert by
        expert: of each the names it may have, as `on_disk`."""
        return tuple(self.on_disk(f"{block.name}.experts.{expert}.{part}") for part in self.parts.get(tensor, ()))

    def replace(self, block: Block, planned: nn.Module) -> None:
        block.module.experts = planned


_PER_EXPERT = MappingProxyType({"gate_up_proj": ("gate_proj.weight", "up_proj.weight"), "down_proj": ("down_proj.weight",)})
_MIXTRAL = MappingProxyType({"gate_up_proj": ("w1.weight", "w3.weight"), "down_proj": ("w2.weight",)})

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "mixtral": Family(_MIXTRAL, renamed=(".mlp.", ".block_sparse_moe.")),
        "qwen2_moe": Family(_PER_EXPERT),
        "qwen3_moe": Family(_PER_EXPERT),
        "deepseek_v2": Family(_PER_EXPERT),
        "deepseek_v3": Family(_PER_EXPERT),
        "olmoe": Family(_PER_EXPERT),
        "gpt_oss": Family(clamps=True),
    }
)
"""By `model_type` of the config."""

"""The Mixture-of-Experts model, as far as a plan depends on it."""

from typing import Literal

from pydantic import Field, model_validator

from engine.cluster import BITS_PER_DTYPE
from engine.errors import InputError
from engine.schema import Frozen


class MoEModel(Frozen):
    """Sizes of an MoE transformer. Layers count from 0 over all decoder layers, dense ones too (the model layer)."""

    name: str = Field(min_length=1, max_length=80)
    layers: int = Field(ge=1, le=1000, description="decoder layers, dense ones included")
    dense_layers: tuple[int, ...] = Field(default=(), description="model layers without experts")
    experts: int = Field(ge=1, le=4096, description="logical experts of one MoE layer")
    experts_per_token: int = Field(ge=1, le=64)
    d_model: int = Field(ge=1, le=1_000_000)
    d_ff: int = Field(ge=1, le=1_000_000, description="inner width of one expert")
    ffn_matrices: Literal[2, 3] = Field(default=3, description="3: gated (SwiGLU); 2: plain")
    shared_experts: int = Field(default=0, ge=0, le=64)
    dtype: Literal["fp32", "tf32", "bf16", "fp16", "fp8"] = "bf16"
    kv_numbers: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="numbers that attention keeps of a token in one layer; absent: keys and values of d_model numbers each",
    )
    batch: int = Field(default=1, ge=1, le=1_000_000, description="sequences in one step")
    sequence_length: int = Field(default=2048, ge=1, le=10_000_000)

    @model_validator(mode="after")
    def _consistent(self) -> "MoEModel":
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token is {self.experts_per_token}, but there are only {self.experts} experts")
        if len(set(self.dense_layers)) < len(self.dense_layers):
            raise ValueError("dense_layers names a layer twice")
        if any(not 0 <= layer < self.layers for layer in self.dense_layers):
            raise ValueError(f"dense_layers must lie in 0 … {self.layers - 1}")
        if len(self.dense_layers) == self.layers:
            raise ValueError("every layer is dense, so there is nothing to plan")
        return self

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Model layer of every MoE layer."""
        dense = set(self.dense_layers)
        return tuple(layer for layer in range(self.layers) if layer not in dense)

    @property
    def bytes_per_number(self) -> float:
        return BITS_PER_DTYPE[self.dtype] / 8

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token's hidden vector, which one (token, expert) pair moves in dispatch and again in combine."""
        return self.d_model * self.bytes_per_number

    @property
    def attention_dtype(self) -> str:
        """The number format of attention and of its keys and values: 16 bits in 8-bit models."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    @property
    def context_bytes_per_token(self) -> float:
        """Bytes that attention keeps of one token, in all layers."""
        return self.layers * (self.kv_numbers or 2 * self.d_model) * BITS_PER_DTYPE[self.attention_dtype] / 8

    @property
    def bytes_per_expert(self) -> float:
        """Bytes of the weights of one expert in one layer."""
        return self.ffn_matrices * self.d_model * self.d_ff * self.bytes_per_number

    @property
    def ffn_flops_per_token(self) -> float:
        """FLOP to pass one token through one expert (a multiply and an add per weight)."""
        return 2.0 * self.ffn_matrices * self.d_model * self.d_ff

    def check_recording(self, layers: int, experts: int, k: int | None, name: str) -> None:
        """Raise InputError unless a recording of these sizes can come from this model.

        layers: MoE layers of the recording
        experts: logical experts of a layer
        k: experts per token; None: unknown
        name: of the recording
        """
        mine = (("MoE layers", len(self.moe_layers), layers), ("experts", self.experts, experts))
        mine += (("experts per token", self.experts_per_token, k),) if k is not None else ()
        for quantity, expected, recorded in mine:
            if expected != recorded:
                raise InputError(
                    f"the model {self.name} does not fit the recording {name}: "
                    f"the model has {expected} {quantity}, the recording {recorded}"
                )

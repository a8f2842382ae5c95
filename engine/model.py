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
    expert_width: int | None = Field(
        default=None, ge=1, le=1_000_000, description="width of what experts take and return (latent experts); absent: d_model"
    )
    expert_biases: int | None = Field(default=None, ge=1, le=10_000_000, description="biases of one expert; absent: none")
    zero_experts: int | None = Field(
        default=None, ge=1, le=4096, description="choices without computation, with the ids after those of the experts"
    )
    expert_groups: int | None = Field(
        default=None, ge=2, le=4096, description="equal groups of experts of which a token may choose only some; absent: none"
    )
    shared_experts: int = Field(default=0, ge=0, le=64)
    shared_d_ff: int | None = Field(
        default=None, ge=1, le=1_000_000, description="inner width of one shared expert; absent: d_ff"
    )
    dtype: Literal["fp32", "tf32", "bf16", "fp16", "fp8"] = Field(
        default="bf16", description="numbers that are computed with and sent, and those of weights unless a key says otherwise"
    )
    expert_bits: float | None = Field(
        default=None, gt=0, le=32, description="bits of one weight of a routed expert with its scales; absent: those of dtype"
    )
    kv_numbers: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="numbers that attention keeps of a token in one layer; absent: keys and values of d_model numbers each",
    )
    attention_layers: int | None = Field(
        default=None, ge=0, le=1000, description="layers whose attention keeps something of every token; absent: all"
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
        if self.experts % (self.expert_groups or 1):
            raise ValueError(f"{self.experts} experts do not make {self.expert_groups} equal groups")
        if (self.attention_layers or 0) > self.layers:
            raise ValueError(f"attention_layers is {self.attention_layers}, but there are only {self.layers} layers")
        if len(self.dense_layers) == self.layers:
            raise ValueError("every layer is dense, so there is nothing to plan")
        return self

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Model layer of every MoE layer."""
        dense = set(self.dense_layers)
        return tuple(layer for layer in range(self.layers) if layer not in dense)

    @property
    def numbers_in_words(self) -> str:
        """`bf16`, or `bf16, experts at 4.5 bits a weight and 1,024 wide`."""
        bits = f"at {self.expert_bits:g} bits a weight" if self.expert_bits else ""
        width = f"{self.expert_width:,} wide" if self.expert_width else ""
        about = " and ".join(filter(None, (bits, width)))
        return f"{self.dtype}, experts {about}" if about else self.dtype

    @property
    def bytes_per_number(self) -> float:
        return BITS_PER_DTYPE[self.dtype] / 8

    @property
    def row_width(self) -> int:
        """Numbers that one (token, expert) pair moves in dispatch and again in combine, and that an expert takes."""
        return self.expert_width or self.d_model

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token's vector, which one (token, expert) pair moves in dispatch and again in combine."""
        return self.row_width * self.bytes_per_number

    @property
    def router_choices(self) -> int:
        """Ids that a router chooses among: those of the experts, then those of choices without computation."""
        return self.experts + (self.zero_experts or 0)

    @property
    def shared_width(self) -> int:
        """Inner width of all shared experts of a layer together."""
        return self.shared_experts * (self.shared_d_ff or self.d_ff)

    @property
    def attention_dtype(self) -> str:
        """The number format of attention and of its keys and values: 16 bits in 8-bit models."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    @property
    def context_bytes_per_token(self) -> float:
        """Bytes that attention keeps of one token, in all layers."""
        layers = self.layers if self.attention_layers is None else self.attention_layers
        return layers * (self.kv_numbers or 2 * self.d_model) * BITS_PER_DTYPE[self.attention_dtype] / 8

    @property
    def numbers_per_expert(self) -> int:
        """Weights and biases of one expert in one layer."""
        return self.ffn_matrices * self.row_width * self.d_ff + (self.expert_biases or 0)

    @property
    def bytes_per_expert(self) -> float:
        """Bytes of the weights of one expert in one layer."""
        return self.numbers_per_expert * (self.expert_bits or BITS_PER_DTYPE[self.dtype]) / 8

    @property
    def ffn_flops_per_token(self) -> float:
        """FLOP to pass one token through one expert (a multiply and an add per weight)."""
        return 2.0 * self.ffn_matrices * self.row_width * self.d_ff

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

"""The sizes of a transformer outside its experts: attention, dense layers and vocabulary; and the sizes that are assumed of a
model and its serving step until a person says more."""

import re

from pydantic import Field, model_validator

from engine.model import MoEModel
from engine.schema import Frozen
from engine.serving.step import Phase, ServingStep
from engine.training import TrainingStep

HEAD_SIZE = 128
KV_HEADS = 8
SEQUENCES: dict[Phase, int] = {"decode": 64, "prefill": 4}


BITS = "bits of one weight of these matrices with its scales, the mean over layers; absent: those of the model's dtype"


class Mixer(Frozen):
    """Layers without keys and values, such as Mamba or linear attention: they keep a state of fixed size of each sequence.

    projections: (output width, input width) of the matrices that tokens are multiplied with, in order
    further: weights of convolutions and of the recurrence in one layer
    state_bytes: bytes that one layer keeps of a sequence, however long
    """

    name: str = Field(min_length=1, max_length=80)
    layers: int = Field(ge=1, le=1000)
    projections: tuple[tuple[int, int], ...] = Field(min_length=1, max_length=10)
    further: int = Field(ge=0, le=10**12)
    state_bytes: int = Field(ge=0, le=10**12)

    @property
    def weights(self) -> int:
        """Numbers of one layer's matrices."""
        return self.further + sum(width * depth for width, depth in self.projections)


class TransformerSizes(Frozen):
    """The sizes that `MoEModel` leaves out because no placement depends on them.

    Attention is either of query and key-value heads of one size (multi-head, grouped or multi-query), or latent (MLA,
    DeepSeek-V2 §2.1), which keeps `kv_rank + rope_size` numbers of a token for all heads together. For MLA `head_size` is that
    of queries and keys without the rotary part, `value_size` that of values. Sparse latent attention (DSA, DeepSeek-V3.2 §2.1)
    scores all tokens with small index heads first, and attends to the best `sparse_keys` of them; so may grouped attention
    (MiniMax-M3). Layers with a sliding window may have heads of their own (`in_windows`). Hybrid models have `mixers` in the
    layers that `MoEModel.attention_layers` does not count.
    """

    heads: int = Field(ge=1, le=4096)
    kv_heads: int = Field(ge=1, le=4096)
    head_size: int = Field(ge=1, le=65536)
    value_size: int = Field(ge=1, le=65536)
    kv_rank: int = Field(default=0, ge=0, le=1_000_000, description="MLA: width of the latent; 0: no MLA")
    q_rank: int = Field(default=0, ge=0, le=1_000_000, description="MLA: width of the queries' latent; 0: none")
    rope_size: int = Field(default=0, ge=0, le=65536, description="MLA: rotary part of queries and keys")
    sparse_keys: int = Field(default=0, ge=0, le=10_000_000, description="DSA: tokens that a token attends to; 0: all")
    index_heads: int = Field(default=0, ge=0, le=4096, description="DSA: heads that score tokens")
    index_size: int = Field(default=0, ge=0, le=65536, description="DSA: size of such a head; all share their keys")
    window: int = Field(default=0, ge=0, le=10_000_000, description="tokens that a token sees in layers with a sliding window")
    windowed_layers: int = Field(default=0, ge=0, le=1000, description="layers with a sliding window")
    window_heads: int = Field(default=0, ge=0, le=4096, description="heads of those layers; 0: as the others")
    window_kv_heads: int = Field(default=0, ge=0, le=4096, description="key-value heads of those layers; 0: as the others")
    window_head_size: int = Field(default=0, ge=0, le=65536, description="size of those heads; 0: as the others")
    window_value_size: int = Field(default=0, ge=0, le=65536, description="size of those heads' values; 0: as the others")
    values_from_keys: bool = Field(
        default=False, description="layers without a window make values of the keys' projection, without a matrix for them"
    )
    sparse_layers: int | None = Field(
        default=None, ge=1, le=1000, description="layers with sparse attention; absent: all without a window"
    )
    index_layers: int | None = Field(
        default=None, ge=1, le=1000, description="DSA: layers with an index of their own; absent: all"
    )
    gate: int = Field(default=0, ge=0, le=10_000_000, description="numbers of the gate on attention's output; 0: no gate")
    mixers: tuple[Mixer, ...] = Field(default=(), max_length=10, description="layers without keys and values")
    dense_ffns: int | None = Field(
        default=None, ge=0, le=1000, description="layers with a dense FFN; absent: all that have no experts"
    )
    shared_gate: bool = Field(default=False, description="a gate of one row in front of the shared expert")
    attention_bits: float | None = Field(default=None, gt=0, le=32, description=BITS)
    shared_bits: float | None = Field(default=None, gt=0, le=32, description=BITS)
    dense_bits: float | None = Field(default=None, gt=0, le=32, description=BITS)
    dense_d_ff: int = Field(ge=1, le=10_000_000, description="inner width of the FFN of dense layers")
    vocabulary: int = Field(ge=1, le=10_000_000)
    tied_embeddings: bool = Field(default=False, description="input and output embedding are one matrix")

    @model_validator(mode="after")
    def _consistent(self) -> "TransformerSizes":
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly")
        if (self.window_heads or self.heads) % (self.window_kv_heads or self.kv_heads):
            raise ValueError("the heads of layers with a sliding window cannot share their key-value heads evenly")
        if not self.kv_rank and (self.q_rank or self.rope_size):
            raise ValueError("q_rank and rope_size belong to latent attention (MLA), which needs kv_rank too")
        if bool(self.window) != bool(self.windowed_layers):
            raise ValueError("layers with a sliding window need both window and windowed_layers")
        sparse = (self.sparse_keys, self.index_heads, self.index_size)
        if any(sparse) and not (all(sparse) and (self.q_rank or not self.latent)):
            raise ValueError(
                "sparse attention (DSA) needs sparse_keys, index_heads and index_size, and with MLA latent queries (q_rank)"
            )
        return self

    @property
    def latent(self) -> bool:
        """True if attention is latent (MLA)."""
        return self.kv_rank > 0

    @property
    def kv_numbers(self) -> int:
        """Numbers that the KV cache keeps of a token in one layer."""
        kept = self.kv_rank + self.rope_size if self.latent else self.kv_heads * (self.head_size + self.value_size)
        return kept + self.index_size

    @property
    def in_windows(self) -> "TransformerSizes":
        """The sizes as layers with a sliding window have them."""
        heads, value_size = self.window_heads or self.heads, self.window_value_size or self.value_size
        gate = heads if self.gate == self.heads else heads * value_size if self.gate else 0
        own = {"heads": heads, "kv_heads": self.window_kv_heads or self.kv_heads, "value_size": value_size, "gate": gate}
        own |= {"head_size": self.window_head_size or self.head_size, "values_from_keys": False}
        return self.model_copy(update=own | {"sparse_keys": 0, "index_heads": 0, "index_size": 0})

    def indexed_layers(self, layers: int) -> int:
        """Layers with an index, in a model with so many layers of attention."""
        counted = self.sparse_layers if self.index_layers is None else self.index_layers
        return layers - self.windowed_layers if counted is None else counted

    def kept_numbers(self, tokens: int, layers: int) -> int:
        """Numbers that the KV cache keeps of a sequence of so many tokens in a model with so many layers of attention."""
        others = layers - self.windowed_layers
        numbers = others * self.kv_numbers - (others - self.indexed_layers(layers)) * self.index_size
        return tokens * numbers + self.windowed_layers * min(tokens, self.window) * self.in_windows.kv_numbers

    def projections(self, d_model: int, index: bool = True) -> tuple[tuple[str, int, int], ...]:
        """Name, output and input width of the matrices that attention multiplies tokens with, in order. Of MLA those of
        prefill; decode takes the same numbers of the up-projection of keys and values apart (absorption).

        index: False for a layer that takes another layer's index, or has none
        """
        query = self.heads * (self.head_size + self.rope_size)
        out = ("output projection", d_model, self.heads * self.value_size)
        if not self.latent:
            keys = self.kv_heads * (self.head_size + (0 if self.values_from_keys else self.value_size))
            width = self.heads * self.head_size + keys + self.gate + (self.index_heads + 1) * self.index_size * index
            return (("query, key and value projection", width, d_model), out)
        # The index heads' keys and weights come with the down-projection, their queries with those of attention.
        width = self.q_rank + self.kv_rank + self.rope_size + self.gate
        if index:
            width, query = width + self.index_size + self.index_heads, query + self.index_heads * self.index_size
        return (
            ("down-projection", width, d_model),
            ("query up-projection", query, self.q_rank or d_model),
            ("key-value up-projection", self.heads * (self.head_size + self.value_size), self.kv_rank),
            out,
        )

    def attention_weights(self, d_model: int, index: bool = True) -> int:
        """Numbers of one layer's attention matrices."""
        return sum(width * depth for _, width, depth in self.projections(d_model, index))

    def weights(self, model: MoEModel) -> tuple[int, int]:
        """Numbers of everything but the routed experts: of the matrices inside the layers, which are in the model's number
        format, and of embedding, head and routers, which stay at 16 bits."""
        parts = self._inside(model)
        moe = len(model.moe_layers)
        embeddings = (1 if self.tied_embeddings else 2) * self.vocabulary * model.d_model
        routers = moe * model.router_choices * model.d_model
        return sum(parts.values()), embeddings + routers

    def bytes_inside(self, model: MoEModel) -> float:
        """Bytes of the matrices inside the layers without the routed experts."""
        bits = {"attention": self.attention_bits, "shared": self.shared_bits, "dense": self.dense_bits}
        usual = 8 * model.bytes_per_number
        return sum(numbers * (bits[part] or usual) / 8 for part, numbers in self._inside(model).items())

    def _inside(self, model: MoEModel) -> dict[str, int]:
        """Numbers of the matrices inside the layers, by part."""
        d_model, moe = model.d_model, len(model.moe_layers)
        layers = model.layers if model.attention_layers is None else model.attention_layers
        indexed, windowed = self.indexed_layers(layers), self.windowed_layers
        attention = indexed * self.attention_weights(d_model) + windowed * self.in_windows.attention_weights(d_model)
        attention += (layers - windowed - indexed) * self.attention_weights(d_model, index=False)
        shared = model.ffn_matrices * d_model * model.shared_width + (d_model if self.shared_gate else 0)
        latent = 2 * d_model * model.expert_width if model.expert_width else 0
        dense = len(model.dense_layers) if self.dense_ffns is None else self.dense_ffns
        return {
            "attention": attention + sum(mixer.layers * mixer.weights for mixer in self.mixers),
            "shared": moe * (shared + latent),
            "dense": dense * model.ffn_matrices * d_model * self.dense_d_ff,
        }


def usual_serving(phase: Phase = "decode") -> ServingStep:
    """A step of a chat with 2000 tokens in and 1000 out: one token of 64 sequences per GPU, or the prompts of 4."""
    return ServingStep(phase=phase, sequences=SEQUENCES[phase], context=2000, output=1000)


_LENGTH = r"(?<![a-z])(?:{})[-_= ]?([1-9]\d{{0,6}})(?![\d.,]*[\dkm])"
_LENGTHS = {
    "context": re.compile(_LENGTH.format("in|isl|input|prompt")),
    "output": re.compile(_LENGTH.format("out|osl|output")),
}


def named_serving(name: str, phase: Phase | None) -> ServingStep:
    """The usual step of a phase, decode if it is not known, with the tokens in and out that a recording's name tells, such as
    `decode_in2000out100` or `isl1024-osl512`."""
    told = {field: int(match[1]) for field, known in _LENGTHS.items() if (match := known.search(name.lower()))}
    return usual_serving(phase or "decode").model_copy(update=told)


def of_lengths(told: ServingStep, phase: Phase) -> ServingStep | None:
    """The usual step of a phase with the lengths of another step; None where those are the usual ones, so that nobody told any.
    A target says of how many sequences in all."""
    usual = usual_serving(phase)
    if (told.context, told.output) == (usual.context, usual.output):
        return None
    return usual.model_copy(update={"sequences": 1, "context": told.context, "output": told.output})


def usual_sizes(model: MoEModel) -> TransformerSizes:
    """Sizes for a model that tells only its own: heads of 128 that share 8 key-value heads, or as many of them as divide the
    heads, dense FFNs as wide as all experts that a token visits, and the vocabulary of a usual training step."""
    size = min(HEAD_SIZE, model.d_model)
    heads = min(4096, model.d_model // size)
    return TransformerSizes(
        heads=heads,
        kv_heads=next(count for count in range(min(KV_HEADS, heads), 0, -1) if heads % count == 0),
        head_size=size,
        value_size=size,
        dense_d_ff=model.d_ff * model.experts_per_token + model.shared_width,
        vocabulary=TrainingStep.model_fields["vocabulary"].default,
    )

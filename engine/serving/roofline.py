"""Operators by the datasheet: each takes the longer of its arithmetic and its memory traffic, at stated shares of the peak."""

from dataclasses import dataclass, field

import numpy as np

from engine.cluster import Gpu
from engine.costs import Datasheet
from engine.model import MoEModel
from engine.serving.sizes import Mixer, TransformerSizes
from engine.serving.step import BYTES_PER_KV, Kind, Operator, ServingStep

ACTIVATION_BYTES = 2
"""Activations outside of 8-bit GEMMs are 16 bits wide."""


@dataclass(frozen=True)
class RooflineOperators:
    """The datasheet's times (`engine.costs.Datasheet`) for every operator.

    Attention reads each sequence's keys and values once and multiplies at the 16-bit rate; MLA decodes with its up-projections
    absorbed into queries and outputs (DeepSeek-V2 §2.1.2), so that all heads share the latent. Causal prompts cost half of the
    square. Normalisation reads and writes the hidden vectors and the residuals, twice a layer.
    """

    model: MoEModel
    sizes: TransformerSizes
    gpu: Gpu
    datasheet: Datasheet = field(default_factory=Datasheet)

    @property
    def source(self) -> str:
        return self.datasheet.source

    def operators(self, step: ServingStep) -> tuple[Operator, ...]:
        model, sizes, tokens = self.model, self.sizes, step.tokens
        moe, hidden = len(model.moe_layers), model.d_model * ACTIVATION_BYTES
        dense = len(model.dense_layers) if sizes.dense_ffns is None else sizes.dense_ffns
        timed: list[tuple[str, Kind, float, int]] = [
            ("embedding", "embedding", self._pass(2 * tokens * hidden), 1),
            ("normalisation and residual", "norm", self._pass(8 * tokens * hidden), model.layers),
        ]
        timed += [(name, "attention", seconds, layers) for name, seconds, layers in self._attention(step)]
        for mixer in sizes.mixers:
            timed.append((mixer.name, "attention", self._mixer(mixer, step), mixer.layers))
        if model.expert_width:
            down = self._gemm(tokens, model.expert_width, model.d_model, model.dtype)
            up = self._gemm(tokens, model.d_model, model.expert_width, model.dtype)
            timed.append(("projections to and from the experts' width", "shared expert", down + up, moe))
        timed.append(("shared experts", "shared expert", self._ffn(tokens, model.shared_width), moe))
        timed.append(("dense FFN", "dense FFN", self._ffn(tokens, sizes.dense_d_ff), dense))
        timed.append(("output head", "head", self._gemm(step.head_rows, sizes.vocabulary, model.d_model, "bf16"), 1))
        return tuple(
            Operator(name, kind, seconds * layers, layers, "datasheet")
            for name, kind, seconds, layers in timed
            if seconds and layers
        )

    def _attention(self, step: ServingStep) -> list[tuple[str, float, int]]:
        """Name, seconds of one layer and layers of the attention operators."""
        model, sizes, tokens = self.model, self.sizes, step.tokens
        absorbed = sizes.latent and step.phase == "decode"
        layers = model.layers if model.attention_layers is None else model.attention_layers
        if not layers:
            return []
        windows, windowed = sizes.in_windows, sizes.windowed_layers
        others, indexed = layers - windowed, sizes.indexed_layers(layers)
        kinds: dict[tuple, tuple[str, int]] = {}
        for label, count, projections in (
            ("", indexed, sizes.projections(model.d_model)),
            (" without an index", others - indexed, sizes.projections(model.d_model, index=False)),
            (" in windows", windowed, windows.projections(model.d_model)),
        ):
            if count:
                label, before = kinds.get(projections, (label, 0))
                kinds[projections] = (label, before + count)
        rows = []
        for projections, (label, count) in kinds.items():
            for name, width, depth in projections:
                if absorbed and name == "key-value up-projection":
                    # The same numbers, one small GEMM a head before attention and one after it.
                    flops, weights = 2.0 * tokens * width * depth, width * depth * model.bytes_per_number
                    rows.append(("absorbed up-projections" + label, self._roofline(flops, weights, model.dtype), count))
                else:
                    rows.append((name + label, self._gemm(tokens, width, depth, model.dtype), count))
        core = []
        if sizes.sparse_keys:
            flops = 2.0 * tokens * step.keys * sizes.index_heads * sizes.index_size
            read = tokens * (step.keys if step.phase == "decode" else 1) * sizes.index_size * BYTES_PER_KV[step.kv_dtype]
            core.append(("index", self._roofline(flops, read, model.dtype), indexed))
        full = 0 if sizes.sparse_keys and sizes.sparse_layers is None else others - (sizes.sparse_layers or 0)
        core.append(("attention", self._core(sizes, step, step.keys, absorbed), full))
        keys = min(step.keys, sizes.sparse_keys)
        core.append((f"{'sparse ' * bool(full)}attention", self._core(sizes, step, keys, absorbed), others - full))
        inside = self._core(windows, step, step.keys_within(sizes.window), absorbed)
        core.append(("attention in windows", inside, windowed))
        out = [row for row in rows if row[0].startswith("output")]
        return [*(row for row in rows if row not in out), *core, *out]

    def _core(self, sizes: TransformerSizes, step: ServingStep, keys: float, absorbed: bool) -> float:
        """Seconds of attention itself in one layer, where a token looks back on `keys` others in the mean."""
        tokens = step.tokens
        keys_and_values = 2 * sizes.kv_rank if absorbed else sizes.head_size + sizes.value_size
        flops = 2.0 * tokens * keys * sizes.heads * (keys_and_values + sizes.rope_size)
        if step.phase == "decode":
            moved = tokens * keys * (sizes.kv_numbers - sizes.index_size) * BYTES_PER_KV[step.kv_dtype]
        else:
            moved = tokens * (2 * sizes.heads + 2 * sizes.kv_heads) * sizes.value_size * ACTIVATION_BYTES
        return self._roofline(flops, moved, "bf16")

    def _mixer(self, mixer: Mixer, step: ServingStep) -> float:
        """Seconds of one layer without keys and values: its matrices, and its states read and written once for every sequence;
        the recurrence's own arithmetic is left out."""
        gemms = sum(self._gemm(step.tokens, width, depth, self.model.dtype) for width, depth in mixer.projections)
        return gemms + self._pass(2.0 * step.sequences * mixer.state_bytes)

    def _ffn(self, tokens: int, d_ff: int) -> float:
        if not d_ff:
            return 0.0
        model = self.model
        inward = self._gemm(tokens, (model.ffn_matrices - 1) * d_ff, model.d_model, model.dtype)
        return inward + self._gemm(tokens, model.d_model, d_ff, model.dtype)

    def _gemm(self, rows: int, width: int, depth: int, dtype: str) -> float:
        return float(self.datasheet.gemm(self.gpu, np.array(float(rows)), width, depth, dtype))

    def _pass(self, size: float) -> float:
        return float(self.datasheet.memory_pass(self.gpu, np.array(size)))

    def _roofline(self, flops: float, moved: float, dtype: str) -> float:
        arithmetic = flops / (self.gpu.flops(dtype) * self.datasheet.compute_efficiency)
        memory = moved / (self.gpu.memory_bandwidth * self.datasheet.memory_efficiency)
        return max(arithmetic, memory) + self.datasheet.launch

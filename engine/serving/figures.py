"""The figures that people use of a whole step of serving: the simulated MoE layers and the other operators."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from pydantic import TypeAdapter

from engine.cluster import MEMORY_SHARE, Cluster
from engine.model import MoEModel
from engine.result import Ints, Unbounded
from engine.serving.sizes import TransformerSizes
from engine.serving.step import BYTES_PER_KV, Operator, ServingStep, by_kind, seconds_of
from engine.units import size

HALF_BYTES = 2
ROUND_OFF = 1e-9


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU.

    experts: its experts
    others: the rest of the model
    kv: keys and values of its sequences at their full length
    room: bytes of the GPU that may be used, the rest is for activations, buffers and the runtime
    states: those of its sequences in layers that keep no keys and values
    sequences: its own, where GPUs of several types have not as many; None: those of the step
    most: there the sequences per GPU, in the mean, for which all GPUs together have room
    """

    experts: float
    others: float
    kv: float
    room: float
    states: float = 0.0
    sequences: int | None = None
    most: int | None = None

    @property
    def total(self) -> float:
        return self.experts + self.others + self.kv + self.states

    @property
    def in_words(self) -> str:
        """`22.5 GB experts, 12.9 GB other weights, 4.72 GB keys and values`, and states where there are any."""
        said = f"{size(self.experts)} experts, {size(self.others)} other weights, {size(self.kv)} keys and values"
        return f"{said}, {size(self.states)} states of sequences" if self.states else said

    @property
    def fits(self) -> bool:
        return self.total <= self.room

    def most_sequences(self, step: ServingStep) -> int:
        """Sequences per GPU for which there is room."""
        if self.most is not None:
            return self.most
        free, own = self.room - self.experts - self.others, step.sequences if self.sequences is None else self.sequences
        return max(0, int(free // ((self.kv + self.states) / own)))


@dataclass(frozen=True)
class ServingFigures:
    """One step of a plan.

    seconds: of the whole step
    bound: seconds; no send order brings the placement below it; None: `unbounded` says why there is none
    operators: those outside the MoE layers' simulation
    moe: busy seconds of the MoE layers by kind of event, one step after another (with two batches those of both)
    sources: of the times of operators and of MoE layers
    dealt: (GPU type, fewest, most sequences on one) of every type; none where all GPUs have as many
    around: seconds of every GPU before the first MoE layer, before each of them, and after the last one; none where all
        GPUs take as long
    """

    step: ServingStep
    seconds: float
    bound: float | None
    unbounded: Unbounded | None
    operators: tuple[Operator, ...]
    moe: Mapping[str, float]
    memory: Memory
    sources: tuple[str, str]
    dealt: tuple[tuple[str, int, int], ...] = ()
    around: tuple[tuple[float, float, float], ...] = ()

    @property
    def dealt_in_words(self) -> str:
        """`35 sequences on each H100, 92 to 93 on each B200`; nothing where all GPUs have as many."""
        said = [f"{f'{least:,} to ' * (least < most)}{most:,}{{}} on each {kind}" for kind, least, most in self.dealt]
        return ", ".join(part.format(" sequences" if place == 0 else "") for place, part in enumerate(said))

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second and GPU: in decode generated ones, in prefill those of the prompts."""
        return self.step.tokens / self.seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of every kind of operator and of every kind of event in the MoE layers, as if nothing overlapped."""
        return by_kind(self.operators) | {kind: seconds for kind, seconds in self.moe.items() if seconds}

    @property
    def hidden(self) -> float:
        """Seconds that overlap saves: the sum of the parts less the step; round-off is nothing."""
        saved = seconds_of(self.operators) + sum(self.moe.values()) - self.seconds
        return saved if saved > ROUND_OFF * self.seconds else 0.0

    def gain_over(self, other: "ServingFigures") -> float:
        """Further tokens per second than another plan, as a share: 0.1 is 10 % more."""
        return other.seconds / self.seconds - 1

    def fields(self) -> dict[str, Any]:
        """Plain JSON from which `from_fields` makes the same figures."""
        return TypeAdapter(ServingFigures).dump_python(self, mode="json")

    @classmethod
    def from_fields(cls, data: Mapping[str, Any]) -> Self:
        """The figures of these fields. Raises ValueError where they are of others."""
        return TypeAdapter(cls).validate_python(data)

    def to_dict(self) -> dict:
        """Plain JSON, seconds and bytes."""
        named = {"decode": "seconds_per_token", "prefill": "seconds_to_first_token"}[self.step.phase]
        memory = asdict(self.memory) | {"total": self.memory.total, "fits": self.memory.fits}
        return {
            "phase": self.step.phase,
            "step_seconds": self.seconds,
            "bound_seconds": self.bound,
            "unbounded": self.unbounded,
            named: self.seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second,
            "moe_seconds": sum(self.moe.values()),
            "hidden_seconds": self.hidden,
            "parts": self.parts,
            "sequences_in_words": self.dealt_in_words,
            "operators": [asdict(operator) for operator in self.operators],
            "memory": memory | {"most_sequences": self.memory.most_sequences(self.step)},
            "operator_source": self.sources[0],
            "moe_source": self.sources[1],
        }


def memory_of(
    held: np.ndarray, cluster: Cluster, model: MoEModel, sizes: TransformerSizes, step: ServingStep, dealt: Ints | None = None
) -> Memory:
    """The memory of the GPU with the least left.

    held: float64[gpu] bytes of routed experts
    dealt: int64[gpu] sequences; None: those of the step on every GPU
    """
    others, *each = bytes_beside_experts(model, sizes, step)
    sequences = np.full(len(held), step.sequences) if dealt is None else dealt
    room = cluster.values("memory") * MEMORY_SHARE
    # A GPU without sequences does not tell how many more there is room for, so it comes last.
    left = np.where(sequences > 0, room - held - sequences * sum(each), np.inf)
    fullest = int(left.argmin())
    kv, states = (float(sequences[fullest] * size) for size in each)
    own = most = None
    if np.ptp(sequences):
        unit = 2 if step.overlap == "two-batch" else 1
        held_by = np.maximum(room - held - others, 0) // (max(sum(each), 1e-9) * unit) * unit
        own, most = int(sequences[fullest]), int(held_by.mean()) // unit * unit
    return Memory(float(held[fullest]), float(others), kv, float(room[fullest]), states, own, most)


def sequences_of_types(dealt: Ints, cluster: Cluster) -> tuple[tuple[str, int, int], ...]:
    """`ServingFigures.dealt` of int64[gpu] sequences."""
    if np.ptp(dealt) == 0:
        return ()
    kinds = np.array([gpu.type for gpu in cluster.gpus])
    return tuple(
        (kind, int(dealt[kinds == kind].min()), int(dealt[kinds == kind].max())) for kind in dict.fromkeys(kinds.tolist())
    )


def bytes_beside_experts(model: MoEModel, sizes: TransformerSizes, step: ServingStep) -> tuple[float, float, float]:
    """Bytes of a GPU's weights but the experts; of the keys and values, and of the states, of a sequence at full length."""
    others = sizes.bytes_inside(model) + sizes.weights(model)[1] * HALF_BYTES
    layers = model.layers if model.attention_layers is None else model.attention_layers
    kv = sizes.kept_numbers(step.longest, layers) * BYTES_PER_KV[step.kv_dtype]
    return others, kv, sum(mixer.layers * mixer.state_bytes for mixer in sizes.mixers)

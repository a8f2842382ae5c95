"""One step of a serving engine, in which every GPU works on sequences of its own; its operators outside the MoE layers, and the
protocol of the sources that time them; and the sequences of every GPU where GPUs are of several types."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import numpy as np
from pydantic import Field, model_validator

from engine.cluster import Cluster, Gpu
from engine.errors import InputError
from engine.model import MoEModel
from engine.result import Floats, Ints
from engine.schema import Frozen
from engine.workload import ExpertLoad, RoutingTrace, Workload

MOST_CHOICES = 2**27
"""Limit of choices in a recording at the tokens of a step; a larger one is kept as loads. 8192 tokens on each of 32 GPUs, as
DeepSeek-V3 routes them, have 1.2e8."""
Phase = Literal["prefill", "decode"]
BYTES_PER_KV = {"bf16": 2, "fp8": 1}

Kind = Literal["attention", "norm", "shared expert", "dense FFN", "embedding", "head", "other"]
"""Kinds of operators. The router, the experts, dispatch, combine and the sum of the experts' outputs are simulated."""
IN_MOE_LAYERS: frozenset[Kind] = frozenset(("shared expert",))
OUTSIDE_MOE_LAYERS: frozenset[Kind] = frozenset(("embedding", "head", "dense FFN"))


class ServingStep(Frozen):
    """Prefill or decode with data-parallel attention on all GPUs and the experts spread over them, as wide expert parallelism
    is served: every GPU has sequences of its own and a copy of everything but the experts. GPUs of several types divide all
    sequences by their speed, see `deal`.

    A prefill step takes whole prompts and ends with their first tokens; a decode step makes one token of each sequence.
    """

    phase: Phase
    sequences: int = Field(ge=1, le=100_000, description="sequences on each GPU in one step, the mean where types differ")
    context: int = Field(ge=1, le=10_000_000, description="tokens of a prompt")
    output: int = Field(default=1, ge=1, le=10_000_000, description="tokens generated for a prompt")
    overlap: Literal["none", "two-batch"] = Field(
        default="none", description="two-batch: two halves of the step, one computes while the other's tokens travel"
    )
    kv_dtype: Literal["bf16", "fp8"] = Field(default="bf16", description="numbers of the KV cache")

    @model_validator(mode="after")
    def _consistent(self) -> "ServingStep":
        if self.overlap == "two-batch" and self.sequences % 2:
            raise ValueError(
                f"two-batch overlap cuts a step into two equal halves, but {self.sequences} sequences on a GPU are odd; use an "
                'even number, or overlap "none"'
            )
        return self

    @property
    def tokens(self) -> int:
        """Tokens that every GPU passes through the layers in one step."""
        return self.sequences * self.tokens_each

    @property
    def tokens_each(self) -> int:
        """Tokens that a sequence passes through the layers in one step."""
        return self.context if self.phase == "prefill" else 1

    @property
    def keys(self) -> float:
        """Tokens that a token attends to, itself included: the mean over a prompt's tokens, in decode half-way through the
        output."""
        return (self.context + 1) / 2 if self.phase == "prefill" else self.context + (self.output + 1) / 2

    def keys_within(self, window: int) -> float:
        """Tokens that a token attends to if it sees no further than the last `window` tokens, itself included."""
        if self.phase == "decode":
            return min(self.keys, window)
        growing = min(self.context, window)
        return (growing * (growing + 1) / 2 + (self.context - growing) * window) / self.context

    @property
    def head_rows(self) -> int:
        """Tokens that every GPU scores the vocabulary for: the last of each sequence."""
        return self.sequences

    @property
    def longest(self) -> int:
        """Tokens of a sequence at its full length, in prefill of its prompt."""
        return self.context + (self.output if self.phase == "decode" else 0)

    @property
    def prompts(self) -> tuple[int, int]:
        """(tokens of a prompt for every token that a sequence passes through the layers in a step, steps that share it): in
        prefill these are the prompts' own."""
        return (1, 1) if self.phase == "prefill" else (self.context, self.output)

    def half(self) -> "ServingStep":
        """One of the two batches of two-batch overlap, on its own."""
        return self.model_copy(update={"sequences": self.sequences // 2, "overlap": "none"})


def load_of_step(workload: Workload, step: ServingStep, model: MoEModel, gpus: int, dealt: Ints | None = None) -> ExpertLoad:
    """The recording's popularity of experts, layer by layer, at the tokens of one step of all GPUs. A layer without any
    recorded token is balanced. Raises InputError for a recording that is not of the model.

    dealt: int64[gpu] sequences; None: those of the step on every GPU

    These are expected loads: a step's own tokens scatter around them, which counts most where an expert gets only a few. Which
    experts a token chooses together, and from which GPU, is not kept.
    """
    model.check_recording(workload.layers, workload.num_experts, workload.k, workload.name)
    sequences = np.full(gpus, step.sequences) if dealt is None else dealt
    copies = float(sequences.sum()) * step.tokens_each * model.experts_per_token
    load = workload.load
    total = load.sum(axis=1, keepdims=True)
    share = load / total.clip(min=1e-300)
    share[total[:, 0] == 0] = 1 / load.shape[1]
    loads = ExpertLoad(_name(workload, step), share * copies, model.moe_layers)
    return loads if np.ptp(sequences) == 0 else loads.from_ranks(sequences / sequences.sum())


def recording_of_step(workload: Workload, step: ServingStep, model: MoEModel, gpus: int) -> Workload:
    """A recording with as many tokens as one step of all GPUs, to plan for: of a routing log a sample of its tokens, evenly
    spaced, or all of them over and over; of anything else, and of very large steps, the loads. Tokens are on any GPU."""
    tokens = step.tokens * gpus
    if not isinstance(workload, RoutingTrace) or tokens * workload.layers * workload.k > MOST_CHOICES:
        return load_of_step(workload, step, model, gpus)
    sample = workload.spread(tokens).experts
    experts = np.resize(sample, (tokens, *sample.shape[1:]))
    return RoutingTrace(_name(workload, step), experts, workload.num_experts)


def _name(workload: Workload, step: ServingStep) -> str:
    return f"{workload.name}, at {step.tokens} tokens per GPU"[:200]


@dataclass(frozen=True)
class Operator:
    """An operator and its time.

    seconds: of the whole step on one GPU, all `layers` in which it runs together
    origin: silicon (interpolated between measurements), empirical (a formula fitted to measurements), mixed, or datasheet (a
        formula alone)
    """

    name: str
    kind: Kind
    seconds: float
    layers: int
    origin: str


class OperatorSource(Protocol):
    """Times of one model on one kind of GPU."""

    @property
    def source(self) -> str:
        """One line for people: the origin of the times, with the assumptions made."""

    def operators(self, step: ServingStep) -> tuple[Operator, ...]:
        """Every operator of the step, in the order of the model. Raises InputError if the source cannot time it."""


def seconds_of(operators: Iterable[Operator]) -> float:
    """All of them, one after another."""
    return sum(operator.seconds for operator in operators)


def by_kind(operators: Iterable[Operator]) -> dict[str, float]:
    """Seconds by kind, in the order in which kinds come first."""
    seconds: dict[str, float] = {}
    for operator in operators:
        seconds[operator.kind] = seconds.get(operator.kind, 0.0) + operator.seconds
    return seconds


def computing(gpu: Gpu) -> Gpu:
    """The GPU without its memory and ports: two that are equal in this compute alike."""
    return gpu.model_copy(update={"memory": 1.0, "send_bandwidth": 1.0, "receive_bandwidth": 1.0})


@dataclass(frozen=True)
class OperatorsOfTypes:
    """Operators on a cluster of several types of GPUs. of_kind: a source for each, by `computing`"""

    of_kind: Mapping[Gpu, OperatorSource]

    @property
    def source(self) -> str:
        """One line for people: every source, with the types that it times where there are several."""
        types: dict[str, list[str]] = {}
        for gpu, source in self.of_kind.items():
            types.setdefault(source.source, []).append(gpu.type)
        return "; ".join(said if len(types) == 1 else f"{', '.join(of)}: {said}" for said, of in types.items())


Operators = OperatorSource | OperatorsOfTypes


def sources_of(operators: Operators, cluster: Cluster) -> list[OperatorSource]:
    """The source of every GPU. Raises InputError for a type of GPU that none is known of."""
    kinds = [computing(gpu) for gpu in cluster.gpus]
    if not isinstance(operators, OperatorsOfTypes):
        if len(set(kinds)) > 1:
            raise InputError(f"the operators are timed for one type of GPU, but {cluster.name} has several; time them for each")
        return [operators] * len(kinds)
    if unknown := [kind.type for kind in kinds if kind not in operators.of_kind]:
        raise InputError(f"no operators are timed for {unknown[0]}; time them for every type of GPU of {cluster.name}")
    return [operators.of_kind[kind] for kind in kinds]


def deal(total: int, seconds: Sequence[Callable[[int], float]], most: Floats, unit: int = 1) -> Ints:
    """int64[gpu]: sequences of every GPU, so that the one that computes longest ends early; those beyond all limits too.

    total: sequences of all GPUs; a multiple of the unit
    seconds: of every GPU, of so many sequences, more never shorter; one function for GPUs that compute alike
    most: float64[gpu] sequences that have room
    unit: sequences that stay together
    """
    limit = np.minimum(np.maximum(most, 0), total).astype(np.int64) // unit * unit
    if limit.sum() < total:
        limit = np.full(len(limit), total)
    known = {each: cache(each) for each in dict.fromkeys(seconds)}

    def within(time: float) -> Ints:
        """int64[gpu]: sequences that end in time."""
        counts = {}
        for each, timed in known.items():
            low, high = 0, total // unit
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if timed(middle * unit) <= time else (low, middle - 1)
            counts[each] = low * unit
        return np.minimum([counts[each] for each in seconds], limit)

    early, late = 0.0, max(timed(total) for timed in known.values())
    for _ in range(24):
        middle = (early + late) / 2
        early, late = (early, middle) if within(middle).sum() >= total else (middle, late)
    whole = (most := within(late)) * (total / max(int(most.sum()), 1)) / unit
    dealt = np.floor(whole).astype(np.int64)
    dealt[np.argsort(dealt - whole, kind="stable")[: total // unit - int(dealt.sum())]] += 1
    return dealt * unit

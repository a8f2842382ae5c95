"""The parts of a server's steps by physics alone: bytes over bandwidth, arithmetic over peak rates, and counts of layers,
exchanges and sequences at a round time each.

No part knows an engine; `engine.serving.forecast` multiplies each by factors that were fitted to measured steps.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.catalogue import GpuType
from engine.catalogue.links import FABRIC_LATENCY
from engine.catalogue.packaged import package_folder
from engine.costs import deepep
from engine.model import MoEModel
from engine.result import Floats, Ints
from engine.serving.deployment import BYTES_PER_WEIGHT, Demand, Deployment, Precision, Ranks
from engine.serving.sizes import TransformerSizes

START_UP, LAYER, PROMPT_LAYER, STEP = 1e-5, 1e-5, 1e-4, 1e-3
"""Seconds of an exchange, of a layer of a decode step and of a prompt's, and of a step: round numbers that factors multiply."""
RATES: dict[Precision, int] = {"bf16": 1, "fp8": 2, "fp4": 4, "int4": 1}
"""Peak rates over that of 16 bits."""
FOUR_BITS = ("B200", "B300", "GB200", "GB300", "RTX-PRO")
"""Beginnings of the GPU types that multiply 4-bit floats."""
HEAD_BYTES = ACTIVATION_BYTES = 2
KV_BYTES = 1
ROOM = 0.97
"""Share of the memory for weights, keys and values: steps were measured that need more than nine tenths of it."""

DECODE = {
    "experts": "weights",
    "other weights": "weights",
    "keys and values": "attention",
    "attention": "attention",
    "matrices": "arithmetic",
    "all-reduces": "exchanges",
    "all-reduced bytes": "exchanges",
    "all-to-alls": "exchanges",
    "exchanged bytes": "exchanges",
    "across machines": "exchanges",
    "layers": "overheads",
    "step": "overheads",
    "sequences": "overheads",
}
"""Parts of a decode step, and the factor that each shares: weights read from memory (experts of the tokens of one step, each
once, and all others), keys and values of all sequences, arithmetic, exchanges by start-ups and by bytes, those between the
machines of a server, and overheads of layers, of the step and of each sequence."""
PROMPT = {
    "prompt: matrices": "prompts",
    "prompt: attention": "prompts",
    "prompt: weights": "prompts",
    "prompt: all-reduced bytes": "prompts",
    "prompt: all-to-alls": "prompts",
    "prompt: across machines": "prompts",
    "prompt: layers": "prompts",
    "prompt: step": "prompts",
}
"""Parts of taking one prompt."""
FIRST = {
    "queue": "waiting",
    "host": "waiting",
    "running step": "waiting",
    "reading the prompt": "front end",
    "sending keys and values on": "front end",
    "front end": "front end",
}
"""Further parts of the time to the first token: other users' prompts that come first, work of the host for all users, the step
under way; and the front end's, for the prompt's tokens, for keys and values that another server takes, and for the request."""
PARTS = DECODE | PROMPT | FIRST
ACROSS = ("across machines", "prompt: across machines")
"""Parts that keep their seconds: too few measured servers have several machines."""
FACTORS = tuple(dict.fromkeys(PARTS.values()))


@dataclass(frozen=True)
class Work:
    """One deployment's parts in seconds.

    decode, prompt: in the order of DECODE and PROMPT
    prompts_per_step: prompts that a replica of attention takes during one decode step, where it also generates
    ahead: other users' prompts at each replica of attention, if all came at once
    waits: users that find no room, for each that does
    accepted: tokens that speculation adds to a step
    tokens: of a prompt; output: generated for it; users: all; sent_on: True where another server generates
    """

    decode: tuple[float, ...]
    prompt: tuple[float, ...]
    prompts_per_step: float
    ahead: float
    waits: float
    tokens: int
    output: int
    users: int
    sent_on: bool
    accepted: float


def work_of(deployment: Deployment, demand: Demand, on: "Machine") -> Work:
    """The parts of a deployment on its GPUs."""
    servers, prompts = deployment.decode, deployment.prompts
    wanted = demand.users / servers.servers
    held = min(wanted, max(on.most_sequences(servers, demand), servers.data))
    generates = deployment.prefill is None
    return Work(
        decode=on.decode(servers, held * (1 + demand.accepted), held, demand.prompt + demand.output / 2),
        prompt=on.prompt(prompts, demand.prompt),
        prompts_per_step=held / demand.output * (1 + demand.accepted) / prompts.data if generates else 0.0,
        ahead=float(others_ahead(demand.users, prompts.servers * prompts.data)),
        waits=wanted / held - 1,
        tokens=demand.prompt,
        output=demand.output,
        users=demand.users,
        sent_on=not generates,
        accepted=demand.accepted,
    )


def multiplies(precision: Precision, gpu: GpuType) -> bool:
    """True if a GPU type computes with these numbers; those of `int4` are computed with in 16 bits."""
    return gpu.name.startswith(FOUR_BITS) if precision == "fp4" else precision != "fp8" or gpu.flops_fp8 > 0


def others_ahead(users: Ints | int, replicas: Ints | int) -> Floats:
    """Other users' prompts at each of so many replicas of attention, if all came at once."""
    return np.maximum(users / replicas - 1, 0.0)


@dataclass(frozen=True)
class Machine:
    """A model in a number format on GPUs of a type.

    sizes: of the model outside its experts
    link: bytes/s out of a GPU to the others of its machine
    size: GPUs of a machine
    """

    model: MoEModel
    sizes: TransformerSizes
    gpu: GpuType
    link: float
    precision: Precision
    size: int = 8

    @property
    def weight(self) -> float:
        """Bytes of one weight."""
        return BYTES_PER_WEIGHT[self.precision]

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.gpu.flops_fp16 * (RATES[self.precision] if self.precision != "fp4" or multiplies("fp4", self.gpu) else 1)

    @property
    def experts(self) -> float:
        """Weights of all routed experts."""
        return len(self.model.moe_layers) * self.model.experts * self.expert

    @property
    def expert(self) -> float:
        """Weights of one expert."""
        return self.model.ffn_matrices * self.model.row_width * self.model.d_ff

    @property
    def others(self) -> float:
        """Weights inside the layers without the experts."""
        return self.sizes.weights(self.model)[0]

    @property
    def head(self) -> float:
        return self.sizes.vocabulary * self.model.d_model

    @property
    def attending(self) -> int:
        """Layers that keep keys and values."""
        return self.model.layers if self.model.attention_layers is None else self.model.attention_layers

    def kept(self, tokens: float, tensor: int) -> float:
        """Bytes of the keys and values of a sequence on a GPU, of which so many share its attention."""
        share = 1 if self.sizes.latent else 1 / min(tensor, self.sizes.kv_heads)
        states = sum(mixer.layers * mixer.state_bytes for mixer in self.sizes.mixers) / tensor
        return self.sizes.kept_numbers(round(tokens), self.attending) * share * KV_BYTES + states

    def most_sequences(self, ranks: Ranks, demand: Demand) -> float:
        """Sequences of full length that a server has room for."""
        weights = self.experts * self.weight / ranks.gpus + self.others * self.weight / ranks.tensor
        room = self.gpu.memory * ROOM - weights - 2 * self.head * HEAD_BYTES / ranks.tensor
        return ranks.data * room // self.kept(demand.prompt + demand.output, ranks.tensor)

    def least_read(self, gpus: int) -> float:
        """Seconds in which a server of so many GPUs reads the weights of one token once, all of them at their full bandwidth:
        a bound of every decode step."""
        active = len(self.model.moe_layers) * self.model.experts_per_token * self.expert
        return ((active + self.others) * self.weight + self.head * HEAD_BYTES) / gpus / self.gpu.memory_bandwidth

    def decode(self, ranks: Ranks, tokens: float, sequences: float, keys: float) -> tuple[float, ...]:
        """Seconds of every part of a step.

        tokens, sequences: of one server in one step
        keys: tokens that a token attends to
        """
        model, sizes, memory = self.model, self.sizes, self.gpu.memory_bandwidth
        each = max(1.0, tokens / ranks.data)
        of_each = max(1.0, sequences / ranks.data)
        row = model.d_model * ACTIVATION_BYTES
        touched = 1 - (1 - model.experts_per_token / model.experts) ** tokens
        active = len(model.moe_layers) * model.experts_per_token * self.expert
        per_key = (2 * sizes.kv_rank if sizes.latent else sizes.head_size + sizes.value_size) + sizes.rope_size
        shared, spread, moe = ranks.tensor > 1, ranks.data > 1, len(model.moe_layers)
        inside = spread and ranks.gpus <= self.size
        return (
            self.experts * touched * self.weight / ranks.gpus / memory,
            (self.others * self.weight + self.head * HEAD_BYTES) / ranks.tensor / memory,
            of_each * self.kept(keys, ranks.tensor) / memory,
            2 * each * keys * self.attending * sizes.heads * per_key / ranks.tensor / self.gpu.flops_fp16,
            2 * (tokens * active / ranks.gpus + each * (self.others + self.head) / ranks.tensor) / self.rate,
            2 * model.layers * START_UP * shared,
            2 * model.layers * each * row * shared / self.link,
            2 * moe * START_UP * spread,
            2 * moe * each * row * min(model.experts_per_token, ranks.gpus) * inside / self.link,
            self.across(ranks, each, "copies"),
            model.layers * LAYER,
            STEP,
            of_each * START_UP,
        )

    def prompt(self, ranks: Ranks, tokens: int) -> tuple[float, ...]:
        """Seconds of every part of one prompt of so many tokens."""
        model, sizes, moe = self.model, self.sizes, len(self.model.moe_layers)
        active = moe * model.experts_per_token * self.expert
        per_key = sizes.heads * (sizes.head_size + sizes.rope_size + sizes.value_size)
        weights = self.experts / ranks.gpus + self.others / ranks.tensor
        return (
            tokens * 2 * (active / ranks.gpus + self.others / ranks.tensor) / self.rate,
            tokens * tokens * per_key * self.attending / ranks.tensor / self.gpu.flops_fp16,
            weights * self.weight / self.gpu.memory_bandwidth,
            tokens * 2 * model.layers * model.d_model * ACTIVATION_BYTES * (ranks.tensor > 1) / self.link,
            2 * moe * START_UP * (ranks.data > 1),
            self.across(ranks, tokens, "node"),
            model.layers * PROMPT_LAYER,
            STEP,
        )

    def across(self, ranks: Ranks, tokens: float, unit: Literal["copies", "node"]) -> float:
        """Seconds that the machines of a server exchange with each other in all layers; 0 for a server of one.

        All-reduces are of halves by turns, all GPUs of a machine at once. All-to-alls, of experts that are chosen evenly, are
        DeepEP's as measured, where they were; else they take the bytes over the GPU's port, and a start-up. Both come on top
        of the start-ups that were fitted inside machines, so that a server over machines is never faster than one in one.
        tokens: of a replica of attention
        unit: a row of each token for every expert, or for every machine with some of them
        """
        machines, port, start = -(-ranks.gpus // self.size), self.gpu.bandwidth, FABRIC_LATENCY
        if machines == 1:
            return 0.0
        spent = 0.0
        if (shared := -(-ranks.tensor // self.size)) > 1:
            size = tokens * self.model.d_model * ACTIVATION_BYTES * 2 * (shared - 1) / shared
            spent += 2 * self.model.layers * (size / self.size / port + math.ceil(math.log2(shared)) * start)
        if ranks.data > 1:
            k, others = self.model.experts_per_token, machines - 1
            rows = k * others / machines if unit == "copies" else others * (1 - (1 - 1 / machines) ** k)
            measured = measured_between(self.gpu.name, self.size)
            for kind, width in zip(("dispatch", "combine"), deepep.travel_of(unit).row_bytes(self.model), strict=True):
                size = tokens / ranks.tensor * rows * width
                seconds = deepep.exchange_seconds(kind, unit, machines, size) if measured else size / port + start
                spent += len(self.model.moe_layers) * seconds
        return spent


def measured_between(gpu: str, size: int) -> bool:
    """True for machines of so many GPUs of a type between which DeepEP was measured, if the measurements are installed."""
    return gpu in deepep.GPU_TYPES and size == deepep.GPUS_PER_NODE and package_folder() is not None

"""The question for the cheapest deployments of a model that users ask, its answer, and the candidates: engines and modes with
fitted factors, number formats, and divisions of the model among the GPUs of a server.

Of divisions that the forecast cannot tell apart one stands for all: experts one by one where attention has replicas, else by
their matrices.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from engine.catalogue.packaged import USE, every_gpu_type
from engine.compare.trust.whole_steps import OTHER_FORMAT, known_model
from engine.errors import InputError
from engine.formats.measured.serving_rows import PRECISIONS, gpu_type_of
from engine.formats.packaged import is_packaged
from engine.model import MoEModel
from engine.schema import Frozen
from engine.serving.deployment import BYTES_PER_WEIGHT, Demand, Deployment, Mode, Precision, Ranks
from engine.serving.forecast import fitted
from engine.serving.sizes import TransformerSizes
from engine.sizing.inputs import ServingTarget, read_serving_target
from engine.units import digits

BLOCK = 128
"""Rows and columns of 8-bit weights with one scale (DeepSeek-V3 §3.3.2), of which no GPU holds a part."""
_GROUP = re.compile(r"(\S+) on (.+), (agg|disagg)")
_VERSION = re.compile(r"(\S+) (\d\S*), (agg|disagg)")

Why = Literal["not measured", "number format", "memory", "bound", "token", "first token", "prompts", "GPUs", "price"]
WHY: dict[Why, tuple[str, str]] = {
    "not measured": ("engine mode", "never measured on it"),
    "number format": ("number format", "that it does not compute with"),
    "memory": ("server", "without room for the weights and a sequence for each replica of attention"),
    "bound": ("server", "unable to read the weights of a token within the target at full bandwidth (a bound)"),
    "token": ("setup", "predicted slower than the target"),
    "first token": ("setup", "predicted to send the first token later than the target"),
    "prompts": ("setup", "whose prompts are predicted to come faster than they are taken"),
    "GPUs": ("setup", "that take more GPUs than there are"),
    "price": ("setup", "above the budget"),
}
"""Candidates that are left out, and why, in words and in the order in which it is asked."""


class Question(Frozen):
    """A model, who asks it for how much, and the GPUs that can be had.

    sizes: of the model outside its experts
    checkpoint: its name on the Hugging Face Hub
    target: in words, see `read_serving_target`
    """

    model: MoEModel
    sizes: TransformerSizes
    checkpoint: str = Field(min_length=1, max_length=200)
    prompt: int = Field(ge=1, le=10_000_000, description="tokens of a prompt")
    output: int = Field(ge=1, le=10_000_000, description="tokens generated for it")
    prices: dict[str, float] = Field(min_length=1, max_length=12, description="of a GPU an hour, by type")
    target: str = Field(default="", max_length=300)
    most: int = Field(default=64, ge=1, le=4096, description="GPUs of all replicas together")
    formats: tuple[Precision, ...] = Field(default=(), description="number formats; absent: that of the checkpoint")
    engines: tuple[str, ...] = Field(default=(), description="names of engines; absent: all that were measured")
    extrapolate: bool = Field(default=False, description="engines in modes that were never measured on a GPU type too")
    currency: str = Field(default="$", min_length=1, max_length=4)

    @field_validator("prices")
    @classmethod
    def _known(cls, prices: dict[str, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, price in prices.items():
            if (kind := gpu_type_of(name)) is None:
                raise ValueError(f"no GPU type '{name}'; known are {', '.join(every_gpu_type())}")
            if kind in found:
                raise ValueError(f"{kind} has two prices; give it one")
            if not 0 < price <= 1e9:
                raise ValueError(f"the price of {kind} must be above 0 and at most 1e9 an hour, not {price:g}")
            found[kind] = price
        return found

    @field_validator("formats", mode="before")
    @classmethod
    def _own_names(cls, formats: Any) -> Any:
        if not isinstance(formats, list | tuple):
            return formats
        return tuple(PRECISIONS.get(str(name).lower(), str(name).lower()) for name in formats)

    @field_validator("engines")
    @classmethod
    def _measured(cls, engines: tuple[str, ...]) -> tuple[str, ...]:
        known = sorted({engine for engine, _, _ in measured_groups()})
        if unknown := [name for name in engines if name not in known]:
            raise ValueError(f"no engine '{unknown[0]}' was measured; known are {', '.join(known)}")
        return engines

    @property
    def limits(self) -> ServingTarget:
        """The target. Raises InputError for words that are none."""
        return read_serving_target(self.target)


class Point(Frozen):
    """A deployment, as many times as the demanded rate needs.

    deployment, demand: of one replica; gpus: of all
    first_token, token, low, high: seconds, as in `Forecast`
    rate: tokens/s generated by all replicas
    hour, million: price of all GPUs an hour, and of a million tokens generated at this rate
    best: True if no deployment on another GPU type is cheaper and as fast
    held: False for servers over more machines than were measured
    parts: seconds of a token by part
    """

    deployment: Deployment
    demand: Demand
    replicas: int
    gpus: int
    first_token: float
    token: float
    low: float
    high: float
    rate: float
    hour: float
    million: float
    best: bool
    held: bool = True
    parts: dict[str, float]

    @property
    def in_words(self) -> str:
        """`8 × H200, sglang 0.5.9 fp8, 1 × tp8, 24 users`."""
        of, times = self.deployment, f" × {self.replicas}" if self.replicas > 1 else ""
        engine = " ".join(filter(None, (of.engine, of.version, of.precision)))
        return f"{self.gpus} × {of.gpu}, {engine}, {of.servers_in_words}{times}, {self.demand.users * self.replicas:,} users"

    @property
    def as_servers(self) -> str:
        """`8 H200 as one tp8 server`, `12 GB200 as 2 replicas of one tp4 server and one dp4 ep4 server for prompts`."""
        of = self.deployment
        servers = _servers(of.decode) + (f" and {_servers(of.prefill)} for prompts" if of.prefill else "")
        times = f"{self.replicas} replicas of " * (self.replicas > 1)
        return f"{self.gpus} {of.gpu} as {times}{servers}{' †' * (not self.held)}"

    def cost(self, hour: bool, currency: str) -> str:
        """`$6.25 a million tokens`, or `$28.00 an hour`."""
        if hour:
            return f"{currency}{self.hour:,.2f} an hour"
        return f"{currency}{self.million:,.{2 if self.million >= 1 else 4}f} a million tokens"


def _servers(ranks: Ranks) -> str:
    return f"{'one' if ranks.servers == 1 else ranks.servers} {ranks.in_words} server{'s' * (ranks.servers > 1)}"


def by_type(points: Sequence[Point]) -> list[Point]:
    """The cheapest deployment of every GPU type, the cheapest first. points: by price"""
    first: dict[str, Point] = {}
    for point in points:
        first.setdefault(point.deployment.gpu, point)
    return list(first.values())


def decision(points: Sequence[Point], target: ServingTarget, currency: str) -> str:
    """The cheapest deployment in a sentence, and the next GPU type or, where there is one type, the next faster one.

    points: by price; at least one
    """
    first, *others = by_type(points)
    hour = target.in_all
    said = [
        f"{first.as_servers} ({first.deployment.engine}): {digits(first.rate / first.gpus)} tokens/s a GPU, "
        f"{first.cost(hour, currency)}, {digits(1 / first.token)} tokens/s a user."
    ]
    if others:
        times = others[0].hour / first.hour if hour else others[0].million / first.million
        said.append(f"The next GPU type: {others[0].as_servers}, {others[0].cost(hour, currency)}, {times:.3g}× the price.")
    elif faster := [point for point in points if point.token < first.token]:
        next_one = faster[0]
        said.append(
            f"The next faster one: {next_one.as_servers}, {next_one.cost(hour, currency)}, "
            f"{digits(1 / next_one.token)} tokens/s a user."
        )
    return " ".join(said)


class LeftOut(Frozen):
    """Candidates of a GPU type that are left out for one reason. nearest: the least seconds among those that are too slow"""

    gpu: str
    why: Why
    count: int
    nearest: float | None = None

    @property
    def in_words(self) -> str:
        """`3 servers without room for …`."""
        unit, reason = WHY[self.why]
        return f"{self.count:,} {unit}{'s' * (self.count > 1)} {reason}"


class Found(Frozen):
    """The answer so far.

    decision: the cheapest in a sentence, see `decision`; empty where there is none
    points: by price the front of every GPU type between price and time of a token
    left_out: by GPU type
    tried: deployments that were timed
    token: seconds at most of a token by the target
    notes: for people
    """

    decision: str = ""
    points: tuple[Point, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    tried: int = 0
    token: float | None = None
    notes: tuple[str, ...] = ()


class Group(NamedTuple):
    """Deployments that have the same factors."""

    engine: str
    version: str
    gpu: str
    mode: Mode
    precision: Precision

    def deployment(self, checkpoint: str, decode: Ranks, prefill: Ranks | None) -> Deployment:
        return Deployment(
            engine=self.engine,
            version=self.version,
            checkpoint=checkpoint,
            gpu=self.gpu,
            precision=self.precision,
            decode=decode,
            prefill=prefill,
        )


def formats_of(checkpoint: str, model: MoEModel) -> tuple[Precision, ...]:
    """The number format of a checkpoint: by its name where the name says it and the package has only another one of the model,
    else by the model's. Raises InputError where the forecast knows none such."""
    suffix = OTHER_FORMAT.search(checkpoint)
    if suffix and not is_packaged(checkpoint):
        said = suffix.group()[1:].lower()
        return ("int4",) if said in ("awq", "gptq") else (PRECISIONS.get(said, said),)
    bits = model.expert_bits
    if bits is None:
        return ("fp8" if model.dtype == "fp8" else "bf16",)
    if 4 <= bits < 5:
        return ("fp4" if model.dtype == "fp8" else "int4",)
    if model.dtype == "fp8" and 8 <= bits < 9:
        return ("fp8",)
    known = ", ".join(BYTES_PER_WEIGHT)
    raise InputError(
        f"no engine was measured with experts at {bits:g} bits a weight; name formats of another checkpoint: {known}"
    )


def divisions(model: MoEModel, sizes: TransformerSizes, precision: Precision, gpus: int) -> Iterator[Ranks]:
    """The servers of so many GPUs that divide heads, experts and their matrices evenly, one for every division of attention."""
    blocks = model.d_ff // BLOCK if precision == "fp8" and model.d_ff % BLOCK == 0 else model.d_ff
    shares = [one for one in range(1, gpus + 1) if gpus % one == 0 == model.experts % one and blocks % (gpus // one) == 0]
    heads = [(sizes.heads, sizes.kv_heads)]
    if sizes.windowed_layers:
        heads.append((sizes.in_windows.heads, sizes.in_windows.kv_heads))
    for tensor in range(1, gpus + 1):
        whole = all(
            all_heads % tensor == 0 and (sizes.latent or max(tensor, kept) % min(tensor, kept) == 0)
            for all_heads, kept in heads
        )
        if gpus % tensor or not whole or not shares:
            continue
        expert = max(shares) if tensor < gpus else min(shares)
        yield Ranks(tensor=tensor, data=gpus // tensor, expert_tensor=gpus // expert, expert=expert)


def measured_groups() -> set[tuple[str, ...]]:
    """(engine, GPU type, mode) with fitted factors."""
    return {found.groups() for name in fitted().kinds if (found := _GROUP.fullmatch(name))}


def newest_version(engine: str, mode: Mode) -> str:
    """The newest version of an engine with fitted factors; empty where none has a number."""
    found = [
        match for name in fitted().kinds if (match := _VERSION.fullmatch(name)) and match[1] == engine and match[3] == mode
    ]
    return max((match[2] for match in found), key=lambda text: [int(part) for part in re.findall(r"\d+", text)], default="")


def counted_as(question: Question) -> str:
    """The measured checkpoint with the sizes of a question's model, in whatever number format; else its own name."""
    checkpoints = fitted().checkpoints
    if question.checkpoint not in checkpoints:
        wanted = _sizes_alone(question.model, question.sizes)
        for checkpoint in checkpoints:
            with suppress(InputError):
                if _sizes_alone(*known_model(checkpoint)) == wanted:
                    return checkpoint
    return question.checkpoint


def _sizes_alone(model: MoEModel, sizes: TransformerSizes) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    bits = {"attention_bits", "shared_bits", "dense_bits"}
    return model.model_dump(exclude=USE | {"dtype", "expert_bits"}), sizes.model_dump(exclude=bits)

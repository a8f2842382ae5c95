"""Time to the first token and per token of a deployment: the parts of `engine.serving.parts`, each times a few named factors
that were fitted to measured steps, and an interval that was measured too.

A part takes its own factor of all engines, times the factors of its kind (see `FACTORS`) for the engine on the GPU, for the
number format there, and for the engine's version; one that was never measured is 1. All are positive, so more work never takes
less time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import NamedTuple

import numpy as np
from pydantic import Field

from engine.catalogue.packaged import every_gpu_type, links_of_types, machine_size
from engine.errors import InputError
from engine.model import MoEModel
from engine.result import Floats
from engine.schema import Frozen
from engine.serving.deployment import Demand, Deployment, Precision
from engine.serving.parts import DECODE, FACTORS, FIRST, PARTS, PROMPT, Machine, Work, work_of
from engine.serving.sizes import TransformerSizes

HOST, PER_TOKEN, FRONT_END = 1e-3, 1e-6, 1e-2
"""Seconds of the host for every user, of a prompt's token and of a request: round numbers that factors multiply."""
MOST_ACROSS = {"trtllm on H100, disagg": 16}
"""GPUs of the largest measured servers of several machines, by the first of `groups_of`; there are no others."""
KIND_OF_PART = np.array([FACTORS.index(kind) for kind in PARTS.values()])
"""int64[part]: the place of its factor."""


class Margins(Frozen):
    """Shares that 9 of 10 measured times per token are above or below predictions, of steps that were not fitted: of known
    engines on known GPUs, and where no step was fitted of the version, of the engine on the GPU, or of the model."""

    known: float = Field(gt=0)
    other_version: float = Field(gt=0)
    other_gpu: float = Field(gt=0)
    other_model: float = Field(gt=0)


class Factors(Frozen):
    """Fitted factors.

    parts: of every part, for all engines; 1 where absent, as nothing was fitted
    kinds: by the names of `groups_of`, the factors in the order of `FACTORS`
    checkpoints: models of the measured steps
    source: the measurements
    """

    parts: dict[str, float]
    kinds: dict[str, tuple[float, ...]]
    checkpoints: tuple[str, ...]
    margins: Margins
    source: str

    def of(self, deployment: Deployment) -> Floats:
        """float64[part]: the factor of every part."""
        whole = np.array([self.parts.get(part, 1.0) for part in PARTS])
        for name in groups_of(deployment):
            whole = whole * np.array(self.kinds.get(name, (1.0,) * len(FACTORS)))[KIND_OF_PART]
        return whole

    def margin(self, deployment: Deployment) -> float:
        """The share that 9 of 10 predictions of such a deployment stay within."""
        (on, _, version), margins = groups_of(deployment), self.margins
        met = (
            (True, margins.known),
            (version not in self.kinds, margins.other_version),
            (on not in self.kinds, margins.other_gpu),
            (deployment.checkpoint not in self.checkpoints, margins.other_model),
            (not held_against(deployment), max(margins.other_gpu, margins.other_model)),
        )
        return max(margin for holds, margin in met if holds)


class Forecast(NamedTuple):
    """Seconds that a deployment takes.

    first_token, token: to the first token, and for each further one
    low, high: 9 of 10 measured times per token lie between them
    parts: of one token by part, prompts of other users included where the same servers take them
    first_parts: of the first token
    """

    first_token: float
    token: float
    low: float
    high: float
    parts: Mapping[str, float]
    first_parts: Mapping[str, float]


def groups_of(deployment: Deployment) -> tuple[str, str, str]:
    """Names of a deployment's factors: `sglang on B200, agg`, `sglang on B200, agg, fp8` and `sglang 0.5.9, agg`."""
    engine, mode = deployment.engine, deployment.mode
    on = f"{engine} on {deployment.gpu}, {mode}"
    return on, f"{on}, {deployment.precision}", f"{engine} {deployment.version or 'of an unknown version'}, {mode}"


def held_against(deployment: Deployment) -> bool:
    """False for servers over more machines than such an engine on such GPUs was measured with."""
    most = max(machine_size(deployment.gpu), MOST_ACROSS.get(groups_of(deployment)[0], 0))
    return max(deployment.decode.gpus, deployment.prompts.gpus) <= most


@lru_cache
def fitted() -> Factors:
    """The factors that come with Switchyard."""
    return Factors.from_json(files("engine.serving").joinpath("factors.json").read_bytes(), "factors.json")


def machine_of(gpu: str, precision: Precision, model: MoEModel, sizes: TransformerSizes) -> Machine:
    """A model in a number format on a GPU type. Raises InputError for a type that is not known."""
    if (kind := every_gpu_type().get(gpu)) is None:
        raise InputError(f"no GPU type '{gpu}'; known are {', '.join(every_gpu_type())}")
    links = links_of_types().get(gpu)
    return Machine(model, sizes, kind, links.bandwidth if links else 1.0, precision, machine_size(gpu))


def work(deployment: Deployment, demand: Demand, model: MoEModel, sizes: TransformerSizes) -> Work:
    """The parts of a deployment. Raises InputError for a GPU type that is not known, for one without links to others, and for
    servers without room for a sequence on every replica of attention."""
    on = machine_of(deployment.gpu, deployment.precision, model, sizes)
    if deployment.gpu not in links_of_types() and max(deployment.decode.gpus, deployment.prompts.gpus) > 1:
        raise InputError(f"servers of several {deployment.gpu} need links between them, and none are known")
    for ranks in (deployment.decode, deployment.prompts):
        if on.most_sequences(ranks, demand) < ranks.data:
            raise InputError(
                f"{ranks.gpus} {deployment.gpu} have no room for {model.name} in {deployment.precision} and one sequence of "
                f"{demand.prompt + demand.output:,} tokens on each replica of attention"
            )
    return work_of(deployment, demand, on)


def forecast(
    deployment: Deployment, demand: Demand, model: MoEModel, sizes: TransformerSizes, factors: Factors | None = None
) -> Forecast:
    """Predict a deployment's times. Raises InputError if its GPU is not known or its model does not fit.

    model, sizes: of its checkpoint
    factors: None: those that come with Switchyard
    """
    known, parts = factors or fitted(), work(deployment, demand, model, sizes)
    timed = times(Stack.of([parts]), known.of(deployment)[None])
    margin = known.margin(deployment)
    token = float(timed.token[0])
    of_token = dict(zip((*DECODE, *PROMPT), timed.of_token[0].tolist(), strict=True))
    of_first = dict(zip((*PROMPT, *FIRST, "waiting for room"), timed.of_first[0].tolist(), strict=True))
    kept = ({name: spent for name, spent in each.items() if spent} for each in (of_token, of_first))
    return Forecast(float(timed.first[0]), token, token / (1 + margin), token * (1 + margin), *kept)


@dataclass(frozen=True)
class Stack:
    """Parts of several deployments: float64[row, part], and one number a row as in `Work`."""

    decode: Floats
    prompt: Floats
    rest: Mapping[str, Floats]

    @classmethod
    def of(cls, works: Sequence[Work]) -> "Stack":
        names = ("prompts_per_step", "ahead", "waits", "tokens", "output", "users", "sent_on", "accepted")
        rest = {name: np.array([float(getattr(each, name)) for each in works]) for name in names}
        return cls(np.array([each.decode for each in works]), np.array([each.prompt for each in works]), rest)

    def part(self, rows: Floats) -> "Stack":
        """Some of the rows."""
        return Stack(self.decode[rows], self.prompt[rows], {name: each[rows] for name, each in self.rest.items()})


class Times(NamedTuple):
    """float64[row]: seconds to the first token and per token; float64[row, part]: their parts."""

    first: Floats
    token: Floats
    of_token: Floats
    of_first: Floats


def times(stack: Stack, factors: Floats) -> Times:
    """Seconds of every row. factors: float64[row, part]"""
    rest, (decode, prompt, more) = stack.rest, _apart(factors)
    prompts = stack.prompt * prompt
    of_token = np.hstack((stack.decode * decode, rest["prompts_per_step"][:, None] * prompts))
    step = of_token.sum(axis=1)
    token = step / (1 + rest["accepted"])
    further = more * _further(stack, prompts.sum(axis=1), step)
    room = rest["waits"] * rest["output"] * token
    of_first = np.hstack((prompts, further, room[:, None]))
    return Times(of_first.sum(axis=1), token, of_token / (1 + rest["accepted"])[:, None], of_first)


def growth(stack: Stack, factors: Floats) -> tuple[Floats, Floats]:
    """float64[row, part], twice: by what share a token's time, and the first one's, grow for each share by which the part's
    factor grows."""
    rest, (decode, prompt, more) = stack.rest, _apart(factors)
    timed = times(stack, factors)
    prompts, step = stack.prompt * prompt, timed.token * (1 + rest["accepted"])
    of_step = np.hstack((stack.decode * decode, rest["prompts_per_step"][:, None] * prompts))
    first = np.array(list(FIRST))
    per_step = more[:, first == "running step"] + (rest["waits"] * rest["output"] / (1 + rest["accepted"]))[:, None]
    of_first = per_step * of_step
    of_first[:, len(DECODE) :] += prompts * (1 + more[:, first == "queue"] * rest["ahead"][:, None] / 10)
    further = more * _further(stack, prompts.sum(axis=1), step)
    none = np.zeros_like(further)
    return np.hstack((of_step / step[:, None], none)), np.hstack((of_first, further)) / timed.first[:, None]


def _apart(factors: Floats) -> list[Floats]:
    """Factors of the parts of a decode step, of a prompt, and of the rest of the time to the first token."""
    return np.split(factors, np.cumsum((len(DECODE), len(PROMPT))), axis=1)


def _further(stack: Stack, prompt: Floats, step: Floats) -> Floats:
    """float64[row, part]: the parts of FIRST. prompt, step: float64[row] seconds of one prompt and of a step"""
    rest = stack.rest
    tokens = rest["tokens"] * PER_TOKEN
    every = np.full(len(step), FRONT_END)
    return np.stack((rest["ahead"] * prompt / 10, rest["users"] * HOST, step, tokens, tokens * rest["sent_on"], every), axis=1)

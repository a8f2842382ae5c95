"""Estimates of the size of a recording: bytes from the model, the tokens and the forward passes, with the sum behind them."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.model import MoEModel

SGLANG_SLOTS = 8
"""Choices that SGLang's `per_token` has room for, whatever the model's k."""


@dataclass(frozen=True)
class Run:
    """A run to record.

    tokens: prompt and generated tokens, all requests together
    passes: forward passes (steps)
    ranks: those that each write a file
    """

    model: MoEModel
    tokens: int
    passes: int
    ranks: int


@dataclass(frozen=True)
class Estimate:
    """An estimated size.

    bytes: of all files, or over the network
    sum: the calculation, for people
    """

    bytes: float
    sum: str


def _counts(run: Run, layers: int, rounds: str, width: int, by_rank: bool = True, remark: str = "") -> Estimate:
    """The size of counts of every expert.

    rounds: the passes' name
    width: bytes of a count
    by_rank: True if every rank has its own
    remark: ends the sum
    """
    ranks = f" × {run.ranks} ranks" if by_rank else ""
    product = f"{run.passes:,} {rounds}{ranks} × {layers} layers × {run.model.experts} experts × {width} bytes{remark}"
    return Estimate(run.passes * (run.ranks if by_rank else 1) * layers * run.model.experts * width, product)


def _sglang_per_token(run: Run) -> Estimate:
    layers, counts = run.model.layers, _counts(run, run.model.layers, "passes", 4)
    product = f"{run.tokens:,} tokens × {layers} layers × {SGLANG_SLOTS} places × 4 bytes, and counts: {counts.sum}"
    return Estimate(run.tokens * layers * SGLANG_SLOTS * 4 + counts.bytes, product)


def _vllm_answers(run: Run) -> Estimate:
    return _choices(run, len(run.model.moe_layers), 1 if run.model.experts <= 256 else 2)


def _choices(run: Run, layers: int, width: int, base64: bool = True) -> Estimate:
    """The size of the choices of every token. width: bytes of an id"""
    k = run.model.experts_per_token
    product = f"{run.tokens:,} tokens × {layers} layers × {k} experts × {width} byte{'s' * (width > 1)}"
    return Estimate(
        run.tokens * layers * k * width * (4 / 3 if base64 else 1),
        product + (" × 4/3 in base64" if base64 else ", before compression"),
    )


def _ascend_map(run: Run) -> Estimate:
    layers, experts = len(run.model.moe_layers), run.model.experts
    width = _digits(experts) + 2
    return Estimate(layers * experts * width, f"{layers} layers × {experts} experts × about {width:.1f} characters")


def _megatron(run: Run) -> Estimate:
    layers, k = len(run.model.moe_layers), run.model.experts_per_token
    width = k * (_digits(run.model.experts) + 2) + 2
    product = f"{run.tokens:,} tokens × {layers} layers × about {width:.0f} characters of JSON"
    return Estimate(run.tokens * layers * width, product)


def _digits(experts: int) -> float:
    """The mean number of digits of an expert's id."""
    return sum(len(str(expert)) for expert in range(experts)) / experts


ESTIMATES: dict[str, Callable[[Run], Estimate]] = {
    "sglang-stat": lambda run: _counts(run, run.model.layers, "passes", 4, by_rank=False, remark=", whatever the tokens"),
    "sglang-per-pass": lambda run: _counts(run, run.model.layers, "passes", 4),
    "sglang-per-token": _sglang_per_token,
    "sglang-answers": lambda run: _choices(run, run.model.layers, 4),
    "vllm-answers": _vllm_answers,
    "vllm-ascend-answers": _vllm_answers,
    "vllm-ascend-map": _ascend_map,
    "tensorrt-llm": lambda run: _counts(run, len(run.model.moe_layers), "iterations", 8),
    "megatron": _megatron,
    "pytorch": lambda run: _choices(run, len(run.model.moe_layers), 2, base64=False),
}
"""The estimates by the key of a way to record, see `guide`."""


def estimate(way: str, model: MoEModel, tokens: int, passes: int = 1000, ranks: int = 1) -> Estimate:
    """The size of a recording in one of the ways of `guide`, without the few kilobytes of headers.

    tokens: prompt and generated tokens
    passes: forward passes
    ranks: those that write a file each
    """
    return ESTIMATES[way](Run(model, tokens, passes, ranks))

"""The operators of a serving step beside its MoE layers, and the protocol of the sources that time them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.serving.step import ServingStep

Kind = Literal["attention", "norm", "shared expert", "dense FFN", "embedding", "head", "other"]
"""Of operators. The router, the experts, dispatch, combine and what adds the experts' outputs up are simulated."""

IN_MOE_LAYERS: frozenset[Kind] = frozenset(("shared expert",))
OUTSIDE_MOE_LAYERS: frozenset[Kind] = frozenset(("embedding", "head", "dense FFN"))


@dataclass(frozen=True)
class Operator:
    """seconds: of the whole step on one GPU, all `layers` in which it runs together; origin: silicon (interpolated between
    measurements), empirical (a formula fitted to measurements), mixed, or datasheet (a formula alone)."""

    name: str
    kind: Kind
    seconds: float
    layers: int
    origin: str


class OperatorSource(Protocol):
    """Times of one model on one kind of GPU."""

    @property
    def source(self) -> str:
        """One line for people: where the times come from, with the assumptions made."""

    def operators(self, step: ServingStep) -> tuple[Operator, ...]:
        """Every operator of the step, in the order of the model. Raises InputError where the source cannot time it."""


def seconds_of(operators: Iterable[Operator]) -> float:
    """All of them, one after another."""
    return sum(operator.seconds for operator in operators)


def by_kind(operators: Iterable[Operator]) -> dict[str, float]:
    """Seconds by kind, in the order in which kinds come first."""
    seconds: dict[str, float] = {}
    for operator in operators:
        seconds[operator.kind] = seconds.get(operator.kind, 0.0) + operator.seconds
    return seconds

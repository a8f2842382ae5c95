"""Handlers asked and answering in JSON, as a job's folder has it, and a context that stops them after so many answers."""

import json
from collections.abc import Callable
from typing import Any

from engine.jobs import kinds
from engine.jobs.kinds import Answer
from engine.jobs.protocol import Context


def in_json(handler: kinds.Handler) -> Callable[[dict[str, Any], Context], dict[str, Any]]:
    """A handler that takes arguments and returns a result as they stand in a job's folder."""
    return lambda arguments, context: kinds.answered(handler, arguments, context).model_dump(mode="json")


def strict(result: dict) -> dict:
    """A copy by way of JSON, which must not have a NaN or an infinity."""
    return json.loads(json.dumps(result, allow_nan=False))


class FakeContext:
    """The part of a job that a handler may ask for. It is asked to stop once it has kept `enough` partial results."""

    def __init__(self, enough: float = float("inf")) -> None:
        self.enough = enough
        self.kept: list[dict] = []
        self.said: list[tuple[float | None, str]] = []

    def stop(self) -> bool:
        return len(self.kept) >= self.enough

    def report(self, done: float | None, message: str, incumbent: float | None = None, bound: float | None = None):
        self.said.append((done, message))

    def keep(self, result: Answer) -> None:
        self.kept.append(strict(result.model_dump(mode="json")))

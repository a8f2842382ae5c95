"""Handlers asked and answering in JSON, as a job's folder has it."""

from collections.abc import Callable
from typing import Any

from engine.jobs import kinds
from engine.jobs.protocol import Context


def in_json(handler: kinds.Handler) -> Callable[[dict[str, Any], Context], dict[str, Any]]:
    """A handler that takes arguments and returns a result as they stand in a job's folder."""
    return lambda arguments, context: kinds.answered(handler, arguments, context).model_dump(mode="json")

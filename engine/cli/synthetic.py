"""`synthetic`: a recording of routing that nobody recorded."""

import argparse
from pathlib import Path
from typing import Any

from engine import formats
from engine.cli import text
from engine.cli.output import answer
from engine.compare.imbalance import USUAL_STEPS, ImbalanceRecipe
from engine.compare.inspection import inspect
from engine.compare.synthetic import Recipe
from engine.errors import InputError
from engine.files import replace_atomically
from engine.formats.writers import write_npz
from engine.workload import RoutingTrace

USUAL_SKEW, USUAL_AFFINITY = 1.0, 0.5


def run_synthetic(options: argparse.Namespace) -> int:
    if options.output.suffix.lower() != ".npz":
        raise InputError(f"{options.output}: a synthetic recording is written as .npz")
    trace = _recipe(options).draw(formats.read_model(options.model))
    _save(trace, options.output)
    answer(options, {"recording": inspect(trace).to_dict(), "saved": str(options.output)}, _as_text)
    return 0


def _recipe(options: argparse.Namespace) -> Recipe | ImbalanceRecipe:
    """What the options ask for. Raises InputError where they ask for two things at once."""
    if options.preset is None:
        if options.steps is not None:
            raise InputError("--steps is of the presets; give --preset too")
        skew = USUAL_SKEW if options.skew is None else options.skew
        affinity = USUAL_AFFINITY if options.affinity is None else options.affinity
        return Recipe(options.tokens, skew, affinity, options.seed)
    if options.skew is not None or options.affinity is not None:
        raise InputError("a preset has no --skew and no --affinity: give either --preset or these")
    steps = min(USUAL_STEPS, max(options.tokens, 1)) if options.steps is None else options.steps
    return ImbalanceRecipe(options.preset, options.tokens, steps, options.seed)


def _save(trace: RoutingTrace, path: Path) -> None:
    """Write the recording whole or not at all. Raises InputError when it cannot be written."""
    try:
        with replace_atomically(path) as draft:
            write_npz(trace, draft)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def _as_text(content: dict[str, Any]) -> str:
    return f"{text.inspected(content['recording'])}\nsaved the recording: {content['saved']}"

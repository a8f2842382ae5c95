"""The options that name a step of serving: the step, the model's sizes beside its experts, and what times its operators."""

import argparse
from pathlib import Path

from engine import formats
from engine.compare.judge import Serving
from engine.errors import InputError
from engine.formats.packaged import is_packaged, packaged_config
from engine.model import MoEModel
from engine.problem import Problem
from engine.serving.choice import choose_operators
from engine.serving.step import ServingStep


def read_serving(options: argparse.Namespace, problem: Problem) -> tuple[Serving, list[str]]:
    """The step that --serving names, and notes on what times it. Raises InputError."""
    step = formats.read_document(ServingStep, options.serving)
    config = _config(options, problem.model)
    sizes = formats.read_sizes(config)
    source, notes = choose_operators(config, problem.model, sizes, problem.cluster.gpus[0], step, options.operators)
    return Serving(step, source, sizes), notes


def _config(options: argparse.Namespace, model: MoEModel) -> Path:
    """The `config.json` that tells the sizes of a model beside its experts."""
    if options.config:
        config = Path(options.config)
        config = config if config.exists() else packaged_config(options.config)
    elif options.model and is_packaged(str(options.model)):
        config = packaged_config(str(options.model))
    elif options.model and formats.is_huggingface(options.model):
        config = options.model
    else:
        try:
            config = packaged_config(model.name)
        except InputError:
            raise InputError(
                f"the sizes of {model.name} beside its experts are not known; name its Hugging Face config.json with --config"
            ) from None
    configured = formats.read_model(config)
    for size in ("d_model", "layers", "experts"):
        if getattr(configured, size) != getattr(model, size):
            raise InputError(
                f"{config.name} has {size} {getattr(configured, size)}, the model {model.name} {getattr(model, size)}"
            )
    return config

"""Models whose `config.json` the package aiconfigurator-core brings along, by their names on the Hugging Face Hub."""

import functools
from pathlib import Path

from engine.catalogue.packaged import package_folder, packaged_configs
from engine.errors import InputError
from engine.formats import huggingface
from engine.formats.source import read_json_object
from engine.model import MoEModel


def is_packaged(checkpoint: str) -> bool:
    """True if the package is installed and has a model of exactly this name."""
    return package_folder() is not None and checkpoint in packaged_configs()


def packaged_models() -> dict[str, MoEModel]:
    """Every packaged MoE model, by checkpoint; dense models are left out. Raises InputError without the package."""
    return dict(_models(tuple(packaged_configs().items())))


@functools.cache
def _models(configs: tuple[tuple[str, Path], ...]) -> dict[str, MoEModel]:
    models = {}
    for checkpoint, path in configs:
        try:
            models[checkpoint] = _model(checkpoint, path)
        except InputError:
            continue
    return models


def packaged_model(checkpoint: str) -> MoEModel:
    """The model of a checkpoint such as `deepseek-ai/DeepSeek-V3`. Raises InputError if the package has no such model, and
    for one without experts."""
    name = _full_name(checkpoint)
    return _model(name, packaged_configs()[name])


def packaged_config(checkpoint: str) -> Path:
    """The file of a checkpoint. Raises InputError if the package has no such model."""
    return packaged_configs()[_full_name(checkpoint)]


def _full_name(checkpoint: str) -> str:
    """The checkpoint's whole name; one without its owner is enough if only one owner has such a model."""
    configs = packaged_configs()
    if checkpoint in configs:
        return checkpoint
    named = [name for name in configs if name.rpartition("/")[2].lower() == checkpoint.lower()]
    if len(named) == 1:
        return named[0]
    raise InputError(f"no packaged model is called {checkpoint}; name a config.json, or one that 'catalogue' lists")


def _model(checkpoint: str, path: Path) -> MoEModel:
    model = huggingface.model_of_config(read_json_object(path), path)
    return model.model_copy(update={"name": checkpoint.rpartition("/")[2][:80]})

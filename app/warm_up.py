"""What pages need that takes a while to load: loaded with the first page of a process, not with each one's first visit."""

import contextlib
import functools
import importlib
import pkgutil
import threading

import app
from engine.errors import InputError
from engine.formats.packaged import packaged_models
from engine.simulate.compile_ahead import compile_ahead

MAIN = "app.main"
"""Streamlit's own script."""


@functools.cache
def begin() -> threading.Thread:
    """Import what all pages import, 0.3 s beside the seconds that the first page waits for PyTorch anyway, and load the
    compiled simulation and the catalogue of models in the background, in the thread that is returned; once a process."""
    for module in pkgutil.walk_packages(app.__path__, "app."):
        if module.name != MAIN:
            importlib.import_module(module.name)
    loading = threading.Thread(target=_load, daemon=True)
    loading.start()
    return loading


def _load() -> None:
    compile_ahead()
    with contextlib.suppress(InputError):  # the package is not installed
        packaged_models()

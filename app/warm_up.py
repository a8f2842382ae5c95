"""What pages need that takes a while to load: loaded with the first page of a process, not with each one's first visit.

Python's garbage collector, kept from walking through every imported library after every click.
"""

import contextlib
import functools
import gc
import importlib
import pkgutil
import sys
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


MANY = 50
"""New modules that are worth a walk."""
_seen = 0


def spare() -> None:
    """Take what the imported modules hold out of later collections; call at the start of a run.

    Streamlit collects after every run of a page. With the engine's libraries that is some 350 000 objects and 0.2 s, most of
    what a page costs, and not one of them is garbage. Pages import more when they are first visited, so it is done again
    then.
    """
    global _seen
    if len(sys.modules) >= _seen + MANY:
        _seen = len(sys.modules)
        gc.collect()
        gc.freeze()

"""Loads the slow parts of pages in the background, after the first page of a process has been drawn; and keeps Python's garbage
collector from walking through every imported library after every click."""

import contextlib
import functools
import gc
import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable

import app
from engine.errors import InputError
from engine.formats.packaged import packaged_models
from engine.launch.places.devices import seen_by_another_process
from engine.simulate.compile_ahead import compile_ahead

MAIN = "app.main"
"""Streamlit's own script."""


@functools.cache
def begin() -> threading.Thread:
    """Import the modules of all pages, load the catalogue of models and find the devices, once a process.

    Returns the thread that does so.
    """
    return _started(_load)


@functools.cache
def begin_simulation() -> threading.Thread:
    """Load the compiled simulation, once a process. It takes 60 MB, so call it when there will be a plan to simulate.

    Returns the thread that does so.
    """
    return _started(compile_ahead)


def _started(work: Callable[[], None]) -> threading.Thread:
    loading = threading.Thread(target=work, daemon=True)
    loading.start()
    return loading


def _load() -> None:
    for module in pkgutil.walk_packages(app.__path__, "app."):
        if module.name != MAIN:
            importlib.import_module(module.name)
    importlib.import_module("alembic.command")  # which opening the team's database waits for
    with contextlib.suppress(InputError):  # the package is not installed
        packaged_models()
    if "torch" not in sys.modules:
        seen_by_another_process()


MANY = 50
"""New modules that are worth another walk."""
_seen = 0


def spare() -> None:
    """Take the objects of the imported modules out of later collections; call at the start of a run.

    Streamlit collects after every run of a page. With the engine's libraries that is some 350 000 objects and 0.2 s, most of
    the cost of a page, and not one of them is garbage. Pages import more when they are first visited, so it is done again then.
    """
    global _seen
    if len(sys.modules) >= _seen + MANY:
        _seen = len(sys.modules)
        gc.collect()
        gc.freeze()
    gc.enable()  # which the main script has kept from walking through what it imports

"""Python's garbage collector, kept from walking through every imported library after every click."""

import gc
import sys

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

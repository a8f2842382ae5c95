"""The kept data: recordings, documents, sessions and simulations as files in the data folder, the team's work in a database.

Here: kept results of simulations, timelines and figures, under digests of all that they depend on. All of it can be simulated
again, so a file that is damaged, or was kept in another form, counts as not there.
"""

import contextlib
import functools
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import TypeAdapter
from pydantic_core import to_json

from engine.errors import InputError
from engine.files import data_folder, open_atomically, write_atomically
from engine.formats.source import one_clear_line
from engine.store.files import (
    alone_with_sessions,
    config_path,
    has_workload,
    is_digest,
    load_document,
    load_session,
    load_workload,
    save_config,
    save_document,
    save_session,
    save_workload,
    scratch,
    session_written,
    used_now,
    writing,
)
from engine.timeline import COLUMNS, KINDS, STREAMS, Timeline
from engine.workload import digest_of

CATEGORIES = {"stream": STREAMS, "kind": KINDS}
LONG, LONGEST = 20_000, 2_000_000
"""Least and most events of a timeline that is kept: with fewer it is simulated in less time than it is written and read
(that of DeepSeek-R1's size on 32 GPUs has 120,640, takes 0.05 to 0.28 s and is read in 0.02 s); with more it takes some
20 MB. Sends are bundled long before that (`engine.simulate.events`)."""
FIGURES = 3
"""Version of the figures. Raise it when the meaning of one changes; those of other versions are computed again."""


Kind = TypeVar("Kind")
"""Few numbers about a plan: a dataclass of fields that pydantic writes and reads, unless it has `to_dict` and `from_dict`."""

_adapter = functools.cache(TypeAdapter)


def is_worth_keeping(timeline: Timeline) -> bool:
    """True if a simulated timeline is read sooner than it is simulated, and small enough to be kept. Few bundles stand
    for many sends."""
    events = len(timeline.events)
    return (timeline.bundled or events > LONG) and events <= LONGEST


def save_timeline(key: str, timeline: Timeline) -> None:
    """Keep a simulated timeline under a digest of all that it depends on."""
    path = _path(key, "timelines", "npz")
    about = {field.name: getattr(timeline, field.name) for field in fields(timeline) if field.name != "events"}
    columns = {name: timeline.events[name] for name in COLUMNS}
    for name in CATEGORIES:
        columns[name] = columns[name].cat.codes
    with writing(path.parent), open_atomically(path) as file:
        np.savez_compressed(file, about=np.asarray(json.dumps(about)), **columns)


def load_timeline(key: str) -> Timeline | None:
    """The timeline that was kept under this digest, which counts as used now; None if there is none that can be read."""
    import pandas as pd

    path = _path(key, "timelines", "npz")
    if not used_now(path):
        return None
    try:
        with one_clear_line(path), np.load(path, allow_pickle=False) as file:
            parts = dict(file)
        about = json.loads(str(parts.pop("about")))
        for name, categories in CATEGORIES.items():
            parts[name] = pd.Categorical.from_codes(parts[name], categories=list(categories))
        about |= {name: about[name] and tuple(about[name]) for name in ("resources", "labels")}
        return Timeline(events=pd.DataFrame({name: parts[name] for name in COLUMNS}), **about)
    except (ValueError, LookupError, TypeError):  # an InputError too
        return None


def save_figures(figures: Kind, *depends_on: str) -> None:
    """Keep figures under a digest of their kind and all that they depend on."""
    kind = type(figures)
    own = hasattr(kind, "to_dict")
    data = figures.to_dict() if own else _adapter(kind).dump_python(figures, mode="json")
    path = _path_of_figures(kind, depends_on)
    with writing(path.parent):
        write_atomically(path, to_json(data, inf_nan_mode="constants"))


def load_figures(kind: type[Kind], *depends_on: str) -> Kind | None:
    """The figures that were kept, which count as used now; None if there are none that can be read."""
    path = _path_of_figures(kind, depends_on)
    if used_now(path):
        # Whatever is wrong with them: no page should fail for figures that it can compute.
        with contextlib.suppress(Exception):
            data = json.loads(path.read_bytes())
            return kind.from_dict(data) if hasattr(kind, "from_dict") else _adapter(kind).validate_python(data)
    return None


def has_figures(kind: type, *depends_on: str) -> bool:
    """True if figures were kept under these digests."""
    return _path_of_figures(kind, depends_on).exists()


def figures(kind: type[Kind], make: Callable[[], Kind], *depends_on: str) -> Kind:
    """The figures that were kept; else they are made and kept. Raises the errors of `make`."""
    if (kept := load_figures(kind, *depends_on)) is not None:
        return kept
    made = make()
    with contextlib.suppress(InputError):  # a full disk: they are made again
        save_figures(made, *depends_on)
    return made


def _path_of_figures(kind: type, depends_on: tuple[str, ...]) -> Path:
    return _path(digest_of(f"{kind.__name__} {FIGURES}", *depends_on), "figures", "json")


def _path(digest: str, folder: str, ending: str) -> Path:
    if not is_digest(digest):
        raise InputError("not the digest of a simulation")
    return data_folder() / folder / f"{digest}.{ending}"

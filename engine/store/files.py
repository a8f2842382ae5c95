"""The data folder: recordings by digest, jobs, runs. `SWITCHYARD_DATA` says where; nothing is written outside it."""

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import numpy as np
import pandas as pd

from engine.errors import InputError
from engine.files import write_atomically
from engine.formats.source import one_clear_line
from engine.schema import Frozen
from engine.timeline import COLUMNS, KINDS, STREAMS, Timeline
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload

Document = TypeVar("Document", bound=Frozen)
CATEGORIES = {"stream": STREAMS, "kind": KINDS}
_DIGEST = re.compile(r"[0-9a-f]{64}")


def data_folder() -> Path:
    """The folder from SWITCHYARD_DATA, or `.switchyard` in the project's root; made if missing."""
    folder = Path(os.environ.get("SWITCHYARD_DATA") or Path(__file__).parents[2] / ".switchyard").resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the data folder {folder} cannot be made ({error.strerror}); set SWITCHYARD_DATA") from None
    return folder


def save_workload(workload: Workload) -> str:
    """Keep a recording under its digest and return the digest."""
    path = _path(workload.digest)
    if not path.exists():
        parts = {field.name: getattr(workload, field.name) for field in fields(workload)}
        arrays = {name: np.asarray(value) for name, value in parts.items() if value is not None}
        partial = path.with_suffix(f".{secrets.token_hex(4)}.partial")  # several sessions may save the same at once
        with _writing(path.parent):
            with partial.open("wb") as file:
                np.savez(file, kind=np.asarray(type(workload).__name__), **arrays)
            partial.replace(path)
    return workload.digest


def has_workload(digest: str) -> bool:
    """Whether the data folder has the recording with this digest."""
    return bool(_DIGEST.fullmatch(digest)) and _path(digest).exists()


def load_workload(digest: str) -> Workload:
    """The recording with this digest; InputError when the data folder does not have it."""
    path = _path(digest)
    if not path.exists():
        raise InputError("this recording is no longer in the data folder; upload it again")
    with one_clear_line(path), np.load(path, allow_pickle=False) as file:
        parts = dict(file)
    kind, name = str(parts["kind"]), str(parts["name"])
    if kind == "RoutingTrace":
        return RoutingTrace(
            name, parts["experts"], int(parts["num_experts"]), parts.get("sequence"), parts.get("source_rank")
        )
    if kind == "ExpertLoad":
        return ExpertLoad(name, parts["load"], tuple(parts["model_layers"].tolist()))
    return TrafficMatrix(name, parts["bytes"], float(parts["bytes_per_token"]))


def save_timeline(key: str, timeline: Timeline) -> None:
    """Keep a simulated timeline under a digest of all that it depends on."""
    path = _path(key, "timelines")
    partial = path.with_suffix(f".{os.getpid()}.partial")
    about = {
        "resources": timeline.resources,
        "source": timeline.source,
        "cost_source": timeline.cost_source,
        "labels": timeline.labels,
        "bundled": timeline.bundled,
        "exact": timeline.exact,
        "latest": timeline.latest,
    }
    columns = {name: timeline.events[name] for name in COLUMNS}
    for name in CATEGORIES:
        columns[name] = columns[name].cat.codes
    with _writing(path.parent):
        with partial.open("wb") as file:
            np.savez_compressed(file, about=np.asarray(json.dumps(about)), **columns)
        partial.replace(path)


def load_timeline(key: str) -> Timeline | None:
    """The timeline that was kept under this digest; None where there is none, or one that cannot be read, as it can be
    simulated again."""
    path = _path(key, "timelines")
    if not path.exists():
        return None
    try:
        with one_clear_line(path), np.load(path, allow_pickle=False) as file:
            parts = dict(file)
    except InputError:
        return None
    about = json.loads(str(parts.pop("about")))
    for name, categories in CATEGORIES.items():
        parts[name] = pd.Categorical.from_codes(parts[name], categories=list(categories))
    about |= {name: about[name] and tuple(about[name]) for name in ("resources", "labels")}
    return Timeline(events=pd.DataFrame({name: parts[name] for name in COLUMNS}), **about)


def save_document(document: Frozen) -> str:
    """Keep a cluster or a model under its digest and return the digest."""
    path = data_folder() / "documents" / f"{document.digest}.json"
    with _writing(path.parent):
        write_atomically(path, document.to_json())
    return document.digest


def load_document(kind: type[Document], digest: str) -> Document:
    """The cluster or model with this digest; InputError when the data folder does not have it."""
    path = data_folder() / "documents" / f"{digest}.json"
    if not _DIGEST.fullmatch(digest) or not path.exists():
        raise InputError(f"the {kind.__name__} of this plan is not in the data folder")
    return kind.from_json(path.read_bytes(), path.name)


def save_session(token: str, text: str) -> None:
    """Keep what a browser session has open (JSON text) under its token, so that a reload finds it again."""
    path = _session(token)
    with _writing(path.parent):
        write_atomically(path, text)


def load_session(token: str) -> str | None:
    """The text kept for a session, as it was saved unless it was damaged since; None: none was."""
    path = _session(token)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Make `folder`, and turn a full disk or a missing permission into an InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(
            f"the data folder {folder} cannot be written ({error.strerror}); set SWITCHYARD_DATA"
        ) from None


def _session(token: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]{8,40}", token):
        raise InputError("this session link is not valid")
    return data_folder() / "sessions" / f"{token}.json"


def _path(digest: str, folder: str = "workloads") -> Path:
    if not _DIGEST.fullmatch(digest):
        raise InputError("not the digest of a recording")
    return data_folder() / folder / f"{digest}.npz"

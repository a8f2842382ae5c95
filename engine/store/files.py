"""The data folder: recordings by digest, jobs, runs. `SWITCHYARD_DATA` names it; nothing is written outside it."""

import hashlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TypeVar, get_args

import numpy as np
from filelock import FileLock

from engine.errors import InputError
from engine.files import PRIVATE_FILE, data_folder, make_folder, open_atomically, write_atomically
from engine.formats.source import one_clear_line
from engine.schema import Frozen
from engine.workload import Origin, Workload

Document = TypeVar("Document", bound=Frozen)
VERSION = 1
"""Version of the arrays in which a recording is kept. Raise it when one is renamed or changes its meaning, and let
`load_workload` mend the older ones. Those of the first release have none."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_TOUCHED_AFTER = 12 * 3600.0
"""Seconds after which a file that is used is marked as used."""
_PATIENCE = 20.0
"""Seconds for which a process that stores a session waits for others."""

_WORKLOADS = {kind.__name__: kind for kind in get_args(Workload)}
_NOT_ARRAYS: dict[str, Callable[[np.ndarray], object]] = {
    "name": str,
    "num_experts": int,
    "bytes_per_token": float,
    "model_layers": lambda layers: tuple(layers.tolist()),
    "origin": lambda text: Origin.model_validate_json(str(text)),
}
"""Fields of workloads that are no arrays, each with a function that reads it from one."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in the data folder for as long as something is being read."""
    with writing(where := data_folder()):
        folder = tempfile.TemporaryDirectory(dir=where, prefix="reading-", ignore_cleanup_errors=True)
    with folder as path:
        yield Path(path)


def save_workload(workload: Workload) -> str:
    """Keep a recording under its digest and return the digest. One that is there counts as used now."""
    path = _path(workload.digest)
    if not used_now(path):
        parts = {field.name: getattr(workload, field.name) for field in fields(workload)}
        parts["origin"] = workload.origin and workload.origin.model_dump_json()
        arrays = {name: np.asarray(value) for name, value in parts.items() if value is not None}
        with writing(path.parent), open_atomically(path) as file:
            np.savez(file, version=np.asarray(VERSION), kind=np.asarray(type(workload).__name__), **arrays)
    return workload.digest


def has_workload(digest: str) -> bool:
    """True if the data folder has the recording with this digest."""
    return is_digest(digest) and _path(digest).exists()


def load_workload(digest: str) -> Workload:
    """The recording with this digest. Raises InputError if the data folder does not have it."""
    path = _path(digest)
    if not path.exists():
        raise InputError("this recording is no longer in the data folder; upload it again")
    with one_clear_line(path), np.load(path, allow_pickle=False) as file:
        parts = dict(file)
        if int(parts.pop("version", 1)) > VERSION:
            raise InputError(f"the recording in {path} was kept by a later version of Switchyard; use that one")
        try:
            kind = _WORKLOADS[str(parts.pop("kind"))]
            for field, read in _NOT_ARRAYS.items():
                if field in parts:
                    parts[field] = read(parts[field])
            return kind(**parts)
        except (LookupError, TypeError, AttributeError):
            raise ValueError("it is no recording") from None


def save_document(document: Frozen) -> str:
    """Keep a cluster or a model under its digest and return the digest."""
    path = data_folder() / "documents" / f"{document.digest}.json"
    with writing(path.parent):
        write_atomically(path, document.to_json())
    return document.digest


def load_document(kind: type[Document], digest: str) -> Document:
    """The cluster or model with this digest. Raises InputError if the data folder does not have it."""
    path = data_folder() / "documents" / f"{digest}.json"
    if not is_digest(digest) or not path.exists():
        words = {"MoEModel": "model", "TrainingStep": "training step", "OperatorGraph": "operator graph"}
        named = words.get(kind.__name__, kind.__name__.lower())
        raise InputError(f"the {named} of this plan is not in the data folder; open or name it too")
    with one_clear_line(path):
        return kind.from_json(path.read_bytes(), path.name)


def save_config(path: Path) -> str:
    """Keep a model's `config.json` under the digest of its content and return the digest."""
    content = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(content.encode()).hexdigest()
    kept = data_folder() / "configs" / f"{digest}.json"
    with writing(kept.parent):
        write_atomically(kept, content)
    return digest


def config_path(digest: str) -> Path:
    """The file that `save_config` kept. Raises InputError if the data folder does not have it."""
    path = data_folder() / "configs" / f"{digest}.json"
    if not is_digest(digest) or not path.exists():
        raise InputError("the config.json of this model is no longer in the data folder; upload it again")
    return path


def save_session(token: str, text: str) -> None:
    """Keep the contents of a browser session (JSON text) under its token, so that a reload finds them again."""
    path = _session(token)
    with writing(path.parent):
        write_atomically(path, text)


def load_session(token: str) -> str | None:
    """The text kept for a session, as it was saved unless it was damaged since; None: none was. It counts as used now.
    Raises InputError if the file is there and cannot be read."""
    path = _session(token)
    used_now(path)
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"the session in {path} cannot be read ({error.strerror or error})") from None


def session_written(token: str) -> tuple[int, int] | None:
    """Two numbers that change whenever a session is saved; None: none was."""
    try:
        about = _session(token).stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_ino


@contextmanager
def alone_with_sessions() -> Iterator[None]:
    """Let nobody else save a session meanwhile, in any studio: for a look at one before it is replaced."""
    with writing(folder := data_folder()), FileLock(folder / "sessions.lock", _PATIENCE, PRIVATE_FILE):
        yield


def used_now(path: Path) -> bool:
    """True if there is such a file; if so, its age begins anew (see `engine.upkeep.retention`). Twice a day is enough:
    other tabs take a session that was touched for one that was saved, and look at it."""
    try:
        if time.time() - path.stat().st_mtime > _TOUCHED_AFTER:
            os.utime(path)
    except FileNotFoundError:
        return False
    except OSError:  # a disk that is read-only, or somebody else's file
        return path.exists()
    return True


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make `folder`, and turn a full disk or a missing permission into an InputError."""
    try:
        make_folder(folder)
        yield
    except OSError as error:
        raise InputError(
            f"the data folder {folder} cannot be written ({error.strerror or error}); make room there, or set "
            "SWITCHYARD_DATA to another one"
        ) from None


def _session(token: str) -> Path:
    if not re.fullmatch(r"[A-Za-z0-9_-]{8,40}", token):
        raise InputError("this session link is not valid")
    return data_folder() / "sessions" / f"{token}.json"


def is_digest(text: str) -> bool:
    """True if a text is a digest, and so can be part of a file's name."""
    return bool(_DIGEST.fullmatch(text))


def _path(digest: str) -> Path:
    if not is_digest(digest):
        raise InputError("not the digest of a recording")
    return data_folder() / "workloads" / f"{digest}.npz"

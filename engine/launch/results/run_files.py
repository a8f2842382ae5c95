"""The files that the ranks of a launch leave in its run folder, read: their events as timelines, and what rank 0 reports."""

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from engine.errors import InputError
from engine.timeline import COLUMNS, HOST_KINDS, KINDS, NETWORK_KINDS, STREAMS, Timeline


def measured_timelines(folder: Path, ranks: int, plans: int, source: str) -> list[list[Timeline]]:
    """The timed passes of every plan of a launch, one timeline each, in order. A send is one event from its sender's post to
    its receiver's completion; a collective is one event on every rank. Raises InputError if a rank's file is missing or torn.

    source: the device that they were measured on
    """
    parts = []
    for rank in range(ranks):
        parts.append(pd.DataFrame(arrays_of(folder / f"events-{rank}.npz")).assign(seen_by=rank))
    events = pd.concat(parts, ignore_index=True)
    sends = events["dst"] >= 0
    key = ["plan", "number", "layer", "kind", "model", "phase", "src", "dst", "row", "bytes", "label"]
    by_sender = events[sends & (events["seen_by"] == events["src"])].drop(columns="end")
    by_receiver = events[sends & (events["seen_by"] == events["dst"])][[*key, "end"]]
    joined = pd.concat([events[~sends], by_sender.merge(by_receiver, on=key)], ignore_index=True)
    names = tuple(f"rank {rank}" for rank in range(ranks))
    timelines: list[list[Timeline]] = [[] for _ in range(plans)]
    for (plan, _), timed_pass in joined.groupby(["plan", "number"]):
        begin = timed_pass["start"].min()
        timed_pass = timed_pass.assign(end=timed_pass["end"] - begin, start=timed_pass["start"] - begin)
        timed_pass = timed_pass.sort_values("start", ignore_index=True)
        on = [timed_pass["kind"].isin(kinds) for kinds in (NETWORK_KINDS, HOST_KINDS)]
        stream = np.select(on, ["network", "host"], "compute")
        frame = timed_pass.rename(columns={"src": "resource", "dst": "peer"}).assign(
            kind=pd.Categorical(timed_pass["kind"], categories=list(KINDS)),
            stream=pd.Categorical(stream, categories=list(STREAMS)),
        )
        labels = tuple(timed_pass["label"]) if timed_pass["label"].any() else None
        timelines[plan].append(Timeline(frame[list(COLUMNS)], names, "measured", source, labels))
    return timelines


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a rank's file, by name, in their order. Raises InputError if it is missing or torn."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> InputError:
    """The error for a file that a rank should have left whole."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else "it is torn"
    return InputError(f"the measurements in {path} cannot be read ({why}); launch again")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file of rank 0. Raises InputError if it is missing or torn."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None

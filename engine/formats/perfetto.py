"""Timelines as Chrome Trace Event JSON, which Perfetto and chrome://tracing open."""

import heapq
from collections.abc import Sequence

import numpy as np
import pandas as pd

from engine.schema import json_text
from engine.timeline import STREAMS, Timeline

LANES_PER_STREAM = 1000
"""Thread ids of stream s are s × 1000, s × 1000 + 1, …: one for each of the sends that run at once."""
MEASURED = 100_000
"""Process ids of a measured run that comes with a predicted one begin here."""


def write_trace(timeline: Timeline, measured: Timeline | None = None) -> str:
    """The JSON text: one complete event (`ph` X) per event, times in µs, process = GPU, thread = stream. Slices of one thread
    must not overlap unless they nest, so sends that run at once go to further lanes of the network stream.

    measured: a run of the same plan; its processes make a second group below those of the timeline, both begin at 0, and each
        process is called after its group
    """
    about = {"source": timeline.source, "cost_source": timeline.cost_source}
    if measured is None:
        trace = _group(timeline, 0, timeline.resources)
    else:
        names = ([f"{part.source} · {name}" for name in part.resources] for part in (timeline, measured))
        trace = _group(timeline, 0, next(names)) + _group(measured, MEASURED, next(names))
        order = [*range(len(timeline.resources)), *range(MEASURED, MEASURED + len(measured.resources))]
        trace += [
            {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}}
            for place, pid in enumerate(order)
        ]
        about["measured_on"] = measured.cost_source
    return json_text({"traceEvents": trace, "displayTimeUnit": "ms", "otherData": about})


def _group(timeline: Timeline, first: int, names: Sequence[str]) -> list[dict]:
    """The records of one timeline, its GPUs as the processes first, first + 1, … of these names."""
    events = timeline.events.assign(label="" if timeline.labels is None else timeline.labels)
    events = events.sort_values(["start", "end"], kind="stable", ignore_index=True)
    thread = _threads(events)
    trace = [_label("process_name", first + gpu, 0, name) for gpu, name in enumerate(names)]
    for gpu, tid in sorted(set(zip(events["resource"].tolist(), thread.tolist(), strict=True))):
        stream, lane = divmod(tid, LANES_PER_STREAM)
        name = STREAMS[stream] if lane == 0 else f"{STREAMS[stream]} {lane + 1}"
        trace.append(_label("thread_name", first + gpu, tid, name))
    return trace + [
        {
            "ph": "X",
            "name": _name_of_event(event),
            "cat": event.kind,
            "pid": first + int(event.resource),
            "tid": int(tid),
            "ts": event.start * 1e6,
            "dur": (event.end - event.start) * 1e6,
            "args": {
                "layer": int(event.layer),
                "model": int(event.model),
                "peer": int(event.peer),
                "bytes": float(event.bytes),
            },
        }
        for event, tid in zip(events.itertuples(index=False), thread, strict=True)
    ]


def _threads(events: pd.DataFrame) -> np.ndarray:
    """The thread id of every event, int64[event], so that no two of a GPU's thread overlap. events: sorted by start"""
    thread = np.empty(len(events), dtype=np.int64)
    for (_, stream), group in events.groupby(["resource", "stream"], observed=True):
        running: list[tuple[float, int]] = []
        free: list[int] = []
        for row, start, end in zip(group.index, group["start"], group["end"], strict=True):
            while running and running[0][0] <= start:
                heapq.heappush(free, heapq.heappop(running)[1])
            lane = heapq.heappop(free) if free else len(running)
            heapq.heappush(running, (end, lane))
            thread[row] = STREAMS.index(stream) * LANES_PER_STREAM + lane
    return thread


def _name_of_event(event) -> str:
    if event.label:
        return event.label
    model = "second model's " if event.model else ""
    return f"{model}{event.kind} layer {event.layer}" + (f" → GPU {event.peer}" if event.peer >= 0 else "")


def _label(kind: str, gpu: int, tid: int, name: str) -> dict:
    return {"ph": "M", "name": kind, "pid": gpu, "tid": tid, "args": {"name": name}}

"""Timelines as Chrome Trace Event JSON, which Perfetto and chrome://tracing open."""

import heapq
import json

import numpy as np
import pandas as pd

from engine.timeline import STREAMS, Timeline

LANES_PER_STREAM = 1000
"""Thread ids of stream s are s × 1000, s × 1000 + 1, …: one per send that runs beside others."""


def write_trace(timeline: Timeline) -> str:
    """The JSON text: one complete event (`ph` X) per event, times in µs, process = GPU, thread = stream.

    Slices of one thread must not overlap unless they nest, so sends that run side by side go to further lanes of the
    network stream.
    """
    events = timeline.events.assign(label="" if timeline.labels is None else timeline.labels)
    events = events.sort_values(["start", "end"], kind="stable", ignore_index=True)
    thread = _threads(events)
    trace = [_label("process_name", gpu, 0, name) for gpu, name in enumerate(timeline.resources)]
    trace += [
        _label("thread_name", gpu, tid, _name_of_thread(tid))
        for gpu, tid in sorted(set(zip(events["resource"].tolist(), thread.tolist(), strict=True)))
    ]
    trace += [
        {
            "ph": "X",
            "name": _name_of_event(event),
            "cat": event.kind,
            "pid": int(event.resource),
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
    other = {"source": timeline.source, "cost_source": timeline.cost_source}
    return json.dumps({"traceEvents": trace, "displayTimeUnit": "ms", "otherData": other}, allow_nan=False)


def _threads(events: pd.DataFrame) -> np.ndarray:
    """int64[event]: thread id, so that no two events of a GPU's thread overlap. Events are sorted by start."""
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


def _name_of_thread(tid: int) -> str:
    stream, lane = divmod(tid, LANES_PER_STREAM)
    return STREAMS[stream] if lane == 0 else f"{STREAMS[stream]} {lane + 1}"


def _name_of_event(event) -> str:
    if event.label:
        return event.label
    model = "second model's " if event.model else ""
    return f"{model}{event.kind} layer {event.layer}" + (f" → GPU {event.peer}" if event.peer >= 0 else "")


def _label(kind: str, gpu: int, tid: int, name: str) -> dict:
    return {"ph": "M", "name": kind, "pid": gpu, "tid": tid, "args": {"name": name}}

"""Chrome Trace Event JSON out of a timeline."""

import json
from collections import defaultdict
from itertools import pairwise

import pandas as pd
import pytest

from engine.formats.perfetto import write_trace
from engine.timeline import COLUMNS, Timeline

EVENTS = [
    (0, "compute", 0.0, 1e-3, "gate", 0, 0, -1, 0.0),
    (1, "compute", 0.0, 2e-3, "gate", 0, 0, -1, 0.0),
    (0, "network", 2e-3, 4e-3, "dispatch", 0, 0, 1, 100.0),
    (0, "network", 3e-3, 5e-3, "dispatch", 0, 0, 2, 200.0),
    (0, "network", 4e-3, 6e-3, "dispatch", 0, 0, 1, 300.0),
]


def test_events_in_microseconds_on_named_threads_where_slices_do_not_overlap():
    timeline = Timeline(pd.DataFrame(EVENTS, columns=list(COLUMNS)), ("GPU 0 · A", "GPU 1 · B"), "simulated", "datasheet")
    written = json.loads(write_trace(timeline))["traceEvents"]
    slices = [event for event in written if event["ph"] == "X"]
    assert len(slices) == len(EVENTS)
    first = next(event for event in slices if event["name"].startswith("dispatch"))
    assert (first["ts"], first["dur"], first["pid"]) == pytest.approx((2000, 2000, 0))
    assert first["args"] == {"layer": 0, "model": 0, "peer": 1, "bytes": 100.0}
    labels = [event for event in written if event["ph"] == "M"]
    assert {event["args"]["name"] for event in labels if event["name"] == "process_name"} == {"GPU 0 · A", "GPU 1 · B"}
    threads = defaultdict(list)
    for event in slices:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {(event["pid"], event["tid"]) for event in labels if event["name"] == "thread_name"} == set(threads)
    assert len(threads) == 4
    for spans in threads.values():
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(sorted(spans)))


def test_operators_of_a_training_step_go_by_their_own_names_and_no_events_make_no_slices():
    events = pd.DataFrame(EVENTS[:3], columns=list(COLUMNS)).iloc[::-1]
    timeline = Timeline(events, ("GPU 0", "GPU 1"), "simulated", "datasheet", ("1.dispatch · part 1 of 2", "1.gate", "0.qkv"))
    slices = [event for event in json.loads(write_trace(timeline))["traceEvents"] if event["ph"] == "X"]
    assert {(event["name"], event["cat"], event["pid"]) for event in slices} == {
        ("1.dispatch · part 1 of 2", "dispatch", 0),
        ("1.gate", "gate", 1),
        ("0.qkv", "gate", 0),
    }
    timeline = Timeline(pd.DataFrame(columns=list(COLUMNS)), ("GPU 0",), "measured", "this machine")
    assert [event["ph"] for event in json.loads(write_trace(timeline))["traceEvents"]] == ["M"]


def test_prediction_and_measurement_are_two_groups_of_processes():
    events = pd.DataFrame(EVENTS, columns=list(COLUMNS))
    predicted = Timeline(events, ("GPU 0", "GPU 1"), "simulated", "datasheet")
    measured = Timeline(events.assign(end=events["end"] * 2), ("rank 0", "rank 1"), "measured", "two CPUs")
    trace = json.loads(write_trace(predicted, measured))
    records = trace["traceEvents"]
    names = {record["pid"]: record["args"]["name"] for record in records if record["name"] == "process_name"}
    assert list(names.values()) == ["simulated · GPU 0", "simulated · GPU 1", "measured · rank 0", "measured · rank 1"]
    order = {record["pid"]: record["args"]["sort_index"] for record in records if record["name"] == "process_sort_index"}
    assert sorted(names, key=order.__getitem__) == list(names)
    slices = [record for record in records if record["ph"] == "X"]
    assert len(slices) == 2 * len(EVENTS) and {record["pid"] for record in slices} == set(names)
    longest = {pid: max(record["dur"] for record in slices if record["pid"] == pid) for pid in names}
    assert longest[0] < longest[list(names)[2]]
    assert trace["otherData"] == {"source": "simulated", "cost_source": "datasheet", "measured_on": "two CPUs"}

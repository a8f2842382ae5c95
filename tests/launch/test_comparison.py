"""Measured beside predicted: the two ends of a send become one event, and the sums are those of the steps."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from engine.launch.rank.recorder import COLUMNS as RECORDED
from engine.launch.results.comparison import compare
from engine.launch.results.run import measured_timelines
from engine.timeline import COLUMNS, KINDS, STREAMS, Timeline

EVENT = ("number", "layer", "kind", "phase", "src", "dst", "row", "bytes", "start", "end")
"""Of one plan; plan, model and label are the same for all."""


def write(folder: Path, *by_rank: list[tuple]) -> None:
    """The event files of a launch, one list of events a rank."""
    for rank, events in enumerate(by_rank):
        columns = {name: np.array(column) for name, column in zip(EVENT, zip(*events, strict=True), strict=True)}
        count = len(events)
        columns |= {"plan": np.zeros(count, int), "model": np.zeros(count, int), "label": np.full(count, "")}
        assert set(columns) == set(RECORDED)
        np.savez(folder / f"events-{rank}.npz", **columns)


def timeline(*events: tuple) -> Timeline:
    """A timeline from (kind, layer, resource, start, end)."""
    rows = [
        {
            "resource": resource,
            "stream": "network" if kind in ("dispatch", "combine") else "compute",
            "start": start,
            "end": end,
            "kind": kind,
            "layer": layer,
            "model": 0,
            "peer": -1,
            "bytes": 0.0,
        }
        for kind, layer, resource, start, end in events
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    frame["kind"] = pd.Categorical(frame["kind"], categories=list(KINDS))
    frame["stream"] = pd.Categorical(frame["stream"], categories=list(STREAMS))
    return Timeline(frame, ("rank 0", "rank 1"), "measured", "test")


def test_a_send_runs_from_its_senders_post_to_its_receivers_end(tmp_path):
    sender = (1, 0, "dispatch", 2, 0, 1, 5, 640.0)
    write(
        tmp_path,
        [(1, 0, "gate", 0, 0, -1, 0, 0.0, 100.0, 101.0), (*sender, 102.0, 103.0)],
        [(1, 0, "gate", 0, 1, -1, 0, 0.0, 100.5, 101.5), (*sender, 101.0, 104.0)],
    )
    ((measured,),) = measured_timelines(tmp_path, 2, 1, "two cores")
    sends = measured.events[measured.events["kind"] == "dispatch"]
    assert sends[["resource", "peer", "start", "end", "bytes"]].to_numpy().tolist() == [[0, 1, 2.0, 4.0, 640.0]]
    assert len(measured.events) == 3 and measured.total == 4.0
    assert (measured.source, measured.cost_source, measured.resources) == (
        "measured",
        "two cores",
        ("rank 0", "rank 1"),
    )
    assert measured.events["stream"].tolist() == ["compute", "compute", "network"]


def test_passes_pieces_and_directions_are_kept_apart(tmp_path):
    files: list[list[tuple]] = [[], []]
    expected = []
    for number in (1, 2):
        origin = 50.0 * number
        for rank in (0, 1):
            files[rank].append((number, 0, "gate", 0, rank, -1, 0, 0.0, origin, origin + 1))
        at = origin + 1
        for kind in ("dispatch", "combine"):
            for src, dst in ((0, 1), (1, 0)):
                for phase, row in ((0, 0), (0, 7), (1, 9)):  # folding makes two pieces of one pair in one phase
                    key = (number, 0, kind, phase, src, dst, row, 64.0)
                    files[src].append((*key, at, at + 5))
                    files[dst].append((*key, at - 0.5, at + 2))
                    expected.append((number, kind, src, dst, at - origin, at + 2 - origin))
                    at += 3
    write(tmp_path, *files)
    (timelines,) = measured_timelines(tmp_path, 2, 1, "x")
    sends = [
        (number, row.kind, row.resource, row.peer, row.start, row.end)
        for number, timeline in enumerate(timelines, start=1)
        for row in timeline.events.itertuples()
        if row.peer >= 0
    ]
    assert sorted(sends) == sorted(expected)
    assert all(set(timeline.events.columns) == set(COLUMNS) for timeline in timelines)


def test_a_single_rank_has_no_sends(tmp_path):
    write(tmp_path, [(1, 0, "gate", 0, 0, -1, 0, 0.0, 3.0, 4.0), (1, 0, "ffn", 0, 0, -1, 0, 0.0, 4.0, 6.5)])
    ((measured,),) = measured_timelines(tmp_path, 1, 1, "x")
    assert measured.total == 3.5 and measured.events["stream"].tolist() == ["compute", "compute"]
    assert measured.seconds_of_kind() == {
        "gate": 1.0,
        "ffn": 2.5,
        "aggregate": 0.0,
        "dispatch": 0.0,
        "combine": 0.0,
        "all_gather": 0.0,
        "prompt_gather": 0.0,
        "attention": 0.0,
    }


def test_the_sums_are_those_of_the_steps():
    predicted = timeline(
        ("gate", 0, 0, 0, 1),
        ("gate", 0, 1, 0, 2),
        ("dispatch", 0, 0, 2, 5),
        ("ffn", 0, 0, 5, 6),
        ("ffn", 0, 1, 5, 9),
        ("gate", 1, 0, 9, 10),
        ("dispatch", 1, 0, 10, 12),
        ("ffn", 1, 1, 12, 13),
    )
    measured = timeline(
        ("gate", 0, 0, 0, 1),
        ("gate", 0, 1, 1, 4),
        ("dispatch", 0, 0, 4.5, 7.5),
        ("ffn", 0, 0, 8, 10),
        ("ffn", 0, 1, 8, 12),
        ("gate", 1, 0, 12, 14),
        ("dispatch", 1, 0, 15, 19),
        ("ffn", 1, 1, 19, 20),
    )
    laid = compare(predicted, measured)
    assert laid.by_kind.to_dict("list") == {
        "kind": ["gate", "ffn", "dispatch"],
        "predicted": [3, 5, 5],
        "measured": [6, 5, 7],
        "ratio": [2, 1, 1.4],
    }
    assert laid.by_layer["layer"].tolist() == [0, 1]
    assert laid.by_layer["predicted"].tolist() == [9, 4] and laid.by_layer["measured"].tolist() == [11, 7]
    assert (laid.predicted, laid.measured, laid.ratio) == (13, 20, pytest.approx(20 / 13))
    # Between 4 and 4.5, 7.5 and 8, 14 and 15 no step runs.
    assert laid.waiting == pytest.approx(2.0)
    assert laid.by_kind["measured"].sum() + laid.waiting == pytest.approx(laid.measured)
    assert laid.by_layer["measured"].sum() + laid.waiting == pytest.approx(laid.measured)


def test_steps_of_two_models_that_overlap_count_once_in_the_time_of_a_layer():
    measured = timeline(
        ("gate", 0, 0, 0, 2), ("gate", 0, 0, 2, 4), ("dispatch", 0, 0, 2, 7), ("ffn", 0, 0, 8, 9), ("ffn", 1, 0, 9, 12)
    )
    measured = replace(measured, events=measured.events.assign(model=[0, 1, 0, 0, 1]))
    laid = compare(measured, measured)
    assert laid.by_kind.set_index("kind")["measured"].to_dict() == {"gate": 4, "ffn": 4, "dispatch": 5}
    assert laid.by_layer["measured"].tolist() == [8, 3] and laid.waiting == laid.predicted_waiting == 1


def test_a_timeline_compared_with_itself_agrees():
    measured = timeline(("gate", 0, 0, 0, 1), ("ffn", 0, 1, 1, 4), ("aggregate", 0, 0, 4, 5))
    laid = compare(measured, measured)
    assert laid.ratio == 1 and (laid.by_kind["ratio"] == 1).all() and (laid.by_layer["ratio"] == 1).all()
    assert laid.waiting == 0

"""`redundancy`: how many spare slots are worth their memory?"""

import argparse
from typing import Any

from engine import formats
from engine.cli import text
from engine.cli.inputs import read_cost, read_recording, read_travel
from engine.cli.output import answer, progress, stopped_by_signals
from engine.cli.step import read_serving
from engine.compare.judge import CONFIDENCE, Judge
from engine.compare.redundancy import RedundancyPoint, Replication, knee, most_slots, planned_and_judged, redundancy
from engine.errors import InputError, StoppedError
from engine.problem import make_problem
from engine.units import seconds, share, signed, size


def run_redundancy(options: argparse.Namespace) -> int:
    if options.training or options.graph or options.workload_b or options.model_b:
        raise InputError(
            "spare slots are advised for inference of one model; leave out the training step or second model"
        )
    model, cluster = formats.read_model(options.model), formats.read_cluster(options.cluster)
    recordings = [read_recording(file, model) for file in options.workload or ()]
    planned, judged, held_out = planned_and_judged(recordings)
    problem = make_problem(planned, cluster, model, read_cost(options, cluster), travel=read_travel(options))
    serving, notes = read_serving(options, problem) if options.serving else (None, [])
    judge = Judge(problem, serving)
    with stopped_by_signals() as stop, progress() as report:
        points = list(redundancy(judge, planned, judged, Replication(options.algorithm, options.groups), stop, report))
    if not points:
        raise StoppedError("stopped before there was a number of slots")
    advised = knee(points)
    content = {
        "planned_on": planned.name,
        "judged_on": [recording.name for recording in judged],
        "held_out": held_out,
        "unit": judge.unit,
        "limit": most_slots(judge)[1],
        "confidence": CONFIDENCE,
        "points": [_as_json(point) for point in points],
        "knee": next(_as_json(point) for point in points if point.slots == advised.slots),
        "why": advised.reason,
        "notes": notes,
    }
    answer(options, content, _as_text)
    return 0


def _as_json(point: RedundancyPoint) -> dict[str, Any]:
    low, high = point.interval
    return point.to_dict() | {"gain_low": low, "gain_high": high}


def _as_text(content: dict[str, Any]) -> str:
    chosen = content["knee"]
    rows = [
        [
            f"{point['slots']}" + (" ←" if point["slots"] == chosen["slots"] else ""),
            str(point["spare"]),
            str(point["slots_of_gpu"]),
            f"{point['balancedness']:.3f}",
            f"{point['planned_balancedness']:.3f}",
            seconds(point["seconds"]),
            signed(point["gain"]),
            f"{signed(point['gain_low'])} to {signed(point['gain_high'])}" if turn else "",
            signed(point["gain_worst"]),
            size(point["memory_bytes"]),
            size(point["gpu_bytes"]),
        ]
        for turn, point in enumerate(content["points"])
    ]
    interval = f"{share(content['confidence'])} interval"
    header = [
        "slots",
        "spare",
        "a GPU",
        "balanced",
        "as planned",
        "time",
        "gain",
        interval,
        "worst",
        "memory of spare",
        "experts per GPU",
    ]
    where = "" if content["held_out"] else ", which was not held out: give another recording"
    lines = [
        f"planned on {content['planned_on']}, judged on {', '.join(content['judged_on'])}{where}",
        text.table(header, rows),
        f"{chosen['slots']} slots, {chosen['spare']} of them spare: {content['why']}",
        f"limit: {content['limit']}",
        f"times are of {content['unit']}",
    ]
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])

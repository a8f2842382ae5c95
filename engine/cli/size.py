"""`size`: the cheapest clusters, with their plans, that meet a target."""

import argparse
import sys
from functools import partial
from typing import Any

import numpy as np

from engine import formats
from engine.cli import STOPPED
from engine.cli.inputs import read_cost, read_recording, read_travel
from engine.cli.judgement import config_of
from engine.cli.output import answer, columns, progress, stopped_by_signals, write
from engine.errors import InputError
from engine.formats.writers import write_recording
from engine.serving.step import ServingStep
from engine.sizing.inputs import Catalogue, Need, counted, in_words, read_target
from engine.sizing.search import Point, Sizing, proven
from engine.store.problems import save_inputs
from engine.units import seconds, share
from engine.validate import refuse_broken

INFEASIBLE = 3
SHOWN = 10
"""Undecided clusters in the table, those nearest to the target first."""


def run_size(options: argparse.Namespace) -> int:
    target = read_target(options.target)
    model = formats.read_model(options.model)
    catalogue = formats.read_document(Catalogue, options.catalogue)
    cost = read_cost(options, catalogue.cluster((1,) * len(catalogue.nodes)))
    recordings = tuple(read_recording(file, model) for file in options.workload)
    step = formats.read_document(ServingStep, options.serving) if options.serving else None
    if options.config:
        config_of(options, model)
    of = counted(target, model, step, partial(config_of, options, model), options.operators)
    unit, notes = of.unit, of.notes
    need = Need(of.recordings(recordings, model), model, catalogue, cost, read_travel(options), of.served)
    points: list[Point] = []
    with stopped_by_signals() as stop:
        with progress() as report:
            for found in Sizing(need, stop, report).answer(target, options.front):
                points = found
        met = sum(point.met for point in points)
        how = proven(target, bool(options.front), met, len(points) - met, stop())
        if stop():
            notes.append("stopped: these are the clusters that were found so far")
        rows = [_row(point, catalogue, options) for point in points]
        answer(options, rows, lambda rows: _as_text(rows, need, how, unit, notes))
        for note in notes if options.json else ():
            print(f"note: {note}", file=sys.stderr)
    return 0 if met else STOPPED if stop() else INFEASIBLE


def _row(point: Point, catalogue: Catalogue, options: argparse.Namespace) -> dict[str, Any]:
    """A point as JSON; its cluster, plan and recording go to the folder of -o, named by its nodes."""
    plan: Any = None
    if point.plan is not None and point.problem is not None:
        refuse_broken(point.plan, point.problem)
        save_inputs(point.problem)
        plan = point.plan.model_dump(mode="json", exclude_none=True)
    if plan and options.output and point.met:
        name = "+".join(f"{count}x{kind}" for kind, count in catalogue.counts(point.vector).items()).replace("/", "-")
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{options.output} cannot be made: {error.strerror}; name a folder with -o") from None
        plan = str(options.output / f"{name}-plan.json")
        write(options.output / f"{name}-plan.json", point.plan.to_json())
        write(options.output / f"{name}-cluster.json", point.problem.cluster.to_json())
        write_recording(point.problem.workload, options.output / f"{name}-recording.npz")
    return {
        "nodes": catalogue.counts(point.vector),
        "price": point.price,
        "objective": point.objective,
        "bound": point.bound,
        "met": point.met,
        "plan": plan,
    }


def _as_text(rows: list[dict[str, Any]], need: Need, how: str, unit: str, notes: list[str]) -> str:
    met, undecided = [[row for row in rows if row["met"] == wanted] for wanted in (True, False)]
    cells = {
        "cluster": lambda row: in_words(row["nodes"]),
        "an hour": lambda row: need.catalogue.money(row["price"]),
        "time": lambda row: "not planned" if row["objective"] is None else seconds(row["objective"]),
        "bound": lambda row: seconds(row["bound"]),
        "left": lambda row: "" if row["objective"] is None else share(1 - row["bound"] / row["objective"]),
    }
    lines = [columns(met, cells)] if met else ["no cluster was found that meets the target"]
    lines += [f"plan: {row['plan']}" for row in met if isinstance(row["plan"], str)]
    if undecided:
        lines += ["", how]
        nearest = sorted(undecided, key=lambda row: row["objective"] or np.inf)[:SHOWN]
        lines += [columns(nearest, cells)]
    elif how:
        lines.append(how)
    return "\n".join([*lines, f"times are of {unit}, by {need.cost.source}", *(f"note: {note}" for note in notes)])

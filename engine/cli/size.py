"""`size`: the cheapest clusters, with their plans, that meet a target."""

import argparse
import sys
from typing import Any

import numpy as np

from engine import formats
from engine.cli import STOPPED
from engine.cli.inputs import read_cost, read_recording, read_travel
from engine.cli.judgement import config_of
from engine.cli.output import answer, columns, progress, stopped_by_signals, write
from engine.cluster import Cluster
from engine.errors import InputError
from engine.formats.writers import write_recording
from engine.model import MoEModel
from engine.serving.aiconfigurator import choose_operators_of
from engine.serving.sizes import usual_serving
from engine.serving.step import Operators, ServingStep, load_of_step
from engine.sizing.inputs import Catalogue, Target, read_target
from engine.sizing.search import Need, Point, Served, Sizing
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
    served, notes = _served(options, target, model)
    unit = "a pass through the MoE layers with all tokens of the recording"
    if served is not None:
        step = served.step
        unit = f"a whole {step.phase} step of {served.sequences:,} sequences on all GPUs together, {step.context:,} tokens in"
    elif target.sequences:
        unit = f"a pass through the MoE layers with a token of {target.sequences:,} sequences"
        step, sequences = usual_serving(target.phase), np.array([target.sequences])
        recordings = tuple(load_of_step(each, step, model, 1, sequences) for each in recordings)
    need = Need(recordings, model, catalogue, cost, read_travel(options), served)
    budget = np.inf if target.price is None else target.price
    points: list[Point] = []
    with stopped_by_signals() as stop:
        with progress() as report:
            sizing = Sizing(need, stop, report)
            if target.seconds is None and not options.front:
                points = sizing.fastest(budget)
            else:
                for found in sizing.front(np.inf if target.seconds is None else target.seconds, budget, options.front or 1):
                    points += found
        if stop():
            notes.append("stopped: these are the clusters that were found so far")
        met = {point.vector: point for point in points if point.met}
        open_ones = {point.vector: point for point in points if point.vector not in met}
        rows = [_row(point, catalogue, options) for point in (*met.values(), *open_ones.values())]
        rows.sort(key=lambda row: row["price"])
        answer(options, rows, lambda rows: _as_text(rows, need, unit, notes))
        for note in notes if options.json else ():
            print(f"note: {note}", file=sys.stderr)
    return 0 if met else STOPPED if stop() else INFEASIBLE


def _served(options: argparse.Namespace, target: Target, model: MoEModel) -> tuple[Served | None, list[str]]:
    """The step that counts, and notes; None: a pass. Raises InputError for a step that is not of the target's phase."""
    if not (options.serving or target.sequences or target.phase == "prefill"):
        return None, []
    step = formats.read_document(ServingStep, options.serving) if options.serving else usual_serving(target.phase)
    if target.phase == "prefill" and step.phase != "prefill":
        raise InputError(f"the target is of a prefill step, but {options.serving} is of decode; name one of prefill")
    sequences = target.sequences or (step.sequences if options.serving else 1)
    if step.overlap == "two-batch" and sequences % 2:
        raise InputError(f"two-batch overlap needs an even number of sequences, not {sequences}")
    try:
        config = config_of(options, model)
    except InputError as error:
        if options.config or options.serving or not target.sequences or target.phase == "prefill":
            raise
        return None, [f"the MoE layers alone are counted, at {sequences:,} tokens: {error}"]
    sizes, notes = formats.read_sizes(config), list[str]()

    def operators(cluster: Cluster) -> Operators:
        source, said = choose_operators_of(config, model, sizes, cluster, step, options.operators)
        notes.extend(note for note in said if note not in notes)
        return source

    return Served(step, sizes, operators, sequences), notes


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


def _as_text(rows: list[dict[str, Any]], need: Need, unit: str, notes: list[str]) -> str:
    met, undecided = [[row for row in rows if row["met"] == wanted] for wanted in (True, False)]
    cells = {
        "cluster": lambda row: " + ".join(f"{count} × {kind}" for kind, count in row["nodes"].items()),
        "an hour": lambda row: need.catalogue.money(row["price"]),
        "time": lambda row: "not planned" if row["objective"] is None else seconds(row["objective"]),
        "bound": lambda row: seconds(row["bound"]),
        "left": lambda row: "" if row["objective"] is None else share(1 - row["bound"] / row["objective"]),
    }
    lines = [columns(met, cells)] if met else ["no cluster was found that meets the target"]
    lines += [f"plan: {row['plan']}" for row in met if isinstance(row["plan"], str)]
    if undecided:
        lines += ["", f"{len(undecided)} undecided, nearest first: no plan that meets the target, no proof that none does"]
        nearest = sorted(undecided, key=lambda row: row["objective"] or np.inf)[:SHOWN]
        lines += [columns(nearest, cells)]
    elif met:
        lines.append("proven: no cheaper cluster of this catalogue meets the target, with one copy of every expert")
    return "\n".join([*lines, f"times are of {unit}, by {need.cost.source}", *(f"note: {note}" for note in notes)])

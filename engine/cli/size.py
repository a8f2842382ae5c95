"""`size`: the cheapest clusters, with their plans, that meet a target; and for `study deployments` its question and answer in
words."""

import argparse
import sys
from functools import partial
from typing import Any

import numpy as np

from engine import formats
from engine.catalogue import model_presets
from engine.cli import STOPPED
from engine.cli.inputs import read_cost, read_recording, read_travel, split_setting
from engine.cli.judgement import config_of
from engine.cli.output import answer, check_folder, columns, progress, stopped_by_signals, write
from engine.compare.trust.whole_steps import known_model
from engine.errors import InputError
from engine.formats.writers import write_recording
from engine.model import MoEModel
from engine.serving.deployment import Deployment
from engine.serving.sizes import TransformerSizes, named_serving, of_lengths
from engine.serving.step import ServingStep
from engine.sizing.deployments import LeftOut
from engine.sizing.inputs import Catalogue, Need, counted, in_words, read_target
from engine.sizing.search import Point, Sizing, proven
from engine.store.problems import as_json, save_inputs
from engine.units import digits, seconds, share
from engine.validate import refuse_broken

INFEASIBLE = 3
SHOWN = 10
"""Undecided clusters in the table, those nearest to the target first."""
MOST_ROWS = 40
"""Deployments of a front in the table."""


def run_size(options: argparse.Namespace) -> int:
    if options.output:
        check_folder(options.output)
    target = read_target(options.target)
    model = formats.read_model(options.model)
    catalogue = formats.read_document(Catalogue, options.catalogue)
    cost = read_cost(options, catalogue.cluster((1,) * len(catalogue.nodes)))
    recordings = tuple(read_recording(file, model) for file in options.workload)
    step = formats.read_document(ServingStep, options.serving) if options.serving else None
    if options.config:
        config_of(options, model)
        if step is None and (target.sequences or target.phase == "prefill"):
            step = of_lengths(named_serving(recordings[0].name, target.phase), target.phase)
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


def deployments_asked(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """The question for the cheapest deployments as JSON. Raises InputError for options that lack or do not belong to it.

    settings: of --set
    """
    for name in UNUSED:
        if getattr(options, name):
            raise InputError(f"study deployments needs no --{name.removesuffix('s').replace('_', '-')}; leave it out")
    for name in ("model", "prompt", "output", "prices"):
        if not getattr(options, name):
            needed = {"model": "its config.json, or its name", "prices": "such as H200=3.5"}.get(name, "a number of tokens")
            raise InputError(f"study deployments: --{name.removesuffix('s')} is missing: {needed}")
    if unknown := [name for name in settings if name not in SETTABLE]:
        raise InputError(f"study deployments has no '{unknown[0]}' to --set (it has: {', '.join(SETTABLE)})")
    prices: dict[str, float] = {}
    for gpu, price in (split_setting(text, "--price") for text in options.prices):
        if gpu in prices:
            raise InputError(f"--price {gpu}={price}: give every GPU type one price")
        try:
            prices[gpu] = float(price)
        except ValueError:
            raise InputError(f"--price {gpu}={price}: write a number, such as {gpu}=3.5") from None
    checkpoint, model, sizes = _checkpoint(options)
    asked = {"model": as_json(model), "sizes": as_json(sizes), "checkpoint": checkpoint, "prices": prices}
    own = {name: getattr(options, name) for name in ("prompt", "output", "target", "most")}
    lists = {name: [value] if isinstance(value, str) else value for name, value in settings.items() if name in LISTS}
    return asked | {name: value for name, value in own.items() if value is not None} | settings | lists


UNUSED = ("workload", "cluster", "plans", "also", "in_use", "training", "graph", "travel", "cost", "workload_b", "model_b")
"""Options of other studies."""
LISTS = ("formats", "engines")
SETTABLE = (*LISTS, "extrapolate", "currency")


def _checkpoint(options: argparse.Namespace) -> tuple[str, MoEModel, TransformerSizes]:
    """The name of the model, the model and its other sizes."""
    name = str(options.model)
    if not options.model.exists() and not options.config:
        try:
            return name, *known_model(name)
        except InputError:
            if name not in model_presets():
                raise
    model = formats.read_model(options.model)
    return model.name if options.model.exists() else name, model, formats.read_sizes(config_of(options, model))


def deployments_text(content: dict[str, Any]) -> str:
    """The front as a table, the best of GPU types that are not on it, and the candidates left out."""
    points, lines = content["points"], [content["decision"], ""] if content["decision"] else []
    best = [row for row in points if row["best"]]
    cells = {
        "GPUs": lambda row: f"{row['gpus']} × {row['deployment']['gpu']}",
        "engine": lambda row: " ".join(row["deployment"][name] for name in ("engine", "version", "precision")),
        "servers": lambda row: (
            Deployment.from_dict(row["deployment"], "deployment").servers_in_words + " †" * (not row["held"])
        ),
        "replicas": "replicas",
        "users": lambda row: f"{row['demand']['users'] * row['replicas']:,}",
        "a token": lambda row: seconds(row["token"]),
        "9 of 10 within": lambda row: f"{seconds(row['low'])} to {seconds(row['high'])}",
        "first token": lambda row: seconds(row["first_token"]),
        "tokens/s a user": lambda row: digits(1 / row["token"]),
        "in all": lambda row: f"{row['rate']:,.0f}",
        "a GPU": lambda row: digits(row["rate"] / row["gpus"]),
        "an hour": lambda row: f"{row['hour']:,.2f}",
        "a million": lambda row: f"{row['million']:,.3f}",
    }
    lines.append(columns(best[:MOST_ROWS], cells) if best else "no deployment is predicted to meet the target")
    if len(best) > MOST_ROWS:
        lines.append(f"… and {len(best) - MOST_ROWS} more; --json has all")
    for gpu in dict.fromkeys(row["deployment"]["gpu"] for row in points):
        if not any(row["deployment"]["gpu"] == gpu for row in best):
            row = next(row for row in points if row["deployment"]["gpu"] == gpu)
            lines.append(f"{gpu}: others are cheaper and faster; its cheapest, {row['million']:,.3f} a million tokens:")
            lines.append(columns([row], cells))
    if beyond := sum(row["high"] > content["token"] for row in best) if content.get("token") else 0:
        lines.append(f"the interval of {beyond} of them reaches beyond the target")
    if not all(row["held"] for row in points):
        lines.append("†: servers over more machines than any measured: not held against a measurement, intervals are wider")
    there = {row["deployment"]["gpu"] for row in points}
    for each in (LeftOut.from_dict(row, "left out") for row in content["left_out"]):
        near = f"; the nearest takes {seconds(each.nearest)}" if each.nearest and each.gpu not in there else ""
        lines.append(f"left out, {each.gpu}: {each.in_words}{near}")
    said = "times are predicted, mostly of deployments never measured; users ask again as soon as they have an answer"
    lines.append(f"{content['tried']:,} deployments timed; {said}")
    return "\n".join([*lines, *(f"note: {note}" for note in content["notes"])])

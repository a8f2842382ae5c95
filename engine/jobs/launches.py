"""Launches as jobs. Arguments and results are plain JSON."""

from pathlib import Path
from typing import Any

import pandas as pd

from engine.files import write_atomically
from engine.jobs.protocol import Context
from engine.jobs.runner import Job
from engine.launch import local, testbed
from engine.launch.compare import compare
from engine.launch.devices import attached
from engine.launch.on_cluster import run_on_cluster
from engine.launch.preference import prefer
from engine.launch.wanted import On, Wanted
from engine.schema import Frozen
from engine.validate import refuse_broken_launch

RUN = "run"
"""Folder in a job's folder: the launch's own. On a cluster it has what was seen of the job there."""

BRIEF = "brief.json"


class Brief(Frozen):
    """What a list of launches tells of one; its results are large. predicted, measured: seconds of each plan, once known."""

    plans: tuple[str, ...]
    on: On
    ranks: int | None = None
    tokens: int | None = None
    predicted: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()


def launch(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Run plans. arguments: as `Wanted` gives them; the result: see `describe_run`, and of a testbed its links."""
    wanted = Wanted.from_arguments(arguments)
    prepared, bed = wanted.prepare(attached())
    refuse_broken_launch(wanted.plans, wanted.workload, wanted.model, wanted.cluster, wanted.second, wanted.step)
    names = tuple(plan.name for plan in wanted.plans)
    brief = Brief(plans=names, on=wanted.on, ranks=prepared.spec.ranks, tokens=prepared.tokens)
    write_atomically(context.folder / BRIEF, brief.to_json())
    folder = context.folder / RUN
    if wanted.destination is not None:
        found = describe_run(run_on_cluster(prepared, wanted.destination, folder, context.stop, context.report))
    elif bed is None:
        found = describe_run(local.run(prepared, folder, context.stop, context.report))
    else:
        with bed:
            found = describe_run(testbed.run(prepared, bed, folder, context.stop, context.report))
        found["testbed"] = bed.to_dict()
    write_atomically(context.folder / BRIEF, brief.model_copy(update=_figures(found)).to_json())
    return found


def _figures(result: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(run[f"{name}_seconds"] for run in result["runs"]) for name in ("predicted", "measured")}


def brief_of(job: Job) -> Brief | None:
    """What a list tells of a launch: as it noted itself, else what was asked for; None when that was asked for in a form that
    no version since knows."""
    path = job.folder / BRIEF
    if path.exists():
        return Brief.from_json(path.read_bytes(), BRIEF)
    asked = job.request.arguments
    try:
        names = tuple(plan["name"] for plan in asked["plans"])
        return Brief(plans=names, on=asked.get("on", "local"), ranks=asked.get("ranks"), tokens=asked.get("tokens"))
    except (KeyError, TypeError, ValueError):
        return None


def run_folder(job: Job) -> Path:
    """The folder of a job's launch."""
    return job.folder / RUN


def describe_run(run: local.Run) -> dict[str, Any]:
    """A finished launch as JSON: of every plan both timelines and their comparison, and what it was measured on."""
    return {
        "runs": [_describe_plan(one) for one in run.runs],
        "preference": prefer(run.runs).to_dict() if len(run.runs) > 1 else None,
        "device": run.device,
        "tokens": run.tokens,
        "clock_error": run.clock_error,
        "profile": run.profile.model_dump(mode="json", exclude_none=True),
    }


def _columns(table: pd.DataFrame) -> dict[str, list]:
    """A table as JSON, what is missing as null."""
    return table.astype(object).where(table.notna(), None).to_dict("list")


def _describe_plan(one: local.Measured) -> dict[str, Any]:
    laid = compare(one.predicted, one.measured)
    return {
        "plan": one.plan.id,
        "name": one.plan.name,
        "predicted": one.predicted.to_dict(),
        "measured": one.measured.to_dict(),
        "by_kind": _columns(laid.by_kind),
        "by_layer": _columns(laid.by_layer),
        "predicted_seconds": laid.predicted,
        "measured_seconds": laid.measured,
        "waiting_seconds": laid.waiting,
        "predicted_waiting_seconds": laid.predicted_waiting,
        "pass_seconds": list(one.totals),
        "difference": one.difference,
    }

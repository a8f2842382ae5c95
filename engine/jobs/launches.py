"""Launches as jobs. Arguments and results are plain JSON.

Calibrations as jobs. Arguments and results are plain JSON.
"""

import contextlib
from pathlib import Path
from typing import Any

import pandas as pd

from engine.costs.device_profile import DeviceProfile, Fit
from engine.errors import InputError
from engine.files import write_atomically
from engine.jobs.protocol import Context
from engine.jobs.runner import Job
from engine.launch.calibration.calibrate import calibrate, plan_sweep
from engine.launch.places.devices import attached
from engine.launch.places.testbed import Testbed
from engine.launch.preparation.launch import Launch, On, plans_in
from engine.launch.preparation.prepare import prepare
from engine.launch.results.comparison import compare
from engine.launch.results.preference import prefer
from engine.launch.results.run import MeasuredPlan, Run
from engine.launch.running.local import run
from engine.schema import Frozen
from engine.units import digits, seconds, share, size
from engine.validate import refuse_broken_launch

RUN = "run"
"""Folder in a job's folder: the launch's own. On a cluster it has what was seen of the job there."""

BRIEF = "brief.json"


class Brief(Frozen):
    """What a list of launches shows of each; its results are large. predicted, measured: seconds of each plan, once known."""

    plans: tuple[str, ...]
    on: On
    ranks: int | None = None
    tokens: int | None = None
    predicted: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()


def launch(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Run plans. arguments: as `Launch` gives them; the result: see `describe_run`."""
    asked = Launch.from_arguments(arguments)
    prepared = prepare(asked)
    refuse_broken_launch(asked.plans, asked.workload, asked.model, asked.cluster, asked.second, asked.step)
    names = tuple(plan.name for plan in asked.plans)
    brief = Brief(plans=names, on=asked.on, ranks=prepared.instructions.ranks, tokens=prepared.tokens)
    write_atomically(context.folder / BRIEF, brief.to_json())
    finished = run(prepared, context.folder / RUN, context.stop, context.report)
    result = describe_run(finished, prepared.testbed)
    write_atomically(context.folder / BRIEF, brief.model_copy(update=_figures(result)).to_json())
    return result


def _figures(result: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    return {
        name: tuple(plan_run[f"{name}_seconds"] for plan_run in result["runs"]) for name in ("predicted", "measured")
    }


def brief_of(job: Job) -> Brief | None:
    """What a list shows of a launch: as it noted itself; else, also where that is damaged, what was asked for; None when that
    was asked for in a form that no version since knows."""
    with contextlib.suppress(OSError, InputError):
        return Brief.from_json((job.folder / BRIEF).read_bytes(), BRIEF)
    asked = job.request.arguments
    try:
        names = tuple(plan["name"] for plan in plans_in(asked))
        return Brief(plans=names, on=asked.get("on", "local"), ranks=asked.get("ranks"), tokens=asked.get("tokens"))
    except (KeyError, TypeError, ValueError):
        return None


def run_folder(job: Job) -> Path:
    """The folder of a job's launch."""
    return job.folder / RUN


def describe_run(finished: Run, testbed: Testbed | None = None) -> dict[str, Any]:
    """A finished launch as JSON: of every plan both timelines and their comparison, what it was measured on, and of a testbed
    its links."""
    described = {
        "runs": [_describe_plan(measured) for measured in finished.runs],
        "preference": prefer(finished.runs).to_dict() if len(finished.runs) > 1 else None,
        "device": finished.device,
        "tokens": finished.tokens,
        "clock_error": finished.clock_error,
        "profile": finished.profile.model_dump(mode="json", exclude_none=True),
    }
    return described if testbed is None else described | {"testbed": testbed.to_dict()}


def _columns(table: pd.DataFrame) -> dict[str, list]:
    """A table as JSON, what is missing as null."""
    return table.astype(object).where(table.notna(), None).to_dict("list")


def _describe_plan(measured: MeasuredPlan) -> dict[str, Any]:
    comparison = compare(measured.predicted, measured.measured)
    return {
        "plan": measured.plan.id,
        "name": measured.plan.name,
        "predicted": measured.predicted.to_dict(),
        "measured": measured.measured.to_dict(),
        "by_kind": _columns(comparison.by_kind),
        "by_layer": _columns(comparison.by_layer),
        "predicted_seconds": comparison.predicted,
        "measured_seconds": comparison.measured,
        "waiting_seconds": comparison.waiting,
        "predicted_waiting_seconds": comparison.predicted_waiting,
        "pass_seconds": list(measured.totals),
        "difference": measured.difference.error,
        "allowed_difference": measured.difference.allowed,
    }


NAMES = {
    "gemm": "GEMM",
    "memory": "memory",
    "all_to_all": "all-to-all",
    "exchange": "exchange with a peer",
    "all_reduce": "all-reduce",
}
RUN = "run"
"""Folder in a job's folder: the ranks' own."""


def calibrate_devices(arguments: dict[str, Any], context: Context) -> dict[str, Any]:
    """Measure the attached devices.

    arguments: optional ranks, dtypes, quick, see `plan_sweep`; optional type of GPUs that are not known by name. Result: see
    `describe_calibration`.
    """
    sweep = plan_sweep(attached(), arguments.get("ranks"), arguments.get("dtypes", ()), arguments.get("quick", False))
    return describe_calibration(
        calibrate(sweep, context.folder / RUN, context.stop, context.report, arguments.get("type"))
    )


def describe_calibration(profile: DeviceProfile) -> dict[str, Any]:
    """A calibration as JSON: the profile itself as `calibration`, and its fits and errors as figures for people."""
    return {
        "name": profile.measured.name,
        "origin": profile.measured.origin,
        "fits": [
            fit.model_dump(include={"operation", "gpu", "dtype", "points", "smallest", "largest", "spread"})
            | {"start_up": fit.line.alpha, "rate": fit.rate, "error": fit.line.error}
            for fit in profile.fits
        ],
        "held_out": [
            {
                "gpu": shapes.gpu,
                "dtype": shapes.dtype,
                "shapes": len(shapes.points),
                "mean": float(shapes.errors.mean()),
                "worst": float(shapes.errors.max()),
            }
            for shapes in profile.held_out
        ],
        "calibration": profile.model_dump(mode="json", exclude_none=True),
    }


def table_of(profile: DeviceProfile) -> list[dict[str, str]]:
    """The fits for people: one row each, by column."""
    return [
        {
            "operation": " ".join(filter(None, (NAMES[fit.operation], fit.dtype, fit.gpu))),
            "latency α": seconds(fit.line.alpha),
            "rate 1/β": "" if fit.rate is None else f"{digits(fit.rate / 1e9)} {_giga(fit)}",
            "line's error": share(fit.line.error),
            "spread": share(fit.spread),
            "points": str(fit.points),
            "up to": f"m·n·k = {fit.largest:.1e}" if fit.operation == "gemm" else size(fit.largest),
        }
        for fit in profile.fits
    ]


def _giga(fit: Fit) -> str:
    return "GFLOP/s" if fit.operation == "gemm" else "GB/s"

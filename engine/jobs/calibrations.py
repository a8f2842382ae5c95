"""Calibrations as jobs. Arguments and results are plain JSON."""

from typing import Any

from engine.costs.calibration import Calibration, Fit
from engine.jobs.protocol import Context
from engine.launch.calibration import calibrate, plan_sweep
from engine.launch.devices import attached
from engine.units import digits, seconds, share, size

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


def describe_calibration(made: Calibration) -> dict[str, Any]:
    """A calibration as JSON: the document itself as `calibration`, and its fits and errors as figures for people."""
    return {
        "name": made.measured.name,
        "origin": made.measured.origin,
        "fits": [
            one.model_dump(include={"operation", "gpu", "dtype", "points", "smallest", "largest", "spread"})
            | {"start_up": one.line.alpha, "rate": one.rate, "error": one.line.error}
            for one in made.fits
        ],
        "held_out": [
            {
                "gpu": one.gpu,
                "dtype": one.dtype,
                "shapes": len(one.points),
                "mean": float(one.errors.mean()),
                "worst": float(one.errors.max()),
            }
            for one in made.held_out
        ],
        "calibration": made.model_dump(mode="json", exclude_none=True),
    }


def table_of(made: Calibration) -> list[dict[str, str]]:
    """The fits for people: one row each, by column."""
    return [
        {
            "operation": " ".join(filter(None, (NAMES[one.operation], one.dtype, one.gpu))),
            "start-up α": seconds(one.line.alpha),
            "rate 1/β": "" if one.rate is None else f"{digits(one.rate / 1e9)} {_giga(one)}",
            "line's error": share(one.line.error),
            "spread": share(one.spread),
            "points": str(one.points),
            "up to": f"m·n·k = {one.largest:.1e}" if one.operation == "gemm" else size(one.largest),
        }
        for one in made.fits
    ]


def _giga(fit: Fit) -> str:
    return "GFLOP/s" if fit.operation == "gemm" else "GB/s"

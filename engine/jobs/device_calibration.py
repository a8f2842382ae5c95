"""Calibrations as jobs. Arguments and results are plain JSON."""

from typing import Any

from engine.costs.device_profile import DeviceProfile, Fit
from engine.jobs.protocol import Context
from engine.launch.calibration.calibrate import calibrate, plan_sweep
from engine.launch.places.devices import attached
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

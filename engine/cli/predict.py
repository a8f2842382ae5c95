"""The command `predict`: whole steps of serving engines, as measured rows set them up."""

import argparse
from typing import Any

import numpy as np

from engine import formats
from engine.cli.output import answer, columns, stopped_by_signals
from engine.compare.trust.whole_steps import Predicted, Sizes, explanations, known_model, predicted
from engine.errors import InputError
from engine.formats.measured.request_traces import read_requests
from engine.formats.measured.serving_rows import read_steps
from engine.serving.arrivals import PERCENTILES, at_random, serve_arrivals
from engine.serving.deployment import MeasuredStep
from engine.serving.forecast import Forecast
from engine.units import digits, seconds, share, signed

SHOWN = 40
"""Rows of a table on the console; all are in --json."""


def run_predict(options: argparse.Namespace) -> int:
    steps, refused = read_steps(options.rows)
    own = (formats.read_model(options.config), formats.read_sizes(options.config)) if options.config else None
    rows: list[dict[str, Any]] = []
    found: list[Predicted] = []
    for step in steps:
        try:
            found.append(predicted(step, own))
        except InputError as error:
            rows.append(_row(step.id, refused=str(error)))
        else:
            rows.append(_row(step.id, found[-1].forecast))
    rows += [_row(each.id, refused=f"{each.place}: {each.why}") for each in refused]
    if options.why is not None:
        if (row := next((each for each in found if each.step.id == options.why), None)) is None:
            known = next((f": {each['refused']}" for each in rows if each["id"] == options.why), "; no row has this id")
            raise InputError(f"{options.why} is not predicted{known}")
        print(_why(row))
        return 0
    if options.rate is not None or options.replay is not None:
        return _under_arrivals(options, [each.step for each in found], own)
    answer(options, rows, lambda _: _as_text(found, [row for row in rows if row["refused"]]))
    return 0


def _under_arrivals(options: argparse.Namespace, steps: list[MeasuredStep], own: Sizes | None) -> int:
    """Percentiles of the rows that can be predicted, their users replaced by arrivals."""
    recorded = read_requests(options.replay) if options.replay else None
    rows = []
    with stopped_by_signals() as stop:
        for step in steps:
            demand = step.demand
            if demand.accepted:
                raise InputError(f"{step.id}: arrivals are simulated without speculation; leave out 'accepted'")
            requests = recorded or at_random(options.rate, options.requests, demand.prompt, demand.output)
            served = serve_arrivals(requests, step.deployment, *(own or known_model(step.deployment.checkpoint)), stop=stop)
            span = float(served.end.max() - requests.arrival[0])
            figures = {"requests": len(served.first), "seconds": span, "tokens_per_second": float(requests.output.sum() / span)}
            for name, of in served.percentiles().items():
                key = {"first": "ttft", "token": "tpot"}[name]
                figures |= {f"{key}_p{at}": value for at, value in of.items()}
            rows.append({"id": step.id} | figures)
    cells = {"id": "id", "requests": "requests", "tokens/s": lambda row: digits(row["tokens_per_second"])}
    for key, title in (("ttft", "first token"), ("tpot", "a token")):
        for at in PERCENTILES:
            cells[f"{title} p{at}"] = lambda row, key=f"{key}_p{at}": seconds(row[key])
    answer(options, rows, lambda rows: columns(rows, cells))
    return 0


def _row(id: str, found: Forecast | None = None, refused: str | None = None) -> dict[str, Any]:
    times = (found.first_token, found.token, found.low, found.high) if found else (None,) * 4
    return dict(zip(("id", "ttft", "tpot", "low", "high", "refused"), (id, *times, refused), strict=True))


def _as_text(found: list[Predicted], refused: list[dict[str, Any]]) -> str:
    cells = {
        "id": lambda row: row.step.id,
        "first token": lambda row: seconds(row.forecast.first_token),
        "measured": lambda row: seconds(row.step.first_token) if row.step.first_token else "",
        "a token": lambda row: seconds(row.forecast.token),
        "9 of 10 within": lambda row: f"{seconds(row.forecast.low)} to {seconds(row.forecast.high)}",
        "measured ": lambda row: seconds(row.step.token) if row.step.token else "",
        "off": lambda row: "" if row.error is None else signed(row.error),
    }
    lines = [columns(found[:SHOWN], cells)] if found else []
    if len(found) > SHOWN:
        lines.append(f"… and {len(found) - SHOWN:,} more; --json has all")
    if token := [abs(row.error) for row in found if row.error is not None]:
        within = share(float(np.mean([row.inside for row in found if row.error is not None])))
        middle, mean = share(float(np.median(token))), share(float(np.mean(token)))
        lines.append(f"a token: median error {middle}, mean {mean}, {within} of {len(token):,} inside the interval")
    if first := [abs(row.first_error) for row in found if row.first_error is not None]:
        lines.append(f"the first token: median error {share(float(np.median(first)))}")
    reasons: dict[str, list[str]] = {}
    for row in refused:
        reasons.setdefault(row["refused"].partition(": ")[2] or row["refused"], []).append(row["id"])
    for why, ids in list(reasons.items())[:SHOWN]:
        lines.append(f"left out: {ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}: {why}")
    return "\n".join(lines)


def _why(row: Predicted) -> str:
    """The parts of one row, and what could explain its difference."""
    step, found = row
    parts = sorted(found.parts.items(), key=lambda part: -part[1])
    cells = {
        "part of a token": lambda row: row[0],
        "predicted": lambda row: seconds(row[1]),
        "share": lambda row: share(row[1] / found.token),
    }
    lines = [f"{step.id}: {seconds(found.token)} a token predicted", columns(parts, cells)]
    if step.token is None:
        return "\n".join([*lines, "no measured time to explain"])
    lines.append(f"measured {seconds(step.token)}: {signed(row.error)} off; it would be explained by")
    cells = {
        "kind of work": lambda row: row.kind,
        "predicted": lambda row: seconds(row.seconds),
        "times as long": lambda row: digits(row.times),
        "engines differ by": lambda row: digits(row.usual),
    }
    return "\n".join([*lines, columns(explanations(found, step.token), cells)])

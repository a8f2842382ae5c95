"""The command `predict`: whole steps of serving engines, as measured rows set them up."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from engine import formats
from engine.cli.output import answer, columns, stopped_by_signals
from engine.compare.trust.whole_steps import known_model
from engine.compare.trust.why_off import explanations
from engine.errors import InputError
from engine.formats.measured.request_traces import read_requests
from engine.formats.measured.serving_rows import read_steps
from engine.model import MoEModel
from engine.serving.arrivals import PERCENTILES, at_random, serve_arrivals
from engine.serving.deployment import MeasuredStep
from engine.serving.forecast import Forecast, forecast
from engine.serving.sizes import TransformerSizes
from engine.units import digits, seconds, share, signed

Sizes = tuple[MoEModel, TransformerSizes]
SHOWN = 40
"""Rows of a table on the console; all are in --json."""


def run_predict(options: argparse.Namespace) -> int:
    steps, refused = read_steps(options.rows)
    own = _own_model(options.config) if options.config else None
    rows, found = [], {}
    for step in steps:
        try:
            found[step.id] = step, _forecast(step, own)
        except InputError as error:
            rows.append(_row(step.id, refused=str(error)))
        else:
            rows.append(_row(step.id, found[step.id][1]))
    rows += [_row(each.id, refused=f"{each.place}: {each.why}") for each in refused]
    if options.why is not None:
        if options.why not in found:
            known = next((f": {row['refused']}" for row in rows if row["id"] == options.why), "; no row has this id")
            raise InputError(f"{options.why} is not predicted{known}")
        print(_why(*found[options.why]))
        return 0
    if options.rate is not None or options.replay is not None:
        return _under_arrivals(options, [step for step, _ in found.values()], own)
    answer(options, rows, lambda _: _as_text(found, [row for row in rows if row["refused"]]))
    return 0


def _under_arrivals(options: argparse.Namespace, steps: list[MeasuredStep], own: Sizes | None) -> int:
    """Percentiles of the rows that can be predicted, their users replaced by arrivals."""
    recorded = read_requests(options.replay) if options.replay else None
    rows = []
    with stopped_by_signals() as stop:
        for step in steps:
            demand = step.demand
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


def _own_model(config: Path) -> Sizes:
    return formats.read_model(config), formats.read_sizes(config)


def _forecast(step: MeasuredStep, own: Sizes | None) -> Forecast:
    return forecast(step.deployment, step.demand, *(own or known_model(step.deployment.checkpoint)))


def _row(id: str, found: Forecast | None = None, refused: str | None = None) -> dict[str, Any]:
    times = (found.first_token, found.token, found.low, found.high) if found else (None,) * 4
    return dict(zip(("id", "ttft", "tpot", "low", "high", "refused"), (id, *times, refused), strict=True))


def _as_text(found: dict[str, tuple[MeasuredStep, Forecast]], refused: list[dict[str, Any]]) -> str:
    measured = [(step, each) for step, each in found.values() if step.token is not None]
    cells = {
        "id": lambda row: row[0].id,
        "first token": lambda row: seconds(row[1].first_token),
        "measured": lambda row: seconds(row[0].first_token) if row[0].first_token else "",
        "a token": lambda row: seconds(row[1].token),
        "9 of 10 within": lambda row: f"{seconds(row[1].low)} to {seconds(row[1].high)}",
        "measured ": lambda row: seconds(row[0].token) if row[0].token else "",
        "off": lambda row: signed(row[1].token / row[0].token - 1) if row[0].token else "",
    }
    lines = [columns(list(found.values())[:SHOWN], cells)] if found else []
    if len(found) > SHOWN:
        lines.append(f"… and {len(found) - SHOWN:,} more; --json has all")
    if measured:
        token = np.abs([each.token / step.token - 1 for step, each in measured])
        within = np.mean([each.low <= step.token <= each.high for step, each in measured])
        lines.append(
            f"a token: median error {share(float(np.median(token)))}, mean {share(float(token.mean()))}, {share(within)} "
            f"of {len(measured):,} inside the interval"
        )
    if first := [abs(each.first_token / step.first_token - 1) for step, each in found.values() if step.first_token]:
        lines.append(f"the first token: median error {share(float(np.median(first)))}")
    reasons: dict[str, list[str]] = {}
    for row in refused:
        reasons.setdefault(row["refused"].partition(": ")[2] or row["refused"], []).append(row["id"])
    for why, ids in list(reasons.items())[:SHOWN]:
        lines.append(f"left out: {ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}: {why}")
    return "\n".join(lines)


def _why(step: MeasuredStep, found: Forecast) -> str:
    """The parts of one row, and what could explain its difference."""
    parts = sorted(found.parts.items(), key=lambda part: -part[1])
    cells = {
        "part of a token": lambda row: row[0],
        "predicted": lambda row: seconds(row[1]),
        "share": lambda row: share(row[1] / found.token),
    }
    lines = [f"{step.id}: {seconds(found.token)} a token predicted", columns(parts, cells)]
    if step.token is None:
        return "\n".join([*lines, "no measured time to explain"])
    lines.append(f"measured {seconds(step.token)}: {signed(found.token / step.token - 1)} off; it would be explained by")
    cells = {
        "kind of work": lambda row: row.kind,
        "predicted": lambda row: seconds(row.seconds),
        "times as long": lambda row: digits(row.times),
        "engines differ by": lambda row: digits(row.usual),
    }
    return "\n".join([*lines, columns(explanations(found, step.token), cells)])

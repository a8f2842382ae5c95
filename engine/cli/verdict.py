"""`verdict`: is a plan worth it?"""

import argparse
import contextlib
from typing import Any

from engine import store
from engine.cli import text
from engine.cli.inputs import plans_and_problem, read_recording, split_setting
from engine.cli.output import answer, progress, stopped_by_signals
from engine.cli.step import read_serving
from engine.compare.evidence import Thresholds
from engine.compare.held_out import roles_of, running
from engine.compare.verdict import verdict_of
from engine.compare.wording import WORDS
from engine.errors import InputError
from engine.plan import Plan
from engine.units import digits, seconds, share, signed, size
from engine.workload import Workload


def run_verdict(options: argparse.Namespace) -> int:
    thresholds = _thresholds(options.thresholds)
    files = options.workload or []
    options.workload = files[0] if files else None
    paths = [options.plan, *([options.deployed] if options.deployed else [])]
    (plan, *deployed), problem = plans_and_problem(options, paths)
    deployed = [running(now.placement, plan, now.name) if _is_bare(now) else now for now in deployed]
    recordings = [problem.workload, *(read_recording(file, problem.model) for file in files[1:]), *_remembered(plan)]
    serving, notes = read_serving(options, problem) if options.serving else (None, [])
    with stopped_by_signals() as stop, progress() as report:
        verdict = verdict_of(
            plan, problem, recordings, *deployed, thresholds=thresholds, serving=serving, stop=stop, report=report
        )
    answer(options, verdict.model_dump(mode="json") | {"notes": notes}, _as_text)
    return 0


def _is_bare(deployed: Plan) -> bool:
    """Whether it was read from a file that says where experts are and nothing else."""
    return deployed.provenance.optimiser == "file"


def _thresholds(settings: list[str]) -> Thresholds:
    values = dict(split_setting(setting, "--threshold") for setting in settings)
    if unknown := sorted(set(values) - set(Thresholds.model_fields)):
        raise InputError(f"there is no threshold '{unknown[0]}' (there are: {', '.join(Thresholds.model_fields)})")
    return Thresholds.from_values(values)


def _remembered(plan: Plan) -> list[Workload]:
    """The recordings that the plan was made from, as far as the data folder has them."""
    recordings = []
    for digest in roles_of(plan):
        with contextlib.suppress(InputError):
            recordings.append(store.load_workload(digest))
    return recordings


def _as_text(content: dict[str, Any]) -> str:
    lines = [f"{content['plan']}: {WORDS[content['verdict']]}", *(f"  {reason}" for reason in content["reasons"]), ""]
    rows = [
        [
            criterion["title"],
            _value(criterion),
            ("at least " if criterion["at_least"] else "at most ")
            + _quantity(criterion["threshold"], criterion["unit"]),
            "passed" if criterion["passed"] else "not passed",
            criterion["name"],
        ]
        for criterion in content["criteria"]
    ]
    lines += [text.table(["figure", "value", "threshold", "", "name"], rows), ""]
    if content["parts"]:
        lines += [text.table(["held out", "planned on", "now", "plan", "gain", "made for it"], _parts(content)), ""]
    beside = [[row["name"], _gain(row["gain"]), size(row["replica_bytes"])] for row in content["beside"]]
    lines.append(text.table(["beside", "gain held out", "memory of replicas"], beside))
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])


def _parts(content: dict[str, Any]) -> list[list[str]]:
    return [
        [
            part["part"],
            part["planned_on"],
            seconds(part["seconds_deployed"]),
            seconds(part["seconds"]),
            f"{signed(part['gain'])} ± {share(part['error'])}",
            _gain(part["made_for_it"]),
        ]
        for part in content["parts"]
    ]


def _gain(value: float | None) -> str:
    return "unknown" if value is None else signed(value)


def _value(criterion: dict[str, Any]) -> str:
    if criterion["infinite"]:
        return "none" if criterion["at_least"] else "never"
    return "unknown" if criterion["value"] is None else _quantity(criterion["value"], criterion["unit"])


def _quantity(value: float, unit: str) -> str:
    if unit == "minutes":
        return f"{digits(value)} min" if value >= 1 else seconds(60 * value)
    return digits(value) if unit == "count" else f"{100 * value:.2f} %"

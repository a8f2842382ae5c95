"""`simulate` and `compare`: what plans are worth on a problem."""

import argparse
import json
from pathlib import Path

from engine.cli import text
from engine.cli.command import Commands, add_command
from engine.cli.inputs import add_inputs, plans_and_problem
from engine.cli.output import answer, write
from engine.simulate import simulate
from engine.simulate.metrics import metrics


def add(commands: Commands) -> None:
    """The commands of this group."""
    command = add_command(commands, "simulate", _simulate, "timeline and metrics of a plan on any workload")
    command.add_argument("plan", type=Path)
    add_inputs(command, required=False)
    command.add_argument("-o", "--output", type=Path, metavar="timeline.json")

    command = add_command(commands, "compare", _compare, "plans side by side, with the differences to the first")
    command.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    add_inputs(command, required=False)


def _simulate(options: argparse.Namespace) -> int:
    (plan,), problem = plans_and_problem(options, [options.plan])
    timeline = simulate(plan, problem)
    if options.output:
        write(options.output, json.dumps(timeline.to_dict()))
    content = {
        "name": plan.name,
        "id": plan.id,
        "metrics": metrics(plan, problem, timeline).to_dict(),
        "bound_covers": plan.claim.scope if plan.claim else None,
        "cost_source": timeline.cost_source,
        "events": len(timeline.events),
    }
    answer(options, content, text.simulated)
    return 0


def _compare(options: argparse.Namespace) -> int:
    plans, problem = plans_and_problem(options, options.plans)
    rows = []
    for path, plan in zip(options.plans, plans, strict=True):
        figures = metrics(plan, problem, simulate(plan, problem)).to_dict()
        rows.append(
            {"file": path.name, "name": plan.name, "id": plan.id, "order": plan.send_order.mode, "metrics": figures}
        )
    first = rows[0]["metrics"]
    for plan, row in zip(plans, rows, strict=True):
        total = row["metrics"]["total"]
        row["speedup"] = first["total"] / total if total else 1.0  # a recording of nothing takes no time under any plan
        row["moved_experts"] = plans[0].placement.moved_experts(plan.placement)
    answer(options, {"plans": rows}, text.comparison)
    return 0

"""`simulate` and `compare`: what plans are worth on a problem."""

import argparse
from pathlib import Path

from engine.cli import text
from engine.cli.command import Commands, add_command
from engine.cli.inputs import add_inputs, add_travel, plans_and_problem
from engine.cli.output import answer, progress, stopped_by_signals, write
from engine.compare.figures import metrics, speedup
from engine.schema import json_text
from engine.simulate import simulate


def add(commands: Commands) -> None:
    """The commands of this group."""
    command = add_command(commands, "simulate", _simulate, "timeline and metrics of a plan on any workload")
    command.add_argument("plan", type=Path)
    add_inputs(command, required=False)
    add_travel(command, "the plan's own")
    command.add_argument("-o", "--output", type=Path, metavar="timeline.json")

    command = add_command(commands, "compare", _compare, "plans side by side, with the differences to the first")
    command.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    add_inputs(command, required=False)
    add_travel(command, "the plan's own")


def _simulate(options: argparse.Namespace) -> int:
    (plan,), problem = plans_and_problem(options, [options.plan])
    with stopped_by_signals() as stop, progress() as report:
        timeline = simulate(plan, problem, stop, lambda share: report(share, "simulating", None, None))
    if options.output:
        write(options.output, json_text(timeline.to_dict()))
    figures = metrics(plan, problem, timeline)
    content = {
        "name": plan.name,
        "id": plan.id,
        "metrics": figures.to_dict(),
        "how_simulated": figures.how_simulated,
        "bound_covers": plan.claim.scope if plan.claim else None,
        "cost_source": timeline.cost_source,
        "events": len(timeline.events),
    }
    answer(options, content, text.simulated)
    return 0


def _compare(options: argparse.Namespace) -> int:
    plans, problem = plans_and_problem(options, options.plans)
    figures = [metrics(plan, problem) for plan in plans]
    rows = [
        {
            "file": path.name,
            "name": plan.name,
            "id": plan.id,
            "order": plan.send_order.mode,
            "metrics": scored.to_dict(),
            "speedup": speedup(figures[0].total, scored.total),
            "moved_experts": plans[0].placement.moved_experts(plan.placement),
        }
        for path, plan, scored in zip(options.plans, plans, figures, strict=True)
    ]
    answer(options, {"plans": rows}, text.comparison)
    return 0

"""`simulate` and `compare`: what plans are worth on a problem."""

import argparse

from engine.cli import text
from engine.cli.inputs import plans_and_problem
from engine.cli.output import answer, progress, stopped_by_signals, write
from engine.compare.figures import metrics, speedup
from engine.schema import json_text
from engine.simulate import loads_of, simulate


def run_simulate(options: argparse.Namespace) -> int:
    (plan,), problem = plans_and_problem(options, [options.plan])
    with stopped_by_signals() as stop, progress() as report:
        loads = loads_of(plan, problem)
        timeline = simulate(plan, problem, stop, lambda share: report(share, "simulating", None, None), loads)
    if options.output:
        write(options.output, json_text(timeline.to_dict()))
    figures = metrics(plan, problem, timeline, loads)
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


def run_compare(options: argparse.Namespace) -> int:
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

"""`simulate` and `compare`: the timeline of a plan, and the figures of several plans on one problem."""

import argparse
from typing import Any

from engine.cli.inputs import plans_and_problem
from engine.cli.output import OVERLOAD, answer, columns, gap, order_gap, overload, progress, stopped_by_signals, write
from engine.compare.figures import metrics, speedup
from engine.result import not_bounded
from engine.schema import json_text
from engine.simulate import loads_of, simulate
from engine.timeline import over_layers
from engine.units import digits, ratio, seconds, share, size


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
    answer(options, content, _simulation_as_text)
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
    answer(options, {"plans": rows}, _comparison_as_text)
    return 0


def _simulation_as_text(answer: dict[str, Any]) -> str:
    figures = answer["metrics"]
    factors = figures["balance"]["overload_factor"]
    imbalance = figures["balance"]["imbalance_ratio"]["mean"]
    engines = ", ".join(f"{number:.3f} ({engine})" for engine, number in figures["balance"]["balancedness"].items())
    last = [
        f"  balancedness {engines}, overload factor {ratio(factors['mean'])} (imbalance ratio "
        f"{digits(imbalance)}); over layers {over_layers(factors)}",
        f"  costs: {answer['cost_source']}",
    ]
    lines = [f"{answer['name']} ({answer['id'][:12]}): {seconds(figures['total'])} simulated"]
    if figures["decomposition"] is not None:
        return "\n".join([*lines, *_step_figures(figures), *last])
    lines.append(f"  {answer['how_simulated']}")
    if figures["unbounded"]:
        lines.append(f"  order of sends {not_bounded(figures['unbounded'])}")
    else:
        lines.append(f"  no order of sends is below {seconds(figures['order_bound'])} ({gap(figures['order_gap'])} away)")
    if figures["bound"] is not None and answer["bound_covers"] != "order":
        lines.append(
            "  its optimiser claims, which is not computed again here: no placement with as many slots per GPU and no "
            f"replicas is below {seconds(figures['bound'])} ({gap(figures['gap'])} away)"
        )
    lines.append("  " + ", ".join(f"{kind} {seconds(value)}" for kind, value in figures["seconds"].items()))
    lines.append(
        f"  utilisation {share(figures['utilisation'])}, kept local {share(figures['kept_local'])}, up to "
        f"{size(figures['memory'])} of experts on a GPU"
    )
    return "\n".join(lines + last)


def _step_figures(figures: dict[str, Any]) -> list[str]:
    parts = figures["decomposition"]
    return [
        f"  no schedule of its placement is below {seconds(figures['order_bound'])} ({gap(figures['order_gap'])} away)",
        f"  exposed communication {seconds(parts['communication'])}, exposed computation {seconds(parts['computation'])}, "
        f"overlapped {seconds(parts['overlapped'])}, neither {seconds(parts['idle'])}",
        "  busy: " + ", ".join(f"{kind} {seconds(value)}" for kind, value in figures["seconds"].items() if value),
        f"  utilisation {share(figures['utilisation'])}, weights, gradients and momentum up to {size(figures['memory'])} on "
        "a GPU",
    ]


def _comparison_as_text(answer: dict[str, Any]) -> str:
    cells = {
        "plan": lambda plan: f"{plan['file']} ({plan['name']})",
        "order": "order",
        "time": lambda plan: seconds(plan["metrics"]["total"]),
        "speed": lambda plan: ratio(plan["speedup"]),
        "order gap": lambda plan: order_gap(plan["metrics"]),
        "balanced": lambda plan: f"{plan['metrics']['balancedness']:.3f}",
        "overload": lambda plan: overload(plan["metrics"]),
        "kept local": lambda plan: share(plan["metrics"]["kept_local"]),
        "utilisation": lambda plan: share(plan["metrics"]["utilisation"]),
        "moved experts": "moved_experts",
    }
    return columns(answer["plans"], cells) + OVERLOAD

"""`plan` and `graph`: run systems on a problem, and the operators that a training step is planned from."""

import argparse
import os
import sys
from dataclasses import replace
from typing import Any

from engine import parallel
from engine.cli.inputs import new_problem, split_setting
from engine.cli.judgement import read_serving
from engine.cli.output import OVERLOAD, answer, columns, gap, order_gap, overload, progress, stopped_by_signals, write
from engine.compare.baseline import baseline_of
from engine.compare.comparison import Choice, Comparison
from engine.compare.sensitivity import describe_graph, operators_of
from engine.compare.waterfall import Knobs, waterfall
from engine.errors import InputError, StoppedError, one_line
from engine.goal import Goal
from engine.problem import Problem
from engine.result import Status
from engine.store.problems import save_inputs
from engine.systems import SYSTEMS, system_named, systems_for
from engine.units import quantity, seconds, share, size
from engine.validate import refuse_broken

INFEASIBLE = 3


def run_plan(options: argparse.Namespace) -> int:
    problem = new_problem(options)
    choices = _choices(options, problem)
    if options.waterfall and problem.goal is Goal.TWO_MODELS:
        raise InputError("--waterfall turns the knobs of one model; leave --workload-b out")
    if options.serving and any(system.name == "best" for system, _ in choices):
        problem = _judged_by_step(problem, options)
    save_inputs(problem)
    if options.dask:
        os.environ[parallel.ADDRESS] = options.dask
    with stopped_by_signals() as stop:  # to the end: a second signal must not lose the plan
        comparison, plans, lost, turned = Comparison(problem), [], None, []
        with progress() as report:
            try:
                for outcome in comparison.run(choices, stop, report):
                    plans.append(outcome.result.solution)
            except InputError as error:  # a cluster that died half-way must not lose the plans so far
                if not plans:
                    raise
                lost = error
            if options.waterfall and plans and not lost:
                best = SYSTEMS["best"]
                own = best.settings(next((chosen for system, chosen in choices if system is best), {}))
                knobs = Knobs.of(own, problem)
                try:
                    turned = list(waterfall(problem, baseline_of(problem), plans, knobs, stop, report))
                except InputError as error:  # contiguous blocks do not fit, but a plan does
                    text = one_line(str(error))
                    print(f"the knobs cannot be turned from what is deployed, see --in-use: {text}", file=sys.stderr)
        for title, reason in comparison.refused.items():
            print(f"{title} cannot plan for this: {one_line(reason)}", file=sys.stderr)
        if not plans:
            if stop():
                raise StoppedError("stopped before there was a plan")
            raise InputError("no system can plan for this")
        ranked = sorted(zip(comparison.candidates, plans, strict=True), key=lambda pair: pair[0].metrics.total)
        fastest, best = ranked[0]
        if options.output:
            refuse_broken(best, problem)
            write(options.output, best.to_json())
        rows = [
            # Without the plan, which has a file of its own.
            candidate.model_dump(mode="json", exclude={"plan"})
            | {"name": plan.name, "system": plan.provenance.optimiser, "id": plan.id}
            for candidate, plan in ranked
        ]
        content = {"plans": rows, "saved": str(options.output) if options.output else None}
        if turned:
            content["waterfall"] = turned[-1].model_dump(mode="json") | {"in_words": turned[-1].in_words}
        answer(options, content, _plans_as_text)
        if lost:
            raise lost
        return INFEASIBLE if fastest.status == Status.INFEASIBLE.value else 0


def _judged_by_step(problem: Problem, options: argparse.Namespace) -> Problem:
    """The problem with the step of --serving, by which `best` chooses its plan, if the sizes of the model are known."""
    try:
        serving, notes = read_serving(options, problem)
    except InputError as error:
        print(f"note: best chooses by the MoE layers of the step alone: {error}", file=sys.stderr)
        return problem
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return replace(problem, judged_by=serving)


def _choices(options: argparse.Namespace, problem: Problem) -> list[Choice]:
    """The systems that --system names, each with those of the --set options that it has. Raises InputError for a system that
    plans for another goal, and for an option that none of them has."""
    systems = list(systems_for(problem).values())
    if options.system != "all":
        systems = [system_named(options.system, problem)]
    settings = dict(split_setting(setting) for setting in options.settings)
    own = [set(system.options.model_fields) for system in systems]
    for name in settings:
        if not any(name in names for names in own):
            has = ", ".join(sorted(set().union(*own))) or "none"
            raise InputError(f"{options.system} has no option '{name}' (it has: {has})")
    return [
        (system, {name: value for name, value in settings.items() if name in names})
        for system, names in zip(systems, own, strict=True)
    ]


def run_graph(options: argparse.Namespace) -> int:
    problem = new_problem(options)
    graph = operators_of(problem)
    if options.output:
        write(options.output, graph.to_json())
    saved = {"saved": str(options.output) if options.output else None}
    answer(options, describe_graph(problem, graph) | saved, _graph_as_text)
    return 0


def _plans_as_text(answer: dict[str, Any]) -> str:
    cells = {
        "plan": "name",
        "time": lambda plan: seconds(plan["metrics"]["total"]),
        "bound": lambda plan: "—" if plan["metrics"]["bound"] is None else seconds(plan["metrics"]["bound"]),
        "gap": lambda plan: gap(plan["metrics"]["gap"]),
    }
    if answer["plans"][0]["metrics"]["decomposition"] is None:
        explained = OVERLOAD
        cells |= {
            "order gap": lambda plan: order_gap(plan["metrics"]),
            "balanced": lambda plan: f"{plan['metrics']['balancedness']:.3f}",
            "overload": lambda plan: overload(plan["metrics"]),
            "kept local": lambda plan: share(plan["metrics"]["kept_local"]),
        }
    else:
        explained = ""
        cells |= {
            "exposed comm.": lambda plan: seconds(plan["metrics"]["decomposition"]["communication"]),
            "exposed comp.": lambda plan: seconds(plan["metrics"]["decomposition"]["computation"]),
            "overlapped": lambda plan: seconds(plan["metrics"]["decomposition"]["overlapped"]),
        }
    cells |= {"found in": lambda plan: seconds(plan["runtime"]), "proven": "proof"}
    lines = [columns(answer["plans"], cells) + explained]
    for plan in answer["plans"]:
        lines += [f"{plan['name']}: {about}: {quantity(**note)}" for about, note in plan["notes"].items()]
    if turned := answer.get("waterfall"):
        rows = [{"knob": "deployed", "alone": None, "after": turned["deployed"]}, *turned["rows"]]
        cells = {
            "knob": "knob",
            "after": lambda row: seconds(row["after"]),
            "alone": lambda row: "—" if row["alone"] is None else seconds(row["alone"]),
        }
        lines += ["", columns(rows, cells), turned["in_words"]]
    if answer["saved"]:
        lines.append(f"saved the fastest plan: {answer['saved']}")
    return "\n".join(lines)


def _graph_as_text(answer: dict[str, Any]) -> str:
    cells = {
        "kind": lambda row: f"{row['phase']} {row['kind']}",
        "operators": "operators",
        "GFLOP": lambda row: f"{row['flop'] / 1e9:,.1f}",
        "sent": lambda row: size(row["sent"]),
        "time": lambda row: seconds(row["seconds"]),
    }
    lines = [f"{answer['name']}: {answer['operators']} operators, {answer['dependencies']} dependencies"]
    lines += [columns(answer["rows"], cells), f"costs: {answer['cost_source']}"]
    if answer["saved"]:
        lines.append(f"saved: {answer['saved']}")
    return "\n".join(lines)

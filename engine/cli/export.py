"""`export`: a plan as a serving engine or a training framework reads it, or its timeline for Perfetto."""

import argparse
from typing import Any

from engine import formats, store
from engine.cli.inputs import deployed_for, plans_and_problem
from engine.cli.output import answer, write
from engine.compare.redundancy import EvenProjection, project_evenly
from engine.errors import InputError
from engine.formats import perfetto
from engine.formats.placements import Export, open_plan_file, write_placement
from engine.formats.placements.training_step import STEP_TARGETS, write_step
from engine.formats.source import fault, one_clear_line, read_json_object
from engine.model import MoEModel
from engine.plan import Placement, Plan
from engine.simulate import simulate
from engine.timeline import Timeline
from engine.units import ratio, seconds


def run_export(options: argparse.Namespace) -> int:
    if options.measured and options.to != "perfetto":
        raise InputError("--measured is for --to perfetto")
    if options.to == "perfetto":
        if options.even or options.mtp:
            raise InputError("--even and --mtp are for serving engines; leave them out for Perfetto")
        exported, projection = Export({options.output.name: _trace(options).encode()}), None
    elif options.to in STEP_TARGETS:
        if options.even or options.mtp:
            raise InputError("--even and --mtp are for serving engines; leave them out for a training step")
        (plan,), problem = plans_and_problem(options, [options.plan])
        exported = write_step(options.to, plan, problem.model, problem.step, options.output.name)
        projection = None
    else:
        exported, projection = _placement(options)
    for content in exported.files.values():
        write(options.output, content)
    saved = {"to": options.to, "saved": str(options.output), "lines": list(exported.lines)}
    saved |= {"notes": list(exported.notes), "even": projection and _priced(projection)}
    answer(options, saved, _as_text)
    return 0


def _placement(options: argparse.Namespace) -> tuple[Export, EvenProjection | None]:
    """The file for an engine, and the projection if one was asked for."""
    if options.even:
        (plan,), problem = plans_and_problem(options, [options.plan])
        projection = project_evenly(plan, problem)
        plan, model = projection.plan, problem.model
    else:
        projection, (plan, model) = None, _plan_and_model(options)
    return write_placement(options.to, plan, model, options.output.name, options.mtp), projection


def _plan_and_model(options: argparse.Namespace) -> tuple[Plan | Placement, MoEModel]:
    """The plan, or the placement of a serving engine's file, with its model from the options or the plan's own."""
    file = open_plan_file(options.plan)
    if file.plan is not None:
        digest = file.plan.provenance.inputs.get("model", "")
        return file.plan, formats.read_model(options.model) if options.model else store.load_document(MoEModel, digest)
    if not (options.model and options.cluster):
        raise InputError(f"{file.path.name}: a bare placement needs --model and --cluster beside it")
    model = formats.read_model(options.model)
    return deployed_for(file, model, len(formats.read_cluster(options.cluster).gpus)).placement, model


def _trace(options: argparse.Namespace) -> str:
    """Chrome Trace Event JSON of the prediction, or of a launch's prediction and measurement."""
    if not options.measured:
        (plan,), problem = plans_and_problem(options, [options.plan])
        return perfetto.write_trace(simulate(plan, problem))
    plan = formats.read_plan(options.plan)
    with one_clear_line(options.measured):
        runs = read_json_object(options.measured).get("runs")
        for run in runs if isinstance(runs, list) else ():
            if isinstance(run, dict) and run.get("plan") == plan.id:
                try:
                    timelines = [Timeline.from_dict(run[name]) for name in ("predicted", "measured")]
                    return perfetto.write_trace(*timelines)
                except (KeyError, TypeError, AttributeError):
                    raise fault(options.measured, "its timelines are not as a launch saves them") from None
    raise fault(options.measured, f"has no run of the plan {plan.name} ({plan.id[:12]}); give what 'launch --json' printed")


def _priced(projection: EvenProjection) -> dict[str, Any]:
    prices = {"before": projection.before.to_dict(), "after": projection.after.to_dict()}
    return {"slots": projection.slots, "added": projection.added, "dropped": projection.dropped} | prices


def _as_text(content: dict[str, Any]) -> str:
    lines = []
    if (even := content["even"]) is not None:
        before, after = even["before"], even["after"]
        lines.append(
            f"even: {even['slots']} slots on every GPU, {even['added']} copies of experts new, {even['dropped']} given up; "
            f"{seconds(before['total'])} becomes {seconds(after['total'])} ({ratio(after['total'] / before['total'])}), "
            f"balancedness {before['balancedness']:.3f} becomes {after['balancedness']:.3f}"
        )
    lines.append(f"saved: {content['saved']}")
    if content["lines"]:
        lines += ["add to the command line or configuration:", *(f"  {line}" for line in content["lines"])]
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])

"""`verdict`, `redundancy`, `serve` and `trust`: the worth of plans, and the errors of predictions."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

from engine import formats, store
from engine.cli.inputs import plans_and_problem, read_cost, read_recording, read_travel, split_setting
from engine.cli.output import answer, columns, progress, stopped_by_signals, table
from engine.compare.baseline import baseline_of, running, travelling_like
from engine.compare.evidence import Thresholds
from engine.compare.held_out import roles_of
from engine.compare.judge import CONFIDENCE, Judge, Serving
from engine.compare.redundancy import RedundancyPoint, Replication, knee, most_slots, planned_and_judged, redundancy
from engine.compare.trust import predictions, summaries
from engine.compare.verdict import evidence_of, headline_of, verdict_from
from engine.compare.wording import WORDS
from engine.errors import InputError, StoppedError
from engine.formats.packaged import is_packaged, packaged_config
from engine.model import MoEModel
from engine.problem import Problem, make_problem
from engine.reproduce.measured_steps import training_steps
from engine.result import NOT_BOUNDED
from engine.serving.aiconfigurator import choose_operators_of
from engine.serving.step import ServingStep
from engine.simulate.serving import serve_as_measured
from engine.units import digits, seconds, share, signed, size


def run_verdict(options: argparse.Namespace) -> int:
    values = dict(split_setting(setting, "--threshold") for setting in options.thresholds)
    if unknown := sorted(set(values) - set(Thresholds.model_fields)):
        raise InputError(f"there is no threshold '{unknown[0]}' (there are: {', '.join(Thresholds.model_fields)})")
    thresholds = Thresholds.from_values(values)
    files = options.workload or []
    options.workload = files[0] if files else None
    paths = [options.plan, *([options.deployed] if options.deployed else [])]
    (plan, *deployed), problem = plans_and_problem(options, paths)
    if deployed and deployed[0].provenance.optimiser == "file":  # a placement and nothing else
        deployed = [running(deployed[0].placement, plan, deployed[0].name)]
    recordings = [problem.workload, *(read_recording(file, problem.model) for file in files[1:])]
    for digest in roles_of(plan):
        with contextlib.suppress(InputError):  # the data folder may not have what the plan was made from
            recordings.append(store.load_workload(digest))
    serving, notes = read_serving(options, problem) if options.serving else (None, [])
    with stopped_by_signals() as stop, progress() as report:
        now = deployed[0] if deployed else baseline_of(travelling_like(plan, problem))
        evidence = evidence_of(plan, problem, recordings, now, serving, stop, report)
        headline = headline_of(plan, problem, evidence, now, serving, stop)
    verdict = verdict_from(evidence, thresholds).model_dump(mode="json")
    shown = {"headline": headline and headline.to_dict(), "in_words": headline.in_words if headline else []}
    answer(options, verdict | shown | {"notes": notes}, _verdict_as_text)
    return 0


def _verdict_as_text(content: dict[str, Any]) -> str:
    lines = [f"{content['plan']}: {WORDS[content['verdict']]}", *(f"  {line}" for line in content["in_words"])]
    lines += [*(f"  {reason}" for reason in content["reasons"]), ""]
    limit = {True: "at least ", False: "at most "}
    criteria = {
        "figure": "title",
        "value": _value,
        "threshold": lambda row: limit[row["at_least"]] + _quantity(row["threshold"], row["unit"]),
        "": lambda row: "passed" if row["passed"] else "not passed",
        "name": "name",
    }
    parts = {
        "held out": "part",
        "planned on": "planned_on",
        "now": lambda row: seconds(row["seconds_deployed"]),
        "plan": lambda row: seconds(row["seconds"]),
        "gain": lambda row: f"{signed(row['gain'])} ± {share(row['error'])}",
        "made for it": lambda row: _gain(row["made_for_it"]),
    }
    beside = {"beside": "name", "gain held out": lambda row: _gain(row["gain"])}
    beside["memory of replicas"] = lambda row: size(row["replica_bytes"])
    lines += [columns(content["criteria"], criteria), ""]
    if content["parts"]:
        lines += [columns(content["parts"], parts), ""]
    lines.append(columns(content["beside"], beside))
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])


def _gain(value: float | None) -> str:
    return "unknown" if value is None else signed(value)


def _value(criterion: dict[str, Any]) -> str:
    if criterion["infinite"]:
        return "no replicas" if criterion["at_least"] else "never"
    return "unknown" if criterion["value"] is None else _quantity(criterion["value"], criterion["unit"])


def _quantity(value: float, unit: str) -> str:
    if unit == "minutes":
        return f"{digits(value)} min" if value >= 1 else seconds(60 * value)
    return digits(value) if unit == "count" else f"{100 * value:.2f} %"


def run_redundancy(options: argparse.Namespace) -> int:
    if options.training or options.graph or options.workload_b or options.model_b:
        raise InputError("spare slots are advised for inference of one model; leave out the training step or second model")
    model, cluster = formats.read_model(options.model), formats.read_cluster(options.cluster)
    recordings = [read_recording(file, model) for file in options.workload or ()]
    planned, judged, held_out = planned_and_judged(recordings)
    problem = make_problem(planned, cluster, model, read_cost(options, cluster), travel=read_travel(options))
    serving, notes = read_serving(options, problem) if options.serving else (None, [])
    judge = Judge(problem, serving)
    with stopped_by_signals() as stop, progress() as report:
        points = list(redundancy(judge, planned, judged, Replication(options.algorithm, options.groups), stop, report))
    if not points:
        raise StoppedError("stopped before there was a number of slots")
    advised = knee(points)
    content = {
        "planned_on": planned.name,
        "judged_on": [recording.name for recording in judged],
        "held_out": held_out,
        "unit": judge.unit,
        "limit": most_slots(judge)[1],
        "confidence": CONFIDENCE,
        "points": [_point_as_json(point) for point in points],
        "knee": next(_point_as_json(point) for point in points if point.slots == advised.slots),
        "why": advised.reason,
        "notes": notes,
    }
    answer(options, content, _slots_as_text)
    return 0


def _point_as_json(point: RedundancyPoint) -> dict[str, Any]:
    low, high = point.interval
    return point.to_dict() | {"gain_low": low, "gain_high": high}


def _slots_as_text(content: dict[str, Any]) -> str:
    chosen, (first, *_) = content["knee"], content["points"]
    interval = f"{share(content['confidence'])} interval"
    cells = {
        "slots": lambda row: f"{row['slots']}" + (" ←" if row["slots"] == chosen["slots"] else ""),
        "spare": "spare",
        "a GPU": lambda row: f"{row['slots_of_gpu'] - 1} or " * (not row["even"]) + f"{row['slots_of_gpu']}",
        "balanced": lambda row: f"{row['balancedness']:.3f}",
        "as planned": lambda row: f"{row['planned_balancedness']:.3f}",
        "time": lambda row: seconds(row["seconds"]),
        "gain": lambda row: signed(row["gain"]),
        interval: lambda row: "" if row is first else f"{signed(row['gain_low'])} to {signed(row['gain_high'])}",
        "worst": lambda row: signed(row["gain_worst"]),
        "memory of spare": lambda row: size(row["memory_bytes"]),
        "experts per GPU": lambda row: size(row["gpu_bytes"]),
    }
    where = "" if content["held_out"] else ", which was not held out: give another recording"
    lines = [
        f"planned on {content['planned_on']}, judged on {', '.join(content['judged_on'])}{where}",
        columns(content["points"], cells),
        f"{chosen['slots']} slots, {chosen['spare']} of them spare: {content['why']}",
        f"limit: {content['limit']}",
        f"times are of {content['unit']}",
    ]
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])


def run_serve(options: argparse.Namespace) -> int:
    plans, problem = plans_and_problem(options, options.plans)
    serving, notes = read_serving(options, problem)
    step, source, sizes = serving.step, serving.source, serving.sizes
    with stopped_by_signals() as stop:
        served = [serve_as_measured(plan, problem, step, source, sizes, stop).figures for plan in plans]
    rows = [
        {"file": path.name, "name": plan.name, "id": plan.id, "gain": figures.gain_over(served[0])} | figures.to_dict()
        for path, plan, figures in zip(options.plans, plans, served, strict=True)
    ]
    answer(options, {"step": step.model_dump(mode="json"), "plans": rows, "notes": notes}, _steps_as_text)
    return 0


def _steps_as_text(content: dict[str, Any]) -> str:
    rows, decode = content["plans"], content["step"]["phase"] == "decode"
    cells = {
        "plan": "name",
        "a token" if decode else "first token": lambda row: seconds(row["step_seconds"]),
        "tokens/s/GPU": lambda row: digits(row["tokens_per_second_per_gpu"]),
        "MoE": lambda row: seconds(row["moe_seconds"]),
        "hidden": lambda row: seconds(row["hidden_seconds"]),
        "above bound": lambda row: NOT_BOUNDED if row["unbounded"] else share(row["step_seconds"] / row["bound_seconds"] - 1),
        "memory": lambda row: size(row["memory"]["total"]),
        "gain": lambda row: f"{row['gain']:+.1%}",
    }
    parts = [[kind, *(_part(row["parts"], kind) for row in rows)] for kind in rows[0]["parts"]]
    lines = [columns(rows, cells), "", table(["part", *(row["name"] for row in rows)], parts), ""]
    lines += [f"{row['name']}: {_room(row['memory'])}" for row in rows]
    lines += [f"{row['name']}: {row['sequences_in_words']}" for row in rows if row["sequences_in_words"]]
    lines += [f"operators: {rows[0]['operator_source']}", f"MoE layers: {rows[0]['moe_source']}"]
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])


def _room(memory: dict[str, Any]) -> str:
    mean = "" if memory["most"] is None else " per GPU in the mean"
    room = f"room for {memory['most_sequences']:,} sequences{mean}" if memory["fits"] else "it does not fit"
    which = "per GPU" if memory["most"] is None else "on the fullest GPU"
    return (
        f"{size(memory['total'])} of {size(memory['room'])} {which}: {size(memory['experts'])} experts, "
        f"{size(memory['others'])} other weights, {size(memory['kv'])} keys and values"
        + (f", {size(memory['states'])} states of sequences; {room}" if memory["states"] else f"; {room}")
    )


def _part(parts: dict[str, float], kind: str) -> str:
    """Seconds of a kind of work, and its share of the time at work."""
    part = parts.get(kind, 0.0)
    return f"{seconds(part)} {share(part / sum(parts.values()))}"


def read_serving(options: argparse.Namespace, problem: Problem) -> tuple[Serving, list[str]]:
    """The step that --serving names, and notes on the source of its times. Raises InputError."""
    step = formats.read_document(ServingStep, options.serving)
    config = config_of(options, problem.model)
    sizes = formats.read_sizes(config)
    source, notes = choose_operators_of(config, problem.model, sizes, problem.cluster, step, options.operators)
    return Serving(step, source, sizes), notes


def config_of(options: argparse.Namespace, model: MoEModel) -> Path:
    """The `config.json` with the sizes of a model outside its experts."""
    if options.config:
        config = Path(options.config)
        config = config if config.exists() else packaged_config(options.config)
    elif options.model and is_packaged(str(options.model)):
        config = packaged_config(str(options.model))
    elif options.model and options.model.exists() and formats.is_huggingface(options.model):
        config = options.model
    else:
        try:
            config = packaged_config(model.name)
        except InputError:
            raise InputError(
                f"the sizes of {model.name} beside its experts are not known; name its Hugging Face config.json with --config"
            ) from None
    configured = formats.read_model(config)
    for name in ("d_model", "layers", "experts"):
        if getattr(configured, name) != getattr(model, name):
            raise InputError(
                f"{config.name} has {name} {getattr(configured, name)}, the model {model.name} {getattr(model, name)}"
            )
    return config


def run_trust(options: argparse.Namespace) -> int:
    held = [*predictions(), *training_steps()]
    if options.json:
        answer(options, [prediction._asdict() for prediction in held], _trust_as_text)
    else:
        answer(options, [summary._asdict() for summary in summaries(held)], _trust_as_text)
    return 0


def _trust_as_text(summaries: list[dict[str, Any]]) -> str:
    cells = {"predicted": "of", "on": "hardware", "nodes": "nodes"}
    cells |= {"mean error": lambda row: share(row["mean"]), "worst": lambda row: share(row["worst"])}
    return columns(summaries, cells | {"points held out": "points", "points fitted": "fitted"})

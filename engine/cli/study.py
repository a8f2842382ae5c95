"""`study` and `drift`: the studies that the pages start as jobs, answered by the same handlers, and policies on a history.

A study's fields are those of its job's question. The ones left out are as the pages begin with them; `--set` sets others, and
hands names that the question does not have to the options of the system that plans.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from statistics import median
from typing import Any

from engine import formats
from engine.cli.inputs import (
    deployed_for,
    new_problem,
    placed_by,
    plans_and_problem,
    read_cost,
    read_recording,
    read_travel,
    split_setting,
)
from engine.cli.judgement import config_of, read_serving
from engine.cli.output import answer, columns, progress, stopped_by_signals, table
from engine.cli.size import deployments_asked, deployments_text
from engine.compare.affinity import sorted_choices
from engine.compare.baseline import baseline_of
from engine.compare.capacity import CapacityPoint, ladder, parts_of, why_slower
from engine.compare.contention import ContentionPoint, all_alike, exclusive_and_colocated
from engine.compare.drift import Drift, drift, in_parts
from engine.compare.held_out import Maker
from engine.compare.imprecision import LEVELS
from engine.compare.judge import Judge, ratio_gain
from engine.compare.sensitivity import USUAL_VALUES, system_for
from engine.compare.sweep import usual_settings, usual_values
from engine.errors import InputError, StoppedError
from engine.formats.placements import open_plan_file
from engine.goal import Goal
from engine.jobs.kinds import Answer, ask_type, handler_of
from engine.jobs.studies import SweepWanted
from engine.jobs.tasks import ProblemAsk, ServingAsk
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.result import NOT_BOUNDED, Stop
from engine.serving.step import ServingStep
from engine.store.problems import as_json, problem_arguments, save_recordings
from engine.systems import SYSTEMS, systems_for
from engine.systems.base import Report
from engine.units import at_most, digits, ratio, seconds, share, signed
from engine.validate import refuse_broken
from engine.workload import RoutingTrace

Document = dict[str, Any]

TIME_A_PLAN = {"time_limit": 5.0}
"""Options with which the pages begin where a study makes many plans."""


@dataclass(frozen=True)
class Inputs:
    """plans: those that --plan names, or the baseline; settings: by --set, as JSON."""

    problem: Problem
    plans: list[Plan]
    settings: Document

    def limited(self, system: str) -> Document:
        """`TIME_A_PLAN`, if the system has a time limit."""
        known = systems_for(self.problem)
        return dict(TIME_A_PLAN) if system in known and "time_limit" in known[system].options.model_fields else {}


@dataclass(frozen=True)
class Study:
    """usual: the question's fields as the page begins with them, and `options` of the system that plans; text: the answer in
    words, from its JSON."""

    usual: Callable[[Inputs], Document]
    text: Callable[[Document], str]


class _Watched:
    """The part of a job's context that a handler asks for."""

    def __init__(self, stop: Stop, report: Report) -> None:
        self.stop, self._report = stop, report

    def report(self, done: float | None, message: str, *more: float | None, expected: float | None = None) -> None:
        self._report(done or 0.0, message, *more)

    def keep(self, result: Answer) -> None:
        """The command line prints the last answer alone."""


def run_study(options: argparse.Namespace) -> int:
    settings = {key: _value(text) for key, text in map(split_setting, options.settings)}
    if options.study == "deployments":
        return _answered(options, deployments_asked(options, settings), deployments_text)
    unfit = [name for name in OF_DEPLOYMENTS if name != "config" or not options.serving]
    if used := [name for name in unfit if getattr(options, name) not in (None, [])]:
        raise InputError(f"--{used[0].removesuffix('s')} is for study deployments")
    if options.serving and options.study not in OF_STEPS:
        raise InputError(f"study {options.study} times no serving step (these do: {', '.join(OF_STEPS)}); leave --serving out")
    # The step is timed with the recording as it is, not with a recording brought to the step's tokens.
    problem, plans = _inputs(argparse.Namespace(**vars(options) | {"serving": None}))
    if options.study == "utilisation":
        if settings:
            raise InputError("study utilisation has nothing to --set")
        answer(options, _utilisation(problem, plans), lambda content: columns(content["models"], UTILISATION))
        return 0
    save_recordings(problem)
    study = STUDIES[options.study]
    inputs = Inputs(problem, plans or [baseline_of(problem)] if options.study in OF_PLANS else plans, settings)
    arguments = problem_arguments(problem) | _question(options.study, study.usual(inputs), settings)
    if options.serving:
        if problem.goal is not Goal.INFERENCE:
            raise InputError("a serving step is of one model's inference; leave out the training step or second model")
        step, config = formats.read_document(ServingStep, options.serving), config_of(options, problem.model)
        arguments["serving"] = as_json(ServingAsk(step=step, sizes=formats.read_sizes(config), config=config.resolve()))
    return _answered(options, arguments, study.text)


def _answered(options: argparse.Namespace, arguments: Document, text: Callable[[Document], str]) -> int:
    """Answer a study's question. text: the answer in words, from its JSON"""
    handler = handler_of(options.study)
    ask = ask_type(handler).from_dict(arguments, f"study {options.study}")
    with stopped_by_signals() as stop, progress() as report:
        found = handler(ask, _Watched(stop, report))
    said = "\nstopped: these are the answers so far" if stop() else ""
    answer(options, json.loads(found.model_dump_json()), lambda content: text(content) + said)
    return 0


def _inputs(options: argparse.Namespace) -> tuple[Problem, list[Plan]]:
    """The problem, and the plans that --plan names; of these the problem, unless the options say otherwise."""
    if not options.plans:
        for name in ("cluster", "model"):
            if not getattr(options, name):
                raise InputError(f"--{name} is missing: name it, or a plan with --plan, which remembers its inputs")
        return new_problem(options), []
    plans, problem = plans_and_problem(options, options.plans)
    others = tuple(read_recording(file, problem.model) for file in options.also)
    gpus = len(problem.cluster.gpus)
    in_use = options.in_use and deployed_for(open_plan_file(options.in_use), problem.model, gpus).placement
    return replace(problem, others=others, in_use=in_use), plans


def _value(text: str) -> Any:
    """The value that a person typed: JSON, parts between commas, or a text."""
    try:
        return json.loads(text)
    except ValueError:
        return [_value(part.strip()) for part in text.split(",")] if "," in text and text[0] not in "[{" else text


def _question(name: str, usual: Document, settings: Document) -> Document:
    """The fields of a question: the usual ones under those that are set. Raises InputError for a name that nothing has."""
    fields = dict(ask_type(handler_of(name)).model_fields)
    if name == "sweep":
        fields = SweepWanted.model_fields | {"options": fields["sweep"]}
    own = {key: field for key, field in fields.items() if key not in ProblemAsk.model_fields and key not in GIVEN}
    asked, options = {key: value for key, value in usual.items() if key != "options"}, usual.get("options", {})
    for key, value in settings.items():
        listed = key in LISTS or (key in own and "tuple" in str(own[key].annotation))
        value = [value] if listed and value is not None and not isinstance(value, list) else value
        if key in own and key != "options":
            asked[key] = value
        elif "options" in own:
            options = options | {key: value}
        else:
            raise InputError(f"study {name} has no '{key}' (it has: {', '.join(sorted(own)) or 'none'})")
    if missing := [key for key, field in own.items() if field.is_required() and key not in {*asked, "options"}]:
        raise InputError(f"study {name} needs --set {missing[0]}=…; docs/command-line.md says in which unit")
    if name == "sweep":
        return {"sweep": {key: asked[key] for key in SweepWanted.model_fields if key in asked} | {"settings": options}}
    if name == "imprecision":
        options = {"aurora": options}
    return asked | {"options": options} if "options" in own else asked


def _capacity(inputs: Inputs) -> Document:
    parts = parts_of(inputs.problem.cluster)
    title = inputs.settings.pop("title", list(parts)[-1])
    if title not in parts:
        raise InputError(f"study capacity: the cluster has no part '{title}' (it has: {'; '.join(parts)})")
    system = inputs.settings.get("system", next(iter(systems_for(inputs.problem))))
    return {
        "part": [as_json(node) for node in parts[title]],
        "title": title,
        "sizes": ladder(inputs.problem.cluster, parts[title]),
        "system": system,
        "options": inputs.limited(system),
    }


def _sweep(inputs: Inputs) -> Document:
    kind = inputs.settings.get("kind", "micro_op")
    return {"kind": kind, "values": usual_values(kind, inputs.problem), "options": usual_settings(kind)}


def _curve(inputs: Inputs) -> Document:
    system, options = system_for(inputs.problem, inputs.plans[0])
    if inputs.settings.get("system", system) != system:
        options = {}
    values = USUAL_VALUES.get(inputs.settings.get("field"), ())
    return {"plans": [as_json(plan) for plan in inputs.plans], "values": values, "system": system, "options": options}


def _replan(inputs: Inputs) -> Document:
    system, options = system_for(inputs.problem, inputs.plans[0])
    if inputs.settings.get("system", system) != system:
        options = {}
    return {"parent": inputs.plans[0].id, "system": system, "options": options}


def _imprecision(inputs: Inputs) -> Document:
    noise = "layers" if inputs.problem.workload.layers > 1 else "experts"
    return {"levels": LEVELS, "seeds": 3, "noise": noise, "options": TIME_A_PLAN}


def _affinity(inputs: Inputs) -> Document:
    trace = inputs.problem.workload
    by_id = isinstance(trace, RoutingTrace) and sorted_choices(trace)
    return {"gpus": len(inputs.problem.cluster.gpus), "first_choice": not by_id}


def _lina(inputs: Inputs) -> Document:
    others = [other.digest for other in inputs.problem.others]
    usual = {"lengths": [1, 3, 6], "options": {"batch_tokens": 1024, "copies": 64.0}, "others": []}
    return usual | {"profile": others[0] if others else None}


def _matrix(inputs: Inputs) -> Document:
    recordings = [inputs.problem.workload.digest, *(other.digest for other in inputs.problem.others)]
    system = next(system.name for system in SYSTEMS.values() if Goal.INFERENCE in system.goals)
    return {"recordings": recordings, "others": [], "system": system, "options": {}}


def _plan(inputs: Inputs) -> Document:
    return {"plan": as_json(inputs.plans[0])}


def _seconds(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "—" if row[key] is None else seconds(row[key])


def _affinity_text(content: Document) -> str:
    lines, tokens, others = [], content["tokens"], content["others"]
    if tokens:
        sizes = sorted({point["tokens"] for point in tokens["points"]})
        rows = [(size, [point["kept"] for point in tokens["points"] if point["tokens"] == size]) for size in sizes]
        lines += [
            table(["planned from tokens", "hops kept"], [[f"{size:,}", share(sum(kept) / len(kept))] for size, kept in rows])
        ]
        lines += [
            f"contiguous blocks keep {share(tokens['linear'])}; no placement keeps more than {share(tokens['limit'])}",
            "",
        ]
    if others:
        names = others["names"]
        rows = [["contiguous blocks", *map(share, others["linear"])]]
        rows += [[name, *map(share, kept)] for name, kept in zip(names, others["kept"], strict=False)]
        lines.append(table(["planned on, scored on", *names], rows))
    return "\n".join(lines)


def _imprecision_text(content: Document) -> str:
    times: dict[tuple[float, str], list[float]] = {}
    for point in content["points"]:
        times.setdefault((point["level"], point["system"]), []).append(point["total"])
    systems = list(dict.fromkeys(system for _, system in times))
    levels = sorted({level for level, _ in times})
    rows = [[share(level), *(_median(times.get((level, system))) for system in systems)] for level in levels]
    of = f"median of {content['seeds']} draws" if content["seeds"] > 1 else "one draw"
    return table(["noise", *systems], rows) + f"\n{of}; costs: {content['cost_source']}"


def _median(times: list[float] | None) -> str:
    return seconds(median(times)) if times else "—"


def _curve_text(content: Document) -> str:
    times = {(point["series"], point["value"]): point["total"] for point in content["points"]}
    names = list(dict.fromkeys(series for series, _ in times))
    values = sorted({value for _, value in times})
    cells = [
        [f"{value:g}", *(_median([total] if (total := times.get((name, value))) else None) for name in names)]
        for value in values
    ]
    return table([content["field"], *names], cells)


def _contention_text(content: Document) -> str:
    if not content["points"]:
        return "no point yet"
    modes = content["points"][0]["seconds"]
    cells = {"contention": lambda row: f"{100 * row['contention']:g} %"}
    cells |= {mode: lambda row, mode=mode: seconds(row["seconds"][mode]) for mode in modes}
    start = content["pays_from"]
    said = "ordering never pays here" if start is None else f"ordering pays from {100 * start:.3g} % on"
    if start is not None and all_alike(point["seconds"] for point in content["points"]):
        said = "ordering changes nothing here"
    found = [ContentionPoint(**point).saved >= 0 for point in content["points"]]
    if len(found) < content["of"] or (start is None and any(found)):  # stopped
        said = "from where on ordering pays is not known"
    most = f"orders save {at_most(content['most_saved'])} as things are"
    return columns(content["points"], cells) + f"\n{said}; {most}"


def _capacity_text(content: Document) -> str:
    target = content["target"]
    meets = {True: "meets the target", False: "misses the target"}
    cells = {
        "GPUs": "gpus",
        "time": _seconds("total"),
        "bound": _seconds("bound"),
        f"target {seconds(target)}": lambda row: row["refused"] or meets[row["total"] <= target],
    }
    points = [CapacityPoint(**row) for row in content["points"]]
    why = {point.gpus: why_slower(point, points) for point in points}
    if any(why.values()):
        cells["why"] = lambda row: why[row["gpus"]]
    return columns(sorted(content["points"], key=lambda row: row["gpus"]), cells) + f"\nbuilt from {content['title']}"


def _matrix_text(content: Document) -> str:
    rows = [[name, *("—" if cell is None else seconds(cell) for cell in row)] for name, row in _named(content)]
    return table([f"{content['system']} on, scored on", *content["names"]], rows)


def _named(content: Document) -> Iterable[tuple[str, list[float | None]]]:
    return zip(content["names"], content["seconds"], strict=True)


POINT = {
    "series": lambda row: row["point"]["series"],
    "value": lambda row: "—" if row["point"]["value"] is None else f"{row['point']['value']:g}",
    "step": lambda row: seconds(row["point"]["total"]),
    "bound": lambda row: seconds(row["point"]["bound"]),
    "pieces": lambda row: f"{row['point']['pieces']}",
}
FRONT = {
    "weight": lambda row: f"{row['weight']:.2f}",
    "hops kept": lambda row: share(row["kept_share"]),
    "rows a token": lambda row: "—" if row["rows"] is None else digits(row["rows"]),
    "balanced": lambda row: f"{row['balancedness']:.3f}",
    "time": lambda row: seconds(row["plan"]["claim"]["objective"]),
    "moves": "moves",
}
REPLAN = {
    "plan": lambda row: row["plan"]["name"],
    "after the change": lambda row: seconds(row["point"]["seconds"]),
    "bound": lambda row: seconds(row["point"]["bound"]) if row["point"]["bound"] else NOT_BOUNDED,
    "now": lambda row: seconds(row["plan"]["claim"]["objective"]),
}
LINA = {
    "path length": lambda row: f"{row['options']['path_length']}",
    "right": lambda row: share(row["accuracy"]),
    "right in order": lambda row: share(row["accuracy_in_order"]),
    "tuned again": lambda row: share(row["fine_tuning_rate"]),
    "ideal batch": lambda row: seconds(row["ideal_seconds"]),
    "median, of ideal": lambda row: "  ".join(f"{name} {ratio(of['median_inference'])}" for name, of in row["figures"].items()),
}
UTILISATION = {
    "served": "served",
    "GPU utilisation": lambda row: share(row["mean"]),
    "of GPUs": lambda row: f"{share(min(row['gpu']))} to {share(max(row['gpu']))}",
    "pass": _seconds("seconds"),
}

STUDIES = {
    "affinity": Study(_affinity, _affinity_text),
    "sweep": Study(_sweep, lambda content: columns(content["candidates"], POINT)),
    "sensitivity": Study(
        lambda inputs: _plan(inputs) | {"share": 0.25},
        lambda content: (
            columns(content["points"], {"parameter": "title", "less": _seconds("less"), "more": _seconds("more")})
            + f"\nby {share(content['share'])}; as things are {seconds(content['total'])}"
        ),
    ),
    "curve": Study(_curve, _curve_text),
    "contention": Study(_plan, _contention_text),
    "imprecision": Study(_imprecision, _imprecision_text),
    "capacity": Study(_capacity, _capacity_text),
    "replan": Study(_replan, lambda content: columns(content["candidates"], REPLAN)),
    "front": Study(
        lambda inputs: {"points": 9, "over": "worst", "max_moves": 0, "time_limit": 20.0},
        lambda content: columns(content["candidates"], FRONT),
    ),
    "matrix": Study(_matrix, _matrix_text),
    "lina": Study(_lina, lambda content: columns(content["runs"], LINA)),
}
OF_DEPLOYMENTS = ("prompt", "output", "target", "prices", "most", "config")
"""Options that no other study has."""
OF_PLANS = ("sensitivity", "curve", "contention", "replan")
"""Studies of a plan; without one of the baseline."""
OF_STEPS = ("sensitivity", "curve", "contention", "imprecision")
"""Studies that time a whole serving step if one is given."""
GIVEN = ("plan", "plans", "serving", "parent", "part", "recordings", "gpus", "profile", "settings")
"""Fields that the inputs give, not --set."""
LISTS = ("orders", "parts")
"""Settings of a sweep that are lists."""


def _utilisation(problem: Problem, plans: list[Plan]) -> Document:
    if problem.goal is not Goal.TWO_MODELS or len(plans) != 1:
        raise InputError("study utilisation is of one plan for two models; name it with --plan")
    parts = exclusive_and_colocated(plans[0], problem).parts
    return {
        "models": [
            {"served": part.served, "seconds": part.seconds, "mean": part.mean, "gpu": part.gpu.tolist()} for part in parts
        ]
    }


def run_drift(options: argparse.Namespace) -> int:
    if options.training or options.graph or options.workload_b or options.model_b:
        raise InputError("drift is studied for inference of one model; leave out the training step or second model")
    model, cluster = formats.read_model(options.model), formats.read_cluster(options.cluster)
    windows = [read_recording(file, model) for file in options.workload or ()]
    if options.parts is not None:
        if len(windows) != 1:
            raise InputError(f"--parts cuts one recording into windows; {len(windows)} were given")
        windows = list(in_parts(windows[0], options.parts))
    if not windows:
        raise InputError("--workload is missing: name the recordings in order of time, or one with --parts")
    problem = make_problem(windows[0], cluster, model, read_cost(options, cluster), travel=read_travel(options))
    if options.system not in SYSTEMS or Goal.INFERENCE not in SYSTEMS[options.system].goals:
        raise InputError(f"{options.system} does not plan inference of one model")
    system = SYSTEMS[options.system]
    serving, notes = read_serving(options, problem) if options.serving else (None, [])
    maker = Maker(system, system.settings(dict(map(split_setting, options.settings))), problem)
    deployed = None if options.deployed is None else _deployed(options, problem)
    with stopped_by_signals() as stop, progress() as report:
        found = [*drift(Judge(problem, serving), windows, maker, deployed, options.passes, stop, report)]
    if not found:
        raise StoppedError("stopped before a window was judged")
    answer(options, described(found[-1]) | {"notes": notes}, _drift_text)
    return 0


def described(found: Drift) -> Document:
    """The answer as JSON, with the figures that are said of it."""
    later = found.later and {"policy": found.later[0].name, "saved_over_never": found.later[1]}
    said = {"best": found.policies[0].name, "never": found.never.total, "always": found.always.total, "chosen_by_half": later}
    return found.model_dump(mode="json") | said | {"sentence": found.in_words}


def _deployed(options: argparse.Namespace, problem: Problem) -> Plan:
    """The plan of --deployed, whose tokens travel as those of the problem."""
    file = open_plan_file(options.deployed)
    plan = file.plan or placed_by(file, problem)
    refuse_broken(plan, problem, options.deployed.name)
    return baseline_of(replace(problem, in_use=plan.placement), plan)


SHOWN = 10
"""Policies of the ranking that are printed; --json has all."""


def _drift_text(content: Document) -> str:
    windows, never = content["windows"], content["never"]
    seen = {
        "window": "name",
        "deployed": _seconds("deployed"),
        "made for it": _seconds("own"),
        "aged": lambda row: signed(row["aged"]),
        "move": _seconds("move_seconds"),
        "pays after passes": lambda row: "never" if row["pays_after"] is None else f"{ceil(row['pays_after']):,}",
    }
    ranked = {
        "policy": "name",
        "time": _seconds("total"),
        "gain over never": lambda row: signed(ratio_gain(never, row["total"])),
        "moves": lambda row: f"{len(row['moves'])}",
        "moving": lambda row: seconds(sum(move["seconds"] for move in row["moves"])),
    }
    shown = content["policies"][:SHOWN]
    shown += [row for row in content["policies"][SHOWN:] if row["rule"] == "never"]
    lines = [f"{content['system']}, deployed at first: {content['deployed']}; {content['passes']:,} passes a window"]
    lines += [columns(windows, seen), "", columns(shown, ranked)]
    lines.append(
        f"limit: {seconds(content['limit'])}; each window's fastest plan of those made, known beforehand, moved to for nothing"
    )
    lines.append("a bound for schedules of these plans alone; another optimiser's may be faster")
    lines += [content["sentence"], f"times are of {content['unit']}; costs: {content['cost_source']}"]
    if len(windows) < content["of"]:
        lines.append(f"stopped after {len(windows)} of {content['of']} windows")
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])

"""`launch`, and `status`, `cancel` and `collect` of one on a cluster: run a plan as a real job."""

import argparse
import contextlib
import shlex
import sys
from pathlib import Path
from typing import Any

from engine import formats
from engine.cli.arguments import CLUSTER
from engine.cli.inputs import bare_plan, cluster_of, drawn_cluster, inputs_of, read_recording, second_of, step_of
from engine.cli.output import answer, progress, stopped_by_signals, table
from engine.errors import InputError
from engine.formats.placements import open_plan_file
from engine.jobs.launches import ByLayer, KeptScheduler, LaunchAnswer, LaunchedPlan, describe_run
from engine.launch.places.destination import CPUS_PER_RANK, MEMORY_PER_RANK, SCHEDULERS, Destination, as_drawn, gpus_of
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.instructions import OwnModel, uses_nodes
from engine.launch.results.comparison import furthest, layer_in_words
from engine.launch.results.own import Generated
from engine.launch.running import clusters
from engine.launch.running.local import command_of, temporary_folder
from engine.launch.running.local import run as run_prepared
from engine.launch.running.torchx_application import dry_run
from engine.model import MoEModel
from engine.plan import Plan
from engine.program import command
from engine.recording.own_model import read_texts
from engine.recording.per_request import read_prompts
from engine.training import balanced_load
from engine.units import digits, ratio, seconds, size
from engine.validate import refuse_broken_launch
from engine.workload import Workload


def run_launch(options: argparse.Namespace) -> int:
    asked = _launch_asked(options)
    prepared = prepare(asked)
    names, cluster = [path.name for path in options.plans], drawn_cluster(options, asked.plans[0])
    refuse_broken_launch(asked.plans, asked.workload, asked.model, cluster, asked.second, asked.step, names)
    for check in prepared.checks:
        print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.text}", file=sys.stderr)
    if prepared.destination is not None:
        answer(options, submit_or_show(prepared, options.submit), show)
        return 0
    with temporary_folder() as folder:
        command = shlex.join(command_of(prepared, folder))
        print(f"$ {command}" + ("  (rank 0; the others alike)" if prepared.testbed else ""), file=sys.stderr)
        # The output of ranks is a log.
        with stopped_by_signals() as stop, progress() as report, contextlib.redirect_stdout(sys.stderr):
            finished = run_prepared(prepared, folder, stop, report)
    _answer(options, describe_run(finished, prepared.testbed))
    return 0


def _launch_asked(options: argparse.Namespace) -> Launch:
    """The launch that the options ask for. Raises InputError if they do not go together."""
    if options.cost or options.graph:
        raise InputError("a launch measures its own costs and makes its own operators; leave out --cost and --graph")
    if options.text is not None:
        own, plans, workload, model = _own_model(options)
        second = step = None
    else:
        if options.new_tokens is not None:
            raise InputError("--new-tokens goes with --text: texts for the model in the folder --model")
        own, plans = None, tuple(formats.read_plan(path) for path in options.plans)
        model, workload = inputs_of(options, plans[0])
        second, step = second_of(options, plans[0], model), step_of(options, plans[0], model)
    if step is not None and options.tokens is not None:
        raise InputError("a training step has its own tokens; leave out --tokens, or describe a smaller step (--training)")
    if options.on != "testbed" and options.scale is not None:
        raise InputError("--scale is for emulated links; add --on testbed, or leave it out")
    cluster = destination = None
    if options.on in SCHEDULERS:
        if options.ranks is not None:
            raise InputError("a cluster has nodes: say --nodes and --ranks-per-node instead of --ranks")
        destination = destination_of(options, plans[0])
    else:
        for name in (*CLUSTER, "submit"):
            if getattr(options, name) is not None and getattr(options, name) is not False:
                raise InputError(f"{_option(name)} is for a cluster; add --on slurm or --on kubernetes, or leave it out")
    if options.on == "testbed":
        cluster = cluster_of(options, plans[0])
    elif any(map(uses_nodes, plans)):
        cluster = drawn_cluster(options, plans[0])
    named = {name: getattr(options, name) for name in ("on", "scale", "ranks", "tokens", "repeats", "limit", "dtype")}
    return Launch(plans, workload, model, cluster, second, destination=destination, step=step, own=own, **named)


def _own_model(options: argparse.Namespace) -> tuple[OwnModel, tuple[Plan, ...], Workload, MoEModel]:
    """A person's own model, the plans for it, and what these are checked against."""
    for name in ("workload_b", "model_b", "training", "tokens"):
        if getattr(options, name):
            raise InputError(f"{_option(name)} does not go with --text, which runs one model on its own texts; leave it out")
    if options.model is None:
        raise InputError("--model is missing: the folder of the model that --text is run through")
    prompts, folder = read_prompts(options.text), options.model.absolute()
    new_tokens = 20 if options.new_tokens is None else options.new_tokens
    if new_tokens < 1:
        raise InputError(f"--new-tokens {new_tokens}: at least one is needed")
    files = [open_plan_file(path) for path in options.plans]
    gpus = next((file.plan.placement.gpus for file in files if file.plan is not None), None)
    if gpus is None:
        if not options.cluster:
            raise InputError(f"{options.plans[0].name}: a bare placement needs --cluster, for its number of GPUs")
        gpus = len(formats.read_cluster(options.cluster).gpus)
    texts = read_texts(folder, prompts, new_tokens)
    for note in texts.notes_on_texts():
        print(f"note: {note}", file=sys.stderr)
    plans = tuple(file.plan or bare_plan(file, texts.model, gpus) for file in files)
    workload = read_recording(options.workload, texts.model) if options.workload else balanced_load(texts.model)
    own = OwnModel(folder=str(folder), prompts=tuple(map(tuple, texts.ids)), new_tokens=new_tokens)
    return own, plans, workload, texts.model


def run_status(options: argparse.Namespace) -> int:
    handle = clusters.handle_of(options.folder)
    now = clusters.status(handle)
    content = {"handle": handle, "state": now.state, "message": now.message, "over": now.over}
    answer(options, content, lambda _: f"{handle} is {now.text}")
    return 0


def run_cancel(options: argparse.Namespace) -> int:
    handle = clusters.handle_of(options.folder)
    clusters.cancel(handle)
    answer(options, {"handle": handle}, lambda _: f"{handle} is told to end")
    return 0


def run_collect(options: argparse.Namespace) -> int:
    _answer(options, describe_run(clusters.collect(options.folder)))
    return 0


def _answer(options: argparse.Namespace, launched: LaunchAnswer) -> None:
    answer(options, launched.model_dump(mode="json"), lambda _: as_text(launched))


DERIVED = ("ranks_per_node", "cpus_per_node", "memory_per_node")


def submit_or_show(launch: PreparedLaunch, submit: bool) -> dict[str, Any]:
    """Write the run folder, and submit it if asked. Returns the job that was, or would be, submitted."""
    with clusters.new_run_folder(launch) as folder:
        text = dry_run(launch, folder)
        handle = clusters.submit(launch, folder) if submit else None
    print(f"run folder: {folder}", file=sys.stderr)
    return {"folder": str(folder), "seen_as": launch.destination.seen(folder), "text": text, "handle": handle}


def show(content: dict[str, Any]) -> str:
    """The text that would be submitted, or the handle of the submitted job."""
    if content["handle"] is None:
        return content["text"].rstrip("\n")
    folder = shlex.quote(content["folder"])
    return (
        f"submitted: {content['handle']}\nhow it stands: {command()} status {folder}\n"
        f"when it has ended: {command()} collect {folder}"
    )


def destination_of(options: argparse.Namespace, plan: Plan) -> Destination:
    """The destination from the options; they default to the plan's cluster as drawn."""
    kind = SCHEDULERS[options.on]
    fields = {name: value for name in CLUSTER if (value := getattr(options, name)) is not None}
    for name in fields:
        if name not in kind.model_fields:
            raise InputError(f"{_option(name)} is not for --on {options.on}")
    if fields.get("gpus_per_node") != 0 or "nodes" not in fields:
        cluster = cluster_of(options, plan)
        sized = {"nodes", "gpus_per_node"} <= set(fields)
        fields = (gpus_of(cluster) if sized else as_drawn(cluster)) | fields
    needed = {name for name, field in kind.model_fields.items() if field.is_required()} - set(DERIVED)
    for name in CLUSTER:
        if name in needed and name not in fields:
            raise InputError(f"--on {options.on} needs {_option(name)}: {CLUSTER[name][2]}")
    gpus, nodes = fields["gpus_per_node"], fields["nodes"]
    each = fields.setdefault("ranks_per_node", gpus if gpus else -(-plan.placement.gpus // max(1, nodes)))
    fields.setdefault("cpus_per_node", CPUS_PER_RANK * each)
    memory = fields.get("memory_per_node")
    fields["memory_per_node"] = MEMORY_PER_RANK * each if memory is None else memory * 2**30
    fields["shared"] = str(Path(fields["shared"]).absolute())
    return kind.from_dict(fields, f"--on {options.on}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def as_text(answer: LaunchAnswer) -> str:
    lines = [_launched_plan(run) for run in answer.runs]
    if answer.preference is not None:
        rows = []
        for run in (answer.runs[place] for place in answer.preference.order):
            predicted, measured = run.predicted_seconds, run.measured_seconds
            rows.append([run.name, seconds(predicted), seconds(measured), ratio(measured / predicted), _spread(run)])
        header = ["plan", "predicted", "measured", "measured / predicted", f"{len(answer.runs[0].pass_seconds)} passes"]
        lines.append("\n".join([table(header, rows), *answer.preference.lines]))
    lines.append(f"{answer.tokens:,} tokens on {answer.device}")
    if (own := answer.own) is not None:
        lines.append(f"predicted: {own.predicted_from}")
        memory = zip(own.predicted_memory, own.measured_memory, strict=True)
        each = [f"{size(took)} (predicted {size(wanted)})" for wanted, took in memory]
        lines.append(f"weights on each rank: {', '.join(each)}")
        if own.random_weights:
            lines.append(f"{own.folder} has no weights: random ones, whose answers and routing say nothing about the model")
    if answer.routing:
        lines.append(f"their routing: {answer.routing}")
    if (testbed := answer.testbed) is not None:
        rates = ", ".join(digits(rate * 8 / 1e6) for rate in testbed.bandwidth)
        lines.append(f"links of {testbed.name}: {rates} Mbit/s each way, the drawn bandwidths / {digits(testbed.scale)}")
        if near := sorted({rate for rate in testbed.near or () if rate}):
            inside = ", ".join(digits(rate * 8 / 1e6) for rate in near)
            lines[-1] += f"; inside nodes {inside} Mbit/s"
    return "\n".join(lines)


def _launched_plan(run: LaunchedPlan) -> str:
    kinds = run.by_kind
    rows = [
        [kind, seconds(predicted), seconds(measured), ratio(factor) if factor else ""]
        for kind, predicted, measured, factor in zip(kinds.kind, kinds.predicted, kinds.measured, kinds.ratio, strict=True)
    ]
    total = run.measured_seconds / run.predicted_seconds
    rows.append(["waiting between steps", seconds(run.predicted_waiting_seconds), seconds(run.waiting_seconds), ""])
    rows.append(["total", seconds(run.predicted_seconds), seconds(run.measured_seconds), ratio(total)])
    lines = [
        f"{run.name}: median of {len(run.pass_seconds)} passes ({_spread(run)})",
        *([] if run.generated is None else [_pace(run.generated)]),
        table(["step", "predicted", "measured", "measured / predicted"], rows),
        *filter(None, [furthest(kinds.kind, kinds.predicted, kinds.measured)]),
        *_launched_layers(run.by_layer),
        *_launched_scheduler(run.scheduler),
        _difference(run),
        f"predicted with {run.predicted['cost_source']}",
    ]
    return "\n".join(lines)


def _launched_scheduler(scheduler: KeptScheduler | None) -> list[str]:
    if scheduler is None:
        return []
    columns = zip(scheduler.piece, scheduler.predicted, scheduler.measured, strict=True)
    rows = [[piece, seconds(predicted), seconds(measured)] for piece, predicted, measured in columns]
    return [f"{scheduler.text}; slowest rank of every layer:", table(["of the scheduler", "predicted", "measured"], rows)]


def _pace(generated: Generated) -> str:
    """First token, further ones and their rate, predicted and measured."""
    before, after = generated.predicted, generated.measured
    rows = [["first token", seconds(before.prefill_seconds), seconds(after.prefill_seconds)]]
    if after.token_seconds is not None:
        rows.append(["each further token", seconds(before.token_seconds), seconds(after.token_seconds)])
    rows.append(["new tokens a second", digits(before.tokens_per_second), digits(after.tokens_per_second)])
    return table(["", "predicted", "measured"], rows)


def _difference(run: LaunchedPlan) -> str:
    if run.difference is None:
        return "not compared with the model without a plan, for which rank 0 had no room"
    line = f"differs from the unplanned computation by {run.difference:.2g} of its largest number (rounding explains up to "
    line += f"{run.allowed_difference:.2g})"
    if run.generated is None:
        return line
    others = "some tokens are others, with logits that rounding does not tell apart"
    return f"{line}; {'the same tokens' if run.generated.same_tokens else others}"


def _spread(run: LaunchedPlan) -> str:
    return f"{seconds(min(run.pass_seconds))} to {seconds(max(run.pass_seconds))}"


def _launched_layers(layers: ByLayer) -> list[str]:
    """The least and the greatest factor of several layers."""
    factors = {layer: factor for layer, factor in zip(layers.layer, layers.ratio, strict=True) if factor}
    if len(factors) < 2:
        return []
    least, most = min(factors, key=factors.__getitem__), max(factors, key=factors.__getitem__)
    return [
        f"layers: from {ratio(factors[least])} ({layer_in_words(least)}) to {ratio(factors[most])} ({layer_in_words(most)})"
    ]

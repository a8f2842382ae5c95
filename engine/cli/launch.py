"""`launch`, and `status`, `cancel` and `collect` of one on a cluster: run a plan as a real job."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence

from engine import formats, store
from engine.cli import clusters as cli_clusters
from engine.cli import text
from engine.cli.inputs import drawn_cluster, inputs_of, second_of, step_of
from engine.cli.output import answer, progress, stopped_by_signals
from engine.cluster import Cluster
from engine.errors import InputError
from engine.jobs.launches import ByLayer, KeptPreference, LaunchAnswer, LaunchedPlan, describe_run
from engine.launch.places.destination import SCHEDULERS
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.instructions import uses_nodes
from engine.launch.running import clusters
from engine.launch.running.local import command_of, temporary_folder
from engine.launch.running.local import run as run_prepared
from engine.units import digits, ratio, seconds
from engine.validate import refuse_broken_launch


def run_launch(options: argparse.Namespace) -> int:
    asked = _launch_asked(options)
    prepared = prepare(asked)
    names, cluster = [path.name for path in options.plans], drawn_cluster(options, asked.plans[0])
    refuse_broken_launch(asked.plans, asked.workload, asked.model, cluster, asked.second, asked.step, names)
    for check in prepared.checks:
        print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.text}", file=sys.stderr)
    if prepared.destination is not None:
        answer(options, cli_clusters.submit_or_show(prepared, options.submit), cli_clusters.show)
        return 0
    with temporary_folder() as folder:
        command = shlex.join(command_of(prepared, folder))
        print(f"$ {command}" + ("  (rank 0; the others alike)" if prepared.testbed else ""), file=sys.stderr)
        # What the ranks print is a log.
        with stopped_by_signals() as stop, progress() as report, contextlib.redirect_stdout(sys.stderr):
            finished = run_prepared(prepared, folder, stop, report)
    _answer(options, describe_run(finished, prepared.testbed))
    return 0


def _launch_asked(options: argparse.Namespace) -> Launch:
    """What the options ask to launch. Raises InputError when they do not go together."""
    if options.cost or options.graph:
        raise InputError("a launch measures its own costs and makes its own operators; leave out --cost and --graph")
    plans = tuple(formats.read_plan(path) for path in options.plans)
    model, workload = inputs_of(options, plans[0])
    second, step = second_of(options, plans[0], model), step_of(options, plans[0], model)
    if step is not None and options.tokens is not None:
        raise InputError(
            "a training step has its own tokens; leave out --tokens, or describe a smaller step (--training)"
        )
    if options.on != "testbed" and options.scale is not None:
        raise InputError("--scale is for emulated links; add --on testbed, or leave it out")
    cluster = destination = None
    if options.on in SCHEDULERS:
        if options.ranks is not None:
            raise InputError("a cluster has nodes: say --nodes and --ranks-per-node instead of --ranks")
        destination = cli_clusters.destination_of(options, plans[0])
    else:
        cli_clusters.refuse_options(options)
    if options.on == "testbed":
        digest = plans[0].provenance.inputs.get("cluster", "")
        cluster = formats.read_cluster(options.cluster) if options.cluster else store.load_document(Cluster, digest)
    elif any(map(uses_nodes, plans)):
        cluster = drawn_cluster(options, plans[0])
    return Launch(
        plans,
        workload,
        model,
        cluster,
        second,
        on=options.on,
        scale=options.scale,
        destination=destination,
        ranks=options.ranks,
        tokens=options.tokens,
        repeats=options.repeats,
        limit=options.limit,
        dtype=options.dtype,
        step=step,
    )


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
    answer(options, launched.model_dump(mode="json"), lambda _: _as_text(launched))


def _as_text(answer: LaunchAnswer) -> str:
    lines = [_launched_plan(run) for run in answer.runs]
    if answer.preference is not None:
        lines.append(_launched_together(answer.runs, answer.preference))
    lines.append(f"{answer.tokens:,} tokens on {answer.device}")
    if (testbed := answer.testbed) is not None:
        rates = ", ".join(digits(rate * 8 / 1e6) for rate in testbed.bandwidth)
        lines.append(
            f"links of {testbed.name}: {rates} Mbit/s each way, the drawn bandwidths / {digits(testbed.scale)}"
        )
        if near := sorted({rate for rate in testbed.near or () if rate}):
            inside = ", ".join(digits(rate * 8 / 1e6) for rate in near)
            lines[-1] += f"; inside nodes {inside} Mbit/s"
    return "\n".join(lines)


def _launched_plan(run: LaunchedPlan) -> str:
    kinds = run.by_kind
    rows = [
        [kind, seconds(predicted), seconds(measured), ratio(factor) if factor else ""]
        for kind, predicted, measured, factor in zip(
            kinds.kind, kinds.predicted, kinds.measured, kinds.ratio, strict=True
        )
    ]
    total = run.measured_seconds / run.predicted_seconds
    rows.append(["waiting between steps", seconds(run.predicted_waiting_seconds), seconds(run.waiting_seconds), ""])
    rows.append(["total", seconds(run.predicted_seconds), seconds(run.measured_seconds), ratio(total)])
    spread = f"{seconds(min(run.pass_seconds))} to {seconds(max(run.pass_seconds))}"
    return "\n".join(
        [
            f"{run.name}: median of {len(run.pass_seconds)} passes ({spread})",
            text.table(["step", "predicted", "measured", "measured / predicted"], rows),
            *_launched_layers(run.by_layer),
            f"differs from the unplanned computation by {run.difference:.2g} of its largest number (rounding explains up to "
            f"{run.allowed_difference:.2g})",
            f"predicted with {run.predicted['cost_source']}",
        ]
    )


def _launched_layers(layers: ByLayer) -> list[str]:
    """The least and the greatest factor of several layers."""
    factors = {layer: factor for layer, factor in zip(layers.layer, layers.ratio, strict=True) if factor}
    if len(factors) < 2:
        return []
    least, most = min(factors, key=factors.__getitem__), max(factors, key=factors.__getitem__)
    return [f"layers: from {ratio(factors[least])} (layer {least}) to {ratio(factors[most])} (layer {most})"]


def _launched_together(runs: Sequence[LaunchedPlan], preference: KeptPreference) -> str:
    rows = []
    for place in preference.order:
        run = runs[place]
        passes, predicted, measured = run.pass_seconds, run.predicted_seconds, run.measured_seconds
        spread = f"{seconds(min(passes))} to {seconds(max(passes))}"
        rows.append([run.name, seconds(predicted), seconds(measured), ratio(measured / predicted), spread])
    header = ["plan", "predicted", "measured", "measured / predicted", f"{len(runs[0].pass_seconds)} passes"]
    return "\n".join([text.table(header, rows), *preference.lines])

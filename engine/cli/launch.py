"""`launch`, and `status`, `cancel` and `collect` of one on a cluster: run a plan as a real job."""

import argparse
import contextlib
import shlex
import sys

from engine import formats, store
from engine.cli import clusters as cli_clusters
from engine.cli import text
from engine.cli.inputs import drawn_cluster, inputs_of, second_of, step_of
from engine.cli.output import answer, progress, stopped_by_signals
from engine.cluster import Cluster
from engine.errors import InputError
from engine.jobs.launches import describe_run
from engine.launch.places.destination import SCHEDULERS
from engine.launch.preparation.launch import Launch
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.instructions import uses_nodes
from engine.launch.running import clusters
from engine.launch.running.local import command_of, temporary_folder
from engine.launch.running.local import run as run_prepared
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
    answer(options, describe_run(finished, prepared.testbed), text.launched)
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
    answer(options, describe_run(clusters.collect(options.folder)), text.launched)
    return 0

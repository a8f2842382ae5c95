"""`launch` and `collect`: run a plan as a real job, here or on a cluster."""

import argparse
import contextlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from engine import formats, store
from engine.cli import clusters as cli_clusters
from engine.cli import text
from engine.cli.command import Commands, add_command
from engine.cli.inputs import add_inputs, inputs_of, second_of, step_of
from engine.cli.output import answer, progress, stopped_by_signals
from engine.cluster import Cluster
from engine.errors import InputError
from engine.jobs.launches import describe_run
from engine.launch import clusters, local, testbed
from engine.launch.destination import SCHEDULERS
from engine.launch.devices import Devices, attached
from engine.launch.preflight import place_checks
from engine.launch.prepare import Launch, prepare
from engine.launch.prepare_step import prepare_step


def add(commands: Commands) -> None:
    """The commands of this group."""
    command = add_command(
        commands, "launch", launch, "run a plan as a torch.distributed job; measured beside predicted"
    )
    command.add_argument("plans", nargs="+", type=Path, metavar="PLAN", help="several are run in turn and compared")
    add_inputs(command, required=False)
    command.add_argument(
        "--on",
        choices=["local", "testbed", *SCHEDULERS],
        default="local",
        help="testbed: the plan's cluster emulated on this machine, with shaped links (needs root and iproute2)",
    )
    cli_clusters.add_options(command)
    command.add_argument(
        "--scale",
        type=float,
        metavar="S",
        help="testbed: links S times as slow as drawn (default: what brings the fastest to 100 Mbit/s)",
    )
    command.add_argument("--ranks", type=int, metavar="N", help="default: one per attached GPU, at most 4 on a CPU")
    command.add_argument("--tokens", type=int, metavar="N", help="tokens to replay (default: what takes some seconds)")
    command.add_argument(
        "--dtype", choices=["fp32", "bf16"], help="of all numbers (default: on GPUs the model's own, on CPUs fp32)"
    )
    command.add_argument("--repeats", type=int, default=3, metavar="N", help="timed passes (default 3)")
    command.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="time limit (default 900)")

    command = add_command(commands, "collect", collect, "what a launch on a cluster measured, beside the prediction")
    command.add_argument("folder", type=Path, help="its run folder")


def launch(given: argparse.Namespace) -> int:
    if given.cost or given.graph:
        raise InputError("a launch measures its own costs and makes its own operators; leave out --cost and --graph")
    plans = [formats.read_plan(path) for path in given.plans]
    model, workload = inputs_of(given, plans[0])
    second, step = second_of(given, plans[0], model), step_of(given, plans[0], model)
    if step is not None and given.tokens is not None:
        raise InputError(
            "a training step has its own tokens; leave out --tokens, or describe a smaller step (--training)"
        )
    if given.on != "testbed" and given.scale is not None:
        raise InputError("--scale is for emulated links; add --on testbed, or leave it out")

    def prepared_for(devices: Devices, ranks: int | None) -> Launch:
        if step is not None:
            return prepare_step(plans, workload, model, step, devices, ranks, given.repeats, given.limit, given.dtype)
        return prepare(
            plans, workload, model, devices, ranks, given.tokens, given.repeats, given.limit, second, given.dtype
        )

    if given.on in SCHEDULERS:
        answer(given, cli_clusters.launch_on_cluster(given, plans[0], prepared_for), cli_clusters.show)
        return 0
    cli_clusters.refuse_options(given)
    devices, bed = attached(), None
    if given.on == "testbed":
        devices = replace(devices, gpus=(), memory=())  # ranks in namespaces talk over Gloo, from the CPU
    prepared = prepared_for(devices, given.ranks)
    if given.on == "testbed":
        digest = plans[0].provenance.inputs.get("cluster", "")
        cluster = formats.read_cluster(given.cluster) if given.cluster else store.load_document(Cluster, digest)
        bed = testbed.emulated(plans[0], cluster, prepared.spec.ranks, given.scale)
    prepared = replace(prepared, checks=(*prepared.checks, *place_checks(prepared, bed)))
    for check in prepared.checks:
        print(f"{'ok  ' if check.passed else 'FAIL'}  {check.name}: {check.text}", file=sys.stderr)
    with local.temporary_folder() as folder:
        command = bed.command(0, folder) if bed else prepared.command(folder)
        print("$ " + shlex.join(command) + ("  (rank 0; the others alike)" if bed else ""), file=sys.stderr)
        # What the ranks print is a log.
        with stopped_by_signals() as stop, progress() as tell, contextlib.redirect_stdout(sys.stderr):
            if bed is None:
                finished = local.run(prepared, folder, stop, tell)
            else:
                with bed:
                    finished = testbed.run(prepared, bed, folder, stop, tell)
    answer(given, describe_run(finished) | ({"testbed": bed.to_dict()} if bed else {}), text.launched)
    return 0


def collect(given: argparse.Namespace) -> int:
    answer(given, describe_run(clusters.collect(given.folder)), text.launched)
    return 0

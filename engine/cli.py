"""The command line: everything a page does, in scripts and on a login node.

Answers go to standard output (`--json`: one JSON object), progress and logs to standard error. Exit 0: done, 2: bad
input (one line says where and why), 3: infeasible.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import cli_calibrate, cli_clusters, formats, report, store
from engine.cli_inputs import (
    drawn_cluster,
    inputs_of,
    new_problem,
    plans_and_problem,
    read_recording,
    remember,
    second_of,
    split_setting,
    step_of,
)
from engine.cluster import Cluster
from engine.errors import InputError
from engine.formats.nvidia_topo import read_topology
from engine.formats.source import one_line
from engine.inspection import inspect
from engine.jobs.calibrations import describe_calibration
from engine.jobs.launches import describe_run
from engine.jobs.protocol import write_atomically
from engine.jobs.tasks import candidate
from engine.launch import calibration, clusters, local, testbed
from engine.launch.destination import SCHEDULERS
from engine.launch.devices import Devices, attached, cluster_of
from engine.launch.preflight import place_checks
from engine.launch.prepare import Launch, prepare
from engine.launch.prepare_step import prepare_step
from engine.problem import Problem
from engine.result import Status, Stop
from engine.simulate.inference import simulate
from engine.simulate.metrics import metrics
from engine.solve import KERNELS, Options, solve
from engine.studies.operators import describe_graph, operators_of
from engine.systems import SYSTEMS, TRAINING, run, systems_for
from engine.systems.base import Report, System
from engine.validate import refuse_broken, refuse_broken_launch

INFEASIBLE = 3


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = parser().parse_args(arguments)
    try:
        code = given.function(given)
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output has closed it (`| head`): nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="python -m engine", description="Plan Mixture-of-Experts models on GPU clusters."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help)
        command.set_defaults(function=function)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        return command

    def add_inputs(command: argparse.ArgumentParser, required: bool) -> None:
        more = "" if required else " (default: what the plan was made from)"
        training = "; with --training it may be left out: balanced routing" if required else more
        command.add_argument("--workload", metavar="FILE[::NAME]", help="the recording" + training)
        command.add_argument("--cluster", required=required, type=Path, metavar="FILE", help="cluster JSON" + more)
        command.add_argument(
            "--model",
            required=required,
            type=Path,
            metavar="FILE",
            help="model JSON or Hugging Face config.json" + more,
        )
        command.add_argument(
            "--workload-b",
            action="append",
            default=[],
            metavar="FILE[::NAME]",
            help="the recording of a second model on the same GPUs" + more,
        )
        command.add_argument(
            "--model-b", type=Path, metavar="FILE", help="the second model (default: the same as the first)"
        )
        command.add_argument(
            "--training",
            metavar="STEP",
            help="plan a training step instead of inference: its JSON, or 'usual' for what the "
            "model and the cluster suggest" + more,
        )
        command.add_argument("--graph", type=Path, metavar="FILE", help="the step's operators as JSON" + more)
        command.add_argument(
            "--cost",
            action="append",
            default=[],
            metavar="SOURCE",
            help="datasheet (the default), silicon (measured tables), or a file: an α–β profile or measured times (JSON, CSV), "
            "nccl-tests output, a PyTorch profiler trace; twice: computation and network each from the first that has it",
        )

    command = add("inspect", inspect_files, "what a recording is, its checks, its skew and affinity")
    command.add_argument("files", nargs="+", metavar="FILE[::NAME]")

    command = add("plan", plan, "run one system, or all of them and rank their plans")
    add_inputs(command, required=True)
    command.add_argument("--system", required=True, choices=[*dict.fromkeys([*SYSTEMS, *TRAINING]), "all"])
    command.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="FILE[::NAME]",
        help="another recording of the model that the plan must serve as well; may be given several times",
    )
    command.add_argument(
        "--in-use", type=Path, metavar="PLAN", help="the plan that is deployed now, for what a move costs"
    )
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    command.add_argument("-o", "--output", type=Path, metavar="plan.json", help="where the (best) plan goes")

    command = add("graph", show_graph, "the operators of a training step, their sizes and times")
    add_inputs(command, required=True)
    command.set_defaults(also=[], in_use=None)
    command.add_argument("-o", "--output", type=Path, metavar="graph.json")

    command = add("simulate", simulate_plan, "timeline and metrics of a plan on any workload")
    command.add_argument("plan", type=Path)
    add_inputs(command, required=False)
    command.add_argument("-o", "--output", type=Path, metavar="timeline.json")

    command = add("compare", compare, "plans side by side, with the differences to the first")
    command.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    add_inputs(command, required=False)

    command = add("launch", launch, "run a plan as a torch.distributed job; measured beside predicted")
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

    command = add("collect", collect, "what a launch on a cluster measured, beside the prediction")
    command.add_argument("folder", type=Path, help="its run folder")

    command = add("calibrate", calibrate, "measure GEMMs and collectives on the attached devices, as a source of costs")
    cli_calibrate.add_options(command)

    command = add(
        "detect", detect, "the GPUs of this machine, or of one whose 'nvidia-smi topo -m' was saved, as a cluster"
    )
    command.add_argument("--topology", type=Path, metavar="FILE", help="what 'nvidia-smi topo -m' printed")
    command.add_argument("--type", metavar="TYPE", help="the catalogue's type of GPUs that are not known by name")
    command.add_argument("-o", "--output", type=Path, metavar="cluster.json")

    command = add("solve", solve_kernel, "one kernel on its bare problem: JSON on standard input, JSON out")
    command.add_argument("kernel", choices=list(KERNELS))
    command.add_argument("--options", default="{}", help='for example {"time_limit": 10, "seed": 0, "exact": true}')
    return top


def inspect_files(given: argparse.Namespace) -> int:
    found = [inspect(read_recording(file)) for file in given.files]
    answer(given, {"recordings": [one.to_dict() for one in found]}, report.recordings)
    return 0


def plan(given: argparse.Namespace) -> int:
    problem = new_problem(given)
    settings = dict(split_setting(text) for text in given.settings)
    fitting = systems_for(problem)
    systems = list(fitting.values()) if given.system == "all" else [system_called(given.system, problem)]
    own = [set(system.options.model_fields) for system in systems]
    for name in settings:
        if not any(name in names for names in own):
            has = ", ".join(sorted(set().union(*own))) or "none"
            raise InputError(f"{given.system} has no option '{name}' (it has: {has})")
    remember(problem)
    outcomes, refused = [], {}
    with stopped_by_signals() as stop, progress() as tell:
        for system, names in zip(systems, own, strict=True):
            options = {name: value for name, value in settings.items() if name in names}
            try:
                outcomes.append(run(system, problem, options, stop, tell))
            except InputError as error:
                if len(systems) == 1:
                    raise
                refused[system.title] = str(error)
            if stop():
                break
    for title, reason in refused.items():
        print(f"{title} cannot plan for this: {one_line(reason)}", file=sys.stderr)
    if not outcomes:
        raise InputError("no system can plan for this")
    outcomes.sort(key=lambda outcome: outcome.result.objective)
    best = outcomes[0].result
    if given.output:
        refuse_broken(best.solution, problem)
        write(given.output, best.solution.to_json())
    rows = [candidate(outcome, problem) for outcome in outcomes]
    for row, outcome in zip(rows, outcomes, strict=True):
        made = outcome.result.solution
        del row["plan"]
        row |= {"name": made.name, "system": made.provenance.optimiser, "id": made.id}
    answer(given, {"plans": rows, "saved": str(given.output) if given.output else None}, report.candidates)
    return INFEASIBLE if best.status is Status.INFEASIBLE else 0


def system_called(name: str, problem: Problem) -> System:
    """The system of that name for what is to be planned; InputError when it plans for something else."""
    registry, what = (SYSTEMS, "inference") if problem.step is None else (TRAINING, "a training step")
    if name not in registry:
        raise InputError(f"{name} does not plan {what}; those that do: {', '.join(registry)}")
    return registry[name]


def show_graph(given: argparse.Namespace) -> int:
    problem = new_problem(given)
    graph = operators_of(problem)
    if given.output:
        write(given.output, graph.to_json())
    answer(
        given, describe_graph(problem, graph) | {"saved": str(given.output) if given.output else None}, report.operators
    )
    return 0


def simulate_plan(given: argparse.Namespace) -> int:
    (made,), problem = plans_and_problem(given, [given.plan])
    timeline = simulate(made, problem)
    if given.output:
        write(given.output, json.dumps(timeline.to_dict()))
    found = {"name": made.name, "id": made.id, "metrics": metrics(made, problem, timeline).to_dict()}
    found["bound_covers"] = made.claim.scope if made.claim else None
    answer(given, found | {"cost_source": timeline.cost_source, "events": len(timeline.events)}, report.simulated)
    return 0


def compare(given: argparse.Namespace) -> int:
    plans, problem = plans_and_problem(given, given.plans)
    rows = []
    for path, made in zip(given.plans, plans, strict=True):
        found = metrics(made, problem, simulate(made, problem)).to_dict()
        rows.append(
            {"file": path.name, "name": made.name, "id": made.id, "order": made.send_order.mode, "metrics": found}
        )
    first = rows[0]["metrics"]
    for made, row in zip(plans, rows, strict=True):
        total = row["metrics"]["total"]
        row["speedup"] = first["total"] / total if total else 1.0  # a recording of nothing takes no time under any plan
        row["moved_experts"] = plans[0].placement.moved_experts(made.placement)
    answer(given, {"plans": rows}, report.comparison)
    return 0


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

    cluster, names = drawn_cluster(given, plans[0]), [path.name for path in given.plans]

    def prepared_for(devices: Devices, ranks: int | None) -> Launch:
        launch = prepared_on(devices, ranks)
        refuse_broken_launch(plans, workload, model, cluster, second, step, names)
        return launch

    def prepared_on(devices: Devices, ranks: int | None) -> Launch:
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
    answer(given, describe_run(finished) | ({"testbed": bed.to_dict()} if bed else {}), report.launched)
    return 0


def collect(given: argparse.Namespace) -> int:
    answer(given, describe_run(clusters.collect(given.folder)), report.launched)
    return 0


def calibrate(given: argparse.Namespace) -> int:
    sweep, bed = cli_calibrate.prepared(given)
    # What the ranks print is a log.
    with (
        local.temporary_folder() as folder,
        stopped_by_signals() as stop,
        progress() as tell,
        contextlib.redirect_stdout(sys.stderr),
        bed or contextlib.nullcontext(),
    ):
        made = calibration.calibrate(sweep, folder, stop, tell, given.type, bed)
    write(given.output, made.to_json())
    answer(given, describe_calibration(made) | {"saved": str(given.output)}, cli_calibrate.show)
    return 0


def detect(given: argparse.Namespace) -> int:
    found: dict[str, Any] = {"summary": None, "gpus": [], "cluster": None, "notes": [], "saved": None}
    if given.topology:
        drawn = read_topology(given.topology, given.type)
    else:
        devices, drawn = attached(), None
        found["summary"], found["notes"] = devices.summary, list(devices.notes)
        found["gpus"] = [{"name": gpu.name, "type": gpu.type, "memory": gpu.memory} for gpu in devices.machine]
        try:
            drawn = cluster_of(devices.machine, given.type)
        except InputError as error:
            # To look is no fault where there is nothing to see, to save it is.
            if given.output or given.type:
                raise
            found["notes"].append(str(error))
    if drawn:
        found["cluster"] = drawn.cluster.model_dump(mode="json", exclude_none=True)
        found["notes"] += drawn.notes
        if given.output:
            write(given.output, drawn.cluster.model_dump_json(indent=1, exclude_none=True))
            found["saved"] = str(given.output)
    answer(given, found, report.detected)
    return 0


def solve_kernel(given: argparse.Namespace) -> int:
    options = Options.from_json(given.options, "--options")
    try:
        instances = json.load(sys.stdin)
    except (ValueError, RecursionError) as error:
        raise InputError(f"standard input is not valid JSON ({error})") from None
    print(json.dumps(solve(given.kernel, instances, options)))
    return 0


def write(path: Path, text: str) -> None:
    """Write an output file; InputError when it cannot be written."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None


def answer(given: argparse.Namespace, found: dict[str, Any], show: Callable[[dict[str, Any]], str]) -> None:
    """Print the answer as JSON or as text."""
    print(json.dumps(found) if given.json else show(found))


@contextlib.contextmanager
def progress() -> Iterator[Report]:
    """A `Report` for people: one line of standard error that is written over, and ended before anything else is
    printed."""
    shown = False

    def tell(done: float, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
        nonlocal shown
        shown = True
        print(f"\r{done:4.0%} {message:<60}", end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if shown:
            print(file=sys.stderr)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[Stop]:
    """A `Stop` that SIGTERM and Ctrl-C turn true, so that the best found so far is still answered."""
    asked: list[int] = []
    wanted = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: asked.append(number)) for number in wanted]
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)

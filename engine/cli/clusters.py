"""`launch --on slurm` and `--on kubernetes`: what is to be submitted, and with --submit its submission."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from engine import formats, store
from engine.cli.arguments import CLUSTER
from engine.cluster import Cluster
from engine.errors import InputError
from engine.launch.places.destination import CPUS_PER_RANK, MEMORY_PER_RANK, SCHEDULERS, Destination, as_drawn, gpus_of
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.running import clusters
from engine.launch.running.torchx_application import dry_run
from engine.plan import Plan

DERIVED = ("ranks_per_node", "cpus_per_node", "memory_per_node")


def refuse_options(options: argparse.Namespace) -> None:
    """InputError when an option that is for clusters was given without one."""
    for name in (*CLUSTER, "submit"):
        if getattr(options, name) is not None and getattr(options, name) is not False:
            raise InputError(f"{_option(name)} is for a cluster; add --on slurm or --on kubernetes, or leave it out")


def submit_or_show(launch: PreparedLaunch, submit: bool) -> dict[str, Any]:
    """Write the run folder, and submit it if that is wanted. Returns what was, or would be, submitted."""
    with clusters.new_run_folder(launch) as folder:
        text = dry_run(launch, folder)
        handle = clusters.submit(launch, folder) if submit else None
    print(f"run folder: {folder}", file=sys.stderr)
    return {"folder": str(folder), "seen_as": launch.destination.seen(folder), "text": text, "handle": handle}


def show(content: dict[str, Any]) -> str:
    """The answer for people: the text that would be submitted, or what was."""
    if content["handle"] is None:
        return content["text"].rstrip("\n")
    folder = shlex.quote(content["folder"])
    return (
        f"submitted: {content['handle']}\nhow it stands: python -m engine status {folder}\n"
        f"when it has ended: python -m engine collect {folder}"
    )


def destination_of(options: argparse.Namespace, plan: Plan) -> Destination:
    """Where the options say the plan goes; what they leave open is as its cluster is drawn."""
    kind = SCHEDULERS[options.on]
    fields = {name: value for name in CLUSTER if (value := getattr(options, name)) is not None}
    for name in fields:
        if name not in kind.model_fields:
            raise InputError(f"{_option(name)} is not for --on {options.on}")
    if fields.get("gpus_per_node") != 0 or "nodes" not in fields:
        digest = plan.provenance.inputs.get("cluster", "")
        cluster = formats.read_cluster(options.cluster) if options.cluster else store.load_document(Cluster, digest)
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

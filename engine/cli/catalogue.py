"""`catalogue`: GPUs, clusters and models to start from, with their sources."""

import argparse
from typing import Any

from engine.catalogue import cluster_presets, model_presets, node_types
from engine.catalogue.packaged import every_gpu_type, package_folder, packaged_node
from engine.cli.output import answer, columns, write
from engine.cluster import Cluster
from engine.errors import InputError
from engine.formats.packaged import packaged_models
from engine.model import MoEModel
from engine.units import digits, size

FABRIC_LATENCY = 10e-6
"""Seconds, for a cluster drawn from the catalogue if its nodes state none."""


def run_catalogue(options: argparse.Namespace) -> int:
    if options.gpu:
        return _write_cluster(options)
    if options.output:
        raise InputError("-o writes nodes of one GPU type as a cluster; name the type")
    gpus = [
        kind.model_dump(include={"name", "memory", "memory_bandwidth", "flops_fp16", "flops_fp8", "bandwidth", "source"})
        for kind in every_gpu_type().values()
    ]
    clusters = [
        {"name": name, "gpus": len(preset.cluster.gpus), "nodes": len(preset.cluster.nodes)}
        | preset.model_dump(include={"description", "source"})
        for name, preset in cluster_presets().items()
    ]
    models = [_row(preset.model, None, preset.source) for preset in model_presets().values()]
    notes = []
    if package_folder() is None:
        notes.append("aiconfigurator-core is not installed, which has more GPUs and some seventy MoE models")
    else:
        models += [_row(model, checkpoint, "aiconfigurator-core") for checkpoint, model in packaged_models().items()]
    answer(options, {"gpus": gpus, "clusters": clusters, "models": models, "notes": notes}, _catalogue_as_text)
    return 0


def _row(model: MoEModel, checkpoint: str | None, source: str) -> dict[str, Any]:
    about = model.model_dump(include={"name", "layers", "experts", "experts_per_token", "d_model", "d_ff", "dtype"})
    return about | {"checkpoint": checkpoint, "source": source}


def _catalogue_as_text(content: dict[str, Any]) -> str:
    gpus = {
        "GPU": "name",
        "memory": lambda row: size(row["memory"]),
        "bandwidth": lambda row: f"{size(row['memory_bandwidth'])}/s",
        "16 bits": lambda row: f"{digits(row['flops_fp16'] / 1e12)} TFLOP/s",
        "source": "source",
    }
    clusters = {"cluster": "name", "GPUs": "gpus", "nodes": "nodes", "what it is": "description", "source": "source"}
    models = {"model": lambda row: row["checkpoint"] or row["name"], "layers": "layers", "experts": "experts"}
    models |= {"k": "experts_per_token", "d_model": "d_model", "dtype": "dtype", "source": "source"}
    tables = (("gpus", gpus), ("clusters", clusters), ("models", models))
    lines = ["\n\n".join(columns(content[kind], cells) for kind, cells in tables)]
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])


def _write_cluster(options: argparse.Namespace) -> int:
    """Write nodes of one GPU type as a cluster."""
    if not options.output:
        raise InputError("name the file that the cluster is to be written to (-o)")
    if options.nodes < 1:
        raise InputError(f"{options.nodes} nodes: at least one is needed")
    kind = next((kind for kind in node_types().values() if kind.gpu == options.gpu), None)
    if kind is None and options.gpu not in (known := every_gpu_type()):
        raise InputError(f"no GPU type '{options.gpu}' in the catalogue; it has {', '.join(known)}")
    names = [f"{kind.name if kind else options.gpu}-{index}" for index in range(options.nodes)]
    nodes = tuple(kind.node(name) if kind else packaged_node(options.gpu, name) for name in names)
    latency = kind.fabric_latency if kind else FABRIC_LATENCY
    gpus = sum(len(node.gpus) for node in nodes)
    cluster = Cluster(name=f"{gpus} {options.gpu}", nodes=nodes, latency=latency)
    write(options.output, cluster.to_json())
    said = f"saved {gpus} GPUs in {len(nodes)} node{'s' * (len(nodes) > 1)}: {options.output}"
    answer(options, {"saved": str(options.output), "gpus": gpus, "nodes": len(nodes)}, lambda _: said)
    return 0

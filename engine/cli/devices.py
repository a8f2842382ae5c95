"""`calibrate`, `detect` and `efficiency`: costs of the attached devices, the cluster that they or measured pairs form, and the
shares of their rates that a cluster's ports reach."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine import formats, store
from engine.cli.output import answer, columns, progress, stopped_by_signals, table, write
from engine.costs.pair_cluster import PairCluster, draw_pairs, with_fit
from engine.errors import InputError
from engine.formats.measured.nccl_pairs import read_pairs
from engine.formats.nvidia_topo import read_topology
from engine.formats.recognition import opened
from engine.jobs.launches import CalibrateAnswer, describe_calibration, table_of
from engine.launch.calibration.calibrate import calibrate as calibrate_devices
from engine.launch.calibration.calibrate import plan_sweep
from engine.launch.calibration.sweep import Sweep
from engine.launch.places.devices import attached, cluster_of
from engine.launch.places.testbed import Testbed, emulated_cluster
from engine.launch.running.local import temporary_folder
from engine.units import bandwidth, digits, seconds, share

BUSY = 0.2
"""Spread of repeated readings above which a note asks if the machine is busy."""

USUAL_RANKS = 8
"""Ranks on a testbed: as many as two cores carry."""


def run_calibrate(options: argparse.Namespace) -> int:
    sweep, testbed = _prepared(options)
    # The output of ranks is a log.
    with (
        temporary_folder() as folder,
        stopped_by_signals() as stop,
        progress() as report,
        contextlib.redirect_stdout(sys.stderr),
    ):
        profile = calibrate_devices(sweep, folder, stop, report, options.type, testbed)
    write(options.output, profile.to_json())
    described, saved = describe_calibration(profile), str(options.output)
    content = described.model_dump(mode="json") | {"saved": saved}
    answer(options, content, lambda _: _show(described, saved))
    return 0


def _prepared(options: argparse.Namespace) -> tuple[Sweep, Testbed | None]:
    """The sweep that the options ask for, and its testbed if they name one. Raises InputError."""
    if options.output.suffix.lower() != ".json":
        raise InputError(f"{options.output}: a profile is JSON; give the file a name that ends in .json")
    devices = attached()
    if options.on == "local":
        for option in ("cluster", "scale"):
            if getattr(options, option) is not None:
                raise InputError(f"--{option} is for emulated links; add --on testbed, or leave it out")
        return plan_sweep(devices, options.ranks, options.dtype, options.quick), None
    if options.cluster is None:
        raise InputError("--on testbed needs the cluster to emulate; add --cluster FILE")
    cluster = formats.read_cluster(options.cluster)
    gpus = len(cluster.gpus)
    ranks = min(gpus, USUAL_RANKS) if options.ranks is None else options.ranks
    if not 1 <= ranks <= gpus:
        raise InputError(f"{ranks} ranks: choose between 1 and {gpus}, the GPUs of {cluster.name}")
    # Ranks in namespaces talk over Gloo, from the CPU.
    sweep = plan_sweep(replace(devices, gpus=(), memory=()), ranks, options.dtype, options.quick)
    return sweep, emulated_cluster(cluster, ranks, options.scale)


def _show(described: CalibrateAnswer, saved: str) -> str:
    """The answer for people: every fit, its errors on held-out shapes, and how to use the file."""
    rows = table_of(described.calibration)
    lines = [described.origin, columns(rows, {name: name for name in rows[0]})]
    lines += [
        f"held-out shapes ({gemms.dtype} on {gemms.gpu}): mean {share(gemms.mean)}, worst {share(gemms.worst)} of "
        f"{gemms.shapes} that were also measured directly"
        for gemms in described.held_out
    ]
    if (worst := max(fit.spread for fit in described.fits)) > BUSY:
        lines.append(
            f"note: repeated readings lie up to {share(worst)} apart (between the quartiles); is the machine at other work?"
        )
    lines.append(f"saved: {saved}; use it with --cost {saved}, or open it on the Cluster page")
    return "\n".join(lines)


def run_detect(options: argparse.Namespace) -> int:
    content: dict[str, Any] = {"summary": None, "gpus": [], "cluster": None, "notes": [], "saved": None}
    if options.topology and options.pairs:
        raise InputError("--topology and --pairs are two ways to know a cluster; choose one")
    if options.topology:
        with opened(options.topology) as path:
            drawn = read_topology(path, options.type)
    elif options.pairs:
        drawn = _read_pairs(options.pairs, options.output.stem if options.output else "measured pairs", options.type)
        matrices = {"measured": drawn.measured, "drawn": drawn.drawn}
        content["pairs"] = {
            "gpus": list(drawn.names),
            **{name: np.where(np.isfinite(rate), rate, None).tolist() for name, rate in matrices.items()},
            "mean_error": drawn.mean_error,
            "worst": drawn.worst(WORST),
        }
    else:
        devices, drawn = attached(), None
        content["summary"], content["notes"] = devices.summary, list(devices.notes)
        content["gpus"] = [{"name": gpu.name, "type": gpu.type, "memory": gpu.memory} for gpu in devices.machine]
        try:
            drawn = cluster_of(devices.machine, options.type)
        except InputError as error:
            # A machine without GPUs is a fault only if a cluster is to be saved.
            if options.output or options.type:
                raise
            content["notes"].append(str(error))
    if drawn:
        content["cluster"] = drawn.cluster.model_dump(mode="json", exclude_none=True)
        content["notes"] += drawn.notes
        if options.output:
            write(options.output, drawn.cluster.model_dump_json(indent=1, exclude_none=True))
            content["saved"] = str(options.output)
    answer(options, content, _detected_as_text)
    return 0


def _detected_as_text(answer: dict[str, Any]) -> str:
    lines = [_show_pairs(answer["pairs"])] if "pairs" in answer else []
    if answer["summary"]:
        lines.append(answer["summary"])
    if answer["gpus"]:
        cells = {"GPU": "name", "type in the catalogue": lambda gpu: gpu["type"] or "unknown"}
        cells["memory"] = lambda gpu: f"{digits(gpu['memory'] / 2**30)} GiB"
        lines.append(columns(answer["gpus"], cells))
    for node in answer["cluster"]["nodes"] if answer["cluster"] else ():
        types = [gpu["type"] for gpu in node["gpus"]]
        links = f", links {digits(node['link_bandwidth'] / 1e9)} GB/s" if "link_bandwidth" in node else ""
        lines.append(
            f"node {node['name']}: {', '.join(f'{types.count(kind)} × {kind}' for kind in dict.fromkeys(types))}{links}"
        )
    lines += [f"  note: {note}" for note in answer["notes"]]
    if answer["saved"]:
        lines.append(f"saved the cluster: {answer['saved']}")
    return "\n".join(lines)


LOGS = ("nccl-tests", "nccl-pairs")
"""Formats of logs: of a single one, and of a set."""
WORST = 10
"""Pairs that are listed at most."""


def _read_pairs(paths: Sequence[Path], name: str, default_type: str | None) -> PairCluster:
    """The cluster of the logs among these files, folders and archives, with notes on both. Raises InputError.

    name: of the cluster
    default_type: the catalogue's type of GPUs without a known name
    """
    with store.scratch() as folder:
        parts = formats.parts(paths, folder)
        logs = [path for part in parts if part.format.name in LOGS for path in part.paths]
        others = [part for part in parts if part.format.name not in LOGS]
        if not logs:
            raise InputError(f"{others[0].paths[0].name}: is {others[0].format.title}, not what nccl-tests prints")
        pairs, notes = read_pairs(logs)
    notes += [f"{part.paths[0].name} left out: it is {part.format.title}" for part in others]
    drawn = draw_pairs(pairs, name, default_type)
    return replace(drawn, notes=(*notes, *drawn.notes))


def _show_pairs(pairs: dict[str, Any]) -> str:
    """The pairs that the cluster meets worst, as measured and as drawn."""
    rows = []
    for first, second in pairs["worst"]:
        measured, drawn = (pairs[matrix][first][second] for matrix in ("measured", "drawn"))
        names = f"{pairs['gpus'][first]} and {pairs['gpus'][second]}"
        rows.append([names, bandwidth(measured), bandwidth(drawn), f"{100 * drawn / measured - 100:+z.1f} %"])
    title = f"pairs as measured and as drawn, mean difference {share(pairs['mean_error'])}; the largest differences"
    return f"{title}\n{table(['pair', 'measured', 'drawn', 'difference'], rows)}"


def run_efficiency(options: argparse.Namespace) -> int:
    cluster = formats.read_cluster(options.cluster)
    content: dict[str, Any] = {"saved": None}
    if options.measured:
        collectives = [times for path in options.measured for times in formats.read_collectives(path)]
        origin = f"fitted to {', '.join(path.name for path in options.measured)}"
        cluster, fit = with_fit(cluster, collectives, options.ports, origin, options.relative)
        found = [
            (path, finding.message)
            for path in options.measured
            for finding in formats.findings_of_times(path)
            if finding.code == "times"
        ]
        notes = [f"{path.name}: {note}" for path, note in found if formats.OF_ONE_PAIR not in note]
        content |= {"start_up": fit.start_up, "error": fit.error, "notes": notes}
    elif options.ports or options.output or options.relative:
        raise InputError("nothing to fit: add --measured FILE, or leave out --ports, --relative and --output")
    efficiency = cluster.efficiency and cluster.efficiency.model_dump(mode="json")
    content |= {"efficiency": efficiency, "says": cluster.reached_in_words}
    if options.output:
        write(options.output, cluster.model_dump_json(indent=1, exclude_none=True))
        content["saved"] = str(options.output)
    answer(options, content, _efficiency_as_text)
    return 0


def _efficiency_as_text(content: dict[str, Any]) -> str:
    lines = [content["says"]]
    if "error" in content:
        lines.append(f"start-up of a send {seconds(content['start_up'])}; mean error of the fit {share(content['error'])}")
        lines += [f"note: {note}" for note in content["notes"]]
    if content["saved"]:
        lines.append(f"saved: {content['saved']}")
    return "\n".join(lines)

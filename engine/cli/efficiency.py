"""`efficiency`: what a cluster's ports reach where several sends meet, shown, and fitted to measurements."""

import argparse
from typing import Any

from engine import formats
from engine.cli.output import answer, write
from engine.costs.pair_cluster import with_fit
from engine.errors import InputError
from engine.units import seconds, share


def run_efficiency(options: argparse.Namespace) -> int:
    cluster = formats.read_cluster(options.cluster)
    content: dict[str, Any] = {"saved": None}
    if options.measured:
        collectives = [times for path in options.measured for times in formats.read_collectives(path)]
        origin = f"fitted to {', '.join(path.name for path in options.measured)}"
        cluster, fit = with_fit(cluster, collectives, options.ports, origin, options.relative)
        content |= {"start_up": fit.start_up, "error": fit.error}
    elif options.ports or options.output or options.relative:
        raise InputError("nothing to fit: add --measured FILE, or leave out --ports, --relative and --output")
    efficiency = cluster.efficiency and cluster.efficiency.model_dump(mode="json")
    content |= {"efficiency": efficiency, "says": cluster.reached_in_words}
    if options.output:
        write(options.output, cluster.model_dump_json(indent=1, exclude_none=True))
        content["saved"] = str(options.output)
    answer(options, content, _show)
    return 0


def _show(content: dict[str, Any]) -> str:
    lines = [content["says"]]
    if "error" in content:
        lines.append(
            f"start-up of a send {seconds(content['start_up'])}; mean error of the fit {share(content['error'])}"
        )
    if content["saved"]:
        lines.append(f"saved: {content['saved']}")
    return "\n".join(lines)

"""Answers of the command line as text for people."""

from typing import Any

from engine.units import digits, quantity, ratio, seconds, share, size


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns of even width, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def recordings(found: dict[str, Any]) -> str:
    return "\n\n".join(_recording(recording) for recording in found["recordings"])


def _recording(one: dict[str, Any]) -> str:
    skew = one["max_over_mean"]
    sizes = f"{one['layers']} MoE layers × {one['experts']} experts"
    sizes = f"{one['tokens']:,} tokens × {sizes}, top-{one['k']}" if one["tokens"] is not None else sizes
    lines = [f"{one['name']}: {one['kind']}, {sizes}"]
    lines.append(f"  skew (busiest expert / mean): {ratio(min(skew))} to {ratio(max(skew))}")
    if one["foretold_share"]:
        mean = sum(one["foretold_share"]) / len(one["foretold_share"])
        lines.append(
            f"  affinity: the likeliest next expert is right for {share(mean)} of tokens (by chance: "
            f"{share(1 / one['experts'])})"
        )
    lines += [f"  {check['level']}: {check['text']}" for check in one["checks"]]
    return "\n".join(lines)


def candidates(found: dict[str, Any]) -> str:
    rows = []
    for plan in found["plans"]:
        figures = plan["metrics"]
        if (parts := figures["decomposition"]) is not None:
            rows.append(
                [
                    plan["name"],
                    seconds(figures["total"]),
                    seconds(figures["bound"]),
                    share(figures["gap"]),
                    seconds(parts["communication"]),
                    seconds(parts["computation"]),
                    seconds(parts["overlapped"]),
                    seconds(plan["runtime"]),
                    plan["proof"],
                ]
            )
            continue
        rows.append(
            [
                plan["name"],
                seconds(figures["total"]),
                seconds(figures["bound"]),
                share(figures["gap"]),
                share(figures["order_gap"]),
                f"{figures['balancedness']:.3f}",
                share(figures["kept_local"]),
                seconds(plan["runtime"]),
                plan["proof"],
            ]
        )
    header = ["plan", "time", "bound", "gap", "order gap", "balanced", "kept local", "found in", "status"]
    if found["plans"][0]["metrics"]["decomposition"] is not None:
        header[4:7] = ["exposed comm.", "exposed comp.", "overlapped"]
    lines = [table(header, rows)]
    for plan in found["plans"]:
        lines += [f"{plan['name']}: {about}: {quantity(**note)}" for about, note in plan["notes"].items()]
    if found["saved"]:
        lines.append(f"saved the fastest plan: {found['saved']}")
    return "\n".join(lines)


def operators(found: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['phase']} {row['kind']}",
            str(row["operators"]),
            f"{row['flop'] / 1e9:,.1f}",
            size(row["sent"]),
            seconds(row["seconds"]),
        ]
        for row in found["rows"]
    ]
    lines = [f"{found['name']}: {found['operators']} operators, {found['dependencies']} dependencies"]
    lines.append(table(["kind", "operators", "GFLOP", "sent", "time"], rows))
    lines.append(f"costs: {found['cost_source']}")
    if found["saved"]:
        lines.append(f"saved: {found['saved']}")
    return "\n".join(lines)


def simulated(found: dict[str, Any]) -> str:
    figures = found["metrics"]
    lines = [f"{found['name']} ({found['id'][:12]}): {seconds(figures['total'])} simulated"]
    if figures["decomposition"] is not None:
        return "\n".join([*lines, *_step_figures(figures), f"  costs: {found['cost_source']}"])
    lines.append(f"  no order of sends is below {seconds(figures['order_bound'])} ({share(figures['order_gap'])} away)")
    if figures["bound"] is not None and found["bound_covers"] != "order":
        lines.append(
            f"  nor any placement with as many slots per GPU and no replicas below {seconds(figures['bound'])} "
            f"({share(figures['gap'])} away)"
        )
    lines.append("  " + ", ".join(f"{kind} {seconds(value)}" for kind, value in figures["seconds"].items()))
    lines.append(
        f"  utilisation {share(figures['utilisation'])}, balancedness {figures['balancedness']:.3f}, "
        f"kept local {share(figures['kept_local'])}, up to {size(figures['memory'])} of experts on a GPU"
    )
    lines.append(f"  costs: {found['cost_source']}")
    return "\n".join(lines)


def _step_figures(figures: dict[str, Any]) -> list[str]:
    parts = figures["decomposition"]
    return [
        f"  no schedule of its placement is below {seconds(figures['order_bound'])} ({share(figures['order_gap'])} away)",
        f"  exposed communication {seconds(parts['communication'])}, exposed computation {seconds(parts['computation'])}, "
        f"overlapped {seconds(parts['overlapped'])}, neither {seconds(parts['idle'])}",
        "  busy: " + ", ".join(f"{kind} {seconds(value)}" for kind, value in figures["seconds"].items() if value),
        f"  utilisation {share(figures['utilisation'])}, weights, gradients and momentum up to {size(figures['memory'])} on "
        "a GPU",
    ]


def comparison(found: dict[str, Any]) -> str:
    rows = []
    for plan in found["plans"]:
        figures = plan["metrics"]
        rows.append(
            [
                f"{plan['file']} ({plan['name']})",
                plan["order"],
                seconds(figures["total"]),
                ratio(plan["speedup"]),
                share(figures["order_gap"]),
                f"{figures['balancedness']:.3f}",
                share(figures["kept_local"]),
                share(figures["utilisation"]),
                str(plan["moved_experts"]),
            ]
        )
    header = ["plan", "order", "time", "speed", "order gap", "balanced", "kept local", "utilisation", "moved experts"]
    return table(header, rows)


def launched(found: dict[str, Any]) -> str:
    lines = [_launched_plan(run) for run in found["runs"]]
    if (preference := found["preference"]) is not None:
        lines.append(_launched_together(found["runs"], preference))
    lines.append(f"{found['tokens']:,} tokens on {found['device']}")
    if (bed := found.get("testbed")) is not None:
        rates = ", ".join(digits(rate * 8 / 1e6) for rate in bed["bandwidth"])
        lines.append(f"links of {bed['name']}: {rates} Mbit/s each way, the drawn bandwidths / {digits(bed['scale'])}")
    return "\n".join(lines)


def _launched_plan(one: dict[str, Any]) -> str:
    kinds = one["by_kind"]
    rows = [
        [kind, seconds(predicted), seconds(measured), ratio(factor) if factor else ""]
        for kind, predicted, measured, factor in zip(
            kinds["kind"], kinds["predicted"], kinds["measured"], kinds["ratio"], strict=True
        )
    ]
    total = one["measured_seconds"] / one["predicted_seconds"]
    rows.append(
        ["waiting between steps", seconds(one["predicted_waiting_seconds"]), seconds(one["waiting_seconds"]), ""]
    )
    rows.append(["total", seconds(one["predicted_seconds"]), seconds(one["measured_seconds"]), ratio(total)])
    spread = f"{seconds(min(one['pass_seconds']))} to {seconds(max(one['pass_seconds']))}"
    return "\n".join(
        [
            f"{one['name']}: median of {len(one['pass_seconds'])} passes ({spread})",
            table(["step", "predicted", "measured", "measured / predicted"], rows),
            *_launched_layers(one["by_layer"]),
            f"differs from the unplanned computation by {one['difference']:.2g} of its largest number",
            f"predicted with {one['predicted']['cost_source']}",
        ]
    )


def _launched_layers(layers: dict[str, list]) -> list[str]:
    """Between what the layers' factors lie, where there are several."""
    factors = {layer: factor for layer, factor in zip(layers["layer"], layers["ratio"], strict=True) if factor}
    if len(factors) < 2:
        return []
    least, most = min(factors, key=factors.__getitem__), max(factors, key=factors.__getitem__)
    return [f"layers: from {ratio(factors[least])} (layer {least}) to {ratio(factors[most])} (layer {most})"]


def _launched_together(runs: list[dict[str, Any]], preference: dict[str, Any]) -> str:
    rows = []
    for place in preference["order"]:
        one = runs[place]
        passes, predicted, measured = one["pass_seconds"], one["predicted_seconds"], one["measured_seconds"]
        spread = f"{seconds(min(passes))} to {seconds(max(passes))}"
        rows.append([one["name"], seconds(predicted), seconds(measured), ratio(measured / predicted), spread])
    header = ["plan", "predicted", "measured", "measured / predicted", f"{len(runs[0]['pass_seconds'])} passes"]
    return "\n".join([table(header, rows), *preference["lines"]])


def detected(found: dict[str, Any]) -> str:
    lines = [found["summary"]] if found["summary"] else []
    if found["gpus"]:
        lines.append(
            table(
                ["GPU", "type in the catalogue", "memory"],
                [
                    [one["name"], one["type"] or "unknown", f"{digits(one['memory'] / 2**30)} GiB"]
                    for one in found["gpus"]
                ],
            )
        )
    for node in found["cluster"]["nodes"] if found["cluster"] else ():
        types = [gpu["type"] for gpu in node["gpus"]]
        links = f", links {digits(node['link_bandwidth'] / 1e9)} GB/s" if "link_bandwidth" in node else ""
        lines.append(
            f"node {node['name']}: {', '.join(f'{types.count(kind)} × {kind}' for kind in dict.fromkeys(types))}{links}"
        )
    lines += [f"  note: {note}" for note in found["notes"]]
    if found["saved"]:
        lines.append(f"saved the cluster: {found['saved']}")
    return "\n".join(lines)

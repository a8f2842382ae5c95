"""Answers of the command line as text for people."""

from typing import Any

from engine.timeline import over_layers
from engine.units import digits, quantity, ratio, seconds, share, size

OVERLOAD = "\noverload: largest / mean GPU load, p50 · p95 · worst over layers"
"""What a column of overload factors says."""


CHOSEN_BY = {"keep-prefill": "--keep prefill", "keep-decode": "--keep decode", "fold-slots": "--deployed FILE"}
"""The options of `inspect --fix` that take a remedy which needs a decision or a file."""


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


def inspected(answer: dict[str, Any]) -> str:
    files = answer.get("files", [answer])
    return "\n\n".join(_recording(file) if "max_over_mean" in file else _other_file(file) for file in files)


def _other_file(file: dict[str, Any]) -> str:
    lines = [f"{file['name']}: {file['title']}; {file['belongs']}"]
    return "\n".join(lines + [f"  {check['severity']}: {check['message']}" for check in file["checks"]])


def _recording(recording: dict[str, Any]) -> str:
    skew = recording["skew"]
    sizes = f"{recording['layers']} MoE layers × {recording['experts']} experts"
    sizes = (
        f"{recording['tokens']:,} tokens × {sizes}, top-{recording['k']}" if recording["tokens"] is not None else sizes
    )
    lines = [f"{recording['name']}: {recording['title']}, {sizes}"]
    lines.append(f"  skew (busiest expert / mean): {ratio(skew['mean'])} on average over layers; {over_layers(skew)}")
    if recording["foretold_share"]:
        mean = sum(recording["foretold_share"]) / len(recording["foretold_share"])
        lines.append(
            f"  affinity: the likeliest next expert is right for {share(mean)} of tokens (by chance: "
            f"{share(1 / recording['experts'])})"
        )
    lines += [f"  {check['severity']}: {check['message']}" for check in recording["checks"]]
    if "mended" in recording:
        lines += _mended(recording["mended"]) if recording["mended"] else [_not_mended(recording["checks"])]
    return "\n".join(lines)


def _not_mended(checks: list[dict[str, Any]]) -> str:
    """With the options that choose among the remedies that no command takes by itself."""
    options = " or ".join(CHOSEN_BY[check["remedy"]] for check in checks if check["remedy"] in CHOSEN_BY)
    return "nothing was mended, and nothing written" + (f"; choose with {options}" if options else "")


def _mended(mended: dict[str, Any]) -> list[str]:
    """What was mended, and what is left to say of the recording then."""
    left = [check for check in mended["checks"] if check["severity"] != "ok"]
    skew = mended["max_over_mean"]
    return [
        f"mended: {mended['file']}, skew {ratio(min(skew))} to {ratio(max(skew))}",
        *(f"  {done}" for done in mended["done"]),
        *(f"  not in the file: {lost}" for lost in mended["lost"]),
        *(f"  still {check['severity']}: {check['message']}" for check in left),
    ]


def converted(answer: dict[str, Any]) -> str:
    return f"{answer['name']}: written as {answer['format']} to {answer['file']} ({size(answer['bytes'])})"


def candidates(answer: dict[str, Any]) -> str:
    rows = []
    for plan in answer["plans"]:
        figures = plan["metrics"]
        if (parts := figures["decomposition"]) is not None:
            rows.append(
                [
                    plan["name"],
                    seconds(figures["total"]),
                    seconds(figures["bound"]),
                    _gap(figures["gap"]),
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
                _gap(figures["gap"]),
                _gap(figures["order_gap"]),
                f"{figures['balancedness']:.3f}",
                _overload(figures),
                share(figures["kept_local"]),
                seconds(plan["runtime"]),
                plan["proof"],
            ]
        )
    header = ["plan", "time", "bound", "gap", "order gap", "balanced", "overload", "kept local", "found in", "proven"]
    explained = OVERLOAD
    if answer["plans"][0]["metrics"]["decomposition"] is not None:
        header[4:8], explained = ["exposed comm.", "exposed comp.", "overlapped"], ""
    lines = [table(header, rows) + explained]
    for plan in answer["plans"]:
        lines += [f"{plan['name']}: {about}: {quantity(**note)}" for about, note in plan["notes"].items()]
    if answer["saved"]:
        lines.append(f"saved the fastest plan: {answer['saved']}")
    return "\n".join(lines)


def operators(answer: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['phase']} {row['kind']}",
            str(row["operators"]),
            f"{row['flop'] / 1e9:,.1f}",
            size(row["sent"]),
            seconds(row["seconds"]),
        ]
        for row in answer["rows"]
    ]
    lines = [f"{answer['name']}: {answer['operators']} operators, {answer['dependencies']} dependencies"]
    lines.append(table(["kind", "operators", "GFLOP", "sent", "time"], rows))
    lines.append(f"costs: {answer['cost_source']}")
    if answer["saved"]:
        lines.append(f"saved: {answer['saved']}")
    return "\n".join(lines)


def simulated(answer: dict[str, Any]) -> str:
    figures = answer["metrics"]
    lines = [f"{answer['name']} ({answer['id'][:12]}): {seconds(figures['total'])} simulated"]
    if figures["decomposition"] is not None:
        return "\n".join([*lines, *_step_figures(figures), f"  costs: {answer['cost_source']}"])
    lines.append(f"  {answer['how_simulated']}")
    lines.append(f"  no order of sends is below {seconds(figures['order_bound'])} ({_gap(figures['order_gap'])} away)")
    if figures["bound"] is not None and answer["bound_covers"] != "order":
        lines.append(
            "  its optimiser claims, which is not computed again here: no placement with as many slots per GPU and no "
            f"replicas is below {seconds(figures['bound'])} ({_gap(figures['gap'])} away)"
        )
    lines.append("  " + ", ".join(f"{kind} {seconds(value)}" for kind, value in figures["seconds"].items()))
    lines.append(
        f"  utilisation {share(figures['utilisation'])}, kept local {share(figures['kept_local'])}, up to "
        f"{size(figures['memory'])} of experts on a GPU"
    )
    lines += _balance(figures)
    lines.append(f"  costs: {answer['cost_source']}")
    return "\n".join(lines)


def _balance(figures: dict[str, Any]) -> list[str]:
    factors = figures["balance"]["overload_factor"]
    imbalance = figures["balance"]["imbalance_ratio"]["mean"]
    return [
        f"  balancedness {figures['balancedness']:.3f}, overload factor {ratio(factors['mean'])} (imbalance ratio "
        f"{digits(imbalance)}); over layers {over_layers(factors)}"
    ]


def _gap(gap: float | None) -> str:
    """Above a bound of 0 there is none to tell."""
    return "—" if gap is None else share(gap)


def _overload(figures: dict[str, Any]) -> str:
    factors = figures["balance"]["overload_factor"]
    return " · ".join(ratio(factors[name]) for name in ("p50", "p95", "max"))


def _step_figures(figures: dict[str, Any]) -> list[str]:
    parts = figures["decomposition"]
    return [
        f"  no schedule of its placement is below {seconds(figures['order_bound'])} ({_gap(figures['order_gap'])} away)",
        f"  exposed communication {seconds(parts['communication'])}, exposed computation {seconds(parts['computation'])}, "
        f"overlapped {seconds(parts['overlapped'])}, neither {seconds(parts['idle'])}",
        "  busy: " + ", ".join(f"{kind} {seconds(value)}" for kind, value in figures["seconds"].items() if value),
        f"  utilisation {share(figures['utilisation'])}, weights, gradients and momentum up to {size(figures['memory'])} on "
        "a GPU",
        *_balance(figures),
    ]


def comparison(answer: dict[str, Any]) -> str:
    rows = []
    for plan in answer["plans"]:
        figures = plan["metrics"]
        rows.append(
            [
                f"{plan['file']} ({plan['name']})",
                plan["order"],
                seconds(figures["total"]),
                ratio(plan["speedup"]),
                _gap(figures["order_gap"]),
                f"{figures['balancedness']:.3f}",
                _overload(figures),
                share(figures["kept_local"]),
                share(figures["utilisation"]),
                str(plan["moved_experts"]),
            ]
        )
    header = [
        "plan",
        "order",
        "time",
        "speed",
        "order gap",
        "balanced",
        "overload",
        "kept local",
        "utilisation",
        "moved experts",
    ]
    return table(header, rows) + OVERLOAD


def detected(answer: dict[str, Any]) -> str:
    lines = [answer["summary"]] if answer["summary"] else []
    if answer["gpus"]:
        lines.append(
            table(
                ["GPU", "type in the catalogue", "memory"],
                [
                    [gpu["name"], gpu["type"] or "unknown", f"{digits(gpu['memory'] / 2**30)} GiB"]
                    for gpu in answer["gpus"]
                ],
            )
        )
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


def trusted(summaries: list[dict[str, Any]]) -> str:
    rows = [
        [
            row["of"],
            row["hardware"],
            str(row["nodes"]),
            share(row["mean"]),
            share(row["worst"]),
            str(row["points"]),
            str(row["fitted"]),
        ]
        for row in summaries
    ]
    return table(["predicted", "on", "nodes", "mean error", "worst", "points held out", "points fitted"], rows)

"""`serve`: what plans come to in a whole step of prefill or decode."""

import argparse
from typing import Any

from engine.cli import text
from engine.cli.inputs import plans_and_problem
from engine.cli.output import answer, stopped_by_signals
from engine.cli.step import read_serving
from engine.simulate.serving import serve_as_measured
from engine.units import digits, seconds, share, size


def run_serve(options: argparse.Namespace) -> int:
    plans, problem = plans_and_problem(options, options.plans)
    serving, notes = read_serving(options, problem)
    step, source, sizes = serving.step, serving.source, serving.sizes
    with stopped_by_signals() as stop:
        served = [serve_as_measured(plan, problem, step, source, sizes, stop).figures for plan in plans]
    rows = [
        {"file": path.name, "name": plan.name, "id": plan.id, "gain": figures.gain_over(served[0])} | figures.to_dict()
        for path, plan, figures in zip(options.plans, plans, served, strict=True)
    ]
    answer(options, {"step": step.model_dump(mode="json"), "plans": rows, "notes": notes}, _as_text)
    return 0


def _as_text(content: dict[str, Any]) -> str:
    rows, decode = content["plans"], content["step"]["phase"] == "decode"
    table = [
        [
            row["name"],
            seconds(row["step_seconds"]),
            digits(row["tokens_per_second_per_gpu"]),
            seconds(row["moe_seconds"]),
            seconds(row["hidden_seconds"]),
            share(row["step_seconds"] / row["bound_seconds"] - 1),
            size(row["memory"]["total"]),
            f"{row['gain']:+.1%}",
        ]
        for row in rows
    ]
    header = [
        "plan",
        "a token" if decode else "first token",
        "tokens/s/GPU",
        "MoE",
        "hidden",
        "above bound",
        "memory",
        "gain",
    ]
    kinds = list(rows[0]["parts"])
    of_kind = [
        [
            kind,
            *(
                f"{seconds(row['parts'].get(kind, 0.0))} {share(row['parts'].get(kind, 0.0) / _busy(row))}"
                for row in rows
            ),
        ]
        for kind in kinds
    ]
    lines = [text.table(header, table), "", text.table(["part", *(row["name"] for row in rows)], of_kind), ""]
    lines += [f"{row['name']}: {_room(row['memory'])}" for row in rows]
    lines += [f"operators: {rows[0]['operator_source']}", f"MoE layers: {rows[0]['moe_source']}"]
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])


def _room(memory: dict[str, Any]) -> str:
    room = f"room for {memory['most_sequences']:,} sequences" if memory["fits"] else "it does not fit"
    return (
        f"{size(memory['total'])} of {size(memory['room'])} per GPU: {size(memory['experts'])} experts, "
        f"{size(memory['others'])} other weights, {size(memory['kv'])} keys and values; {room}"
    )


def _busy(row: dict[str, Any]) -> float:
    return sum(row["parts"].values())

"""The operators of a training step, summed up for people."""

from typing import Any

from engine.errors import InputError
from engine.goal import Goal
from engine.overlap.operator_graph import OperatorGraph
from engine.overlap.transformer import transformer_step
from engine.problem import Problem
from engine.simulate.training.pricing import price_step
from engine.systems.pieces import linear_placement


def operators_of(problem: Problem) -> OperatorGraph:
    """The graph of a problem's training step. Raises InputError when it has none."""
    if problem.goal is not Goal.TRAINING:
        raise InputError("there is no training step; describe one with --training")
    return problem.graph or transformer_step(problem.model, problem.step, len(problem.cluster.gpus))


def describe_graph(problem: Problem, graph: OperatorGraph) -> dict[str, Any]:
    """Operators by phase and kind: how many, their FLOP, the bytes they send, and their seconds on the slowest GPU with
    experts in contiguous blocks. Plain JSON."""
    priced = price_step(problem, linear_placement(problem), parts=1)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for operator, seconds in zip(priced.graph.operators, priced.seconds[:, 0].max(axis=1), strict=True):
        row = rows.setdefault(
            (operator.phase, operator.kind),
            {"phase": operator.phase, "kind": operator.kind, "operators": 0, "flop": 0.0, "sent": 0.0, "seconds": 0.0},
        )
        row["operators"] += 1
        row["flop"] += sum(2.0 * gemm.count * gemm.m * gemm.n * gemm.k for gemm in operator.gemms)
        row["sent"] += operator.sent
        row["seconds"] += float(seconds)
    return {
        "name": graph.name,
        "operators": len(graph.operators),
        "dependencies": len(graph.dependencies),
        "rows": list(rows.values()),
        "cost_source": problem.cost_source,
    }

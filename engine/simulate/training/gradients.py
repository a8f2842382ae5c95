"""The gradients of a step on their way through the network: fused to buckets or cut to micro-ops."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.overlap.operator_graph import OperatorGraph
from engine.plan import Priority
from engine.problem import Problem
from engine.simulate.training.pricing import all_reduce_seconds


@dataclass(frozen=True)
class Gradient:
    """One gradient. sent: bytes; after: the tasks that make it; groups: among how many expert groups it is summed (1: over
    all GPUs); seconds: how long that takes, where it was measured."""

    name: str
    sent: float
    after: tuple[int, ...]
    groups: int = 1
    seconds: float | None = None


@dataclass(frozen=True)
class Piece:
    """What the network is given at once: several whole gradients, or one of `parts` equal parts of a single one, counted
    from 0."""

    label: str
    gradients: tuple[Gradient, ...]
    parts: int = 1
    part: int = 0

    @property
    def sent(self) -> float:
        """Bytes."""
        return sum(gradient.sent for gradient in self.gradients) / self.parts

    def seconds(self, problem: Problem) -> float:
        """With the network to itself; measured gradients count as measured."""
        unknown = sum(gradient.sent for gradient in self.gradients if gradient.seconds is None) / self.parts
        known = sum(gradient.seconds or 0.0 for gradient in self.gradients) / self.parts
        return known + float(all_reduce_seconds(problem, [unknown], self.gradients[0].groups)[0])


def gradients_of(graph: OperatorGraph, problem: Problem, groups: int, task_of: dict[str, int]) -> list[Gradient]:
    """All gradients that are summed over GPUs, in the order in which the backward pass makes them.

    groups: expert groups of the placement, over which the gradients of packed experts are summed too; task_of: the last
    task of every operator.
    """
    before: dict[str, list[str]] = {}
    for dependency in graph.dependencies:
        before.setdefault(dependency.after, []).append(dependency.before)
    gradients = [
        Gradient(
            operator.name,
            operator.sent,
            tuple(task_of[name] for name in before[operator.name]),
            seconds=operator.seconds,
        )
        for operator in graph.of_phase("all_reduce")
    ]
    if groups > 1:
        weights = {
            operator.name: operator.parameters * problem.model.bytes_per_number
            for operator in graph.of_phase("forward")
        }
        for operator in graph.of_phase("dw"):
            if operator.kind == "experts":
                own = operator.name.removeprefix("dw.")
                gradients.append(Gradient(f"all_reduce.{own}", weights[own], (task_of[operator.name],), groups))
    return sorted(gradients, key=lambda gradient: max(gradient.after))


def pieces(priority: Priority, gradients: list[Gradient]) -> Iterator[Piece]:
    """Gradients fused to buckets as they come, or each cut into equal micro-ops."""
    if (limit := priority.micro_op) is not None:
        for gradient in gradients:
            parts = max(1, int(np.ceil(gradient.sent / limit)))
            for part in range(parts):
                yield Piece(
                    f"{gradient.name} · piece {part + 1} of {parts}" if parts > 1 else gradient.name,
                    (gradient,),
                    parts,
                    part,
                )
        return
    for groups in sorted({gradient.groups for gradient in gradients}):
        fused: list[Gradient] = []
        own = [gradient for gradient in gradients if gradient.groups == groups]
        for index, gradient in enumerate(own):
            fused.append(gradient)
            if sum(part.sent for part in fused) >= priority.bucket or index == len(own) - 1:
                more = f" and {len(fused) - 1} more gradients" if len(fused) > 1 else ""
                yield Piece(fused[0].name + more, tuple(fused))
                fused = []

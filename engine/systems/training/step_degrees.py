"""Pipeline degrees of the backward pass, chosen by the simulated time of the whole step with its all-reduces.

PipeMoE chooses the degree of a layer by the layer alone. All-reduces of gradients share its network; to choose with them is the
paper's future work (§V-E). No gradient is there before the forward pass is over, so that pass keeps its layers' own degrees.

Branch and bound, over the layers in the order of the backward pass. Until a layer's first all-to-all begins, a step does not
depend on the degrees of that layer and of those after it, so the simulation of any step that begins with some degrees says when
that is and which all-reduces are left. From there on two times are below every choice for the other layers:

* along the chain: the least seconds of each layer's part of the backward pass, on a network that all-reduces do not slow down;
* on the network: the seconds of the all-reduces that are left and of each layer's all-to-alls.

A choice of degrees has both, and so any weighted mean of them; of each mean the least choice is found layer by layer.
"""

import heapq
import time
from itertools import pairwise

import numpy as np

from engine.errors import InputError
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Result, Status, Stop, result_of
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, COMPUTE, Tasks, run_streams
from engine.simulate.training import price_step
from engine.simulate.training.program import Program, program_of
from engine.systems.base import Report

WEIGHTS = np.linspace(0.0, 1.0, 33)
"""Weights of the chain's time in a mean of both."""
SAME = 1e-9
"""Times this close, relatively, are alike."""
TIE = 1e-12
"""As close, and the one that was found first is taken."""

Degrees = tuple[int, ...]
"""Degrees of layers in the order of the backward pass: the last layer first."""


def degrees_of_step(plan: Plan, problem: Problem, most: int, evaluations: int, stop: Stop, report: Report) -> Result[Degrees]:
    """The degrees of the backward pass with which the step takes least time; `solution` is in the model's order.

    plan: of the step; its forward pass has the best degrees of its layers, its backward pass those to begin with
    most: the highest degree
    evaluations: steps that are simulated at most, one at least

    `bound` is of all degrees 1 … `most` in both passes with the plan's placement, order of parts and all-reduces. Raises
    InputError for imported operators, which may be no chain, and for a policy other than "fair".
    """
    if problem.graph is not None or plan.priority.policy != "fair":
        raise InputError("degrees of the whole step are found for the operators of a transformer; take algorithm exact here")
    begin, steps = time.perf_counter(), _Steps(plan, problem, most, evaluations, stop, report)
    layers = len(plan.pipeline.backward)
    nodes: list[tuple[float, int, Degrees]] = [(steps.proven, 0, ())]
    for degree in range(1, most + 1):
        steps.simulate((degree,) * layers)
    before = np.inf
    while steps.least < before and not steps.over:
        before = steps.least
        for place in range(layers):
            for degree in range(1, most + 1):
                steps.simulate((*steps.best[:place], degree, *steps.best[place + 1 :]))
    while nodes and not steps.over:
        bound, depth, prefix = heapq.heappop(nodes)
        for degree in range(1, most + 1):
            own = (*prefix, degree)
            times = steps.simulate(own + steps.best[len(own) :])
            if times is None:  # the work is over: it may still be as fast as its beginning
                heapq.heappush(nodes, (bound, depth, own))
            elif len(own) < layers:
                heapq.heappush(nodes, (max(bound, steps.bound(len(own), *times[len(own)])), depth - 1, own))
        steps.proven = min(steps.least, nodes[0][0] if nodes else steps.least)
    status = Status.CANCELLED if steps.stopped else Status.OPTIMAL if steps.tight else Status.FEASIBLE
    return result_of("step-degrees", begin, status, steps.least, min(steps.proven, steps.least), steps.best[::-1])


class _Steps:
    """Steps that differ in the degrees of the backward pass, and times below which no step is that begins with some degrees."""

    def __init__(self, plan: Plan, problem: Problem, most: int, evaluations: int, stop: Stop, report: Report) -> None:
        self.plan, self.problem, self.evaluations, self.stop, self.report = plan, problem, evaluations, stop, report
        self.priced = price_step(problem, plan.placement)
        self.layers = plan.placement.model_layers[::-1]
        self.timed: dict[Degrees, list[tuple[float, float]]] = {}
        self.least, self.best, self.proven, self.stopped = np.inf, plan.pipeline.backward[::-1], 0.0, False
        chained, sent = [], []
        for degree in range(1, most + 1):
            program = self.program((degree,) * len(self.layers))
            tasks, begins = program.tasks, self.begins(program)
            own = np.where(tasks.stream == ALL_TO_ALL, tasks.seconds[:, 0], 0.0)
            sent.append([own[first:last].sum() for first, last in pairwise(begins)])
            chained.append([self.along(tasks, first, last) for first, last in pairwise(begins)])
        means = WEIGHTS[:, None, None] * np.array(chained) + (1 - WEIGHTS)[:, None, None] * np.array(sent)
        self.rest = means.min(axis=1)[:, ::-1].cumsum(axis=1)[:, ::-1]
        """float64[weight, layer]: the least mean of both times of this layer and of those after it."""
        self.reached = np.cumsum([0.0, *np.min(chained, axis=0)])[:-1]
        """float64[layer]: the least seconds along the chain of the layers before it."""
        reduces = np.flatnonzero(tasks.stream == ALL_REDUCE)
        made = np.array([tasks.edges[tasks.edges[:, 1] == task, 0].max(initial=-1) for task in reduces])
        self.made = np.array([tasks.seconds[reduces[made >= first], 0].sum() for first in begins[:-1]])
        """float64[layer]: seconds of the all-reduces of gradients that are made after the layer has begun."""
        update = [place for place, operator in enumerate(self.priced.graph.operators) if operator.phase == "update"]
        self.update = float(self.priced.seconds[update, 0].max(initial=0.0))
        self.proven = self.bound(0, *self.simulate(self.best)[0])

    @property
    def tight(self) -> bool:
        """True if no degrees are faster than the best so far."""
        return self.least <= self.proven * (1 + SAME)

    @property
    def over(self) -> bool:
        """True if the search ends: proven, stopped, or its work done."""
        self.stopped = self.stopped or self.stop()
        return self.stopped or self.tight or len(self.timed) >= self.evaluations

    def simulate(self, degrees: Degrees) -> list[tuple[float, float]] | None:
        """(When it begins, seconds of the all-reduces that are then left) of every layer; None if the search is over before."""
        if degrees in self.timed:
            return self.timed[degrees]
        if self.timed and self.over:
            return None
        program = self.program(degrees)
        tasks = program.tasks
        start, end = run_streams(tasks, self.plan.priority.policy)
        reduce, exchange = tasks.stream == ALL_REDUCE, tasks.stream == ALL_TO_ALL
        since, ended, seconds = start[reduce, 0], end[reduce, 0], tasks.seconds[reduce, 0]
        times = []
        for now in start[self.begins(program)[:-1], 0].tolist():
            until = np.minimum(ended, now)
            shared = np.minimum(end[exchange, 0], until[:, None]) - np.maximum(start[exchange, 0], since[:, None])
            # At half speed while an all-to-all is under way.
            done = np.where(since < now, until - since - np.clip(shared, 0, None).sum(axis=1) / 2, 0.0)
            times.append((now, float((seconds - done).sum())))
        self.timed[degrees] = times
        if (took := float(end.max(initial=0.0))) < self.least * (1 - TIE):
            self.least, self.best = took, degrees
        share = min(len(self.timed) / self.evaluations, 1.0)
        self.report(share, f"{len(self.timed)} steps simulated", self.least, min(self.proven, self.least))
        return times

    def program(self, degrees: Degrees) -> Program:
        """The tasks of the step."""
        pipeline = self.plan.pipeline.model_copy(update={"backward": degrees[::-1]})
        return program_of(self.plan.model_copy(update={"pipeline": pipeline}), self.problem, self.priced, known=True)

    def begins(self, program: Program) -> list[int]:
        """The first task of every layer, and behind the last layer that of the all-reduces and the update."""
        operators, first = self.priced.graph.operators, {}
        for task, (place, stream) in enumerate(zip(program.operators.tolist(), program.tasks.stream.tolist(), strict=True)):
            if stream == ALL_REDUCE or operators[place].phase == "update":
                return [*(first[layer] for layer in self.layers), task]
            if stream == ALL_TO_ALL and operators[place].phase == "dx":
                first.setdefault(operators[place].layer, task)
        return [*(first[layer] for layer in self.layers), len(program.labels)]

    def along(self, tasks: Tasks, first: int, last: int) -> float:
        """Seconds from a layer's first task to that of the next layer, or to the end of the step.

        All before them is over, and all-reduces slow no all-to-all down: no step takes less, as no task begins earlier.
        """
        edges, behind = tasks.edges, tasks.stream[last : last + 1] != ALL_TO_ALL
        needed = edges[edges[:, 1] == first, 0].max(initial=-1)
        # On alike GPUs weight gradients that are issued before the all-to-all, but not needed for it, begin with it.
        own = [task for task in range(needed + 1, first) if tasks.stream[task] == COMPUTE and tasks.seconds.shape[1] == 1]
        own += range(first, last)
        made = set(edges[np.isin(edges[:, 0], own), 1].tolist())
        last_ones = (task for task in range(last, len(tasks.stream)) if tasks.stream[task] != ALL_REDUCE or task in made)
        own += last_ones if behind else [last]
        index = {task: number for number, task in enumerate(own)}
        inside = [(index[one], index[other]) for one, other in edges.tolist() if one in index and other in index]
        none = np.zeros(len(own))
        part = Tasks(tasks.stream[own], tasks.seconds[own], inside, none, none - 1, none > 0)
        start, end = run_streams(part, "fair", together=(1.0, 1.0))
        return float(end.max() if behind else start[-1].max())

    def bound(self, place: int, begins: float, left: float) -> float:
        """Seconds below which no step is, the layer at `place` beginning then with so many seconds of all-reduces left.

        The network's share is looked at from the begin of every layer from there on.
        """
        along = self.reached[place:] - self.reached[place]
        reduced = np.concatenate([[left], self.made[place + 1 :]])
        ends = along + self.rest[:, place:] + (1 - WEIGHTS)[:, None] * (reduced + self.update)
        return begins + float(ends.max())

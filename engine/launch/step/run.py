"""Execution of a planned training step on a rank: the tasks of the simulated program itself, with real tensors.

An all-to-all of real tokens only learns how many rows come from the exchange of sizes before it, as Lancet's does (§6,
Figure 10), and not from the replayed routing: its buffer is made when they are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate, pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.launch.rank.communicator import page_locked
from engine.launch.rank.context import RankContext
from engine.launch.step.build import Builder, layouts_of
from engine.launch.step.check import StepOutcome, difference
from engine.launch.step.layout import Slices, choices
from engine.launch.step.network import Network, last_computations
from engine.launch.step.nodes import Aggregate, AllToAll, At, Experts, Node
from engine.launch.step.sizes import check_step_plan, step_problem
from engine.launch.step.weights import lay_out_gradients, source_of, weights_of
from engine.overlap.operator_graph import Operator
from engine.plan import Plan
from engine.runtime.exchange.recorder import Mark
from engine.simulate.streams import COMPUTE
from engine.simulate.training import price_step
from engine.simulate.training.program import Program, program_of
from engine.simulate.training.step import event_kind
from engine.timeline import SIZES

REPORTS = 20
"""Reports of a step on how far it is: few, as it is timed meanwhile."""


def start_collective(
    context: RankContext, collective: Callable[..., dist.Work], tensors: Sequence[Tensor]
) -> Callable[[], object]:
    """Start a collective on tensors of the rank's device. The function returned waits until it is over, on a GPU until
    the current stream has been told to wait for it.

    If a GPU's tensors are sent over Gloo, all of it happens in that wait, not in the way of the caller: the copies to
    the host and back are a part of the collective's cost.

    collective: takes the tensors and starts
    tensors: the one sent first, the one received last; one for both of an all-reduce
    """
    if context.communication_device == context.device:
        return collective(*tensors).wait

    def over() -> None:
        sent, *received = tensors
        # The first copy keeps this thread until it is complete, as Gloo waits for no stream. The second one need not: its
        # readers are on the same stream.
        there = [page_locked(sent).copy_(sent), *map(page_locked, received)]
        collective(*there).wait()
        tensors[-1].copy_(there[-1], non_blocking=True)

    return over


class Groups:
    """The process groups of a step: all-to-alls and all-reduces have their own, so that they never queue behind each
    other. Making them is collective. `exchanging` is the group in which this rank exchanges tokens; gradients are added
    up by `everyone`, or by those with the same experts, who are `alike`.

    count: number of such groups, each of which holds every expert once, in the same order
    """

    def __init__(self, context: RankContext, count: int) -> None:
        everyone, size = list(range(context.ranks)), context.ranks // count
        self.exchanging, self.everyone = context.groups(2)
        self.alike = self.everyone
        if count > 1:
            blocks = [everyone[first : first + size] for first in range(0, context.ranks, size)]
            self.exchanging = self._own(context, blocks)
            self.alike = self._own(context, [everyone[first::size] for first in range(size)])
        for group in (self.exchanging, self.everyone, self.alike):  # connects, which no step should pay for
            dist.all_reduce(torch.zeros(1, device=context.communication_device), group=group)

    @staticmethod
    def _own(context: RankContext, blocks: list[list[int]]) -> dist.ProcessGroup:
        """The group of the block that this rank is in. All ranks make all groups, in one order."""
        groups = [dist.new_group(block, timeout=timedelta(seconds=context.instructions.limit)) for block in blocks]
        return next(group for group, block in zip(groups, blocks, strict=True) if context.rank in block)


@dataclass(frozen=True)
class BoundTask:
    """A task of an operator with its node; the update has none. sizes: True for the exchange of sizes of an all-to-all"""

    operator: Operator
    node: Node | None
    at: At
    sizes: bool = False

    def compute(self) -> None:
        {"forward": self.node.forward, "dx": self.node.dx, "dw": self.node.dw}[self.operator.phase](self.at)


class StepExecutor:
    """Executor of a plan for a training step. Every method is to be called on all ranks in the same order.

    Raises InputError for a plan that the step cannot be run with.
    """

    @torch.inference_mode()
    def __init__(self, context: RankContext, plan: Plan) -> None:
        model, step, ranks = context.instructions.model, context.instructions.step, context.instructions.ranks
        self.context, self.plan = context, plan
        groups = check_step_plan(plan, model, step)
        problem = step_problem(model, step, ranks)
        priced = price_step(problem, plan.placement, plan.overlap is not None and plan.overlap.irregular)
        self.graph = priced.graph
        self.program: Program = program_of(plan, problem, priced)
        self._sized = {exchange: task for task, exchange in self.program.sizes.items()}
        """The all-to-all behind every exchange of sizes."""
        self.groups = Groups(context, groups)
        self.choices = choices(model, step, ranks, context.tokens[0] if context.tokens else None)
        self.hosts = {
            layer: [sorted(set(experts)) for experts in row]
            for layer, row in zip(plan.placement.model_layers, plan.placement.experts_of_gpu, strict=True)
        }
        self.source = source_of(context, self.graph)
        hosted = {layer: row[context.rank] for layer, row in self.hosts.items()}
        self.weights = weights_of(self.graph, self.source, hosted)
        layouts = layouts_of(plan, step, self.choices, groups, context.rank, context.device)
        self.nodes = Builder(context, self.weights, layouts).nodes(self.graph)
        self._bound = self._bind()
        self._reduced = self._gradients()
        self._packed: dict[int, list[int]] = {}
        for task, computation in last_computations(self.program.tasks).items():
            if task in self._bound:
                self._packed.setdefault(computation, []).append(task)
        self._forgotten = self._last_uses()
        one_order, policy = context.instructions.backend == "nccl", plan.priority.policy
        streams = context.streams(2)
        self.network = Network(self.program.tasks, policy, self._launch, context.device, streams, one_order)
        self._buffers: dict[int, list[Tensor]] = {}
        self._learnt: dict[int, list[int]] = {}
        """Rows that come from every rank of the group, by all-to-alls of which the sizes have been exchanged."""
        self._computing = torch.cuda.current_stream(context.device) if context.device.type == "cuda" else None
        self._events: dict[int, tuple[Mark, Mark, float]] = {}

    @torch.inference_mode()
    def run(self, report: Callable[[float, str], None]) -> None:
        """One step, from the weights of the seed."""
        tasks = np.flatnonzero(self.program.tasks.stream == COMPUTE).tolist()
        every = max(1, len(tasks) // REPORTS)
        for node in self.nodes.values():
            node.forget()
        for weight in self.weights.values():
            weight.begin()
        dist.barrier()
        self.network.start()
        try:
            for number, task in enumerate(tasks):
                if number % every == 0:
                    report(number / len(tasks), f"operator {number + 1:,} of {len(tasks):,}")
                self._compute(task)
            self.network.end()
        except BaseException as failure:
            self.network.fail(failure)
            raise
        for task, (start, end, size) in sorted(self._events.items()):
            bound = self._bound.get(task)
            kind, layer = ("all_reduce", -1) if bound is None else (event_kind(bound.operator), bound.operator.layer)
            kind = SIZES if bound is not None and bound.sizes else kind
            self.context.recorder.log(kind, layer, start, end, bytes=size, label=self.program.labels[task])
        self._events.clear()

    def difference(self) -> float | None:
        """Difference of the last step's loss, final hidden state and gradients from those of the reference, see
        `check.difference`; None on all ranks but 0."""
        outcome = StepOutcome(
            self.context, self.graph, self.source, self.choices, self.hosts, self.weights, self.loss, self.hidden
        )
        return difference(outcome)

    @property
    def hidden(self) -> Tensor:
        """[token, d]: the input of the head in the last step."""
        return self.nodes["layer_norm"].output.whole()

    @property
    def loss(self) -> Tensor:
        """This rank's part of the last step's loss."""
        return self.nodes["loss"].output.whole()

    def _bind(self) -> dict[int, BoundTask]:
        """Every task but the all-reduces with its node and part."""
        program, step = self.program, self.context.instructions.step
        kinds: dict[int, set[str]] = {}
        for stretch, place in zip(program.stretch.tolist(), program.operators.tolist(), strict=True):
            kinds.setdefault(stretch, set()).add(self.graph.operators[place].kind)
        bound_tasks = {}
        for task, place in enumerate(program.operators.tolist()):
            if place < 0:
                continue
            operator, parts = self.graph.operators[place], int(program.parts[task])
            bounds = tuple(part * step.batch // parts * step.sequence_length for part in range(parts + 1))
            only_experts = kinds[int(program.stretch[task])] <= {"dispatch", "experts", "combine"}
            along = "capacity" if parts > 1 and only_experts else "batch"
            node = self.nodes.get(operator.name.removeprefix(f"{operator.phase}."))
            at = At(along, Slices(bounds), int(program.part[task]))
            bound_tasks[task] = BoundTask(operator, node, at, task in self._sized)
            if isinstance(node, (AllToAll, Experts, Aggregate)):
                at.rows(node.layout)  # laid out here, and not while the step runs
        return bound_tasks

    def _gradients(self) -> dict[int, Tensor]:
        """The buffer of every all-reduce: gradients that are reduced at once lie side by side."""
        names = {
            task: tuple(gradient.name.removeprefix("all_reduce.") for gradient in piece.gradients)
            for task, piece in self.program.pieces.items()
        }
        together = list(dict.fromkeys(names.values()))
        buffers = dict(zip(together, lay_out_gradients(self.weights, together), strict=True))
        reduced = {}
        for task, piece in self.program.pieces.items():
            buffer = buffers[names[task]]
            begin, end = (len(buffer) * part // piece.parts for part in (piece.part, piece.part + 1))
            reduced[task] = buffer[begin:end]
        return reduced

    def _last_uses(self) -> dict[int, list[Callable[[], None]]]:
        """{computation: functions that forget values after it}, so that activations do not stay for the whole step."""
        last = dict.fromkeys(self.nodes, 0)
        for task, bound in self._bound.items():
            if bound.node is not None:
                last[bound.node.name] = max(last[bound.node.name], task)
        read_until = dict.fromkeys(self.nodes, 0)
        for node in self.nodes.values():
            for before in node.inputs:
                read_until[before.name] = max(read_until[before.name], last[node.name])
        computations = np.flatnonzero(self.program.tasks.stream == COMPUTE)
        forgotten: dict[int, list[Callable[[], None]]] = {}

        def forget(task: int, action: Callable[[], None]) -> None:
            forgotten.setdefault(int(computations[np.searchsorted(computations, task)]), []).append(action)

        for name, node in self.nodes.items():
            if name not in ("layer_norm", "loss"):  # which are compared with the reference
                forget(max(last[name], read_until[name]), node.forget_output)
            forget(last[name], node.forget_backward)
            forget(max([last[name], *(last[before.name] for before in node.inputs)]), node.forget_gradients)
        return forgotten

    def _compute(self, task: int) -> None:
        """Run one computation, with the packing of the rows that it hands to the network."""
        self.network.begin(task)
        recorder, bound = self.context.recorder, self._bound[task]
        start = recorder.mark()
        if bound.node is None:
            for weight in self.weights.values():
                weight.update()
        else:
            bound.compute()
        for exchange in self._packed.get(task, ()):
            at, node, backward = (bound := self._bound[exchange]).at, bound.node, bound.operator.phase == "dx"
            if bound.sizes:
                known, _, come = node.known_sizes(at)
                self._buffers[exchange] = [known, known.new_empty(sum(come))]
                continue
            self._buffers[exchange] = [sent := node.pack(at, backward)]
            if exchange not in self.program.sizes:
                self._receive(exchange, sent, node.sizes(at, backward)[1])
        self._events[task] = (start, recorder.mark(), 0.0)
        self.network.finish(task)
        for forget in self._forgotten.get(task, ()):
            forget()

    def _receive(self, exchange: int, sent: Tensor, come: list[int]) -> None:
        """Make room for the rows that come, read only by tasks that the program lets wait for this all-to-all."""
        bound, received = self._bound[exchange], sent.new_empty((sum(come), sent.shape[1]))
        self._buffers[exchange].append(received)
        bound.node.arrived(bound.at, bound.operator.phase == "dx", received)

    def _launch(self, task: int) -> Callable[[], None]:
        """Start a collective; the function returned waits for its end, in a thread of the network."""
        mark = self.context.recorder.mark
        collective, tensors = self._collective(task)
        begin = mark()
        wait = start_collective(self.context, collective, tensors)

        def over() -> None:
            wait()
            if task in self._sized:
                bound = self._bound[task]
                # The host has to know them before it can start the rows, and waits for the device here.
                numbers = tensors[-1].tolist()
                bounds = [0, *accumulate(bound.node.known_sizes(bound.at)[2])]
                self._learnt[self._sized[task]] = [sum(numbers[first:last]) for first, last in pairwise(bounds)]
            self._events[task] = (begin, mark(), float(tensors[0].nbytes))

        return over

    def _collective(self, task: int) -> tuple[Callable[..., dist.Work], list[Tensor]]:
        """(function that starts it, its tensors: the one sent first, the one received last)."""
        if task in self._reduced:
            of_experts = self.program.pieces[task].gradients[0].groups > 1
            group = self.groups.alike if of_experts else self.groups.everyone
            return lambda gradients: dist.all_reduce(gradients, group=group, async_op=True), [self._reduced[task]]
        bound, buffers = self._bound[task], self._buffers[task]
        to, come = bound.node.sizes(bound.at, bound.operator.phase == "dx")
        if bound.sizes:
            _, to, come = bound.node.known_sizes(bound.at)
        elif task in self.program.sizes:
            come = self._learnt.pop(task)
            self._receive(task, buffers[0], come)
            if self._computing is not None:  # made on the stream of the network, and read on the other one
                buffers[1].record_stream(self._computing)
        del self._buffers[task]
        for rows in buffers:
            if rows.is_cuda:  # made on the stream of the computation, which may not reuse them before this one is done
                rows.record_stream(torch.cuda.current_stream())
        group = self.groups.exchanging

        def exchange(sent: Tensor, received: Tensor) -> dist.Work:
            return dist.all_to_all_single(received, sent, come, to, group=group, async_op=True)

        return exchange, buffers

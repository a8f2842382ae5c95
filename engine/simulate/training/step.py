"""The predicted timeline of a training step, on which every group of alike GPUs computes and all share one network; the time
below which no schedule can bring it; and the bytes that it keeps in every GPU's memory."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from engine.errors import InputError
from engine.model import MoEModel
from engine.overlap.operator_graph import Operator
from engine.overlap.transformer import transformer_step
from engine.plan import Placement, Plan
from engine.problem import Problem
from engine.simulate.streams import COMPUTE, run_streams
from engine.simulate.training.pricing import PricedStep, all_reduce_seconds, expert_groups, price_step
from engine.simulate.training.program import program_of
from engine.timeline import KINDS, STREAMS, Timeline
from engine.workload import RoutingTrace

if TYPE_CHECKING:
    import networkx as nx

FORWARD_KINDS = {"experts": "ffn"} | {kind: kind for kind in ("gate", "dispatch", "combine", "aggregate")}

GRID = 2 ** (1 / 256)
"""Ratio of the sizes between which an all-reduce is taken to move the larger in the time of the smaller."""


def simulate_step(plan: Plan, problem: Problem) -> Timeline:
    """The timeline of one training step. Raises InputError when the plan does not fit the problem."""
    problem.check_plan(plan)
    _check_replicas(plan, problem)
    irregular = plan.overlap is not None and plan.overlap.irregular
    # Capacity cuts give equal parts; whole sequences give parts as they were recorded.
    recorded = irregular and problem.step.routing == "recorded" and isinstance(problem.workload, RoutingTrace)
    cuts = {stretch.parts for stretch in plan.overlap.ranges} if recorded and problem.graph is None else ()
    priced = price_step(problem, plan.placement, irregular, as_recorded=tuple(cuts))
    program = program_of(plan, problem, priced)
    start, end = run_streams(program.tasks, plan.priority.policy)
    task, group = np.nonzero(end > start)
    operators = priced.graph.operators
    kind_of = ["all_reduce" if place < 0 else event_kind(operators[place]) for place in program.operators]
    layers = np.array([operators[place].layer if place >= 0 else -1 for place in program.operators])
    network = program.tasks.stream != COMPUTE
    stream = pd.Categorical(np.where(network, "network", "compute")[task], categories=list(STREAMS))
    times = {"start": start[task, group], "end": end[task, group]}
    about = {"kind": pd.Categorical(np.array(kind_of)[task], categories=list(KINDS)), "layer": layers[task]}
    sent = {"model": 0, "peer": -1, "bytes": np.where(network, program.sent, 0.0)[task]}
    events = pd.DataFrame({"resource": group, "stream": stream} | times | about | sent)
    names = problem.cluster.gpu_names
    alike = (len(members) - 1 for members in priced.groups)
    firsts = [names[members[0]] for members in priced.groups]
    lanes = tuple(f"{first} and {more} like it" if more else first for first, more in zip(firsts, alike, strict=True))
    labels = tuple(program.labels[index] for index in task)
    measured = "; operators with measured times count as measured" if problem.graph is not None else ""
    return Timeline(events, lanes, "simulated", problem.cost_source + measured, labels)


def _check_replicas(plan: Plan, problem: Problem) -> None:
    """Gradients of replicated experts have to be summed up, which is only known how to for groups of GPUs."""
    if plan.placement.single:
        return
    if problem.graph is not None:
        raise InputError(f"the plan {plan.name} holds experts several times, but the operator graph has each of them once")
    if expert_groups(plan.placement) == 1:
        raise InputError(
            f"the plan {plan.name} holds experts several times, but not in groups of neighbouring GPUs that hold each once"
        )


def event_kind(operator: Operator) -> str:
    """The kind of event that an operator is on a timeline."""
    if operator.network:
        return operator.kind
    if operator.phase in ("dx", "dw"):
        return operator.phase
    return FORWARD_KINDS.get(operator.kind, "dense")


def bound_of_step(problem: Problem, placement: Placement) -> float:
    """Seconds that every schedule of the step takes under this placement, however its operators are cut (into at most
    `MAX_PARTS` equal parts), fused, ordered and overlapped, with full buffers or only real tokens sent.

    No GPU computes two things at once, and the network carries one collective's worth at a time: both have a least total,
    before the loss, which needs the whole forward pass, and after it. A collective after the loss waits for the loss of all
    GPUs, and the loss of every GPU for all collectives before it; but a GPU's own computation after the loss does not wait
    for the slower GPUs. The update needs every gradient, and with it most communication.
    """
    import networkx as nx

    priced = [price_step(problem, placement, irregular) for irregular in (True, False)]
    least = np.min([_least(step) for step in priced], axis=0)
    operators, graph = priced[0].graph.operators, priced[0].graph.graph()
    kinds = np.array([operator.kind for operator in operators])
    exchanged, update = np.isin(kinds, ("dispatch", "combine")), kinds == "update"
    computed = ~(exchanged | update | (kinds == "gradient"))
    first, after = _around_the_loss(priced[0], graph)
    waited_for = _among(priced[0], *(nx.ancestors(graph, operator.name) for operator in priced[0].graph.of_phase("update")))
    reduced = _all_reduced(problem, priced[0])

    def total(which: np.ndarray) -> np.ndarray:
        return least[which].sum(axis=0)

    before, behind, last = total(computed & first), total(computed & after), total(update)
    sent_before = total(exchanged & first).max()
    sent_behind = max(
        total(exchanged & after).max() + reduced, total(exchanged & after & waited_for).max() + reduced + last.max()
    )
    on_gpus = (before + behind + last).max(), sent_before + (behind + last).max()
    return float(max(*on_gpus, max(before.max(), sent_before) + sent_behind))


def _least(priced: PricedStep) -> np.ndarray:
    """float64[operator, gpu]: seconds in the number of parts that takes least."""
    parts = np.arange(1, priced.seconds.shape[1] + 1)
    least = (priced.seconds * parts[None, :, None]).min(axis=1)
    group = np.empty(sum(map(len, priced.groups)), dtype=np.int64)
    for index, members in enumerate(priced.groups):
        group[list(members)] = index
    return least[:, group]


def _around_the_loss(priced: PricedStep, graph: "nx.DiGraph") -> tuple[np.ndarray, np.ndarray]:
    """bool[operator] twice: operators that must be over before the backward pass begins, and those that cannot begin before.
    Without a loss none is before; one that neither leads to the loss nor follows from it may run on either side and is left
    out."""
    import networkx as nx

    loss = next((operator.name for operator in priced.graph.of_phase("forward") if operator.kind == "loss"), None)
    if loss is None:
        return _among(priced), ~_among(priced)
    return _among(priced, nx.ancestors(graph, loss), {loss}), _among(priced, nx.descendants(graph, loss))


def _among(priced: PricedStep, *names: set[str]) -> np.ndarray:
    """bool[operator]: True if its name is in one of the sets."""
    return np.array([any(operator.name in some for some in names) for operator in priced.graph.operators], dtype=bool)


def _all_reduced(problem: Problem, priced: PricedStep) -> float:
    """Seconds that the network needs for all gradients."""
    gradients = priced.graph.of_phase("all_reduce")
    seconds = sum(gradient.seconds for gradient in gradients if gradient.seconds is not None)
    seconds += _least_all_reduce(problem, sum(gradient.sent for gradient in gradients if gradient.seconds is None))
    if priced.expert_groups > 1:
        own = sum(operator.parameters for operator in priced.graph.of_phase("forward") if operator.kind == "experts")
        seconds += _least_all_reduce(problem, own * problem.model.bytes_per_number, priced.expert_groups)
    return seconds


def _least_all_reduce(problem: Problem, sent: float, groups: int = 1) -> float:
    """Seconds that all-reduces of `sent` bytes take at the very least, in any pieces of at least a byte: at the best rate of
    any size. More bytes never take less time, so that a size takes at least as long as the one below it on a grid."""
    if sent <= 1:
        return 0.0
    # Sizes beyond a measured source cannot be simulated either; half of its reach is already at its last rate.
    largest = sent
    while not _is_priced(problem, largest, groups):
        largest /= 2
    sizes = np.geomspace(1.0, largest, 2 + int(np.log(largest) / np.log(GRID)))
    return float(sent * (all_reduce_seconds(problem, sizes[:-1], groups) / sizes[1:]).min())


def _is_priced(problem: Problem, size: float, groups: int) -> bool:
    try:
        all_reduce_seconds(problem, [size], groups)
    except InputError:
        return size <= 1  # asked for again, it says why
    return True


def bytes_per_parameter(model: MoEModel) -> float:
    """Bytes of weight and gradient in the model's numbers, and for SGD with momentum a momentum in 32 bits, plus a copy of the
    weight in 32 bits if the model's numbers are shorter."""
    number = model.bytes_per_number
    return 2 * number + 4 + (4 if number < 4 else 0)


def step_state_bytes(problem: Problem, placement: Placement) -> np.ndarray:
    """float64[gpu]: bytes of weights, gradients and momentum; activations depend on recomputation and do not count."""
    model = problem.model
    graph = problem.graph or transformer_step(model, problem.step, len(problem.cluster.gpus))
    dense = sum(operator.parameters for operator in graph.of_phase("forward") if operator.kind != "experts")
    if problem.graph is None and problem.step.tied_embeddings:
        dense -= problem.step.vocabulary * model.d_model
    experts = placement.slots.sum(axis=0) * model.bytes_per_expert / model.bytes_per_number
    return (experts + dense) * bytes_per_parameter(model)

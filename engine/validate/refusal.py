"""Refuses a plan that breaks a rule, by one line that names the fault and its place: first the rules of one all-to-all's
schedule, each raising `IllegalError` that names the phase and the GPUs, then those of plans.

Fast enough for every door: whole layers at a time, and nothing is simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.cluster import Cluster, any_gpus
from engine.costs import Datasheet
from engine.errors import IllegalError, InputError
from engine.goal import Goal
from engine.model import MoEModel
from engine.network import Network
from engine.plan import OrderMode, Placement, Plan, Schedule, SendOrder, expert_groups
from engine.problem import Problem, make_problem
from engine.provenance import has_inputs_of
from engine.simulate.training import check_step_parts, graph_of
from engine.simulate.work import Load
from engine.training import TrainingStep
from engine.workload import Workload

RELATIVE = 1e-9
"""Round-off that counts as equal, relative to the largest number of its kind."""


@dataclass(frozen=True, eq=False)
class Sends:
    """The sends of a schedule as arrays.

    src, dst, phase: int64[send]
    bytes: float64[send]
    duration: float64[phase] seconds
    """

    src: np.ndarray
    dst: np.ndarray
    bytes: np.ndarray
    phase: np.ndarray
    duration: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule) -> "Sends":
        src, dst, phase = (column.astype(np.int64) for column in (schedule.src, schedule.dst, schedule.phase))
        return cls(src, dst, schedule.bytes, phase, schedule.duration)

    def only(self, here: np.ndarray) -> "Sends":
        """Some of the sends, bool[send], in the same phases."""
        return Sends(self.src[here], self.dst[here], self.bytes[here], self.phase[here], self.duration)


@dataclass(frozen=True, eq=False)
class Ports:
    """The ports that sends leave by and arrive at.

    out, into: int64[send], indices into capacity
    capacity: float64[port] bytes/s
    """

    out: np.ndarray
    into: np.ndarray
    capacity: np.ndarray

    def only(self, here: np.ndarray) -> "Ports":
        """Those of some of the sends, bool[send]."""
        return Ports(self.out[here], self.into[here], self.capacity)


def node_ports(sends: Sends, network: Network) -> Ports:
    """The ports of a two-tier order: all of a node's together, under the number of its first GPU. (A node here is GPUs that
    reach each other over links; a GPU without them counts as one.)"""
    rates = [np.bincount(network.domain, rate, network.gpus) for rate in (network.send, network.receive)]
    return Ports(sends.src, sends.dst + network.gpus, np.concatenate(rates))


def between_nodes(traffic: np.ndarray, network: Network) -> np.ndarray:
    """float64[src, dst] bytes between nodes, each under the number of its first GPU; 0 inside them.

    traffic: float64[src, dst] bytes
    """
    summed, node = np.zeros_like(traffic), network.domain
    np.add.at(summed, (node[:, None], node[None, :]), traffic)
    return np.where(np.eye(len(traffic), dtype=bool), 0.0, summed)


def check_sends(sends: Sends) -> None:
    """Every send goes to another GPU and carries something."""
    if (own := np.flatnonzero(sends.src == sends.dst)).size:
        raise IllegalError(f"GPU {sends.src[own[0]]} sends to itself")
    if (empty := np.flatnonzero(sends.bytes <= 0)).size:
        raise IllegalError(f"GPU {sends.src[empty[0]]} sends no bytes to GPU {sends.dst[empty[0]]}")


def check_names(sends: Sends, network: Network) -> None:
    """The sends of a two-tier order are between nodes, each named by its first GPU."""
    ends = np.concatenate([sends.src, sends.dst])
    if (other := np.flatnonzero(network.domain[ends] != ends)).size:
        gpu = ends[other[0]]
        raise IllegalError(f"a two-tier order names nodes by their first GPU, but GPU {gpu} is of GPU {network.domain[gpu]}'s")


def check_listing(sends: Sends) -> None:
    """The sends of a phased order are listed phase by phase."""
    if (late := np.flatnonzero(np.diff(sends.phase) < 0)).size:
        before, after = sends.phase[late[0]], sends.phase[late[0] + 1]
        raise IllegalError(f"a send of phase {after} is listed after one of phase {before}; list them phase by phase")


def check_matching(sends: Sends, ports: Ports | None) -> None:
    """In every phase a port (all ports of a node in a two-tier order) sends to at most one peer and receives from at most one.

    ports: None if it is unknown which GPUs have links of their own; a GPU may then have two peers, one over the fabric and
        one over its links
    """
    most = 2 if ports is None else 1
    out, into = (sends.src, sends.dst) if ports is None else (ports.out, ports.into)
    for verb, port, gpu, peer in (("sends to", out, sends.src, sends.dst), ("receives from", into, sends.dst, sends.src)):
        key = sends.phase * (port.max(initial=0) + 1) + port
        order = np.argsort(key, kind="stable")
        crowded = np.flatnonzero(key[order][most:] == key[order][:-most])
        if crowded.size:
            together = order[crowded[0] : crowded[0] + most + 1]
            peers = " and ".join(f"GPU {number}" for number in peer[together])
            raise IllegalError(
                f"phase {sends.phase[together[0]]}: GPU {gpu[together[0]]} {verb} {peers} at once, which is no matching"
            )


def check_bytes(sends: Sends, traffic: np.ndarray) -> None:
    """Every byte is sent, none twice. traffic: float64[src, dst] bytes, the diagonal is ignored"""
    gpus = len(traffic)
    wanted = np.where(np.eye(gpus, dtype=bool), 0.0, traffic)
    sent = np.bincount(sends.src * gpus + sends.dst, sends.bytes, gpus * gpus).reshape(gpus, gpus)
    off = np.abs(sent - wanted)
    if off.max(initial=0) > RELATIVE * wanted.max(initial=0):
        src, dst = np.unravel_index(off.argmax(), off.shape)
        raise IllegalError(f"GPU {src} sends {sent[src, dst]:.12g} bytes to GPU {dst} instead of {wanted[src, dst]:.12g}")


def check_durations(sends: Sends, mode: OrderMode, ports: Ports) -> None:
    """Every phase is long enough: in a shared order for all bytes of a port, in others for each send at the slower of its two
    ports' rates."""
    duration, capacity = sends.duration, ports.capacity
    slack = duration * (1 + RELATIVE) + RELATIVE * duration.sum() * 1e-3
    if mode == "shared":
        loads = []
        for verb, port, gpu in (("send", ports.out, sends.src), ("receive", ports.into, sends.dst)):
            _, busy = np.unique(sends.phase * len(capacity) + port, return_inverse=True)
            moved = np.bincount(busy, sends.bytes)[busy]
            loads.append((moved / capacity[port], gpu, verb, moved, "in it"))
    else:
        seconds = sends.bytes / np.minimum(capacity[ports.out], capacity[ports.into])
        loads = [(seconds, sends.src, "send", sends.bytes, "to GPU {}")]
    for needed, gpu, verb, moved, where in loads:
        if (short := np.flatnonzero(needed > slack[sends.phase])).size:
            first = short[0]
            raise IllegalError(
                f"phase {sends.phase[first]} lasts {duration[sends.phase[first]]:g} s, but GPU {gpu[first]} needs "
                f"{needed[first]:g} s to {verb} {moved[first]:.12g} bytes {where.format(sends.dst[first])}"
            )


def refuse_broken(plan: Plan, problem: Problem, source: str = "", drawn: bool = True) -> None:
    """Raise InputError, one line that names the fault and its place, unless the plan is legal on the problem.

    Always checked: sizes, memory, sends in the order of their phases, phases of a matched or two-tier order as matchings, and
    the parts of a training step. A plan may be tried on another recording than its own, and its orders then carry scaled bytes;
    so their bytes are checked only with the plan's own recording and model, and the length of its phases only if cluster and
    costs are its own too.

    source: the origin of the plan, such as a file's name; its own name unless given
    drawn: False if the problem's cluster only stands for so many GPUs of any kind
    """
    problem.check_plan(plan)
    problem = problem.as_planned(plan)
    try:
        for part in _parts(plan, problem):
            if has_inputs_of(plan, problem, part.inputs[1:]):  # then the layers are the model's own MoE layers
                pairs = zip(part.placement.model_layers, part.problem.model.moe_layers, strict=True)
                for layer, (said, own) in enumerate(pairs):
                    if said != own:
                        where = f"{part.prefix}layer {layer} is said to be model layer {said}"
                        raise IllegalError(f"{where}, but the model's is {own}")
            _check_order(part, plan, problem, drawn)
        if plan.send_order.mode == "joint":
            known = _knows_cluster(plan, problem, drawn)
            timed = known and has_inputs_of(plan, problem, ("cluster", "cost"))
            check_joint_order(plan, problem.network if known else None, timed)
        if problem.goal is Goal.TRAINING:
            check_step_parts(plan, problem, graph_of(problem, expert_groups(plan.placement)))
    except (IllegalError, InputError) as error:
        raise InputError(f"{source or f'the plan {plan.name}'}: {error}") from None


def refuse_broken_launch(
    plans: Sequence[Plan],
    workload: Workload,
    model: MoEModel,
    cluster: Cluster | None = None,
    second: tuple[Workload, MoEModel] | None = None,
    step: TrainingStep | None = None,
    sources: Sequence[str] = (),
) -> None:
    """Raise InputError, see `refuse_broken`, unless all plans of a launch, for equally many GPUs, are legal.

    Plans for another cluster need not fit the drawn GPUs, as they run on ranks.

    cluster: as drawn, if the launch knows it
    sources: the origin of each plan
    """
    gpus = plans[0].placement.gpus
    problems = {False: make_problem(workload, any_gpus(gpus), model, Datasheet(), second, step=step)}
    if cluster is not None and len(cluster.gpus) == gpus:
        problems[True] = make_problem(workload, cluster, model, Datasheet(), second, step=step)
    for plan, source in zip(plans, sources or [""] * len(plans), strict=True):
        drawn = True in problems and plan.provenance.inputs.get("cluster", cluster.digest) == cluster.digest
        refuse_broken(plan, problems[drawn], source, drawn)


@dataclass(frozen=True, eq=False)
class _Part:
    """The part of a plan for one of its models.

    problem: the model's own
    inputs: roles of its recording and model among the plan's inputs
    prefix: the beginning of a message about it
    """

    problem: Problem
    placement: Placement
    order: SendOrder
    inputs: tuple[str, str]
    prefix: str = ""


def _parts(plan: Plan, problem: Problem) -> Iterator[_Part]:
    yield _Part(problem, plan.placement, plan.send_order, ("workload", "model"))
    if plan.goal is Goal.TWO_MODELS:
        inputs = ("workload_b", "model_b")
        yield _Part(problem.second, plan.placement_b, plan.send_order_b, inputs, "second model, ")


def _check_order(part: _Part, plan: Plan, problem: Problem, drawn: bool) -> None:
    mode, placement = part.order.mode, part.placement
    if mode == "concurrent":
        return
    known = _knows_cluster(plan, problem, drawn)
    phased, tiers = mode in ("matched", "joint", "shared", "two-tier"), mode == "two-tier"
    timed = phased and drawn and has_inputs_of(plan, problem, ("cluster", "cost"))
    # Costs decide how fast ports are, but not which there are; where the plan was made with others, they need not know any.
    network = problem.network if timed else Network.of(problem.cluster)
    own = problem.goal is not Goal.TRAINING and has_inputs_of(plan, problem, part.inputs)
    traffic = _traffic(part, plan) if own else None
    for kind, schedules in (("dispatch", part.order.dispatch), ("combine", part.order.combine)):
        for layer, schedule in enumerate(schedules):
            sends = Sends.of(schedule)
            ports = Ports(*network.ports(sends.src, sends.dst), network.capacity) if known else None
            if tiers:  # the nodes are known only for the plan's own cluster, but none ever has two peers
                ports = node_ports(sends, network)
            try:
                check_sends(sends)
                if tiers and known:
                    check_names(sends, network)
                if phased:
                    check_listing(sends)
                if mode in ("matched", "joint", "two-tier"):
                    check_matching(sends, ports)
                if traffic is not None and (known or not tiers):
                    carried = between_nodes(traffic[kind][layer], network) if tiers else traffic[kind][layer]
                    _check_carried(sends, carried, bool(placement.slots[layer].sum() > placement.experts))
                if timed:
                    check_durations(sends, mode, ports)
            except IllegalError as error:
                raise IllegalError(f"{part.prefix}layer {layer}, {kind}: {error}") from None


def _knows_cluster(plan: Plan, problem: Problem, drawn: bool) -> bool:
    return drawn and plan.provenance.inputs.get("cluster", problem.cluster.digest) == problem.cluster.digest


def _check_carried(sends: Sends, traffic: np.ndarray, replicated: bool) -> None:
    try:
        check_bytes(sends, traffic)
    except IllegalError as error:
        shares = "; replicas take equal shares of their expert's tokens" if replicated else ""
        raise IllegalError(f"{error}{shares}") from None


def _traffic(part: _Part, plan: Plan) -> dict[str, np.ndarray]:
    """float64[layer, src, dst] bytes of `dispatch` and `combine`."""
    load = Load(part.problem, part.placement, plan.travel, plan.execution)
    if plan.execution == "vanilla":
        return {"dispatch": load.traffic, "combine": load.traffic_back}
    work = load.work
    return {"dispatch": work.dispatch, "combine": work.combine}


def check_joint_order(plan: Plan, network: Network | None, timed: bool) -> None:
    """Raise IllegalError unless the joint order of two models is one.

    In every layer all four schedules count the same phases, the sends of both models in a phase are a matching together, and
    the combine of a model comes after its own dispatch, and for the second model after the dispatch of the first as well.
    Each model's own bytes are checked with its part of the plan.

    network: the network with the ports, None if it is unknown which GPUs have links of their own
    timed: True if phases must be long enough for the network
    """
    order_a, order_b = plan.send_order, plan.send_order_b
    layers = zip(order_a.dispatch, order_b.dispatch, order_a.combine, order_b.combine, strict=True)
    for layer, schedules in enumerate(layers):
        try:
            _check_joint_layer(schedules, network, timed)
        except IllegalError as error:
            raise IllegalError(f"layer {layer}, both models together: {error}") from None


def _check_joint_layer(schedules: tuple[Schedule, ...], network: Network | None, timed: bool) -> None:
    dispatch_a, dispatch_b, combine_a, combine_b = schedules
    if any(not np.array_equal(schedule.duration, dispatch_a.duration) for schedule in schedules):
        raise IllegalError("the dispatches and combines of a joint order have the same phases")
    for name, combine, waits_for in (("first", combine_a, (dispatch_a,)), ("second", combine_b, (dispatch_a, dispatch_b))):
        last = max(int(schedule.phase.max(initial=-1)) for schedule in waits_for)
        if combine.sends and combine.phase.min() <= last:
            raise IllegalError(
                f"the combine of the {name} model begins in phase {combine.phase.min()}, but waits for a dispatch that ends "
                f"in phase {last}"
            )
    sends = _together(schedules)
    ports = Ports(*network.ports(sends.src, sends.dst), network.capacity) if network is not None else None
    check_matching(sends, ports)
    if timed:
        check_durations(sends, "joint", ports)


def _together(schedules: tuple[Schedule, ...]) -> Sends:
    """The sends of all four schedules; those between two GPUs in one phase count as one transfer."""
    src, dst, phase, size = (
        np.concatenate([getattr(schedule, name) for schedule in schedules]) for name in ("src", "dst", "phase", "bytes")
    )
    gpus = int(max(src.max(initial=0), dst.max(initial=0))) + 1
    keys, which = np.unique((phase.astype(np.int64) * gpus + src) * gpus + dst, return_inverse=True)
    return Sends(keys // gpus % gpus, keys % gpus, np.bincount(which, size, len(keys)), keys // gpus**2, schedules[0].duration)

"""The pieces that recipes share: experts into slots, and the order of an all-to-all's bytes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from engine.communication.order import meeting_bound, one_peer_bound, order
from engine.communication.two_tier import Kernel, fewest_seconds, order_on, two_tier
from engine.errors import InputError, StoppedError
from engine.network import Network
from engine.placement.baselines import linear_assignment
from engine.plan import OrderMode, Placement, Plan, Schedule, SendOrder
from engine.problem import Problem
from engine.result import Advance, Provenance, Stop, never, unwatched
from engine.simulate import simulate
from engine.simulate.work import Load, Work
from engine.systems.base import Draft, Note, Notes, Report
from engine.timeline import Timeline
from engine.units import seconds

TIE = 1e-9
"""Relative difference of two times that are the same."""

# Placement


def to_placement(gpu_of_expert: np.ndarray, problem: Problem) -> Placement:
    """int[layer, expert] as a `Placement` of the problem's model."""
    return Placement.from_gpu_of_expert(gpu_of_expert, len(problem.cluster.gpus), problem.model.moe_layers)


def placement_of(rows: Iterable[Iterable[Iterable[int]]], problem: Problem) -> Placement:
    """The experts of every GPU in every layer ([layer][gpu]), in any order, as a `Placement` of the problem's model."""
    held = tuple(tuple(tuple(sorted(map(int, gpu))) for gpu in row) for row in rows)
    return Placement(experts=problem.workload.num_experts, experts_of_gpu=held, model_layers=problem.model.moe_layers)


def slots_of_gpu(problem: Problem, kind: str) -> np.ndarray:
    """int64[gpu]: expert slots per layer. Raises InputError when the experts do not fit the cluster's memory."""
    experts, gpus = problem.workload.num_experts, len(problem.cluster.gpus)
    fits = problem.expert_slots_of_gpu()
    slots = fits if kind == "uneven" else np.full(gpus, -(-experts // gpus))
    if np.any(slots > fits) or slots.sum() < experts:
        tight = int(fits.argmin())
        raise InputError(
            f"{experts} experts per layer do not fit: {problem.cluster.gpu_names[tight]} has memory for {fits[tight]} per "
            f"layer, all GPUs together for {fits.sum()}; add GPUs or memory, use a smaller dtype"
            + ("" if kind == "uneven" or fits.sum() < experts else ", or set slots=uneven")
        )
    return np.minimum(slots, experts)


def spread_evenly(slots: np.ndarray, experts: int) -> np.ndarray:
    """int64[gpu]: how many experts each GPU takes, in order, when GPUs are filled as evenly as `slots` allow."""
    taken = np.zeros_like(slots)
    while taken.sum() < experts:
        room = np.flatnonzero(taken < slots)
        fewest = room[taken[room] == taken[room].min()]
        taken[fewest[: experts - taken.sum()]] += 1
    return taken


def experts_per_gpu(problem: Problem, kind: str = "even") -> np.ndarray:
    """int64[gpu]: experts of every GPU in a layer, one copy of each, as equally as they divide. Raises InputError if they do
    not fit the memory.

    kind: "even"; "uneven": as equally as the memory allows
    """
    return spread_evenly(slots_of_gpu(problem, kind), problem.workload.num_experts)


def linear_placement(problem: Problem, kind: str = "even") -> Placement:
    """Experts in contiguous blocks, the same in every layer. kind: see `experts_per_gpu`"""
    row = linear_assignment(problem.workload.num_experts, experts_per_gpu(problem, kind))
    return to_placement(np.tile(row, (problem.workload.layers, 1)), problem)


def rows_counted(problem: Problem) -> str:
    """The rows by which Aurora's kernels weigh a placement, for the end of a note; empty where tokens travel just so."""
    return "" if problem.travel is None else ", counted by one row per token copy"


# Send order


@dataclass(frozen=True)
class Ordered:
    """The fastest of the plans that differ in their send orders, its timeline, a note on each order, and the loads."""

    plan: Plan
    timeline: Timeline
    notes: Notes
    loads: tuple[Load, ...]

    def draft(self, notes: Notes, cancelled: bool, limited: bool = False, bound: float | None = None) -> Draft:
        """The draft with these placements.

        notes: on the placement
        cancelled, limited, bound: see `Draft`
        """
        plan, ends = self.plan, {"cancelled": cancelled, "limited": limited}
        second = {"placement_b": plan.placement_b, "send_order_b": plan.send_order_b}
        known = {"timeline": self.timeline, "loads": self.loads}
        return Draft(plan.placement, plan.send_order, bound, notes | self.notes, **ends, **second, **known)


def best_order(placement: Placement, problem: Problem, mode: str, stop: Stop, report: Report) -> Ordered:
    """The best send order of a placement, or the one of the mode that is wanted (see `modes_of`)."""
    load = Load(problem, placement, problem.travel)

    def plan_with(mode: str, advance: Advance) -> Plan:
        send_order = phased_order(load, mode, stop, advance)
        return Draft(placement, send_order).plan("trial", Provenance(optimiser=""), problem.travel)

    return fastest_plan(modes_of(mode, problem), plan_with, (load,), problem, stop, report)


def modes_of(wanted: str, problem: Problem) -> tuple[str, ...]:
    """The modes of orders to choose from: the one that is wanted, or for "best" all that can be the best.

    With equal ports `matched` meets the bound of every order, start-up times aside, and needs no pacing, so `shared` is
    tried only on mixed ones, where a fast receiver can serve two slow senders at once, and `two-tier` only where the GPUs of a
    node can relay for each other.
    """
    rates = np.concatenate([problem.network.send, problem.network.receive])
    choices = {"two-tier": not problem.network.direct, "matched": True, "shared": np.any(rates != rates[0])}
    tried = (*(mode for mode, worthwhile in choices.items() if worthwhile), "concurrent")
    return tried if wanted == "best" else (wanted,)


def fastest_plan(
    modes: Sequence[str],
    plan_with: Callable[[str, Advance], Plan],
    loads: tuple[Load, ...],
    problem: Problem,
    stop: Stop,
    report: Report,
) -> Ordered:
    """The fastest plan of those with an order of each mode, the first of equally fast ones.

    The last of several modes, a plain all-to-all, comes first, because it needs no schedule; one with a bound above the best
    time so far is neither made nor simulated, and of several one that is refused is passed over.

    plan_with: makes the plan of a mode; calls its `Advance` with the share of the orders that are there
    loads: of each model
    """
    plans: dict[str, Plan] = {}
    timelines: dict[str, Timeline] = {}
    notes: Notes = {}
    for step, mode in enumerate(reversed(modes)):
        if timelines and stop():
            break
        fastest = min((timeline.total for timeline in timelines.values()), default=None)
        begin, half = 0.8 + 0.2 * step / len(modes), 0.1 / len(modes)
        report(begin, f"ordering sends: {mode}", fastest, None)
        least = 0.0 if fastest is None else least_seconds([load.work for load in loads], problem.network, mode)
        if fastest is not None and least > fastest * (1 + TIE):
            notes[mode] = Note(f"not made: it takes at least {seconds(least)} (proven), more than another order")
            continue
        give_up = stop if timelines else never
        ordering = partial(_advance, report, begin, half, f"ordering sends: {mode}", fastest, give_up)
        simulating = partial(_advance, report, begin + half, half, f"simulating the {mode} order", fastest, give_up)
        try:
            plans[mode] = plan_with(mode, ordering)
            timelines[mode] = simulate(plans[mode], problem, stop, simulating, loads)
        except StoppedError:
            if not timelines:
                raise
            break
        except InputError as error:  # such as nodes too unlike for two tiers
            if len(modes) == 1:
                raise
            notes[mode] = Note(f"not possible: {error}")
            continue
        notes[mode] = Note(timelines[mode].total, "s")
    best = min((mode for mode in modes if mode in timelines), key=lambda mode: timelines[mode].total)
    in_turn = {f"{mode} order": notes[mode] for mode in modes if mode in notes}
    return Ordered(plans[best], timelines[best], in_turn, loads)


def _advance(
    report: Report, begin: float, width: float, message: str, fastest: float | None, give_up: Stop, share: float
) -> None:
    """Report a share of a piece of work that begins when `begin` of the whole is done and is `width` of it. Raises
    StoppedError once `give_up` answers True."""
    report(begin + width * share, message, fastest, None)
    if give_up():
        raise StoppedError("stopped before all layers had an order")


def least_seconds(works: Sequence[Work], network: Network, mode: str) -> float:
    """Seconds below which no orders of this mode can bring the pass of the slowest of these models."""
    bounds = {
        "matched": one_peer_bound,
        "joint": one_peer_bound,
        "two-tier": lambda at_work, matrix: fewest_seconds(matrix, at_work),
        "concurrent": meeting_bound,
    }
    bound = bounds.get(mode, Network.bound)
    return max(
        sum(float(step.max(axis=1).sum()) for step in work.compute.values())
        + sum(bound(*exchange) for kind in ("dispatch", "combine") for exchange in work.carried(network, kind))
        for work in works
    )


def phased_order(load: Load, mode: str, stop: Stop, advance: Advance = unwatched) -> SendOrder:
    """Exact orders for every layer. Raises InputError for a joint order, which is one of two models.

    advance: called with the share that is done
    """
    if mode == "joint":
        raise InputError("a joint order is one of two models; open a second one, or use matched")
    if mode == "concurrent":
        return SendOrder(mode="concurrent")
    if mode == "two-tier":
        return _every_layer(lambda network, traffic: two_tier(traffic, network, stop).solution, load, mode, advance)
    return order_by(partial(order, mode=mode, stop=stop), load, mode, advance)


def order_by(kernel: Kernel, load: Load, mode: OrderMode, advance: Advance = unwatched) -> SendOrder:
    """The kernel's orders for every layer."""
    return _every_layer(lambda network, traffic: order_on(network, traffic, kernel)[0], load, mode, advance)


def _every_layer(
    schedule_of: Callable[[Network, np.ndarray], Schedule], load: Load, mode: OrderMode, advance: Advance
) -> SendOrder:
    """Schedules for every layer. If every port is as fast out as in, the combine is the dispatch backwards."""
    network, travel = load.problem.network, load.travel
    there, back = load.traffic, load.traffic_back
    rows_out, rows_back = travel.row_bytes(load.problem.model)
    alike = np.array_equal(network.send, network.receive) and network.measured is None
    dispatch, combine = [], []
    for layer, (out, into) in enumerate(zip(there, back, strict=True)):
        advance(layer / len(there))
        dispatch.append(schedule_of(network.carrying("dispatch", travel.unit, out), out))
        combine.append(
            reverse(dispatch[-1], rows_back / rows_out)
            if alike
            else schedule_of(network.carrying("combine", travel.unit, into), into)
        )
    return SendOrder(mode=mode, dispatch=tuple(dispatch), combine=tuple(combine))


def reverse(schedule: Schedule, factor: float = 1.0) -> Schedule:
    """The schedule with every send reversed and so many times as large: the combine of a dispatch (Aurora §2.2)."""
    turned = {"src": schedule.dst, "dst": schedule.src}
    if factor != 1:
        turned |= {"bytes": schedule.bytes * factor, "duration": schedule.duration * factor}
    return schedule.model_copy(update=turned)

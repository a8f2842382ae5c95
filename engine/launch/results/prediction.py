"""The predicted timeline of a launch: a simulation of the plans as its ranks ran them, with costs measured on their machine."""

from dataclasses import replace

import numpy as np
import pandas as pd

from engine.cluster import Cluster, Gpu, Node
from engine.communication.travel import Stops, serving_gpus
from engine.costs import AlphaBeta, CostProfile, fit_line
from engine.goal import Goal
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.rank.instructions import RankInstructions, in_turn
from engine.launch.rank.links import known_links, links_of
from engine.launch.results.scheduled import ASSUMED, Foreseen
from engine.plan import Plan, Schedule, SendOrder
from engine.problem import Problem
from engine.runtime.exchange.hops import Hops, hops_of_layer
from engine.runtime.exchange.links import Links
from engine.simulate import loads_of, simulate
from engine.simulate.colocated import simulate_colocated
from engine.timeline import Timeline


def fit_profile(measured: dict[str, list], device: str, instructions: RankInstructions, cores: int) -> CostProfile:
    """The α–β profile of this machine from the sweep at the start of a launch. cores: its processors, which count if
    the ranks compute on them."""
    known = ("gemm", "gate", "memory", "network", "all_reduce")
    lines = {name: fit_line(*np.array(measured[name]).T) for name in known if measured.get(name)}
    return CostProfile(
        name=f"{instructions.ranks} ranks on {device}",
        origin="measured at the start of the launch, all ranks working",
        gemm={device: lines["gemm"]},
        gate={device: lines["gate"]} if "gate" in lines else {},
        memory={device: lines["memory"]},
        network=lines.get("network"),
        all_reduce=lines.get("all_reduce"),
        ranks=instructions.ranks,
        cores=cores if instructions.device == "cpu" else instructions.gpus,
    )


def predict(launch: PreparedLaunch, plan: Plan, profile: CostProfile, measured: dict[str, list]) -> Timeline:
    """The simulated timeline of one of a launch's plans: computation by the profile, sends at the rates and with the
    start-up of the ranks' links, and for one model step by step the ranks' meetings between the steps. Rows that spread
    inside nodes go slice by slice, as the ranks send them. The work of a plan's scheduler is in it, see `Foreseen`.

    measured: as returned by `measure_machine`
    """
    instructions = launch.instructions
    if instructions.goal is Goal.TRAINING:
        # A testbed's links count if they are known, with the measured start-up.
        links, cost = Links(np.ones(instructions.ranks)), AlphaBeta(profile)
        if instructions.bandwidth is not None and profile.network is not None:
            links = known_links(instructions, profile.network.alpha)
            cost = AlphaBeta(profile.model_copy(update={"network": None}))
        problem = Problem(launch.workloads[0], _machine(profile, links), instructions.model, cost, step=instructions.step)
        return simulate(plan, problem)
    links = links_of(instructions, measured) or Links(np.ones(1))
    foreseen = None if plan.reaction is None else Foreseen.of(plan, launch)
    plan = plan if foreseen is None else foreseen.hosted(plan)
    plan = _as_executed(launch, plan, links)
    here, names = _machine(profile, links), tuple(f"rank {index}" for index in range(instructions.ranks))
    cost, second = AlphaBeta(profile.model_copy(update={"network": None})), None
    if instructions.model_b is not None:
        second = Problem(launch.workloads[1], here, instructions.model_b, cost)
    problem = Problem(launch.workloads[0], here, instructions.model, cost, second, runs_attention=False)
    if second is None:
        timeline = simulate(plan, problem)
        within, between = (gap for _, gap in measured["meetings"])
        events = with_meetings(timeline.events, within, between)
        if foreseen is not None:
            events = foreseen.added_to(events, problem, instructions.device == "cuda", between)
    else:  # the all-to-alls of two models overlap as far as the backend lets them
        problem.check_plan(plan)
        timeline = simulate_colocated(plan, loads_of(plan, problem), in_turn=in_turn(instructions, plan))
        events = timeline.events
    source = f"{AlphaBeta(profile).source}; {links.text}"
    if plan.travel is not None:
        source += f"; {plan.travel.in_words}"
    if foreseen is not None:
        source += f"; {ASSUMED}"
    return replace(timeline, events=events, resources=names, cost_source=source)


def _as_executed(launch: PreparedLaunch, plan: Plan, links: Links) -> Plan:
    """The plan with the steps of node travel written down, as phases that wait for each other: the first slice has to
    enter before anything is spread and the last one is spread when all have entered, and each step costs a start-up."""
    if plan.travel is None or plan.travel.unit != "node":
        return plan
    instructions = launch.instructions
    stops, orders = Stops(instructions.tiers.network.domain), {}
    models = (instructions.model, instructions.model_b)
    placements = {"send_order": plan.placement, "send_order_b": plan.placement_b}
    for (name, placement), model, trace in zip(placements.items(), models, launch.workloads, strict=False):
        source, row_bytes = trace.rank_of_token(instructions.ranks), plan.travel.row_bytes(model)
        hosts = (
            serving_gpus(placement, layer, trace.experts[:, layer], plan.travel, source, stops) for layer in range(trace.layers)
        )
        layers = [hops_of_layer(of_layer, source, stops, row_bytes, links, instructions.backend) for of_layer in hosts]
        ways = [
            [_schedule(hops, size, links) for hops in way]
            for way, size in zip(zip(*layers, strict=True), row_bytes, strict=True)
        ]
        orders[name] = SendOrder(mode="matched", dispatch=ways[0], combine=ways[1])
    return plan.model_copy(update=orders)


def _schedule(hops: Hops, row_bytes: float, links: Links) -> Schedule:
    """The steps of an exchange, in bytes."""
    columns = [(piece.src, piece.dst, piece.end - piece.begin, piece.phase) for piece in hops.order]
    src, dst, rows, phase = np.array(columns, dtype=np.int64).reshape(-1, 4).T
    size = rows * row_bytes
    steps = range(int(phase.max(initial=-1)) + 1)
    seconds = [links.network.fluid_seconds(*(column[phase == step] for column in (src, dst, size))) for step in steps]
    return Schedule(src=src, dst=dst, bytes=size, phase=phase, duration=seconds)


def _machine(profile: CostProfile, links: Links) -> Cluster:
    """The ranks as a cluster, of one GPU a node if they have no links of their own. Only the type, the memory and the
    bandwidths of a GPU are read: times of computation come from the profile."""
    unread = dict.fromkeys(("memory_bandwidth", "flops_fp32", "flops_fp16"), 1)

    def gpu(rate: float) -> Gpu:
        ports = {"send_bandwidth": rate, "receive_bandwidth": rate}
        return Gpu(type=next(iter(profile.gemm)), memory=2.0**60, **ports, **unread)

    network, nodes = links.network, []
    for domain in np.unique(network.domain):
        ranks = np.flatnonzero(network.domain == domain)
        gpus, near = tuple(gpu(rate) for rate in links.rates[ranks].tolist()), float(network.link[domain])
        node = Node(name=f"rank {domain}", gpus=gpus, link_bandwidth=near or None, link_latency=links.start_up)
        nodes.append(node)
    return Cluster(name="this machine", nodes=tuple(nodes), latency=links.start_up)


def with_meetings(events: pd.DataFrame, within: float, between: float) -> pd.DataFrame:
    """The events of steps that follow one another (see `Timeline.events`), with the seconds that pass between two steps
    of a layer and between two layers."""
    steps = events.groupby(["layer", "kind"], observed=True)["start"].min().sort_values(kind="stable")
    layers = steps.index.get_level_values("layer")
    gaps = np.where(layers[1:] == layers[:-1], within, between)
    late = pd.Series(np.r_[0.0, np.cumsum(gaps)], steps.index)
    late = late.loc[pd.MultiIndex.from_frame(events[["layer", "kind"]])].to_numpy()
    return events.assign(start=events["start"] + late, end=events["end"] + late)

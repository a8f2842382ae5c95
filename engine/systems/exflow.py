"""ExFlow (Yao et al., 2024): experts that follow each other on the same GPU, and tokens that stay with them.

Two ideas. Placement (§IV-B to D): experts of neighbouring layers between which many tokens pass share a GPU, or failing
that a node. Execution (§IV-A): every GPU keeps the contexts of all tokens, so a token need not return to its rank after
every layer; one all-to-all a layer is left (with top-1 gating), between an all-gather of the prompts and one of the outputs.
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.network import off_diagonal
from engine.placement.affinity.kernel import AffinityInstance, affinity, affinity_printed
from engine.placement.transitions import executed_hops, kept, transitions
from engine.plan import SendOrder
from engine.problem import Problem
from engine.result import Limits, Result, Status, Stop
from engine.simulate.work import Load, Work
from engine.systems.base import Draft, Note, Notes, Report, System, proof_of
from engine.systems.options import Execution, Options, Seed, TimeLimit
from engine.systems.pieces import linear_placement, to_placement
from engine.units import at_most, share, size
from engine.workload import RoutingTrace


class ExFlowOptions(Options):
    stages: Literal["joint", "staged", "flat", "printed"] = Field(
        "joint",
        description="on nodes of several GPUs: weigh both kinds of hops together, first nodes then GPUs, or ignore nodes; "
        "printed: the paper's integer program, first nodes then GPUs, of small problems",
    )
    execution: Execution = "context-coherent"
    hops: Literal["executed", "all", "first"] = Field(
        "executed",
        title="Hops counted",
        description="with several experts per token: count the copies that context-coherent execution sends (where no node has "
        "links of its own, else all), hops between all of a token's experts, or between the first listed",
    )
    time_limit: TimeLimit = Field(10.0, description="seconds for search and bound together")
    seed: Seed = 0


def exflow(problem: Problem, options: ExFlowOptions, stop: Stop, report: Report) -> Draft:
    """ExFlow's placement by the strongest search there is, and its execution."""
    counts = hops_of(problem, options.hops == "first")
    instance = instance_of(problem, counts, options.stages)
    # With one expert per token hops are all that there is; if hops have two prices the search knows only hops between layers.
    executed = options.hops == "executed" and options.execution == "context-coherent"
    printed = options.stages == "printed"
    executed = executed and (problem.workload.k or 0) > 1 and instance.nodes == 1 and not printed
    if executed:
        instance = executed_instance(problem)
    # Every placement with equal numbers of experts takes as much memory.
    problem.check_memory(linear_placement(problem), execution=options.execution)

    def tell(objective: float, bound: float) -> None:
        total = instance.total * max(instance.cost_gpu, instance.cost_node) or 1.0
        report(0.5, f"cost of hops {share(objective / total)}, at least {share(bound / total)}", None, None)

    report(0.05, "placing experts by affinity", None, None)
    guard, staged = options.guard(stop), options.stages == "staged"
    limits = Limits(options.time_limit, wall=math.inf, seed=options.seed)
    if printed:
        result = affinity_printed(instance, limits, guard)
    else:
        result = affinity(instance, limits, guard, report=tell, staged=staged)
    place = near_the_sources(result.solution, problem) if executed else result.solution
    placement = to_placement(place, problem)
    executions = "vanilla", "context-coherent"
    loads = {execution: Load(problem, placement, problem.travel, execution) for execution in executions}
    notes = hop_notes(result, instance, staged) | compare_executions(loads, problem)
    mine = {"execution": options.execution, "loads": (loads[options.execution],)}
    return Draft(placement, SendOrder(mode="concurrent"), None, notes, stop(), guard.cut, **mine)


def executed_instance(problem: Problem) -> AffinityInstance:
    """The copies that context-coherent execution sends (see `executed_hops`), of the open recording and of the others that the
    plan must serve, each weighing the same. The cost of a placement is the number of them that change GPU."""
    tables = [executed_hops(other.experts, other.num_experts) for other in (problem.workload, *problem.others)]
    between, within = tables[0]
    if len(tables) > 1:
        totals = [max(sum(table.sum() for table in pair), 1.0) for pair in tables]
        between, within = (
            np.mean([pair[part] / total for pair, total in zip(tables, totals, strict=True)], axis=0) * totals[0]
            for part in range(2)
        )
    return AffinityInstance(between, len(problem.cluster.gpus), within=within)


def near_the_sources(place: np.ndarray, problem: Problem) -> np.ndarray:
    """The placement int64[layer, expert] with its GPUs renamed so that the first dispatch leaves as few ranks as it can. No
    other hop is changed by names."""
    from scipy.optimize import linear_sum_assignment

    gpus, demand = len(problem.cluster.gpus), problem.demand[0]
    stays = demand @ (place[0][:, None] == np.arange(gpus))
    rank, called = linear_sum_assignment(stays, maximize=True)
    name = np.empty(gpus, dtype=np.int64)
    name[called] = rank
    return name[place]


def hops_of(problem: Problem, first_choice: bool) -> np.ndarray:
    """float64[layer - 1, expert, expert] of the open recording and of the others that the plan must serve, each weighing
    the same. Raises InputError for a workload without tokens."""
    tables = []
    for other in (problem.workload, *problem.others):
        if not isinstance(other, RoutingTrace):
            raise InputError(
                f"affinity needs tokens that can be followed from layer to layer, but {other.name} has none; use a routing log"
            )
        tables.append(transitions(other.experts, other.num_experts, first_choice))
    if len(tables) == 1:
        return tables[0]
    return np.mean([table / max(table.sum(), 1.0) for table in tables], axis=0) * problem.workload.tokens


def instance_of(problem: Problem, counts: np.ndarray, stages: str) -> AffinityInstance:
    """The placement problem on the cluster. Hops are priced by the slowest port that they may have to use. Raises
    InputError when the experts of a GPU do not fit its memory."""
    network, cluster, experts = problem.network, problem.cluster, problem.workload.num_experts
    gpus = len(cluster.gpus)
    fits = problem.expert_slots_of_gpu()
    if experts % gpus == 0 and fits.min() < experts // gpus:
        tight = int(fits.argmin())
        raise InputError(
            f"{experts // gpus} experts per layer do not fit {cluster.gpu_names[tight]}, which has memory for {fits[tight]}; "
            "add GPUs or memory, or use a smaller dtype"
        )
    sizes = {len(node.gpus) for node in cluster.nodes}
    # A node is a place of its own only where its GPUs have links of their own.
    if stages == "flat" or len(cluster.nodes) == 1 or len(sizes) > 1 or not np.all(network.link > 0):
        return AffinityInstance(counts, gpus)
    fabric = float(np.minimum(network.send, network.receive).min())
    return AffinityInstance(counts, gpus, sizes.pop(), cost_gpu=fabric / float(network.link.min()), cost_node=1.0)


def hop_notes(result: Result, instance: AffinityInstance, staged: bool) -> Notes:
    """The share of hops that stay, and the largest possible one."""
    counts, place = instance.transitions, result.solution
    total = instance.total
    if not total:
        running = "no token has experts in two layers running"
        why = "the recording has a single layer" if instance.layers == 1 else running
        return {"affinity": Note(f"{why}: there are no hops between layers")}
    left, linear = sum(instance.hops(place)), 1 / instance.gpus
    what = "hops" if instance.within is None else "copies"
    text = f"{share(1 - left / total)} of {what} stay on their GPU (by chance {share(linear)})"
    if instance.nodes > 1:
        node_of_gpu = np.arange(instance.gpus) // instance.node_size
        text += f", {share(kept(place, counts, node_of_gpu))} on their node"
    dearest = max(instance.cost_gpu, instance.cost_node)
    if instance.nodes == 1:
        text += f"; {at_most(1 - result.bound / (total * dearest))} is possible (proven)"
    # Two stages minimise hops between nodes and then those between GPUs, not their cost.
    both = staged and instance.nodes > 1 and result.status is Status.OPTIMAL
    proof = "fewest hops between nodes, then fewest between GPUs (proven)" if both else proof_of(result)
    return {"affinity": Note(text), "cost of hops": Note(proof)}


def compare_executions(loads: Mapping[Execution, Load], problem: Problem) -> Notes:
    """Table I on this plan: bytes that leave their GPU under both executions, the all-gathers and their memory."""
    both = {execution: load.work for execution, load in loads.items()}
    crossing = {name: crossing_bytes(work) for name, work in both.items()}
    coherent = both["context-coherent"]
    gathered = off_diagonal(coherent.prompt_gather) / coherent.passes + off_diagonal(coherent.gather)
    gpus, layers, model = len(problem.cluster.gpus), problem.workload.layers, problem.model
    known = "" if model.kv_numbers else " at full width"
    exchanges = layers if problem.workload.k == 1 else 2 * layers
    return {
        "all-to-alls per pass": Note(f"{exchanges} context-coherent and two all-gathers, {2 * layers} vanilla"),
        "bytes between GPUs per pass": Note(
            f"{size(crossing['context-coherent'])} context-coherent (of it {size(float(gathered.sum()))} in the all-gathers, "
            f"{size(float(gathered[~problem.network.linked].sum()))} of that over the fabric), "
            f"{size(crossing['vanilla'])} vanilla"
        ),
        "contexts on every GPU": Note(
            f"{size(problem.context_bytes)} for keys and values of all tokens{known}, instead of "
            f"{size(problem.context_bytes / gpus)}"
        ),
    }


def crossing_bytes(work: Work) -> float:
    """Bytes that change GPU in one pass, all-gathers included."""
    parts = (work.prompt_gather, work.passes), (work.gather, 1)
    gathers = (traffic / passes for traffic, passes in parts if traffic is not None)
    return float(sum(off_diagonal(traffic).sum() for traffic in (*work.dispatch, *work.combine, *gathers)))


SYSTEMS = (
    System(
        name="exflow",
        title="ExFlow",
        summary="keeps tokens on the GPU they are on: experts that follow each other share one",
        paper="ExFlow §IV",
        recipe=exflow,
        options=ExFlowOptions,
    ),
)

"""The cheapest cluster that meets a target, with its plan: clusters by price, those that cannot meet it left out by proof, and
the others planned for with ever more effort. A front asks for less time again and again, and keeps all plans and proofs.

Every expert has one copy, on as many experts a GPU as its memory holds, sent by plain all-to-alls.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from engine.cluster import Cluster, Gpu
from engine.costs.fused_experts import kernel_table
from engine.errors import InputError, StoppedError
from engine.network import Network
from engine.placement.best import compile_ahead, search
from engine.plan import Placement, Plan, SendOrder, Travel
from engine.problem import MEMORY_SHARE, Problem, make_problem
from engine.provenance import input_digests
from engine.result import Floats, Ints, Provenance, Stop, library_versions, never
from engine.serving.figures import bytes_beside_experts
from engine.serving.step import seconds_of, sources_of
from engine.simulate import simulate
from engine.simulate.serving import dealt_within, operators_of, serve_as_measured
from engine.sizing.bounds import PLACES, Bounds, Kinds, Work, kinds_of
from engine.sizing.inputs import Need, Target, Vector
from engine.systems.aurora_exclusive import fixed_compute
from engine.systems.base import Draft, Report, run, silent
from engine.systems.best_layers import LayersOf, bound_of
from engine.systems.pieces import placement_of, to_placement
from engine.systems.registry import SYSTEMS
from engine.units import share
from engine.workload import ExpertLoad, RoutingTrace

NEAR = 1.1
"""A plan that takes longer than so many times the target is not improved before all other clusters were tried."""
EFFORT = (0.3, 3.0)
"""Seconds of work of the search on a cluster: at first, and where that comes near the target."""
MARGIN = 1.01
"""A first placement is not improved at once where that takes so many times the largest gain that was seen so far."""
LONG = 3
"""Clusters, cheaper than the first that meets the target and near it, that all systems plan for."""
STEP_DOWN = 0.8
"""The next target of a front, as a part of the time that was reached."""
BETTER = 0.99
"""The next target on the way to the fastest cluster, as a part of the time that was reached."""
PACE = 0.25
"""Seconds between reports on clusters that are passed by."""
ALONE = (0.5, 1.0)
"""Parts of the tokens that one domain has in some of the deals that are tried: then it has most experts too, and rows stay."""


@dataclass(eq=False)
class Trial:
    """A cluster as far as it was tried.

    problems: of every recording; share: float64[gpu] of the tokens; dealt: int64[gpu] sequences, None: a pass
    estimate: seconds of its first placement by its busiest ports; seconds: simulated, of the plan; None: not yet
    least: seconds that no plan is below with its tokens dealt so
    effort: seconds of work spent on its plan
    """

    problems: tuple[Problem, ...]
    share: Floats
    dealt: Ints | None
    slots: Ints
    placement: Placement
    estimate: float
    plan: Plan | None = None
    seconds: float | None = None
    least: float = 0.0
    effort: float = 0.0

    @property
    def known(self) -> float:
        """Seconds of the best that is known of it."""
        return self.estimate if self.seconds is None else self.seconds


@dataclass(frozen=True, eq=False)
class Point:
    """A cluster of the answer.

    bound: seconds that no plan is below
    objective: seconds of its plan; None: none was made, since its first placement is far above the target
    """

    vector: Vector
    price: float
    objective: float | None
    bound: float
    met: bool
    plan: Plan | None
    problem: Problem | None


@dataclass
class Sizing:
    """The search, with all plans and proofs that it has so far.

    found: called with a cluster that meets the target, before cheaper ones are tried longer
    turn: number of the cluster of the front that is sought, and how many there are
    told: when it last reported, by the monotonic clock
    """

    need: Need
    stop: Stop = never
    report: Report = silent
    trials: dict[Vector, Trial | None] = field(default_factory=dict)
    gains: list[float] = field(default_factory=list)
    found: Callable[[Point], None] = lambda point: None
    turn: tuple[int, int] = (0, 1)
    told: float = 0.0

    def _tell(self, done: float, message: str, known: float | None = None, pace: float = 0.0) -> None:
        """Report a share of one turn of a front. known: seconds of the best so far; pace: seconds between reports, at least"""
        if (now := time.monotonic()) - self.told >= pace:
            self.told = now
            self.report((self.turn[0] + done) / self.turn[1], message, known, None)

    @cached_property
    def bounds(self) -> Bounds:
        for each in self.need.recordings:  # before any cluster is left out
            self.need.model.check_recording(each.layers, each.num_experts, each.k, each.name)
        work = [Work(load, self._row_sizes, self._expert_bytes) for load in self.need.loads]
        return Bounds(work, [self._kinds(load) for load in self.need.loads])

    def cheapest(self, target: float, budget: float = np.inf) -> list[Point]:
        """The cheapest cluster that meets a target in seconds, last; before it the cheaper ones that neither meet it nor are
        proven not to. Without a last one that meets it, none was found."""
        met, open_ones = None, []
        compile_ahead()
        likely, types = self.bounds.likely_price(target, self.need.catalogue), len(self.need.catalogue.nodes)
        for vector in self.need.catalogue.by_price():
            price = self.need.catalogue.price(vector)
            if price > budget or self.stop():
                break
            done = 0.5 * min(1.0, price / min(likely, budget)) ** types  # clusters of so many types grow in number like this
            self._tell(done, f"trying {self.need.catalogue.in_words(vector)}", pace=PACE)
            if self._excluded(vector, target):
                continue
            if self._meets(vector, target, EFFORT[:1]):
                met = vector
                self.found(self._point(vector, target))
                break
            open_ones.append(vector)
        planned = [each for each in open_ones if self.trials[each] is not None]
        near = [each for each in planned if self.trials[each].known <= NEAR * target]
        nearest = sorted(near, key=lambda each: self.trials[each].known)[: 2 * LONG]
        for vector in [each for each in near if each in nearest]:
            if self.stop():
                break
            self._tell(0.5, f"trying {self.need.catalogue.in_words(vector)} longer")
            if self._excluded_alone(vector, target):
                continue
            if self._meets(vector, target, EFFORT[1:]):
                met = vector
                self.found(self._point(vector, target))
                break
        nearest.sort(key=lambda each: self.trials[each].known)
        for vector in [each for each in nearest if self.trials[each].least <= target][:LONG]:
            if self._comes_after(vector, met) or self.stop():
                continue
            if self._best(vector, target):
                met = vector
        cheaper = [each for each in open_ones if not self._comes_after(each, met)]
        priced = [each for each in sorted(planned, key=lambda each: self.trials[each].known) if each in cheaper]
        priced = priced[: 0 if self.stop() else 4 * LONG]
        points = [self._point(each, target, each in priced) for each in cheaper]
        points = [point for point in points if point.bound <= target]
        return points if met is None else [*points, self._point(met, target)]

    def answer(self, target: Target, front: int | None = None) -> Iterator[list[Point]]:
        """All clusters so far, by price: those that met a target, and the undecided ones, once each; again with every new
        cluster of the front.

        front: how many; None: the cheapest, or for a price alone the fastest
        """
        budget = np.inf if target.price is None else target.price
        turns = self.front(np.inf if target.seconds is None else target.seconds, budget, front or 1)
        points: list[Point] = []
        for found in turns if target.seconds is not None or front else [self.fastest(budget)]:
            points += found
            met = {point.vector: point for point in points if point.met}
            undecided = {point.vector: point for point in points if point.vector not in met}
            yield sorted((*met.values(), *undecided.values()), key=lambda point: point.price)

    def front(self, target: float, budget: float, most: int) -> Iterator[list[Point]]:
        """`cheapest` of a target, then of ever shorter ones, as long as one is met."""
        for turn in range(most):
            self.turn = turn, most
            found = self.cheapest(target, budget)
            yield found
            if not found or not found[-1].met or self.stop():
                return
            target = STEP_DOWN * found[-1].objective

    def fastest(self, budget: float) -> list[Point]:
        """The fastest cluster that a budget buys, last, and others that may be faster."""
        affordable = []
        for vector in self.need.catalogue.by_price():
            if self.need.catalogue.price(vector) > budget:
                break
            affordable.append(vector)
        least = {each: self.bounds.least(each, priced=False) for each in affordable}
        first = sorted((each for each in affordable if np.isfinite(least[each])), key=least.get)[: 8 * LONG]
        tried = [each for each in first if not self.stop() and self._trial(each) is not None]
        if not tried:
            return []
        first = min(tried, key=lambda each: self.trials[each].known)
        self._meets(first, 0.0, EFFORT[:1], always=True)
        found = [self._point(first, np.inf)]
        while not self.stop():
            faster = self.cheapest(found[-1].objective * BETTER, budget)
            if not faster or not faster[-1].met:
                return [*faster, found[-1]]
            found = faster
        return found

    def _comes_after(self, vector: Vector, met: Vector | None) -> bool:
        """True if a cluster is not preferable to the one that meets the target."""
        if met is None:
            return False

        def ranked(each: Vector) -> tuple[float, int, int]:
            return round(self.need.catalogue.price(each), 6), sum(map(bool, each)), sum(each)

        return ranked(vector) >= ranked(met)

    def _point(self, vector: Vector, target: float, priced: bool = True) -> Point:
        trial, price = self.trials[vector], self.need.catalogue.price(vector)
        if trial is None:
            return Point(vector, price, None, self.bounds.least(vector, priced), False, None, None)
        bound = max(self.bounds.least(vector, priced), trial.least)
        seconds = trial.seconds
        met = seconds is not None and seconds <= target
        bound = bound if seconds is None else min(bound, seconds)
        return Point(vector, price, seconds, bound, met, trial.plan, trial.problems[0])

    # Bounds

    def _excluded(self, vector: Vector, target: float) -> bool:
        return self.bounds.exclude(vector, target, tuple(offer.most for offer in self.need.catalogue.nodes))

    def _excluded_alone(self, vector: Vector, target: float) -> bool:
        """True if no plan of a cluster meets a target with its tokens dealt as they are."""
        trial = self.trials[vector]
        if not trial.least:
            least = 0.0
            for problem in trial.problems:
                found = bound_of(problem, trial.slots, problem.workload.num_experts, self.stop)
                least = max(least, 0.0 if found is None else found + self._beside(trial.problems[0].cluster, trial.dealt))
            trial.least = least * (1 - 1e-9) or 1e-300
        return trial.least > target

    @property
    def _expert_bytes(self) -> float:
        return float(self.need.model.bytes_per_expert * len(self.need.model.moe_layers))

    @property
    def _row_sizes(self) -> tuple[float, float] | None:
        """Bytes of a row; None where rows do not simply add up, or the network is not as it is drawn."""
        catalogue = self.need.catalogue
        one = catalogue.cluster((1,) * len(catalogue.nodes))
        network, drawn = self.need.cost.network(one), Network.of(one)
        as_drawn = network.measured is None and np.all(network.capacity <= drawn.capacity)
        return (self.need.travel or Travel()).row_bytes(self.need.model) if self.need.counts_copies and as_drawn else None

    def _kinds(self, load: Floats) -> Kinds:
        need, served = self.need, self.need.served
        others, *each = bytes_beside_experts(need.model, served.sizes, served.step) if served else (0.0, 0.0, 0.0)

        def room(gpu: Gpu) -> float:
            return gpu.memory * MEMORY_SHARE - others

        def seconds(gpu: Gpu) -> Floats:
            by_cost = need.cost.expert_ffn(gpu, load, need.model)
            table = kernel_table(gpu.type, need.model, served.step.phase) if served else None
            return by_cost if table is None else np.minimum(by_cost, table.least(load))

        if served is None:
            shares = np.append(np.geomspace(1e-5, 1, PLACES - 1), 1.0)
        else:
            counts = np.unique(np.geomspace(1, served.sequences, PLACES).round().astype(np.int64))
            shares = counts / served.sequences
        tokens = load.sum(axis=1) / need.model.experts_per_token

        def beside(gpu: Gpu, shares: Floats) -> Floats:
            held = tokens[:, None] * shares
            times = need.cost.gate(gpu, held, need.model) + need.cost.aggregate(gpu, held, need.model)
            if served is None:
                return times.sum(axis=0)
            alone = Cluster.from_dict({"name": "one", "nodes": [{"name": "one", "gpus": [gpu.model_dump()]}]}, "one GPU")
            (source,) = sources_of(served.operators(alone), alone)
            return times.sum(axis=0) + [seconds_of(operators_of(source, int(count), served.step)) for count in counts]

        def network(vector: Vector) -> Network:
            return Network.of(need.catalogue.cluster(vector))

        return kinds_of(need.catalogue, network, room, seconds, beside, shares, served.sequences * sum(each) if served else 0.0)

    # Plans

    def _trial(self, vector: Vector) -> Trial | None:
        """The cluster with a first placement; None where it cannot be timed, or no deal leaves room for the experts."""
        if vector not in self.trials:
            cluster = self.need.catalogue.cluster(vector)
            timed = not (self.need.cost.lacks_computation(cluster) or self.need.cost.lacks_network(cluster))
            tried = [self._begun(cluster, *deal) for deal in self._deals(cluster)] if timed else []
            begun = [trial for trial in tried if trial is not None]
            self.trials[vector] = min(begun, key=lambda trial: trial.estimate, default=None)
        return self.trials[vector]

    def _deals(self, cluster: Cluster) -> Iterator[tuple[Floats, Ints | None]]:
        """Shares of the tokens of every GPU, float64[gpu], and in a step its sequences int64[gpu]."""
        gpus, served = len(cluster.gpus), self.need.served
        if served is not None:
            room = cluster.values("memory") * MEMORY_SHARE
            held = self._expert_bytes * self.need.model.experts * room / room.sum()
            sources = sources_of(served.operators(cluster), cluster)
            dealt = dealt_within(served.sequences, served.step, sources, room - held, self.need.model, served.sizes)
            yield dealt / dealt.sum(), dealt
            return
        yield np.full(gpus, 1 / gpus), None
        ports = np.minimum(cluster.values("send_bandwidth"), cluster.values("receive_bandwidth"))
        if np.ptp(ports):
            yield ports / ports.sum(), None
        domain = Network.of(cluster).domain
        if np.ptp(domain):
            for first in {cluster.gpus[at]: at for at in reversed(np.unique(domain).tolist())}.values():
                mine = domain == first
                for part in ALONE:
                    yield np.where(mine, part / mine.sum(), (1 - part) / (~mine).sum()), None

    def _begun(self, cluster: Cluster, share: Floats, dealt: Ints | None) -> Trial | None:
        need, served = self.need, self.need.served
        recordings = []
        for recording, load in zip(need.recordings, need.loads, strict=True):
            if need.counts_copies or not isinstance(recording, RoutingTrace) or served is not None:
                loads = ExpertLoad(recording.name, load, need.model.moe_layers)
                recordings.append(loads.from_ranks(share) if np.ptp(share) else loads)
            else:
                recordings.append(recording.from_ranks(share) if np.ptp(share) else replace(recording, source_rank=None))
        travel = None if need.travel is None else need.travel.model_copy(update={"ranks_per_node": None})
        problems = tuple(make_problem(each, cluster, need.model, need.cost, travel=travel) for each in recordings)
        room = cluster.values("memory") * MEMORY_SHARE
        if served is not None:
            others, *each = bytes_beside_experts(need.model, served.sizes, served.step)
            room = room - others - dealt * sum(each)
        slots = np.clip(room // self._expert_bytes, 0, need.model.experts).astype(np.int64)
        if slots.sum() < need.model.experts:
            return None
        mean = np.mean([load / load.sum() for load in need.loads], axis=0) * need.loads[0].sum()
        placement, seconds = placed_by_load(problems[0], mean, slots)
        return Trial(problems, share, dealt, slots, placement, seconds + self._beside(cluster, dealt))

    def _beside(self, cluster: Cluster, dealt: Ints | None) -> float:
        """Seconds of the operators outside the MoE layers on the GPU that takes longest."""
        if dealt is None:
            return 0.0
        served = self.need.served
        shares = dict.fromkeys(zip(sources_of(served.operators(cluster), cluster), dealt.tolist(), strict=True))
        return max(seconds_of(operators_of(*share, served.step)) for share in shares)

    def _plan(self, trial: Trial, placement: Placement) -> Plan:
        problem = trial.problems[0]
        provenance = Provenance(optimiser="size", versions=library_versions(), inputs=input_digests(problem))
        return Draft(placement, SendOrder(mode="concurrent")).plan("Sizing", provenance, problem.travel)

    def _judged(self, trial: Trial, placement: Placement) -> None:
        """Keep the placement if it is the fastest so far."""
        plan, served = self._plan(trial, placement), self.need.served
        if served is None:
            seconds = max(simulate(plan, problem, self.stop).total for problem in trial.problems)
        else:
            operators = served.operators(trial.problems[0].cluster)
            seconds = max(
                serve_as_measured(plan, problem, served.step, operators, served.sizes, self.stop, trial.dealt).figures.seconds
                for problem in trial.problems
            )
        if trial.seconds is None or seconds < trial.seconds:
            trial.placement, trial.plan, trial.seconds = placement, plan, seconds

    def _meets(self, vector: Vector, target: float, efforts: Sequence[float], always: bool = False) -> bool:
        """True if a plan meets the target, after searches of so many seconds each.

        always: True to search where the first placement is far above the target too
        """
        trial = self._trial(vector)
        if trial is None:
            return False
        if trial.seconds is not None and trial.seconds <= target:
            return True
        for effort in efforts:
            likely = NEAR if effort > EFFORT[0] or len(self.gains) < LONG else min(NEAR, MARGIN * max(self.gains))
            if trial.effort >= effort or not (always or trial.known <= likely * target) or self.stop():
                continue
            trial.effort = effort
            if trial.known <= target:
                self._judged(trial, trial.placement)
            if trial.seconds is None or trial.seconds > target:
                problem = trial.problems[0]
                layers = LayersOf(problem, problem.network, 1.0, trial.slots, problem.workload.num_experts)
                if layers.unknown is None:
                    tasks = [layers.task(layer, trial.placement) for layer in range(problem.workload.layers)]
                    search(tasks, effort, 0, self.stop, lambda done: None)
                    self._judged(trial, placement_of([task.held for task in tasks], problem))
                elif trial.seconds is None:
                    self._judged(trial, trial.placement)
        if trial.seconds is not None:
            self.gains.append(trial.estimate / trial.seconds)
        return trial.seconds is not None and trial.seconds <= target

    def _best(self, vector: Vector, target: float) -> bool:
        """True if a plan of `best` meets the target."""
        trial = self.trials[vector]
        self._tell(0.7, f"planning for {self.need.catalogue.in_words(vector)} with all systems", trial.known)
        problem = trial.problems[0]
        room = trial.slots * self._expert_bytes / MEMORY_SHARE * (1 + 1e-9)
        nodes, first = [], 0
        for node in problem.cluster.nodes:
            gpus = [gpu.model_copy(update={"memory": max(room[first + place], 1.0)}) for place, gpu in enumerate(node.gpus)]
            nodes.append(node.model_copy(update={"gpus": tuple(gpus)}))
            first += len(node.gpus)
        smaller = replace(problem, cluster=problem.cluster.model_copy(update={"nodes": tuple(nodes)}))
        try:
            options = {"slots": "uneven", "order": "concurrent", "time_limit": EFFORT[-1]}
            outcome = run(SYSTEMS["best"], smaller, options, self.stop)
        except (InputError, StoppedError):
            return False
        if outcome.result.solution.execution == "vanilla":
            self._judged(trial, outcome.result.solution.placement)
        return trial.seconds is not None and trial.seconds <= target


def proven(target: Target, front: bool, met: int, undecided: int, stopped: bool) -> str:
    """The proof of an answer in words; empty where there is none.

    front: True if one was asked for
    met, undecided: how many clusters
    stopped: True if the search did not come to its end
    """
    if undecided:
        return f"{undecided} undecided, nearest first: no plan that meets the target, no proof that none does"
    if not met or stopped:
        return ""
    which = "cheaper cluster of this catalogue meets the target"
    if target.seconds is None and not front:
        which = f"cluster of this catalogue at this price takes {share(1 - BETTER)} less time"
    return f"proven: no {which}, with one copy of every expert"


def placed_by_load(problem: Problem, load: Floats, slots: Ints) -> tuple[Placement, float]:
    """The experts with most tokens first, each to the GPU with which the busiest ports and the longest FFNs grow least; and the
    seconds of its pass by these.

    load: float64[layer, expert] token copies
    slots: int64[gpu] experts of a layer at most
    """
    network, model, gpus = problem.network, problem.model, problem.cluster.gpus
    there, back = (problem.travel or Travel()).row_bytes(model)
    tokens = problem.tokens_of_rank
    share = tokens.sum(axis=0) / max(float(tokens.sum()), 1e-300)
    linked = network.link > 0
    near = np.bincount(network.domain, share, len(gpus))[network.domain]
    link = np.where(linked, near - share, 0.0) / np.where(linked, network.link, 1.0)
    per_copy = np.stack(
        [np.maximum((1 - near) / rate, link) * size for rate, size in ((network.receive, there), (network.send, back))]
    )
    kinds = {gpu: problem.cost.expert_ffn(gpu, load, model) for gpu in dict.fromkeys(gpus)}
    ffn = np.stack([kinds[gpu] for gpu in gpus], axis=2)  # float64[layer, expert, gpu]
    layers, each = len(load), np.arange(len(load))
    gpu_of_expert, order = np.zeros(load.shape, dtype=np.int64), np.argsort(-load, axis=1, kind="stable")
    busy, longest = np.zeros((3, layers, len(gpus))), np.zeros((3, layers, 1))  # of dispatch, combine and FFNs
    free = np.tile(slots, (layers, 1))
    for expert in order.T:
        then = busy.copy()
        then[:2] += load[each, expert][:, None] * per_copy[:, None]
        then[2] += ffn[each, expert]
        score = np.maximum(then, longest).sum(axis=0) + 1e-6 * then.sum(axis=0)
        gpu = np.where(free > 0, score, np.inf).argmin(axis=1)
        gpu_of_expert[each, expert] = gpu
        busy[:, each, gpu] = then[:, each, gpu]
        longest = np.maximum(longest, busy[:, each, gpu][:, :, None])
        free[each, gpu] -= 1
    placement = to_placement(gpu_of_expert, problem)
    start = 2 * layers * network.latency if len(set(network.domain.tolist())) > 1 else 0.0
    return placement, float(longest.sum()) + start + float(
        sum(step.max(axis=1).sum() for step in fixed_compute(problem).values())
    )

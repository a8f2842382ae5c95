"""Jobs that make many plans and score each on several recordings: the front, the cross-workload score, and Lina's
scheduler for several path lengths."""

from typing import Literal

import numpy as np

from engine import store
from engine.compare.comparison import Candidate, candidate_of_plan
from engine.compare.figures import metrics
from engine.errors import InputError, StoppedError
from engine.jobs.kinds import Answer, Document
from engine.jobs.protocol import Context
from engine.jobs.tasks import ProblemAsk
from engine.parallel import reported
from engine.placement.joint.front import USUAL_SECONDS, FrontPoint, front
from engine.placement.joint.instance import JointInstance
from engine.placement.joint.rows import RowsInstance, with_starts
from engine.plan import Claim, Plan, SendOrder
from engine.problem import Problem
from engine.provenance import input_digests
from engine.result import GUARD, Limits, Provenance, Status, Stop, library_versions
from engine.schema import Frozen
from engine.simulate import claimable_bound, loads_of, simulate
from engine.simulate.scheduler import TwoPhaseOptions
from engine.simulate.two_phase import SCHEMES, Figures, two_phase
from engine.systems import System, run, system_named
from engine.systems.base import Draft, Report
from engine.systems.joint import START_SHARE, instance_of, moves_left, moves_to, start_of
from engine.systems.options import Value
from engine.systems.pieces import to_placement
from engine.workload import RoutingTrace


class FrontAsk(ProblemAsk):
    """points: at most; over: several recordings; max_moves: 0: any number; time_limit: seconds."""

    points: int
    over: Literal["worst", "mean"]
    max_moves: int
    time_limit: float


class FrontRow(Candidate):
    """A plan of the front; weight, kept_share and balancedness are as the search counts them.

    rows: that a token sends in a layer, if rows count and not hops; else None, as of the first versions
    moves: experts that move from the placement in use
    """

    plan_id: str
    weight: float
    kept_share: float
    rows: float | None = None
    balancedness: float
    moves: int


class FrontAnswer(Answer):
    """Plans from the fewest hops to the best balance; of a running job in the order in which they were found."""

    candidates: tuple[FrontRow, ...] = ()


def find_front(ask: FrontAsk, context: Context) -> FrontAnswer:
    """Find placements of which none is better in both affinity (hops, or rows if they are shared) and balance."""
    problem, points = ask.problem(), ask.points
    instance, start = instance_of(problem), start_of(problem)
    left = moves_left(problem, start, ask.max_moves)
    time_limit, initial = ask.time_limit, ()
    wall_limit = time_limit * (GUARD if time_limit == USUAL_SECONDS else 1.0)
    # By the identity of the point, which the search hands out once more at the end.
    candidates: dict[int, FrontRow] = {}

    def add(point: FrontPoint) -> None:
        candidates[id(point)] = _point(point, instance, problem, ask)
        context.keep(FrontAnswer(candidates=tuple(candidates.values())))
        context.report(min(len(candidates) / points, 1.0), f"{len(candidates)} of at most {points} placements", None, None)

    context.report(0.0, "searching from both ends")
    if isinstance(instance, RowsInstance):
        instance, initial = with_starts(
            instance, Limits(START_SHARE * time_limit, wall=START_SHARE * wall_limit, seed=0), context.stop
        )
        time_limit, wall_limit = (1 - START_SHARE) * time_limit, (1 - START_SHARE) * wall_limit
    final = front(
        instance,
        Limits(time_limit, wall=wall_limit),
        context.stop,
        report=add,
        points=points,
        workloads=ask.over,
        start=start,
        max_moves=left,
        initial=initial,
    )
    for point in final:
        # Simulating further points would keep whoever cancelled waiting.
        if id(point) not in candidates and not context.stop():
            candidates[id(point)] = _point(point, instance, problem, ask)
    return FrontAnswer(candidates=tuple(candidates[id(point)] for point in final if id(point) in candidates))


def _point(point: FrontPoint, instance: JointInstance, problem: Problem, ask: FrontAsk) -> FrontRow:
    placement = to_placement(point.gpu_of_expert, problem)
    options = {"weight": float(point.weight), "over": ask.over, "max_moves": ask.max_moves}
    provenance = Provenance(optimiser="front", options=options, versions=library_versions(), inputs=input_digests(problem))
    plan = Draft(placement, SendOrder(mode="concurrent")).plan(f"Front at {point.weight:.2f}", provenance, problem.travel)
    loads = loads_of(plan, problem)
    timeline = simulate(plan, problem, loads=loads)
    seconds = timeline.total
    bound = min(claimable_bound(plan, problem, loads), seconds)
    claim = Claim(status=Status.FEASIBLE, objective=seconds, bound=bound, scope="order")
    plan = plan.model_copy(update={"claim": claim})
    row = candidate_of_plan(plan, problem, 0.0, {}, timeline, loads)
    return FrontRow(
        **{name: getattr(row, name) for name in Candidate.model_fields},
        plan_id=plan.id,
        weight=float(point.weight),
        kept_share=float(point.kept_share),
        rows=_rows_a_token(point, instance, ask.over),
        balancedness=float(point.balancedness),
        moves=moves_to(point.gpu_of_expert, problem),
    )


def _rows_a_token(point: FrontPoint, instance: JointInstance, over: str) -> float | None:
    """Rows of the recording that sends most, or on average over those with tokens; None if hops count."""
    if not isinstance(instance, RowsInstance):
        return None
    rows = instance.rows_a_token(point.gpu_of_expert)[instance.tokens > 0]
    return float(rows.max() if over == "worst" else rows.mean())


class MatrixAsk(ProblemAsk):
    """recordings: digests; options: of the system."""

    system: str
    options: Document
    recordings: tuple[str, ...]


Table = list[list[float | None]]
"""[plan made on][scored on]; None: not reached yet."""


class MatrixAnswer(Answer):
    """names: of the recordings; system: its title; overload: `Balance.factors` by cell, None of the first versions."""

    names: tuple[str, ...]
    system: str
    seconds: Table
    balancedness: Table
    kept_local: Table
    overload: list[list[dict[str, float] | None]] | None = None


def score_matrix(ask: MatrixAsk, context: Context) -> MatrixAnswer:
    """Run one system on every recording, and simulate every plan on every recording; kept after every score."""
    problem = ask.problem()
    recordings = [store.load_workload(digest) for digest in ask.recordings]
    problems = [problem.with_workload(recording) for recording in recordings]
    count, system = len(problems), system_named(ask.system, problem)
    tables = {name: [[None] * count for _ in problems] for name in ("seconds", "balancedness", "kept_local", "overload")}
    names = tuple(recording.name for recording in recordings)
    context.keep(MatrixAnswer(names=names, system=system.title, **tables))
    titles, common = [f"{system.title} on {name}" for name in names], (problems, system, ask.options)
    for made_on, plan in reported(_plan_on, common, titles, context.stop, context.report):
        # Its own recording first: the others are compared with that.
        for scored_on in sorted(range(count), key=lambda index: index != made_on):
            if context.stop():
                break
            figures = metrics(plan, problems[scored_on])
            tables["seconds"][made_on][scored_on] = figures.total
            tables["balancedness"][made_on][scored_on] = figures.balancedness
            tables["kept_local"][made_on][scored_on] = figures.kept_local
            tables["overload"][made_on][scored_on] = figures.balance.factors
            context.keep(MatrixAnswer(names=names, system=system.title, **tables))
    return MatrixAnswer(names=names, system=system.title, **tables)


def _plan_on(common: tuple[list[Problem], System, dict[str, Value]], index: int, stop: Stop, report: Report) -> Plan:
    """The plan made on a recording."""
    problems, system, options = common
    return run(system, problems[index], options, stop, report).result.solution


class LinaAsk(ProblemAsk):
    """lengths: of paths; options: fields of `TwoPhaseOptions`.

    profile: digest of the recording to learn from; None: the first half of the open one, and then the second half is served
    """

    profile: str | None = None
    lengths: tuple[int, ...]
    options: Document


class LinaRun(Frozen):
    """Both phases at one path length.

    batches: simulated; figures: by scheme; ideal_seconds: median of a batch with ideal hosting
    accuracy: share of right estimates as a set, also by layer (None: no estimate there); accuracy_in_order: in order too
    """

    options: TwoPhaseOptions
    batches: int
    cost_source: str
    figures: dict[str, Figures]
    accuracy: float
    accuracy_in_order: float
    accuracy_of_layer: tuple[float | None, ...]
    fine_tuning_rate: float
    ideal_seconds: float


class LinaAnswer(Answer):
    """profile, served: names of the recordings."""

    runs: tuple[LinaRun, ...] = ()
    profile: str
    served: str


def lina_study(ask: LinaAsk, context: Context) -> LinaAnswer:
    """Simulate Lina's two phases for several path lengths (Table 5, Figures 16 and 19)."""
    problem = ask.problem()
    trace = problem.workload
    if not isinstance(trace, RoutingTrace):
        raise InputError(f"{trace.name} has no tokens whose paths could predict anything; use a routing log")
    profile, served = trace.halves()
    if ask.profile:
        profile, served = store.load_workload(ask.profile), trace
        if not isinstance(profile, RoutingTrace):
            raise InputError(f"{profile.name} has no tokens whose paths could predict anything; learn from a routing log")
    lengths = [length for length in ask.lengths if length < trace.layers]
    if not lengths:
        few = f"{trace.name} has {trace.layers} MoE layers"
        raise InputError(f"{few}: " + ("no path goes on" if trace.layers < 2 else f"choose lengths below {trace.layers}"))
    common = (
        problem.with_workload(served),
        profile,
        [TwoPhaseOptions(path_length=length, **ask.options) for length in lengths],
    )
    answer = LinaAnswer(profile=profile.name, served=served.name)
    titles = [f"path length {length}" for length in lengths]
    for _, run_of_length in reported(_lina_run, common, titles, context.stop, context.report):
        answer = answer.model_copy(update={"runs": (*answer.runs, run_of_length)})
        context.keep(answer)
    return answer


def _lina_run(
    common: tuple[Problem, RoutingTrace, list[TwoPhaseOptions]], index: int, stop: Stop, report: Report
) -> LinaRun | None:
    """The run of a path length; None if stopped before a batch was simulated."""
    problem, profile, choices = common
    try:
        result = two_phase(problem, profile, choices[index], stop)
    except StoppedError:
        return None
    layers = result.accuracy_of_layer("set")
    return LinaRun(
        options=choices[index],
        batches=result.batches,
        cost_source=result.cost_source,
        figures={scheme: result.figures(scheme) for scheme in SCHEMES},
        accuracy=result.accuracy("set"),
        accuracy_in_order=result.accuracy("order"),
        accuracy_of_layer=tuple(None if value != value else float(value) for value in layers),
        fine_tuning_rate=result.fine_tuning_rate,
        ideal_seconds=float(np.median(result.inference_seconds("ideal"))),
    )

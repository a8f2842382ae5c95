"""A launch made ready: plans on their ranks, a training step small enough for the machine, and all checks."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from engine.errors import InputError
from engine.goal import Goal
from engine.launch.places.devices import Devices, attached
from engine.launch.places.fold import fold_plan, fold_trace, keeps_exchange, of_layers, packed
from engine.launch.places.testbed import emulated
from engine.launch.preparation import settled
from engine.launch.preparation.inference import prepare_inference
from engine.launch.preparation.launch import Check, Launch, PreparedLaunch
from engine.launch.preparation.memory import RankMemory, memory_checks
from engine.launch.preparation.own import prepare_own
from engine.launch.preparation.place_checks import place_checks
from engine.launch.preparation.replayed import routing_checks, routing_of_step
from engine.launch.preparation.scheduled import Schedulers
from engine.launch.preparation.settled import Attempt
from engine.launch.rank.difference import in_words
from engine.launch.rank.instructions import RankInstructions
from engine.launch.step import sizes as step_sizes
from engine.model import MoEModel
from engine.overlap.transformer import transformer_step
from engine.plan import Plan, expert_groups
from engine.problem import model_for
from engine.simulate.training.program import check_step_parts
from engine.training import TrainingStep, balanced_load, served_in_words
from engine.workload import RoutingTrace, TrafficMatrix, Workload

FLOP_BUDGET = 1e11
"""FLOP of one training step of all ranks together that a CPU launch runs: some seconds on two cores."""


def prepare_training(launch: Launch, devices: Devices) -> PreparedLaunch:
    """Fold plans for a training step onto the ranks of a launch, and leave out as much of the step as these devices
    need: sequences first, see `shrunk`; where the weights do not fit, fewer and narrower layers. Raises InputError if the
    launch makes no sense.

    The launch's workload is replayed if the step is routed as recorded; where it has no tokens, some are drawn to match.
    """
    step, workload, asked = launch.step, launch.workload, model_for(launch.workload, launch.model)
    gpus = settled.gpus_of(launch.plans)
    for plan in launch.plans:
        if "graph" in plan.provenance.inputs:
            raise InputError(
                f"the plan {plan.name} was made for imported operators, which the ranks cannot compute; plan without a graph"
            )
    ranks = settled.ranks_of(launch, devices)
    settled.check_passes(launch.repeats, launch.limit)
    recorded = step.routing == "recorded"
    asked.check_recording(workload.layers, workload.num_experts, workload.k, workload.name)
    folded = tuple(fold_plan(plan, ranks) for plan in launch.plans)
    shared = min(len(devices.gpus), ranks)
    model = settled.computed_in(asked, launch.dtype, bool(shared), training=True)
    for plan in folded:
        step_sizes.check_step_plan(plan, model, step)
    if recorded and isinstance(workload, RoutingTrace):
        workload = fold_trace(workload, gpus, ranks)

    def attempts() -> Iterator[Attempt]:
        for kept, divisor, plans in _sizes(model, step, folded):
            cut = len(kept) < model.layers
            narrow = settled.narrowed(settled.of_model_layers(model, kept), divisor, step.heads)
            narrow_step = step_sizes.narrowed_step(step, divisor)
            small = narrow_step if shared else step_sizes.shrunk(narrow_step, narrow, plans, FLOP_BUDGET / ranks)
            instructions = settled.instructions_of(launch, devices, ranks, plans=plans, model=narrow, step=small)
            part = _of_layers(workload, model, kept, recorded) if cut else workload
            if recorded and not isinstance(part, RoutingTrace):
                part = routing_of_step(part, narrow, gpus, ranks, small.tokens)
            advice = "describe a smaller step, or use fewer ranks"
            memory = tuple(memory_checks(instructions, devices, _memory(instructions, part), advice))
            yield Attempt(instructions, (part,), memory, kept if cut else ())

    chosen, memory = settled.first_that_fits(attempts())
    served = served_in_words(step, workload)
    checks = (*_checks(chosen.instructions, step, memory, launch.plans, devices, served), *_routing(launch, chosen))
    checks = (*checks, *Schedulers.of(folded, launch.workload).checks(step.tokens))
    return PreparedLaunch(tuple(launch.plans), chosen.instructions, chosen.replayed, launch.limit, checks)


def _sizes(
    model: MoEModel, step: TrainingStep, plans: tuple[Plan, ...]
) -> Iterator[tuple[tuple[int, ...], int, tuple[Plan, ...]]]:
    """Layers kept, the divisor of all widths and the plans of these layers, ever smaller: layers and widths in turn, as few
    layers say little and narrow ones compute otherwise."""
    whole, *fewer = settled.parts_of_layers(model)
    yield whole, 1, plans
    choices = [(whole, plans)]
    for kept in fewer:
        with contextlib.suppress(InputError):  # of some cuts nothing is left that may be cut
            choices.append((kept, tuple(_of_those(plan, model, step, kept) for plan in plans)))
    last, narrowest = len(choices) - 1, len(settled.NARROWER) - 1
    for turn in range(1, narrowest + last + 1):
        at = max(min((turn + 1) // 2, last), turn - narrowest)
        kept, own = choices[at]
        yield kept, settled.NARROWER[turn - at], own


def _of_those(plan: Plan, model: MoEModel, step: TrainingStep, kept: Sequence[int]) -> Plan:
    """The plan with these layers. Raises InputError if no step has the parts that are left of it."""
    gpus = plan.placement.gpus // expert_groups(plan.placement)
    small = of_layers(plan, kept, [operator.name for operator in transformer_step(model, step, gpus).of_phase("forward")])
    own = settled.of_model_layers(model, kept)
    check_step_parts(small, step_sizes.step_problem(own, step, plan.placement.gpus), transformer_step(own, step, gpus))
    return small


def _of_layers(workload: Workload, model: MoEModel, kept: Sequence[int], recorded: bool) -> Workload:
    """The workload of these model layers. recorded: true if it tells the routing; else that is balanced"""
    if not recorded:
        return balanced_load(settled.of_model_layers(model, kept))
    rows = [row for row, layer in enumerate(model.moe_layers) if layer in set(kept)]
    if isinstance(workload, RoutingTrace):
        scores = None if workload.scores is None else workload.scores[:, rows]
        return replace(workload, experts=workload.experts[:, rows], scores=scores)
    if isinstance(workload, TrafficMatrix):
        return replace(workload, bytes=workload.bytes[rows])
    by_source = workload.by_source if workload.by_source is None else workload.by_source[:, rows]
    layers = tuple(workload.model_layers[row] for row in rows)
    return replace(workload, load=workload.load[rows], model_layers=layers, by_source=by_source, by_step=None)


def _routing(launch: Launch, chosen: Attempt) -> Iterator[Check]:
    """The line on a recorded routing without tokens."""
    if launch.step.routing == "recorded":
        yield from routing_checks([launch.workload], chosen.replayed, [chosen.instructions.model])


def _checks(
    instructions: RankInstructions,
    planned: TrainingStep,
    memory: Iterable[Check],
    plans: Sequence[Plan],
    devices: Devices,
    served: str | None,
) -> Iterator[Check]:
    yield settled.rank_check(instructions, settled.gpus_of(plans))
    yield settled.backend_check(instructions, devices)
    yield from _exchange_checks(plans, instructions)
    yield from memory
    step = instructions.step
    sizes = f"{step.batch:,} × {step.sequence_length:,} tokens on each rank"
    if (step.batch, step.sequence_length) != (planned.batch, planned.sequence_length):
        sizes += f" instead of {planned.batch:,} × {planned.sequence_length:,}, which would take too long on these devices"
    each = f" of each of {len(instructions.plans)} plans in turn" if len(instructions.plans) > 1 else ""
    routing = "as recorded" if step.routing == "recorded" else "balanced by assumption"
    routing += f"; {served}" if served else ""
    yield Check("Step", True, f"{sizes}, {instructions.repeats} timed steps{each} after a warm-up; routing {routing}")
    dtype = instructions.model.dtype
    yield Check(
        "Numbers",
        True,
        f"{dtype}, random weights and tokens. What comes out (gradients, loss, hidden state) is compared with one process' "
        f"automatic differentiation{in_words(dtype, dtype, 'the largest number of each')}",
    )


def _exchange_checks(plans: Sequence[Plan], instructions: RankInstructions) -> Iterator[Check]:
    """Lines on plans that folding takes all-to-alls from."""
    ranks = instructions.ranks
    for plan, folded in zip(plans, instructions.plans, strict=True):
        groups, size = packed(plan.placement)
        if ranks == plan.placement.gpus or size == 1:
            continue
        if not keeps_exchange(plan, ranks):
            fewer = [number for number in range(2, ranks) if keeps_exchange(plan, number)][-1:]
            more = [number for number in range(ranks + 1, plan.placement.gpus + 1) if keeps_exchange(plan, number)][:1]
            choose = " or ".join(map(str, fewer + more))
            each = "the only rank" if ranks == 1 else "every rank"
            text = f"none: {each} would hold all experts of {plan.name}, and no overlap with an all-to-all is tested"
            yield Check("All-to-all", True, f"{text}; use {choose} ranks", warning=True)
        elif groups > 1:
            together = ranks // packed(folded.placement)[0]
            text = f"{groups} groups of {size} GPUs of {plan.name} hold all experts each, on the ranks groups of {together}"
            yield Check("All-to-all", True, text)


def _memory(instructions: RankInstructions, workload: Workload) -> RankMemory:
    """Memory of the fullest rank."""
    model, step, ranks, plans = instructions.model, instructions.step, instructions.ranks, instructions.plans
    problem = step_sizes.step_problem(model, step, ranks)
    first = step_sizes.step_bytes(problem, plans[0])
    more = [step_sizes.further_plan_bytes(problem, plans[:at], plan) for at, plan in enumerate(plans) if at]
    choices = ranks * step.tokens * model.experts_per_token * len(model.moe_layers)
    return RankMemory(
        device=float(np.sum([first, *more], axis=0).max()),
        compared=step_sizes.reference_bytes(model, step, ranks),
        # Every token's experts, as int64, and a mask of those kept, layer by layer and all at once.
        host=17.0 * choices + (workload.experts.nbytes if isinstance(workload, RoutingTrace) else 0),
        through_host=step_sizes.pool_bytes(model, step) * 4 / model.bytes_per_number,  # random numbers are made in 32 bits
        staged=max(step_sizes.staged_bytes(problem, plan) for plan in plans),
    )


def prepare(launch: Launch, devices: Devices | None = None) -> PreparedLaunch:
    """Fold the plans onto the ranks, settle the open choices of the launch, and check it for its destination. Raises
    InputError if it makes no sense; a mere obstacle here and now is a check that fails.

    devices: those of this machine (default: looked for, unless the launch goes to a cluster)
    """
    if launch.destination is not None:
        devices, launch = launch.destination.devices, replace(launch, ranks=launch.destination.ranks)
    elif devices is None:
        devices = attached()
    if launch.on == "testbed":
        devices = replace(devices, gpus=(), memory=())  # ranks in namespaces talk over Gloo, from the CPU
    if launch.own is not None:
        prepared = prepare_own(launch, devices)
    else:
        prepared = prepare_training(launch, devices) if launch.goal is Goal.TRAINING else prepare_inference(launch, devices)
    prepared = replace(prepared, destination=launch.destination)
    if launch.on == "testbed":
        ranks = prepared.instructions.ranks
        prepared = prepared.on_testbed(emulated(launch.plans[0], launch.cluster, ranks, launch.scale))
    return replace(prepared, checks=(*prepared.checks, *place_checks(prepared, launch.cluster)))

"""Plans at the doors: every system's plans pass, also on other inputs than their own, and each fault is one line."""

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest

from engine.costs import Datasheet
from engine.errors import InputError
from engine.goal import Goal
from engine.plan import Overlap, PartitionRange, Pipeline, Placement, Plan, SendOrder
from engine.problem import Problem, make_problem
from engine.provenance import input_digests
from engine.result import Provenance
from engine.systems import SYSTEMS, TRAINING, run
from engine.systems.base import System
from engine.validate import refuse_broken
from tests.cases.examples import tried
from tests.cases.samples import mixed_problem, training_problem, with_memory
from tests.cases.two_models import pairs
from tests.strategies import NEEDS_ROWS, planned_or_skipped, problems

SHORT = {"time_limit": 0.1, "seed": 3}
ONE_MODEL = [system for system in SYSTEMS.values() if Goal.INFERENCE in system.goals and system.name not in NEEDS_ROWS]
TWO_MODELS = [system for system in SYSTEMS.values() if Goal.TWO_MODELS in system.goals]
CHOICES = [
    (system, {name: choice})
    for system in ONE_MODEL
    for name in ("order", "slots", "execution", "placement")
    if name in system.options.model_fields
    for choice in get_args(system.options.model_fields[name].annotation)
    if choice != "joint"  # an order of two models
]
CHOICES += [(system, {}) for system in ONE_MODEL if not any(system is chosen for chosen, _ in CHOICES)]


def planned(system: System, problem: Problem, **options) -> Plan:
    known = system.options.model_fields
    chosen = {name: value for name, value in (SHORT | options).items() if name in known}
    plan = planned_or_skipped(lambda: run(system, problem, chosen).result.solution)
    return Plan.from_json(plan.to_json(), "plan.json")


# Legal plans


@pytest.mark.parametrize(("system", "options"), CHOICES, ids=lambda part: getattr(part, "name", None) or str(part))
@tried(5, problem=problems(), fewest=2)
def test_what_a_system_plans_passes_whatever_is_chosen(system, options, problem):
    refuse_broken(planned(system, problem, **options), problem)


@pytest.mark.parametrize("system", TWO_MODELS, ids=lambda system: system.name)
@tried(5, problem=pairs(most=4), fewest=2)
def test_what_a_system_plans_for_two_models_passes(system, problem):
    refuse_broken(planned(system, problem), problem)


@pytest.mark.parametrize("system", TRAINING.values(), ids=lambda system: system.name)
def test_what_a_system_plans_for_a_training_step_passes(system):
    problem = training_problem()
    refuse_broken(planned(system, problem), problem)


# Plans away from where they were made


@pytest.fixture(scope="module", params=["matched", "shared", "two-tier", "sequential"])
def ordered(request) -> tuple[Plan, Problem]:
    problem = mixed_problem()
    if request.param == "sequential":
        return planned(SYSTEMS["sjf"], problem), problem
    return planned(SYSTEMS["aurora"], problem, order=request.param), problem


def test_a_plan_may_be_tried_on_what_it_was_not_made_for(ordered):
    """Its sends are scaled to another recording, and on another cluster nobody knows which sends went over links."""
    plan, problem = ordered
    without_links = tuple(node.model_copy(update={"link_bandwidth": None}) for node in problem.cluster.nodes)
    for elsewhere in (
        replace(problem, workload=mixed_problem(1).workload),
        replace(problem, cluster=problem.cluster.model_copy(update={"nodes": without_links})),
        replace(problem, cost=Datasheet(launch=1.0)),
        replace(problem, model=problem.model.model_copy(update={"dtype": "fp32"})),
    ):
        assert input_digests(elsewhere) != input_digests(problem)
        refuse_broken(plan, elsewhere)
        refuse_broken(plan, elsewhere, drawn=False)


def test_scaled_bytes_pass_only_where_they_are_not_the_plans_own(ordered):
    plan, problem = ordered
    broken = changed(plan, "dispatch", 1, **column("bytes", lambda sizes: [2 * size for size in sizes]), **LONGER)
    refuse_broken(broken, replace(problem, workload=mixed_problem(1).workload))
    with pytest.raises(InputError, match=r"^the plan .*: layer 1, dispatch: GPU \d sends .* bytes to GPU \d instead of"):
        refuse_broken(broken, problem)


# Broken plans


COLUMNS = ("src", "dst", "bytes", "phase")


def column(name: str, change: Callable[[list], list], *names: str) -> dict[str, Callable[[dict], list]]:
    return {each: lambda sends, each=each: change(sends[each]) for each in (name, *names)}


DOUBLED = column("bytes", lambda sizes: [2 * sizes[0], *sizes[1:]])
LONGER = column("duration", lambda seconds: [2 * each for each in seconds])
CROWDED = column("phase", lambda phases: [0] * len(phases))


def changed(plan: Plan, kind: str, layer: int, part: str = "send_order", **columns: Callable[[dict], list]) -> Plan:
    """The plan with other columns in one schedule, each made from all that the schedule has."""
    data = plan.model_dump(mode="json")
    sends = data[part][kind][layer]
    data[part][kind][layer] = sends | {name: change(sends) for name, change in columns.items()}
    return Plan.from_dict(data, "plan.json")


def refusal(plan: Plan, problem: Problem, **more) -> str:
    with pytest.raises(InputError) as caught:
        refuse_broken(plan, problem, "plan.json", **more)
    line = str(caught.value)
    assert "\n" not in line and line.startswith("plan.json: ")
    return line.removeprefix("plan.json: ")


@pytest.mark.parametrize(
    ("kind", "layer", "columns", "says"),
    [
        ("dispatch", 0, DOUBLED, "GPU {src} sends {twice} bytes to GPU {dst} instead of {once}"),
        ("combine", 1, column("bytes", lambda sizes: [0.0, *sizes[1:]]), "GPU {src} sends no bytes to GPU {dst}"),
        ("combine", 0, {"dst": lambda sends: [sends["src"][0], *sends["dst"][1:]]}, "GPU {src} sends to itself"),
        ("dispatch", 1, column(COLUMNS[0], lambda entries: entries[1:], *COLUMNS[1:]), "GPU {src} sends "),
    ],
    ids=["other bytes", "no bytes", "to itself", "a send is missing"],
)
def test_a_broken_schedule_is_one_line(ordered, kind, layer, columns, says):
    plan, problem = ordered
    sends = getattr(plan.send_order, kind)[layer]
    pair = (sends.src[0], sends.dst[0])
    once = sum(size for *ends, size in zip(sends.src, sends.dst, sends.bytes, strict=True) if tuple(ends) == pair)
    wanted = f"layer {layer}, {kind}: {says}".format(
        src=pair[0], dst=pair[1], once=f"{once:.12g}", twice=f"{once + sends.bytes[0]:.12g}"
    )
    assert refusal(changed(plan, kind, layer, **columns), problem).startswith(wanted)


@pytest.fixture(scope="module")
def matched() -> tuple[Plan, Problem]:
    problem = mixed_problem()
    return planned(SYSTEMS["aurora"], problem, order="matched"), problem


def test_a_two_tier_order_names_nodes_by_their_first_gpu():
    problem = mixed_problem()
    plan = planned(SYSTEMS["aurora"], problem, order="two-tier")
    other = {0: 1, 2: 2}
    renamed = {name: lambda sends, name=name: [other[gpu] for gpu in sends[name]] for name in ("src", "dst")}
    said = refusal(changed(plan, "dispatch", 0, **renamed), problem)
    assert said == "layer 0, dispatch: a two-tier order names nodes by their first GPU, but GPU 1 is of GPU 0's"


def test_sends_that_are_no_matching(matched):
    plan, problem = matched
    crowded = changed(plan, "dispatch", 1, **CROWDED)
    for elsewhere in (problem, replace(problem, workload=mixed_problem(1).workload)):
        line = refusal(crowded, elsewhere)
        assert line.startswith("layer 1, dispatch: phase 0: GPU ") and line.endswith(" at once, which is no matching")
        assert " sends to GPU " in line or " receives from GPU " in line
    # Where it is unknown which GPUs have links, a GPU may have one peer over them and one over the fabric, but no third.
    assert " and GPU " in refusal(crowded, problem, drawn=False)


@pytest.mark.parametrize("order", ["matched", "shared"])
def test_a_phase_too_short_for_its_sends(order):
    problem = mixed_problem()
    plan = planned(SYSTEMS["aurora"], problem, order=order)
    short = changed(plan, "combine", 0, duration=lambda sends: [seconds / 2 for seconds in sends["duration"]])
    assert "lasts" in refusal(short, problem) and "layer 0, combine: phase 0 lasts" in refusal(short, problem)
    refuse_broken(short, replace(problem, cost=Datasheet(launch=1.0)))


def test_phases_that_are_listed_out_of_turn(matched):
    plan, problem = matched
    line = refusal(changed(plan, "dispatch", 0, **column(COLUMNS[0], lambda entries: entries[::-1], *COLUMNS[1:])), problem)
    assert line.startswith("layer 0, dispatch: a send of phase ") and line.endswith("list them phase by phase")


def test_layers_that_are_not_the_models_own(matched):
    plan, problem = matched
    astray = plan.placement.model_copy(update={"model_layers": (2, 1)})
    line = refusal(plan.model_copy(update={"placement": astray}), problem)
    assert line == "layer 0 is said to be model layer 2, but the model's is 1"


def test_memory_and_sizes_are_looked_at_too(matched):
    plan, problem = matched
    full = Placement(experts=8, experts_of_gpu=((tuple(range(8)), (), (), ()),) * 2, model_layers=(1, 2))
    everything = plan.model_copy(update={"placement": full, "send_order": SendOrder(mode="concurrent")})
    with pytest.raises(InputError, match="GPU 0 · type-0 would hold"):
        refuse_broken(everything, with_memory(problem, [1, 1, 1, 1]))
    with pytest.raises(InputError, match="is for 4 GPUs, but there are 2"):
        refuse_broken(plan, replace(problem, cluster=problem.cluster.part([0, 1])))


def test_the_second_model_is_looked_at_as_well():
    first = mixed_problem()
    second = (mixed_problem(1).workload, first.model)
    problem = make_problem(first.workload, first.cluster, first.model, first.cost, second=second)
    plan = planned(SYSTEMS["aurora"], problem, order="matched")
    refuse_broken(plan, problem)
    broken = changed(plan, "combine", 1, "send_order_b", **DOUBLED, **LONGER)
    assert refusal(broken, problem).startswith("second model, layer 1, combine: GPU ")


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"pipeline": Pipeline(forward=(99,) * 4, backward=(1,) * 4)}, "into 99 parts"),
        ({"overlap": Overlap(ranges=(PartitionRange(first="nothing", last="loss", parts=2),))}, "does not have"),
        ({"overlap": Overlap(under={"nothing": "dispatch_1"})}, "is no weight gradient of this step"),
    ],
    ids=["degree", "range", "weight gradient"],
)
def test_parts_of_a_training_step_that_it_does_not_have(parts, says):
    problem = training_problem()
    plan = planned(TRAINING["deepspeed"], problem)
    with pytest.raises(InputError, match=says):
        refuse_broken(plan.model_copy(update={"overlap": None, "pipeline": None} | parts), problem)


def test_a_plan_without_inputs_is_held_against_the_cluster_it_is_tried_on(matched):
    plan, problem = matched
    bare = plan.model_copy(update={"provenance": Provenance(optimiser="by hand")})
    refuse_broken(bare, problem)
    refuse_broken(changed(bare, "dispatch", 0, **DOUBLED), problem)
    assert "no matching" in refusal(changed(bare, "dispatch", 0, **CROWDED), problem)

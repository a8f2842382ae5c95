"""Plans: refusals, ids, and the meaning of a placement."""

import json

import numpy as np
import pytest
from hypothesis import strategies as st

from engine.errors import InputError
from engine.plan import Claim, Placement, Plan, Schedule, SendOrder, Travel
from engine.result import Provenance, Status, relative_gap
from tests.cases.examples import tried
from tests.cases.refusals import refusal
from tests.strategies import placements, seeds

TWO = Schedule(src=(0, 1), dst=(1, 0), bytes=(5.0, 6.0), phase=(0, 0), duration=(1.0,))

UNTIMED = TWO.model_dump() | {"duration": ()}


def placement_of(*rows, experts: int = 2) -> Placement:
    return Placement(experts=experts, experts_of_gpu=rows, model_layers=tuple(range(len(rows))))


def example(**changes) -> Plan:
    fields = {
        "name": "plan",
        "placement": placement_of(((0,), (1,))),
        "provenance": Provenance(optimiser="test"),
        "send_order": SendOrder(mode="matched", dispatch=(TWO,), combine=(TWO,)),
    }
    return Plan(**(fields | changes))


sizes = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5))
drawn_placements = sizes.flatmap(lambda size: placements(*size))


# Placement


@tried(100, drawn_placements)
def test_replicas_share_an_expert_in_equal_parts(placement):
    share = placement.share
    assert share.shape == (placement.layers, placement.experts, placement.gpus)
    np.testing.assert_allclose(share.sum(axis=2), 1)
    for layer, row in enumerate(placement.experts_of_gpu):
        for expert in range(placement.experts):
            slots = [slot for held in row for slot in held].count(expert)
            for gpu, held in enumerate(row):
                assert share[layer, expert, gpu] == pytest.approx(held.count(expert) / slots)
    assert placement.slots.tolist() == [[len(held) for held in row] for row in placement.experts_of_gpu]


@tried(60, sizes, seeds)
def test_an_array_and_a_placement_say_the_same(size, seed):
    layers, experts, gpus = size
    gpu_of_expert = np.random.default_rng(seed).integers(0, gpus, (layers, experts))
    placement = Placement.from_gpu_of_expert(gpu_of_expert, gpus, tuple(range(layers)))
    np.testing.assert_array_equal(placement.share.argmax(axis=2), gpu_of_expert)
    assert placement.share.max(initial=1) == 1 and placement.gpus == gpus


@tried(60, sizes.flatmap(lambda size: st.tuples(placements(*size), placements(*size))))
def test_moved_experts_are_the_copies_that_come_new_of_equal_sizes(pair):
    before, after = pair
    new = sum(
        len(set(held) - set(had))
        for old_row, row in zip(before.experts_of_gpu, after.experts_of_gpu, strict=True)
        for had, held in zip(old_row, row, strict=True)
    )
    assert (before.moved_experts(after), before.moved_experts(before)) == (new, 0)
    assert placement_of(((0,), (1,))).moved_experts(placement_of(((0, 1),))) is None


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([((0,), ())], "layer 0: expert 1 is on no GPU"),
        ([((0,), (1,)), ((0, 1), (7,))], r"layer 1: there is no expert 7 \(experts are 0 … 1\)"),
        ([((0,), (1,)), ((0, 1),)], "layer 1 is placed on 1 GPUs, layer 0 on 2"),
        ([((0, -1), (1,))], "there is no expert -1"),
        ([], "experts_of_gpu"),
    ],
)
def test_faulty_placements_are_refused_with_the_place(rows, says):
    data = {"experts": 2, "experts_of_gpu": rows, "model_layers": list(range(len(rows)))}
    with pytest.raises(InputError, match=f"^plan.json: .*{says}"):
        Placement.from_dict(data, "plan.json")


# Schedules and orders


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dst": (1,)}, "one entry per send"),
        ({"phase": (0, 1)}, "a phase that has no duration"),
        ({"phase": (-1, 0)}, "a phase that has no duration"),
        ({"bytes": (5.0, -6.0)}, "bytes → 1: "),
        ({"duration": (-1.0,)}, "duration → 0: "),
    ],
)
def test_faulty_schedules_are_refused(changes, says):
    assert says in refusal(Schedule.from_dict, TWO.model_dump() | changes, "plan")


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ({"mode": "concurrent", "dispatch": [TWO.model_dump()], "combine": [TWO.model_dump()]}, "has no schedules"),
        ({"mode": "matched"}, "a matched order needs a schedule"),
        ({"mode": "shared", "dispatch": [TWO.model_dump()]}, "one schedule per MoE layer each"),
        ({"mode": "chaotic"}, "mode"),
        ({"mode": "matched", "dispatch": [UNTIMED], "combine": [UNTIMED]}, "needs the duration of every phase"),
    ],
)
def test_faulty_orders_are_refused(order, says):
    assert says in refusal(SendOrder.from_dict, order, "plan")


def test_parts_of_a_plan_must_fit_each_other():
    with pytest.raises(ValueError, match="the order covers 2 MoE layers, the placement 1"):
        example(send_order=SendOrder(mode="matched", dispatch=(TWO, TWO), combine=(TWO, TWO)))
    for ends in ({"dst": (1, 2)}, {"src": (-1, 1)}):
        astray = Schedule.model_validate(TWO.model_dump() | ends)
        with pytest.raises(ValueError, match="outside 0 … 1"):
            example(send_order=SendOrder(mode="matched", dispatch=(TWO,), combine=(astray,)))


# Identity


@tried(60, drawn_placements, st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=5))
def test_a_plan_survives_json(placement, volumes):
    count = len(volumes)
    ends = {"src": (0,) * count, "dst": (placement.gpus - 1,) * count, "phase": range(count)}
    schedule = Schedule(**ends, bytes=volumes, duration=volumes)
    order = SendOrder(mode="shared", dispatch=(schedule,) * placement.layers, combine=(schedule,) * placement.layers)
    plan = example(placement=placement, send_order=order)
    again = Plan.from_json(plan.to_json(), "again")
    assert again == plan and again.id == plan.id
    assert Plan.from_json(json.dumps(json.loads(plan.to_json()), indent=3), "again").id == plan.id


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": placement_of(((1,), (0,)))},
        {"placement": placement_of(((0,), (1, 0)))},
        {"send_order": SendOrder(mode="concurrent")},
        {"send_order": SendOrder(mode="shared", dispatch=(TWO,), combine=(TWO,))},
        {"provenance": Provenance(optimiser="test", seed=1)},
        {"parent": "0" * 64},
    ],
)
def test_content_changes_the_id_and_name_and_claim_do_not(changes):
    plan, claim = example(), Claim(status=Status.OPTIMAL, objective=1.0, bound=1.0, scope="order")
    assert example(name="another").id == example(claim=claim).id == plan.id == plan.model_copy(update={"claim": claim}).id
    assert plan.id != example(**changes).id == plan.model_copy(update=changes).id


def test_other_parts_are_checked_with_the_rest():
    plan = example()
    assert plan.id  # computed before, and of the plan without them
    at_once = plan.with_parts(send_order=SendOrder(mode="concurrent"), parent=plan.id, travel=Travel())
    assert at_once.id != plan.id == at_once.parent and at_once.travel is None
    with pytest.raises(ValueError, match="the order covers 1 MoE layers, the placement 2"):
        plan.with_parts(placement=placement_of(((0,), (1,)), ((0,), (1,))))


def test_plans_compare_whatever_was_computed_of_them():
    first, second, other = placement_of(((0,), (1,))), placement_of(((0,), (1,))), placement_of(((1,), (0,)))
    first.share, other.share, second.slots  # noqa: B018
    assert first == second
    assert hash(first) == hash(second)
    second.share  # noqa: B018
    assert first == second != other
    assert first != "a placement"
    assert example(placement=first) == example(placement=second)
    swapped = first.model_copy(update={"experts_of_gpu": other.experts_of_gpu})
    assert swapped.share[0, 0].tolist() == [0, 1], "a changed copy forgets what was computed before"
    with pytest.raises(ValueError, match="frozen"):
        example().name = "other"


TEXT = example().to_json()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"name": "x", "colour": 1}', "p.json: "),
        ("[]", "p.json: "),
        (TEXT.replace("6.0", '"many"'), "send_order → dispatch → 0 → bytes → 1: "),
        (json.dumps(json.loads(TEXT) | {"colour": "red"}), "colour: "),
        (TEXT.replace("5.0", "NaN"), "bytes → 0"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_place(text, says):
    assert says in refusal(Plan.from_json, text, "p.json")


def test_gaps_are_relative_to_the_bound_and_never_negative():
    gaps = [relative_gap(*both) for both in ((3.0, 2.0), (2.0, 2.1), (0.0, 0.0), (1.0, 0.0))]
    assert gaps == [0.5, 0, 0, float("inf")]

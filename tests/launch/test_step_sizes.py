"""How large a step is, and how small it can be made."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InputError
from engine.launch.step.sizes import (
    check_step_plan,
    gradient_bytes,
    reference_bytes,
    shrunk,
    step_bytes,
    step_flops,
    step_problem,
)
from engine.model import MoEModel
from engine.plan import Overlap, PartitionRange, Pipeline, Placement, Plan, Priority, SendOrder
from engine.result import Provenance
from engine.simulate.training import price_step
from engine.simulate.training.program import program_of
from engine.systems.pieces import linear_placement
from engine.systems.training.lina import packed_placement
from engine.training import TrainingStep
from tests.cases.examples import examples

pytestmark = pytest.mark.slow

MODEL = MoEModel(name="tiny", layers=4, dense_layers=(0, 2), experts=8, experts_per_token=1, d_model=64, d_ff=96)
STEP = TrainingStep(batch=16, sequence_length=128, heads=4, dense_d_ff=64, vocabulary=500)


def plan_of(placement: Placement | None = None, **parts) -> Plan:
    return Plan(
        name="test",
        placement=placement or linear_placement(step_problem(MODEL, STEP, 4)),
        send_order=SendOrder(mode="concurrent"),
        provenance=Provenance(optimiser="test"),
        priority=Priority(policy="fair", bucket=1e6),
        **parts,
    )


def cut(parts: int, last: str = "3.qkv") -> Overlap:
    return Overlap(ranges=(PartitionRange(first="1.dispatch", last=last, parts=parts),))


def flops_of_shapes(step: TrainingStep, ranks: int) -> float:
    """By hand: every product of the forward pass, and twice as much backward."""
    tokens, width = step.tokens, MODEL.d_model
    linear = MODEL.layers * 4 * width**2 + 2 * 3 * width * step.dense_d_ff + width * step.vocabulary
    linear += 2 * (MODEL.experts * width + MODEL.experts_per_token * 3 * width * MODEL.d_ff)
    return 3 * 2 * tokens * (linear + MODEL.layers * 2 * step.sequence_length * width)


def test_flops_are_those_of_the_products():
    assert step_flops(MODEL, STEP, plan_of()) == pytest.approx(flops_of_shapes(STEP, 4))
    wide = STEP.model_copy(update={"capacity_factor": 2.0})
    experts = 3 * 2 * STEP.tokens * 2 * 3 * MODEL.d_model * MODEL.d_ff
    assert step_flops(MODEL, wide, plan_of()) == pytest.approx(flops_of_shapes(STEP, 4) + experts)
    assert step_flops(MODEL, wide, plan_of(overlap=Overlap(irregular=True))) == pytest.approx(flops_of_shapes(STEP, 4))


@settings(max_examples=examples(25), deadline=None)
@given(
    st.floats(6, 12),
    st.integers(2, 8),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from((0.0, 1.0, 1.25)),
    st.sampled_from(("3.qkv", "1.combine")),
)
def test_a_shrunk_step_fits_the_budget_or_is_as_small_as_the_plans_allow(
    digits, parts, forward, backward, factor, last
):
    step, budget = STEP.model_copy(update={"capacity_factor": factor}), 10.0**digits
    piped = plan_of(pipeline=Pipeline(forward=(1, forward), backward=(backward, 2)))
    plans = [plan_of(overlap=cut(parts, last)), piped]
    small = shrunk(step, MODEL, plans, budget)
    assert 1 <= small.batch <= step.batch and 1 <= small.sequence_length <= step.sequence_length
    work = max(step_flops(MODEL, small, plan) for plan in plans)
    sequences = parts if last == "3.qkv" else 1
    rows = max(forward, backward, 2, parts if last == "1.combine" else 1)
    assert small.batch >= sequences and small.tokens * (factor or 1) / MODEL.experts >= rows
    for plan in plans:
        own = step_problem(MODEL, small, 4)
        program_of(plan, own, price_step(own, plan.placement))
    if work > budget:  # nothing smaller would do
        assert small.batch == sequences
        assert (small.tokens - small.batch) * (factor or 1) / MODEL.experts < rows or small.sequence_length == 1
    elif small != step:  # and nothing much larger fits
        longer = small.model_copy(update={"sequence_length": small.sequence_length + 1})
        larger = small.model_copy(update={"batch": small.batch + sequences})
        grown = larger if small.sequence_length == step.sequence_length else longer
        assert max(step_flops(MODEL, grown, plan) for plan in plans) > budget or grown.batch > step.batch
    assert shrunk(small, MODEL, plans, max(budget, work)) == small


def test_a_step_that_fits_stays_as_it_is():
    assert shrunk(STEP, MODEL, [plan_of()], 1e30) is STEP


def test_bytes_grow_with_what_a_rank_holds():
    problem = step_problem(MODEL, STEP, 4)
    plain, packed = plan_of(), plan_of(packed_placement(problem, 4))
    held = 2 * 2 * 3 * MODEL.d_model * MODEL.d_ff  # two more experts in each of two layers
    more = step_bytes(problem, packed) - step_bytes(problem, plain)
    assert (more >= held * 12).all()  # bf16: weight, gradient, and momentum and weight in 32 bits
    assert (gradient_bytes(problem, packed) - gradient_bytes(problem, plain) == held * 2).all()
    numbers = held + MODEL.layers * 4 * 64**2 + 2 * 3 * 64 * 64 + 2 * 64 * 8 + 500 * 64
    assert gradient_bytes(problem, plain) == pytest.approx(np.full(4, numbers * 2))
    longer = step_problem(MODEL, STEP.model_copy(update={"batch": 32}), 4)
    assert (step_bytes(longer, plain) > 1.5 * step_bytes(problem, plain)).all()
    assert reference_bytes(MODEL, STEP, 4) > 4 * reference_bytes(MODEL, STEP, 1) / 1.5


def test_what_no_rank_can_execute_is_refused_with_a_reason():
    problem = step_problem(MODEL, STEP, 4)
    packed = packed_placement(problem, 4)
    assert check_step_plan(plan_of(packed), MODEL, STEP) == 2 and check_step_plan(plan_of(), MODEL, STEP) == 1
    rows = tuple((row[0], row[1], row[3], row[2]) for row in packed.experts_of_gpu)
    crossed = packed.model_copy(update={"experts_of_gpu": rows})
    doubled = tuple((*row[:3], (*row[3], 0)) for row in linear_placement(problem).experts_of_gpu)
    for placement in (crossed, packed.model_copy(update={"experts_of_gpu": doubled})):
        with pytest.raises(InputError, match="holds experts several times"):
            check_step_plan(plan_of(placement), MODEL, STEP)
    with pytest.raises(InputError, match="5 heads"):
        check_step_plan(plan_of(), MODEL, STEP.model_copy(update={"heads": 5}))
    with pytest.raises(InputError, match="describe the step"):
        check_step_plan(plan_of(), MODEL, None)
    with pytest.raises(InputError, match="fp32 or bf16, not in fp16"):
        check_step_plan(plan_of(), MODEL.model_copy(update={"dtype": "fp16"}), STEP)
    with pytest.raises(InputError, match="for inference"):
        check_step_plan(plan_of().model_copy(update={"priority": None}), MODEL, STEP)
    with pytest.raises(InputError, match="8 experts in 2 layers"):
        check_step_plan(plan_of(), MODEL.model_copy(update={"experts": 4}), STEP)

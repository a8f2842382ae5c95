"""How large a step is on every rank, before it runs, and how to make it small enough for the machine at hand."""

from collections.abc import Sequence
from math import lcm

import numpy as np

from engine.launch.step.problem import step_problem
from engine.model import MoEModel
from engine.overlap.operator_graph import Gemm
from engine.overlap.transformer import transformer_step
from engine.plan import Placement, Plan
from engine.problem import Problem
from engine.simulate.training.memory import bytes_per_parameter, step_state_bytes
from engine.simulate.training.routing import expert_groups, route
from engine.systems.pieces import linear_placement
from engine.training import TrainingStep


def step_flops(model: MoEModel, step: TrainingStep, plan: Plan) -> float:
    """FLOP of the matrix products of one step on a rank, forward and backward, when routing is balanced; of filled buffers
    the empty rows count, as they are computed too."""
    graph = transformer_step(model, step, plan.placement.gpus // expert_groups(plan.placement))
    copies, rows = step.tokens * model.experts_per_token, step.capacity(model) * model.experts
    fill = rows / copies if step.capacity_factor and not _irregular(plan) else 1.0
    return float(
        sum(
            (fill if operator.kind == "experts" else 1.0) * _flops(gemm)
            for operator in graph.operators
            for gemm in operator.gemms
        )
    )


def _flops(gemm: Gemm) -> float:
    return 2.0 * gemm.count * gemm.m * gemm.n * gemm.k


def _irregular(plan: Plan) -> bool:
    return plan.overlap is not None and plan.overlap.irregular


def step_bytes(problem: Problem, plan: Plan) -> np.ndarray:
    """float64[rank]: bytes that a rank of the plan needs at once: weights, gradients, momentum and the random numbers that
    weights are made of, and what the forward pass keeps for the backward pass. The problem has a step.

    Several plans in one launch have everything in common but the gradients, see `gradient_bytes`.
    """
    state = step_state_bytes(problem, plan.placement) + _pool_bytes(problem.model, problem.step)
    return state + _kept_bytes(problem, plan.placement, _irregular(plan))


def gradient_bytes(problem: Problem, plan: Plan) -> np.ndarray:
    """float64[rank]: what every further plan of a launch needs besides."""
    model = problem.model
    return step_state_bytes(problem, plan.placement) * model.bytes_per_number / bytes_per_parameter(model)


def reference_bytes(model: MoEModel, step: TrainingStep, ranks: int) -> float:
    """Bytes that rank 0 needs besides for the comparison: weights of all experts with their gradients, and the activations
    of all ranks' tokens, in 32 bits."""
    model = model.model_copy(update={"dtype": "fp32"})
    alone = step_problem(model, step.model_copy(update={"batch": step.batch * ranks}), 1)
    placement = linear_placement(alone)
    weights = step_state_bytes(alone, placement) * 8 / bytes_per_parameter(model)
    return float((weights + _kept_bytes(alone, placement, True))[0])


def _pool_bytes(model: MoEModel, step: TrainingStep) -> float:
    inner = max(step.dense_d_ff, model.shared_experts * model.d_ff) * (model.ffn_matrices - 1)
    widest = max(step.vocabulary, 3 * model.d_model, inner)
    return model.d_model * widest * model.bytes_per_number + model.bytes_per_expert


def _kept_bytes(problem: Problem, placement: Placement, irregular: bool) -> np.ndarray:
    """float64[rank]: what is kept from the forward pass, and the gradients of the operator that has most of them."""
    model, step = problem.model, problem.step
    number, wide, width, tokens = model.bytes_per_number, max(model.bytes_per_number, 4.0), model.d_model, step.tokens
    routing = route(problem, placement, irregular)
    received = np.nan_to_num(routing.rows).sum(axis=2)  # [layer, rank]
    sent = routing.traffic.sum(axis=2) / model.bytes_per_token
    matrices, scores = model.ffn_matrices, tokens * step.heads * step.sequence_length * number
    # Both norms, queries, keys and values, both sums, what attention mixed and its projection; and the probabilities.
    attention = 9 * tokens * width * number + scores
    dense = tokens * (matrices * step.dense_d_ff + width) * number
    # What came in the experts' order, their inner rows before and after activation, their results; the same back at home.
    experts = (received * (2 * width + matrices * model.d_ff) + sent * width) * number
    experts += tokens * (width * number + model.experts * wide)
    if model.shared_experts:
        experts += tokens * (matrices * model.shared_experts * model.d_ff + width) * number
    logits = tokens * step.vocabulary * (number + wide)
    behind = np.maximum(np.maximum(3 * scores, tokens * step.vocabulary * (number + wide)), experts.max(axis=0))
    return model.layers * attention + len(model.dense_layers) * dense + experts.sum(axis=0) + logits + behind


def shrunk(step: TrainingStep, model: MoEModel, plans: Sequence[Plan], flop_budget: float) -> TrainingStep:
    """The step with fewer and shorter sequences, so that a rank of no plan has more than `flop_budget` FLOP to do, or as few
    as the plans allow: no part of a batch has less than a sequence, no part of an expert's buffer less than a row.

    Sequences are left out first, which keeps all operators in proportion; then they are shortened. A step that fits
    stays as it is.
    """

    def fits(small: TrainingStep) -> bool:
        return max(step_flops(model, small, plan) for plan in plans) <= flop_budget

    if fits(step):
        return step
    cuts = [_cuts(plan, model, step) for plan in plans]
    sequences, rows = ([part for cut in cuts for part in cut[which]] for which in (0, 1))
    least = min(step.batch, max(sequences, default=1))
    one_sequence = step.model_copy(update={"batch": 1})
    affordable = int(
        flop_budget / max(step_flops(model, one_sequence, plan) for plan in plans)
    )  # FLOP grow with the batch
    batch = min(step.batch, max(least, affordable))
    together = lcm(*sequences) if sequences else 1
    batch = batch // together * together or batch  # equal parts where there are enough sequences
    small = step.model_copy(update={"batch": batch})
    # Tokens of a rank so that each of its experts' buffers has a row for every part.
    tokens = max(rows, default=1) * model.experts / (model.experts_per_token * (step.capacity_factor or 1))
    low = min(step.sequence_length, max(1, int(np.ceil(tokens / batch))))
    high = step.sequence_length
    while low < high:
        middle = (low + high + 1) // 2
        if fits(small.model_copy(update={"sequence_length": middle})):
            low = middle
        else:
            high = middle - 1
    return small.model_copy(update={"sequence_length": low})


def _cuts(plan: Plan, model: MoEModel, step: TrainingStep) -> tuple[list[int], list[int]]:
    """(parts into which the plan cuts the batch, those into which it cuts the experts' buffers)."""
    along: tuple[list[int], list[int]] = ([], [])
    if plan.pipeline is not None:
        along[1].extend(plan.pipeline.forward + plan.pipeline.backward)
    if plan.overlap is not None and plan.overlap.ranges:
        forward = transformer_step(model, step, plan.placement.gpus).of_phase("forward")
        place = {operator.name: index for index, operator in enumerate(forward)}
        for cut in plan.overlap.ranges:
            kinds = {operator.kind for operator in forward[place[cut.first] : place[cut.last] + 1]}
            along[kinds <= {"dispatch", "experts", "combine"}].append(cut.parts)
    return along

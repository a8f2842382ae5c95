"""The memory and FLOP of a step on every rank before it runs, a step small enough for the machine at hand, and its
planning problem.

The problem has as many alike GPUs as there are ranks. Only the order of the tasks is taken from it, on which no time
and no bandwidth has any influence.
"""

from collections.abc import Sequence
from math import lcm

import numpy as np

from engine.cluster import any_gpus
from engine.costs import Datasheet
from engine.errors import InputError
from engine.goal import Goal
from engine.launch.rank.instructions import POOL_STRIDE
from engine.model import MoEModel
from engine.overlap.transformer import transformer_step
from engine.plan import Placement, Plan, expert_groups
from engine.problem import Problem, make_problem
from engine.simulate.training.pricing import route
from engine.simulate.training.step import bytes_per_parameter, step_state_bytes
from engine.systems.pieces import linear_placement
from engine.training import TrainingStep, balanced_load


def step_problem(model: MoEModel, step: TrainingStep, ranks: int) -> Problem:
    """A problem with `ranks` alike GPUs of any kind and balanced routing."""
    return make_problem(balanced_load(model), any_gpus(ranks), model, Datasheet(), step=step)


def check_step_plan(plan: Plan, model: MoEModel, step: TrainingStep | None) -> int:
    """Number of groups of ranks that hold all experts each. Raises InputError for a plan or step that no rank can execute."""
    placement = plan.placement
    if plan.goal is not Goal.TRAINING:
        raise InputError(f"the plan {plan.name} is for inference; a training step needs a plan for training")
    if step is None:
        raise InputError(f"the plan {plan.name} is for a training step; describe the step too")
    if plan.offload is not None:
        raise InputError(
            f"the plan {plan.name} keeps experts in the host's memory, which is simulated and not launched; plan with "
            "offload=off"
        )
    if model.dtype not in ("fp32", "bf16"):
        raise InputError(
            f"a training step is computed in fp32 or bf16, not in {model.dtype}, whose gradients would have to be scaled; "
            "choose one of them"
        )
    if model.d_model % step.heads:
        raise InputError(
            f"the width {model.d_model} of {model.name} does not divide into {step.heads} heads; change the heads of the step"
        )
    if placement.layers != len(model.moe_layers) or placement.experts != model.experts:
        raise InputError(
            f"the plan {plan.name} places {placement.experts} experts in {placement.layers} layers, but {model.name} has "
            f"{model.experts} in {len(model.moe_layers)}"
        )
    groups = expert_groups(placement)
    size = placement.gpus // groups
    alike = all(set(row[rank]) == set(row[rank % size]) for row in placement.experts_of_gpu for rank in range(placement.gpus))
    if not placement.single and (groups == 1 or not alike):
        raise InputError(
            f"the plan {plan.name} holds experts several times, but not in groups of neighbouring ranks that hold each once "
            "and in the same order; launch it on as many ranks as it has GPUs, or plan without packing"
        )
    return groups


def step_flops(model: MoEModel, step: TrainingStep, plan: Plan) -> float:
    """FLOP of the matrix products of one step on a rank, forward and backward, with balanced routing; the empty rows of
    filled buffers count, as they are computed too."""
    graph = transformer_step(model, step, plan.placement.gpus // expert_groups(plan.placement))
    copies, rows = step.tokens * model.experts_per_token, step.capacity(model) * model.experts
    fill = rows / copies if step.capacity_factor and not _irregular(plan) else 1.0
    products = ((gemm, fill if operator.kind == "experts" else 1.0) for operator in graph.operators for gemm in operator.gemms)
    return float(sum(share * (2.0 * gemm.count * gemm.m * gemm.n * gemm.k) for gemm, share in products))


def _irregular(plan: Plan) -> bool:
    return plan.overlap is not None and plan.overlap.irregular


def step_bytes(problem: Problem, plan: Plan) -> np.ndarray:
    """float64[rank]: bytes that a rank of the plan needs at once: weights, gradients, momentum, the random numbers that
    weights are made of, and activations kept for the backward pass. The problem has a step. For several plans in one
    launch see `further_plan_bytes`."""
    state = step_state_bytes(problem, plan.placement) + pool_bytes(problem.model, problem.step)
    # Weights are made one by one and then copied, in memory that the allocator keeps afterwards.
    state += max(_widest(problem.model, problem.step) * problem.model.bytes_per_number, problem.model.bytes_per_expert)
    # No activation is kept when gradients are compared: then there are rank 0's tensor, the difference and its magnitude.
    largest = max(_widest(problem.model, problem.step), _first_matrix(problem.model))
    return state + np.maximum(_kept_bytes(problem, plan.placement, _irregular(plan)), 3 * 4.0 * largest)


def further_plan_bytes(problem: Problem, before: Sequence[Plan], plan: Plan) -> np.ndarray:
    """float64[rank]: additional bytes of a plan in a launch with the plans before it: gradients of its own, and the
    rest of its experts on a rank if none of them has the same ones in a layer."""
    model, placement = problem.model, plan.placement
    added = np.zeros(placement.gpus)
    for layer, row in enumerate(placement.experts_of_gpu):
        for rank, experts in enumerate(row):
            known = (set(other.placement.experts_of_gpu[layer][rank]) for other in before)
            if set(experts) not in known:
                added[rank] += len(set(experts))
    per_expert = model.bytes_per_expert / model.bytes_per_number * (bytes_per_parameter(model) - model.bytes_per_number)
    return gradient_bytes(problem, plan) + added * per_expert


def staged_bytes(problem: Problem, plan: Plan) -> float:
    """Page-locked bytes of the fullest rank, if all its collectives pass through the host: for the rows that it sends
    and receives, and for all its gradients, each rounded up to a power of two."""
    traffic = route(problem, plan.placement, _irregular(plan)).traffic
    exchanged = max(float(traffic.sum(axis=axis).max()) for axis in (1, 2))
    return 2.0 * (2 * exchanged + float(gradient_bytes(problem, plan).max()))


def gradient_bytes(problem: Problem, plan: Plan) -> np.ndarray:
    """float64[rank]: bytes of the gradients of all weights of a plan."""
    model = problem.model
    return step_state_bytes(problem, plan.placement) * model.bytes_per_number / bytes_per_parameter(model)


def reference_bytes(model: MoEModel, step: TrainingStep, ranks: int) -> float:
    """Additional bytes of rank 0 for the comparison: weights of all experts with their gradients, and the activations
    of all ranks' tokens, in 32 bits."""
    model = model.model_copy(update={"dtype": "fp32"})
    alone = step_problem(model, step.model_copy(update={"batch": step.batch * ranks}), 1)
    placement = linear_placement(alone)
    weights = step_state_bytes(alone, placement) * 8 / bytes_per_parameter(model)
    # The gradient by one expert comes as one by all experts of its layer.
    one_gradient = 4.0 * model.experts * _first_matrix(model)
    return float((weights + _kept_bytes(alone, placement, True))[0]) + one_gradient


def pool_bytes(model: MoEModel, step: TrainingStep) -> float:
    """Bytes of the random numbers that weights are made of, and of the routers."""
    layers = len(model.moe_layers)
    # One for every expert, at most five for the other matrices of a layer, and those of embedding and head.
    windows = POOL_STRIDE * (layers * model.experts + 5 * model.layers + 3)
    numbers = _widest(model, step) + windows + layers * model.d_model * model.experts
    return numbers * model.bytes_per_number + model.bytes_per_expert


def _widest(model: MoEModel, step: TrainingStep) -> int:
    """Numbers of the largest matrix of any operator but experts."""
    inner = max(step.dense_d_ff, model.shared_width) * (model.ffn_matrices - 1)
    return model.d_model * max(step.vocabulary, 3 * model.d_model, inner)


def _first_matrix(model: MoEModel) -> int:
    """Numbers of an expert's larger matrix."""
    return (model.ffn_matrices - 1) * model.d_model * model.d_ff


def _kept_bytes(problem: Problem, placement: Placement, irregular: bool) -> np.ndarray:
    """float64[rank]: bytes kept from the forward pass, and the gradients of the operator that has most of them."""
    model, step = problem.model, problem.step
    number, wide, width, tokens = model.bytes_per_number, max(model.bytes_per_number, 4.0), model.d_model, step.tokens
    routing = route(problem, placement, irregular)
    received = np.nan_to_num(routing.rows).sum(axis=2)  # [layer, rank]
    sent = routing.traffic.sum(axis=2) / model.bytes_per_token
    matrices, scores = model.ffn_matrices, tokens * step.heads * step.sequence_length * number
    # Both norms, queries, keys and values, both sums, the mixed values and their projection; and the probabilities.
    attention = 9 * tokens * width * number + scores
    dense = tokens * (matrices * step.dense_d_ff + width) * number
    # Arrived rows in the experts' order, their inner rows before and after activation, their results; and these at home.
    experts = (received * (2 * width + matrices * model.d_ff) + sent * width) * number
    experts += tokens * (width * number + model.experts * wide)
    if model.shared_experts:
        experts += tokens * (matrices * model.shared_width + width) * number
    logits = tokens * step.vocabulary * (number + wide)
    behind = np.maximum(np.maximum(3 * scores, tokens * step.vocabulary * (number + wide)), experts.max(axis=0))
    return model.layers * attention + len(model.dense_layers) * dense + experts.sum(axis=0) + logits + behind


def narrowed_step(step: TrainingStep, divisor: int) -> TrainingStep:
    """The step with its dense FFNs and its vocabulary divided, so that all matrices keep their proportions."""
    widths = {name: max(2, getattr(step, name) // divisor) for name in ("dense_d_ff", "vocabulary")}
    return step if divisor == 1 else step.model_copy(update=widths)


def shrunk(step: TrainingStep, model: MoEModel, plans: Sequence[Plan], flop_budget: float) -> TrainingStep:
    """The step with fewer and shorter sequences, so that a rank of no plan has more than `flop_budget` FLOP to do, or
    as few as the plans allow: no part of a batch has less than a sequence, no part of an expert's buffer less than a row.

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
    # FLOP grow with the batch.
    affordable = int(flop_budget / max(step_flops(model, one_sequence, plan) for plan in plans))
    batch = min(step.batch, max(least, affordable))
    together = lcm(*sequences) if sequences else 1
    batch = batch // together * together or batch  # equal parts, if there are enough sequences
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
    """(parts into which the plan cuts the batch, parts into which it cuts the experts' buffers)."""
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

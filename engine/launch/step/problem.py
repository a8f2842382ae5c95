"""The planning problem that a launched step answers: as many alike GPUs as there are ranks. Only the order of the tasks is
taken from it, which no time and no bandwidth has a part in."""

from engine.cluster import any_gpus
from engine.costs import CostModel, Datasheet
from engine.errors import InputError
from engine.goal import Goal
from engine.model import MoEModel
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate.training.routing import expert_groups
from engine.training import TrainingStep, balanced_load


def step_problem(model: MoEModel, step: TrainingStep, ranks: int, cost: CostModel | None = None) -> Problem:
    """A problem with `ranks` alike GPUs of any kind and balanced routing."""
    return make_problem(balanced_load(model), any_gpus(ranks), model, cost or Datasheet(), step=step)


def check_step_plan(plan: Plan, model: MoEModel, step: TrainingStep | None) -> int:
    """How many groups of ranks hold all experts each. Raises InputError for what no rank can execute."""
    placement = plan.placement
    if plan.goal is not Goal.TRAINING:
        raise InputError(f"the plan {plan.name} is for inference; a training step needs a plan for training")
    if step is None:
        raise InputError(f"the plan {plan.name} is for a training step; describe the step too")
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
    alike = all(
        set(row[rank]) == set(row[rank % size]) for row in placement.experts_of_gpu for rank in range(placement.gpus)
    )
    if not placement.single and (groups == 1 or not alike):
        raise InputError(
            f"the plan {plan.name} holds experts several times, but not in groups of neighbouring ranks that hold each once "
            "and in the same order; launch it on as many ranks as it has GPUs, or plan without packing"
        )
    return groups

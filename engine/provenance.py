"""The inputs that a plan was made from, and digests of all that its figures depend on."""

from engine.goal import Goal
from engine.plan import Plan
from engine.problem import Problem
from engine.workload import digest_of

SCORED_ON = ("workload", "cluster", "model", "cost", "workload_b", "model_b", "step", "graph", "serving_step")
"""Roles of the inputs that a plan's simulated time depends on."""


def simulation_digest(plan: Plan, problem: Problem) -> str:
    """Digest of all that the simulated timeline of a plan depends on."""
    mine = input_digests(problem)
    return digest_of("simulation 4", plan.id, *(mine.get(role, "") for role in SCORED_ON))


def metrics_digests(plan: Plan, problem: Problem) -> tuple[str, str]:
    """Digests of all that the figures of a plan depend on: its timeline, and its claim."""
    return simulation_digest(plan, problem), "" if plan.claim is None else plan.claim.digest


def has_inputs_of(plan: Plan, problem: Problem, roles: tuple[str, ...]) -> bool:
    """True if the plan was made from the problem's own inputs in all these roles."""
    own = input_digests(problem)
    return all(plan.provenance.inputs.get(role) == own.get(role) for role in roles)


def input_digests(problem: Problem) -> dict[str, str]:
    """Digest of every input by role, as plans carry them in their provenance."""
    digests = {
        "workload": problem.workload.digest,
        "cluster": problem.cluster.digest,
        "model": problem.model.digest,
        "cost": problem.cost.digest,
    }
    if problem.goal is Goal.TWO_MODELS:
        digests |= {"workload_b": problem.second.workload.digest, "model_b": problem.second.model.digest}
    digests |= {f"workload_also_{index}": workload.digest for index, workload in enumerate(problem.others)}
    if problem.goal is Goal.TRAINING:
        digests["step"] = problem.step.digest
    if problem.travel is not None:
        digests["travel"] = problem.travel.digest
    if problem.graph is not None:
        digests["graph"] = problem.graph.digest
    if problem.serving_step is not None:
        digests["serving_step"] = problem.serving_step.digest
    if problem.in_use is not None:
        digests["in_use"] = problem.in_use.digest
    return digests

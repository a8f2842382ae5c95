"""Simulated training steps: problems and plans."""

from engine.costs import Datasheet
from engine.overlap.transformer import transformer_step
from engine.plan import Pipeline, Placement, Plan, Priority
from engine.problem import Problem, make_problem
from engine.systems.pieces import linear_placement
from engine.training import TrainingStep, balanced_load
from tests.cases.launch_plans import plan_with
from tests.strategies import cluster_of, make_gpu, make_model

FAIR = Priority(policy="fair", bucket=4e3)


def step_of(**more) -> TrainingStep:
    """A small step. more: its other fields"""
    sizes = {"batch": 8, "sequence_length": 16, "heads": 4, "dense_d_ff": 96, "vocabulary": 50}
    return TrainingStep(**(sizes | more))


def problem_of(cluster=None, experts: int = 4, layers: int = 2, k: int = 1, workload=None, **step) -> Problem:
    """A problem of a small step, by default on four GPUs with balanced load. step: fields of the step"""
    model = make_model(layers, experts, k)
    cluster = cluster or cluster_of(*(make_gpu() for _ in range(4)), latency=1e-4)
    return make_problem(workload or balanced_load(model), cluster, model, Datasheet(), step=step_of(**step))


def plan_of(problem: Problem, priority: Priority = FAIR, placement: Placement | None = None, **parts) -> Plan:
    """A plan of a step, by default with a linear placement. parts: other fields of `Plan`"""
    return plan_with(placement or linear_placement(problem), priority=priority, **parts)


def graph_of(problem: Problem, groups: int = 1):
    """The operators of a step. groups: of GPUs, each with all experts"""
    return transformer_step(problem.model, problem.step, len(problem.cluster.gpus) // groups)


def degrees(problem: Problem, forward: int, backward: int, order: str = "dispatch-first") -> Pipeline:
    """The same degrees in all layers."""
    layers = problem.workload.layers
    return Pipeline(forward=(forward,) * layers, backward=(backward,) * layers, order=order)

"""Training steps small enough to be launched on processors."""

from engine.catalogue import cluster_presets
from engine.costs import Datasheet
from engine.launch.places.devices import Devices
from engine.launch.preparation import prepare
from engine.launch.preparation.launch import Launch, PreparedLaunch
from engine.launch.step.sizes import step_problem
from engine.model import MoEModel
from engine.plan import Placement, Plan, Priority
from engine.problem import Problem, make_problem
from engine.result import never
from engine.systems import TRAINING, run
from engine.systems.base import silent
from engine.systems.pieces import linear_placement
from engine.training import TrainingStep, balanced_load
from tests.cases.launch_plans import plan_with

RANKS = 4
MODEL = MoEModel(name="tiny", layers=3, dense_layers=(0,), experts=8, experts_per_token=2, d_model=32, d_ff=24, dtype="fp32")
STEP = TrainingStep(
    batch=4, sequence_length=6, heads=4, dense_d_ff=40, vocabulary=50, gate="top-k", capacity_factor=1.0, routing="recorded"
)
MICRO_OPS = Priority(policy="priority", micro_op=3e3)


def problem(model: MoEModel = MODEL, step: TrainingStep = STEP, ranks: int = RANKS) -> Problem:
    """The step as ranks execute it."""
    return step_problem(model, step, ranks)


def plan_of(placement: Placement | None = None, priority: Priority = MICRO_OPS, **parts) -> Plan:
    """A plan of a step. parts: other fields of `Plan`"""
    return plan_with(placement or linear_placement(problem()), priority=priority, **parts)


TOP_ONE_MODEL = MoEModel(
    name="tiny", layers=3, dense_layers=(0,), experts=4, experts_per_token=1, d_model=32, d_ff=64, ffn_matrices=2
)
TOP_ONE_STEP = TrainingStep(batch=4, sequence_length=8, heads=2, dense_d_ff=64, vocabulary=50)
HOST = Devices(gpus=(), memory=(), cores=2, host_memory=8 * 2.0**30)


def top_one_problem(step: TrainingStep = TOP_ONE_STEP, model: MoEModel = TOP_ONE_MODEL) -> Problem:
    """The step on two GPUs in two nodes."""
    cluster = cluster_presets()["lancet-p3dn-2-nodes"].cluster.part([0, 8])
    return make_problem(balanced_load(model), cluster, model, Datasheet(), step=step)


def plan_by(system: str, problem: Problem) -> Plan:
    return run(TRAINING[system], problem, {}, never, silent).result.solution


def prepare_step(*plans: Plan, step: TrainingStep = TOP_ONE_STEP, **more) -> PreparedLaunch:
    """A launch of training plans. more: workload, devices, and options of `Launch`"""
    workload = more.pop("workload", balanced_load(TOP_ONE_MODEL))
    devices = more.pop("devices", HOST)
    return prepare.prepare_training(Launch(plans, workload, TOP_ONE_MODEL, step=step, **more), devices)

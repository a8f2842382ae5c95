"""The engine of Switchyard: five nouns, what kernels return, and the exception a person reads.

Kernels, systems, simulation and launch are imported from their own modules; see the README for where things are.
"""

from engine.cluster import Cluster, Gpu, Node
from engine.errors import InputError
from engine.model import MoEModel
from engine.plan import Placement, Plan, Schedule, SendOrder
from engine.result import Result, Status
from engine.timeline import Timeline
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload

__all__ = [
    "Cluster",
    "ExpertLoad",
    "Gpu",
    "InputError",
    "MoEModel",
    "Node",
    "Placement",
    "Plan",
    "Result",
    "RoutingTrace",
    "Schedule",
    "SendOrder",
    "Status",
    "Timeline",
    "TrafficMatrix",
    "Workload",
]

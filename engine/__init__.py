"""The engine of Switchyard: five nouns, and what turns recordings of them into plans, predictions and launches.

What it is made of, from the top floor to the ground. A floor imports from those below it, never from its own or from one
above; `tests/test_architecture.py` reads this list and holds every import against it.

    cli: the command line, one file a group of commands
    jobs: long work as a subprocess and a folder
    launch: a plan as a real `torch.distributed` job, measured beside its prediction
    studies: how far a plan can be trusted, and what would change it
    reproduce: the papers' own examples and tables, one file a paper
    systems: recipes over the kernels under the names that users know
    solve: one kernel on its bare problem
    validate: is this legal, and what is it worth; knows no optimiser
    store: recordings, documents and sessions as files, the team's work in a database
    simulate: the door to what a plan takes, whatever its goal
    formats: one module an outside format, both ways
    problem: what every system plans for
    costs: how long computation and communication take, from sources that each have a name
    communication, placement, overlap: the kernels: an instance and options in, a `Result` with a bound out
    catalogue, network, plan, routing_recorder, training: the nouns that build on others
    model, timeline: the model, and what happened when
    cluster, workload: the hardware, and what was recorded on it
    parallel: the points of a study side by side, in processes or on a Dask cluster, and a pool for single questions
    solver: CP-SAT that can be stopped
    result: what kernels return
    columns, schema: how documents are checked and saved
    errors, files, goal, units: the ground
"""

import os

# Read when NumPy is loaded. Matrices here are many and small, and the threads of its BLAS wait for one another in busy loops:
# 58 products of 64 x 256 x 64 took 1.9 s instead of 0.01 s on two cores with other work. The studio is started with it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

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

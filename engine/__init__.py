"""The engine of Switchyard: five nouns, and what turns recordings of them into plans, predictions and launches.

What it is made of, from the top floor to the ground. A floor imports from those below it, never from its own or from one
above; `tests/test_architecture.py` reads this list and holds every import against it.

    cli: the command line, one file a group of commands
    upkeep: what keeps a studio in service: room on the disk, what may go, backups, health
    jobs: long work as a subprocess and a folder
    launch: a plan as a real `torch.distributed` job, measured beside its prediction
    verdict: whether a plan is worth it, from what it gains on what it was not made from
    studies: how far a plan can be trusted, and what would change it
    reproduce: the papers' own examples and tables, one file a paper
    systems: recipes over the kernels under the names that users know
    solve: one kernel on its bare problem
    validate: is this legal, and what is it worth; knows no optimiser
    store: recordings, documents and sessions as files, the team's work in a database
    simulate: the door to what a plan takes, whatever its goal
    recording: where a recording comes from: a guide to every engine, and recording from a running server
    formats: one module an outside format, both ways
    serving: a whole step of serving: its operators beside the MoE layers, memory, and what people ask of it
    problem: what every system plans for
    copies: which copy of an expert serves each token
    costs: how long computation and communication take, from sources that each have a name
    communication, placement, overlap: the kernels: an instance and options in, a `Result` with a bound out
    balance, catalogue, network, plan, routing_recorder, training: the nouns that build on others
    model, timeline: the model, and what happened when
    cluster, workload: the hardware, and what was recorded on it
    efficiency: what part of its rate a port reaches
    parallel: the points of a study side by side, in processes or on a Dask cluster, and a pool for single questions
    solver: CP-SAT that can be stopped
    result: what kernels return
    finding: what is known of a recording beside its numbers
    columns, ranges, schema: how documents are checked and saved
    finite: numbers leave as finite ones or not at all
    data_folder: where everything is kept
    webhook: another service is told what happened
    errors, files, goal, logs, units: the ground
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

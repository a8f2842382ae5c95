"""The engine of Switchyard: five nouns, and the code that turns recordings of them into plans, predictions and launches.

Nine floors, from the command line to the ground. A part imports from its own floor and from those below, never from above, and
no two parts import each other in a circle; `tests/test_architecture.py` reads this list and holds every import against it.

    9 cli: the command line, one file a group of commands
    8 jobs, upkeep: long work as a subprocess and a folder; disk space, backups and health of a studio
    7 compare, launch, reproduce, sizing, solve, store, validate: judgement of plans and clusters, plans as real jobs, and doors
    6 systems, recording: recipes over the kernels under the names that users know; recordings from running servers
    5 simulate, formats, runtime: the timeline of a plan; one module an outside format, both ways; planned layers on a rank
    4 problem, provenance, costs, serving: the input of every system, and how long each thing takes, from named sources
    3 placement, communication, overlap: the kernels: an instance and limits in, a `Result` with a bound out
    2 catalogue, cluster, model, network, plan, routing_recorder, timeline, training, workload: the nouns
    1 errors, files, goal, logs, parallel, program, result, schema, solver, units, webhook: the ground
"""

import os

# Read when NumPy is loaded. Matrices here are many and small, and the threads of its BLAS wait for one another in busy loops:
# 58 products of 64 x 256 x 64 took 1.9 s instead of 0.01 s on two cores with other work. The studio is started with it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

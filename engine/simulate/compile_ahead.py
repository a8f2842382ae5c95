"""Compile the simulation ahead of its first run: `python -m engine.simulate.compile_ahead`, once after installing, which
compiles the placement of several experts to a GPU, of experts that follow each other or fire together, of copies for a rule of
dispatch, and the reading of lists too.

The machine code is kept in the folders of the sources, or if those cannot be written in the cache folder of the user
(numba's rule), and is compiled anew when a source changes.
"""

import numpy as np

from engine.network import Network
from engine.plan import Schedule
from engine.simulate import flows


def compile_ahead() -> None:
    """Run every compiled function once, with the types that it always has."""
    gpus = 64  # enough sends for windows
    alike, nothing = np.ones(gpus), np.zeros(gpus)
    network = Network(alike, alike, nothing, np.arange(gpus), 0.0, nothing)
    flows.all_to_all("concurrent", None, np.ones((gpus, gpus)), network)
    in_turn = Schedule(src=(0, 0), dst=(1, 2), bytes=(1.0, 1.0), phase=(0, 0))
    flows.all_to_all("sequential", in_turn, np.eye(gpus, k=1) + np.eye(gpus, k=2), network)


if __name__ == "__main__":
    # Not needed by who compiles the simulation alone.
    from engine.formats import scan_lists
    from engine.placement import best, group_loads
    from engine.placement.affinity import kernel as affinity
    from engine.placement.coactivation import kernel as coactivation
    from engine.placement.replication import by_rank

    compile_ahead()
    group_loads.compile_ahead()
    best.compile_ahead(by_rank=True)
    affinity.compile_ahead()
    coactivation.compile_ahead()
    by_rank.compile_ahead()
    scan_lists.compile_ahead()

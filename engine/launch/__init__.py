"""A plan as a real `torch.distributed` job, from what a person asks for to what its ranks measured.

`preparation.launch.Launch` is what is asked for. `preparation.prepare.prepare` says what the ranks get of it and whether that
can run, `running.run.run` runs it wherever it is to run and reads what was measured beside what was predicted. The rooms,
from the ground up; each imports only from those above it in this list:

rank: what a rank is told, runs and says: instructions, layers forward, exchanges in the plan's order, clock and events
step: a training step, as a rank runs it
places: where ranks can run: this machine's devices, a testbed of emulated links, a cluster's nodes
preparation: what is asked for, folded onto ranks and checked
results: what the ranks measured, beside the prediction
running: starting the ranks: on this machine, in a testbed, by a cluster's scheduler
calibration: measuring the attached devices as a source of costs

`worker` is the program of every rank and imports `rank` and `step` alone.
"""

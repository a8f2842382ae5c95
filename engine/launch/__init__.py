"""A plan as a real `torch.distributed` job, from a person's request to the ranks' measurements.

`preparation.launch.Launch` is the request. `preparation.prepare.prepare` folds it onto ranks and checks that it can
run, `running.run.run` runs it at its destination and reads the measured times along with the predicted ones. What a
rank sends and computes with is `engine.runtime`, which runs live models too: rows as bytes, exchanges in the plan's order,
experts and sums of their outputs. A launch knows the recording, so its ranks lay out all rows beforehand instead of
telling each other how many come, and its steps begin together, with a clock on each. The rooms,
from the ground up; each imports only from those above it in this list:

rank: instructions of a rank, layers forward, exchanges in the plan's order, clock and events
step: a training step on a rank
own: a person's own model on a rank
places: the places of ranks: this machine's devices, a testbed of emulated links, a cluster's nodes
preparation: the request, folded onto ranks and checked
results: the ranks' measurements, and the comparison with the prediction
running: starting the ranks: on this machine, in a testbed, by a cluster's scheduler
calibration: measuring the attached devices as a source of costs

`worker` is the program of every rank and imports `rank`, `step` and `own` alone.
"""

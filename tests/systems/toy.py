"""Heaviest first: each expert, the one with the most tokens before the others, to the GPU with the least to do so far."""

import numpy as np

from engine.plan import SendOrder
from engine.systems.base import Draft, System
from engine.systems.options import Options, Slots
from engine.systems.pieces import slots_of_gpu, to_placement


class ToyOptions(Options):
    slots: Slots = "even"


def toy(problem, options, stop, report):
    load, slots = problem.workload.load, slots_of_gpu(problem, options.slots)  # float64[layer, expert], int64[gpu]
    gpu_of_expert = np.zeros(load.shape, dtype=np.int64)
    for layer, tokens in enumerate(load):
        busy, free = np.zeros(len(slots)), slots.copy()
        for expert in np.argsort(-tokens, kind="stable"):
            gpu = np.where(free > 0, busy, np.inf).argmin()
            gpu_of_expert[layer, expert] = gpu
            busy[gpu] += tokens[expert]
            free[gpu] -= 1
    return Draft(to_placement(gpu_of_expert, problem), SendOrder(mode="concurrent"))


SYSTEMS = (System("toy", "Toy", "the heaviest experts first, to idle GPUs", "CONTRIBUTING.md", toy, ToyOptions),)

"""The grid of PipeMoE and a walk through its degrees part by part, against which the kernel is held."""

import numpy as np

from engine.overlap.pipeline_degree import DegreeInstance

GPUS = (16, 32, 64)


def walked(instance: DegreeInstance, parts: int) -> np.ndarray:
    """float64[layer] seconds in so many parts on one network, dispatches first: equations 9-12, all layers at once."""
    comm = instance.alpha_comm + instance.beta_comm * instance.size_comm / parts
    comp = instance.alpha_comp + instance.beta_comp * instance.size_comp / parts
    network, compute, computed = np.zeros(instance.layers), np.zeros(instance.layers), []
    for _ in range(parts):
        network = network + comm
        compute = np.maximum(compute, network) + comp
        computed.append(compute)
    for ready in computed:
        network = np.maximum(network, ready) + comm
    return network

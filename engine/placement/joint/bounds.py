"""Lower limits of the hop cost share and of the imbalance of any placement, each alone.

A placement that is good for one aim is rarely good for the other, so the weighted sum of the two limits is valid but not
tight between the extremes. A limit on moves only takes placements away, so the limits hold with it too.
"""

from weakref import WeakKeyDictionary

import numpy as np

from engine.placement.affinity.bounds import spectral
from engine.placement.joint.instance import JointInstance
from engine.result import Floats, Ints, Stop, never

_known: WeakKeyDictionary[JointInstance, tuple[Floats, Floats]] = WeakKeyDictionary()

SPECTRUM_EXPERTS = 512
"""Singular values of larger matrices take longer than a caller that wants to stop should wait."""
SAFETY = 1e-12
"""Taken off every limit, so that round-off never lifts one above a true optimum."""


def least_hop_cost_share(instance: JointInstance, worst: bool, stop: Stop = never) -> float:
    """Lower limit of the largest (`worst`) or the mean hop cost share over the workloads.

    Cost is that of all hops at the dearest price, less the savings of those that stay on the node and on the GPU; both are
    limited from above by `_most_kept`. The mean over the workloads is itself a workload, and no mean is above the largest.
    When `stop` answers True the limit is weaker. Kept for the next call with the instance.
    """
    if instance not in _known:
        share = instance.transition_share
        of_workload = _least_hops(share, instance, stop)
        of_mean = of_workload
        if instance.workloads > 1:
            of_mean = _least_hops(share.mean(axis=0, keepdims=True), instance, stop)
        if stop():
            return _least(of_workload, of_mean, worst)
        _known[instance] = of_workload, of_mean
    return _least(*_known[instance], worst)


def _least(of_workload: Floats, of_mean: Floats, worst: bool) -> float:
    apart = of_workload.max() if worst else of_workload.mean()
    return float(max(apart, of_mean[0]) - SAFETY)


def least_imbalance(instance: JointInstance, worst: bool) -> float:
    """Lower limit of the largest (`worst`) or the mean imbalance over the workloads.

    In every layer the busiest GPU has at least the mean load, rounded up where loads are whole numbers; and of the
    k P + 1 heaviest experts some GPU has k + 1, filled up with the lightest.
    """
    of_workload = _least_imbalance_of_layers(instance).mean(axis=1)
    return float((of_workload.max() if worst else of_workload.mean()) - SAFETY)


def most_balancedness(instance: JointInstance) -> Floats:
    """float64[workload]: upper limit of the balancedness, by the same reasons."""
    return (1 / (1 + _least_imbalance_of_layers(instance))).mean(axis=1) + SAFETY


def _least_imbalance_of_layers(instance: JointInstance) -> Floats:
    limit = np.zeros((instance.workloads, instance.layers))
    for workload, layer in np.ndindex(*limit.shape):
        load = instance.load[workload, layer]
        mean = load.sum() / instance.gpus
        if mean > 0:
            limit[workload, layer] = max(least_peak(load, instance.slots) / mean - 1, 0.0)
    return limit


def least_peak(load: Floats, slots: Ints) -> float:
    """Lower limit of the largest GPU load of one layer, in the unit of load float64[expert]; slots int64[gpu]."""
    used = slots[slots > 0]
    heaviest = np.sort(load)[::-1]
    average = load.sum() / len(used)
    whole = bool((load == np.floor(load)).all()) and load.sum() < 2**53
    limits = [np.ceil(average) if whole else average]
    lightest = np.concatenate([[0.0], np.cumsum(heaviest[::-1])])
    for k in range((len(load) - 1) // len(used) + 1):
        together = heaviest[k * len(used) - k : k * len(used) + 1].sum()
        company = max(int(used.min()) - k - 1, 0)
        limits.append(together + lightest[company])
    return float(max(limits))


def _least_hops(share: Floats, instance: JointInstance, stop: Stop) -> Floats:
    """Lower limit of the hop cost share, float64[workload], for shares [workload, layer - 1, expert, expert]."""
    total = share.sum(axis=(1, 2, 3))
    on_gpu = _most_kept(share, instance.slots, stop)
    if instance.flat:
        return total - on_gpu
    of_node = instance.slots.reshape(-1, instance.gpus_per_node).sum(axis=1)
    inside = instance.cost_gpu / instance.cost_node
    return total - (1 - inside) * _most_kept(share, of_node, stop) - inside * on_gpu


def _most_kept(share: Floats, slots: Ints, stop: Stop) -> Floats:
    """float64[workload]: upper limit of the share kept in groups of `slots` experts per layer.

    It is the least of three a layer pair: an expert keeps at most its heaviest successors, or predecessors, that fit its
    group; and the trace of the product with the same-group matrix, which has the group sizes as singular values (von
    Neumann). With equal groups one of them belongs to the constant vector on both sides, which splits the mean off.
    """
    fit = int(slots.max(initial=0))
    experts = share.shape[-1]
    alike = bool((slots == fit).all())
    most = np.zeros(len(share))
    for workload, pair in np.ndindex(*share.shape[:2]):
        tokens = share[workload, pair]
        spectrum = experts <= SPECTRUM_EXPERTS and not stop()
        if alike and spectrum:
            most[workload] += spectral(tokens, len(slots))
            continue
        kept = min(np.sort(lines, axis=1)[:, experts - fit :].sum() for lines in (tokens, tokens.T))
        if spectrum:
            kept = min(kept, np.linalg.svd(tokens, compute_uv=False)[: len(slots)] @ np.sort(slots)[::-1][:experts])
        most[workload] += kept
    return most

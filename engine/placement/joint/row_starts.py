"""Where a search for few rows and even load begins, and how few rows there can be: what `coactivation` finds and proves."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from engine.placement.coactivation import CoactivationInstance, coactivation
from engine.placement.joint.rows import RowsInstance
from engine.result import Stop, never

CAP = 1.05
"""Load of the busiest GPU, against the mean, under which a placement to begin from is looked for. One gets all the time: with
three caps the searches ended 0.5 % higher on recorded tokens."""
BOUND_SHARE = 0.5
"""Part of the time for the bounds."""


def with_starts(
    instance: RowsInstance, time_limit: float, seed: int = 0, stop: Stop = never
) -> tuple[RowsInstance, tuple[NDArray[np.int64], ...]]:
    """(the instance with `least_rows`, placements int64[layer, expert] to begin from), in so many wall seconds.

    Bounds are of every recording alone, without a cap, so that they hold of every placement, and a placement comes with each;
    another is of all recordings' tokens together, under a cap on load.
    """
    known = [recording for recording in instance.recordings if recording.experts.shape[1]]
    least, places = np.zeros(instance.workloads), []
    for workload, recording in enumerate(instance.recordings):
        if recording.experts.shape[1]:
            uncapped = replace(recording, cap=None)
            result = coactivation(uncapped, BOUND_SHARE * time_limit / len(known), seed, stop=stop)
            least[workload] = result.bound
            places.append(result.solution)
    together = replace(_together(known), cap=CAP)
    places.append(coactivation(together, (1 - BOUND_SHARE) * time_limit, seed, exact=False, stop=stop).solution)
    return replace(instance, least_rows=least), tuple(places)


def _together(recordings: list[CoactivationInstance]) -> CoactivationInstance:
    """One recording of the tokens of all."""
    most = max(recording.experts.shape[2] for recording in recordings)
    experts = [
        np.pad(each.experts, ((0, 0), (0, 0), (0, most - each.experts.shape[2])), constant_values=-1)
        for each in recordings
    ]
    source = np.concatenate([each.source_gpu for each in recordings])
    return replace(recordings[0], experts=np.concatenate(experts, axis=1), source_gpu=source)

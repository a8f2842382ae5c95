"""Events of a simulation, collected as columns."""

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from engine.simulate.flows import Flows
from engine.timeline import COLUMNS, KINDS, STREAMS

STREAM, KIND = pd.CategoricalDtype(list(STREAMS)), pd.CategoricalDtype(list(KINDS))
"""Made once: a type is checked for doubles whenever it is made."""


class EventLog:
    """Collects events; every method returns when its step is over on all GPUs."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def compute(
        self, kind: str, layer: int, start: float | NDArray[np.float64], seconds: NDArray[np.float64], model: int = 0
    ) -> float:
        """A computation on every GPU. start: of all, or float64[gpu]; seconds: float64[gpu], 0 = none."""
        gpu = np.flatnonzero(seconds > 0)
        start = np.broadcast_to(start, seconds.shape)
        end, nobody, nothing = start + seconds, np.full(len(gpu), -1), np.zeros(len(gpu))
        self._add("compute", kind, layer, model, gpu, start[gpu], end[gpu], nobody, nothing)
        return float(end.max())

    def network(self, kind: str, layer: int, start: float, flows: Flows, model: int = 0) -> float:
        """The sends of an all-to-all, on the lane of their sender; the times of the flows count from `start`."""
        begin, end = start + flows.start, start + flows.end
        self._add("network", kind, layer, model, flows.src, begin, end, flows.dst, flows.bytes)
        return start + flows.seconds

    def _add(self, stream: str, kind: str, layer: int, model: int, resource, start, end, peer, size) -> None:
        same = {"stream": STREAMS.index(stream), "kind": KINDS.index(kind), "layer": layer, "model": model}
        part = {name: np.full(len(resource), value) for name, value in same.items()}
        self._parts.append(part | {"resource": resource, "start": start, "end": end, "peer": peer, "bytes": size})

    def frame(self) -> pd.DataFrame:
        """All events, with the columns of `Timeline.events`."""
        columns = {name: np.concatenate([part[name] for part in self._parts]) for name in COLUMNS}
        columns["stream"] = pd.Categorical.from_codes(columns["stream"], dtype=STREAM)
        columns["kind"] = pd.Categorical.from_codes(columns["kind"], dtype=KIND)
        return pd.DataFrame(columns)

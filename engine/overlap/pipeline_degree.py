"""The number of parts into which an MoE layer's tokens are cut so that its all-to-alls hide behind its experts: exact.

PipeMoE sections III and IV. Part i is dispatched (D_i), computed (E_i) and combined (C_i); more parts overlap more, but
every part pays its start-up times again. Equations 9-12 say when parts start, equation 13 and 16 how long they take. All
parts of a layer are equal, so each schedule has a longest path that can be written down; with d, e and c the times of one
part and r parts it is

* two network streams (equations 9-12 to the letter, where C_1 never waits for D_r): d + e + c + (r - 1) max(d, e, c);
* one network stream, all dispatches first (as equations 19, 25, 33 and 40 mean it): the larger of that and r (d + c).
  Each term also bounds every other order of a single network, so no interleaving is faster;
* one network stream, interleaved as D_1 D_2 C_1 D_3 C_2 ... D_r C_(r-1) C_r: for r >= 2 the larger of d + r e + c and
  r (d + c) + max(0, e - d) + max(0, e - c). A path that leaves the network for E_i ... E_j saves as many pairs of D and C,
  except at the first and the last part, where one of the pair does not exist.
"""

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from engine.errors import InputError
from engine.result import Floats, Ints, Result, Status, Stop, never, result_of

Streams = Literal[1, 2]
Order = Literal["dispatch-first", "interleaved"]

MOST_PARTS = 100_000
"""Parts beyond any batch: a slip of the keyboard is answered before it takes all memory."""

TIE = 1e-12
"""Times this close, relatively, differ by rounding only: of such degrees the smallest is taken."""

BLOCK = 1 << 20
"""Degrees looked at between two questions whether to stop; memory is needed for as many."""


@dataclass(frozen=True)
class DegreeInstance:
    """MoE layers with parts that take times on straight lines: alpha + beta · size / parts (equations 13-18).

    alpha_comm, beta_comm, size_comm: float64[layer], of one all-to-all, dispatch and combine alike: start-up seconds,
        seconds per unit and units of the whole layer
    alpha_comp, beta_comp, size_comp: float64[layer], the same of the experts. All are finite and at least 0. A part of
        size 0 still takes its alpha, as the equations say.
    max_degree: int64[layer], the most parts. Scalars are taken for every layer.
    streams: 1, dispatch and combine share the network; 2, each has its own
    order: of a single network (see above)

    Raises InputError for a wrong shape or value, and where the times would overflow.
    """

    alpha_comm: Floats
    beta_comm: Floats
    size_comm: Floats
    alpha_comp: Floats
    beta_comp: Floats
    size_comp: Floats
    max_degree: Ints
    streams: Streams = 1
    order: Order = "dispatch-first"

    def __post_init__(self) -> None:
        numbers = ("alpha_comm", "beta_comm", "size_comm", "alpha_comp", "beta_comp", "size_comp")
        values = [np.asarray(getattr(self, name), dtype=np.float64) for name in numbers]
        shapes = {value.shape for value in (*values, np.asarray(self.max_degree)) if value.ndim}
        shape = shapes.pop() if shapes else (1,)
        if shapes or len(shape) != 1 or not shape[0]:
            raise InputError("a pipeline needs one number per layer (or one for all) under each name, at least one layer")
        for name, value in zip(numbers, values, strict=True):
            if not np.isfinite(value).all() or value.min() < 0:
                raise InputError(f"{name}: every value must be finite and at least 0")
            object.__setattr__(self, name, np.broadcast_to(value, shape))
        most = np.asarray(self.max_degree)
        if not np.issubdtype(most.dtype, np.integer) or most.min() < 1 or most.max() > MOST_PARTS:
            raise InputError(f"max_degree: every value must be a whole number from 1 to {MOST_PARTS}")
        object.__setattr__(self, "max_degree", np.broadcast_to(most.astype(np.int64), shape))
        _check_streams(self.streams, self.order)
        with np.errstate(over="ignore", invalid="ignore"):
            _check_sum([2 * part[:, 0] for part in self.parts(slice(None), 1)], self.max_degree)

    @property
    def layers(self) -> int:
        return len(self.max_degree)

    def parts(self, layers: slice, degrees: int) -> tuple[Floats, Floats]:
        """Seconds of one part (of an all-to-all, of the experts), float64[layer, degrees] each, cut in 1, 2, … parts."""
        cut = np.arange(1, degrees + 1)
        comm = self.alpha_comm[layers, None] + (self.beta_comm * self.size_comm)[layers, None] / cut
        return comm, self.alpha_comp[layers, None] + (self.beta_comp * self.size_comp)[layers, None] / cut

    def time_of_degree(self, layers: slice = slice(None)) -> Floats:
        """float64[layer, most parts] seconds of the chosen layers cut in 1, 2, … parts; infinite above `max_degree`."""
        most = self.max_degree[layers]
        comm, comp = self.parts(layers, int(most.max()))
        seconds = pipeline_seconds(comm, comp, comm, self.streams, self.order)
        return np.where(np.arange(1, seconds.shape[1] + 1) <= most[:, None], seconds, np.inf)

    def limit(self) -> Floats:
        """float64[layer] seconds below which no cut goes, equal or unequal, in however many parts, in any order.

        A first dispatch starts up before any expert works, a last part is computed and combined after all dispatches, and
        a single network does one thing at a time.
        """
        comm, comp = self.beta_comm * self.size_comm, self.beta_comp * self.size_comp
        limit = 2 * self.alpha_comm + self.alpha_comp + np.maximum(comm, comp)
        return np.maximum(limit, 2 * (self.alpha_comm + comm)) if self.streams == 1 else limit


def pipeline_seconds(
    dispatch: Floats, experts: Floats, combine: Floats, streams: Streams = 1, order: Order = "dispatch-first"
) -> Floats:
    """float64[..., K]: seconds of a layer cut in 1 … K equal parts, from its first dispatch to its last combine.

    dispatch, experts, combine: float64[..., K], seconds of **one part** when the layer is cut in 1 … K parts; finite and
        at least 0
    streams, order: as in `DegreeInstance`
    """
    d, e, c = (np.asarray(part, dtype=np.float64) for part in (dispatch, experts, combine))
    r = np.arange(1, d.shape[-1] + 1)
    alone = d + e + c
    if streams == 1 and order == "interleaved":
        network = r * (d + c) + np.maximum(e - d, 0.0) + np.maximum(e - c, 0.0)
        return np.where(r == 1, alone, np.maximum(d + r * e + c, network))
    seconds = alone + (r - 1) * np.maximum(np.maximum(d, e), c)
    return np.maximum(seconds, r * (d + c)) if streams == 1 else seconds


def pipeline_degree(instance: DegreeInstance, stop: Stop = never) -> Result[Ints]:
    """The number of parts of every layer that takes least time, proven; `solution` is int64[layer].

    Of degrees that take equally long the smallest. `objective` is the sum over the layers in seconds; `bound` is of cuts
    in at most `max_degree` equal parts. When `stop` answers True the status is CANCELLED: layers not looked at yet stay
    whole, and the bound has `DegreeInstance.limit` for them.
    """
    start = time.perf_counter()
    degree = np.ones(instance.layers, dtype=np.int64)
    limit = instance.limit()
    comm, comp = instance.parts(slice(None), 1)
    seconds = pipeline_seconds(comm, comp, comm, instance.streams, instance.order)[:, 0]
    least = np.minimum(limit, seconds)
    rows = max(1, BLOCK // int(instance.max_degree.max()))
    cancelled = False
    for first in range(0, instance.layers, rows):
        if cancelled := stop():
            break
        block = slice(first, first + rows)
        degree[block], seconds[block], least[block] = _smallest(instance.time_of_degree(block))
    return _result("pipeline-degree", start, degree, seconds, least, cancelled)


def best_degree(
    dispatch: Floats, experts: Floats, combine: Floats, streams: Streams = 1, order: Order = "dispatch-first"
) -> Result[Ints]:
    """As `pipeline_degree` for parts with times on no straight lines, or with a dispatch unlike the combine.

    dispatch, experts, combine: float64[layer, K], seconds of **one part** when the layer is cut in 1 … K parts; at least
        0, infinite where it cannot be cut so, finite for one part

    Raises InputError for a wrong shape or value.
    """
    start = time.perf_counter()
    _check_streams(streams, order)
    parts = {"dispatch": dispatch, "experts": experts, "combine": combine}
    parts = {name: np.asarray(value, dtype=np.float64) for name, value in parts.items()}
    for name, value in parts.items():
        if value.ndim != 2 or not value.size or value.shape != parts["dispatch"].shape:
            raise InputError(f"{name}: shape {value.shape}; wanted a table [layer, parts] as large as dispatch, not empty")
        if np.isnan(value).any() or value.min() < 0 or not np.isfinite(value[:, 0]).all():
            raise InputError(f"{name}: every value must be at least 0, and finite for one part")
    possible = np.logical_and.reduce([np.isfinite(value) for value in parts.values()])
    finite = [np.where(possible, value, 0.0) for value in parts.values()]
    with np.errstate(over="ignore"):
        _check_sum([2 * value.max(axis=1) for value in finite], possible.shape[1])
    seconds = np.where(possible, pipeline_seconds(*finite, streams, order), np.inf)
    return _result("best-degree", start, *_smallest(seconds), cancelled=False)


def _check_streams(streams: int, order: str) -> None:
    if streams not in (1, 2):
        raise InputError(f"streams: must be 1 or 2, not {streams}")
    if order not in ("dispatch-first", "interleaved"):
        raise InputError(f"order: must be 'dispatch-first' or 'interleaved', not '{order}'")
    if streams == 2 and order != "dispatch-first":
        raise InputError("order: dispatch and combine wait for each other on one network stream only; set streams to 1")


def _check_sum(part: list[Floats], most: Ints | int) -> None:
    """Raises InputError unless `most` parts of all kinds of all layers, float64[layer] seconds each, are finite."""
    if not np.isfinite((sum(part) * most).sum()):
        raise InputError("the times are too large to be added up; give them in seconds, and sizes in the unit of beta")


def _smallest(seconds: Floats) -> tuple[Ints, Floats, Floats]:
    """The best degree of every layer, its seconds and the least seconds, which rounding may have put at another degree."""
    least = seconds.min(axis=1)
    column = (seconds <= least[:, None] * (1 + TIE)).argmax(axis=1)
    return column + 1, seconds[np.arange(len(seconds)), column], least


def _result(optimiser: str, start: float, degree: Ints, seconds: Floats, least: Floats, cancelled: bool) -> Result[Ints]:
    status = Status.CANCELLED if cancelled else Status.OPTIMAL
    return result_of(optimiser, start, status, float(seconds.sum()), float(least.sum()), degree)

"""t = α + β·size: a start-up time and a time per unit, fitted to measurements (PipeMoE §IV-A, §V-B)."""

from dataclasses import dataclass

import numpy as np
from pydantic import Field, model_validator

from engine.cluster import Cluster, Gpu
from engine.costs.base import CostModel, with_measured
from engine.errors import InputError
from engine.model import MoEModel
from engine.network import Network
from engine.schema import Frozen, StartUp
from engine.units import share


class Line(Frozen):
    """seconds = alpha + beta · size. `error` is the mean relative error of the fit on its own points."""

    alpha: StartUp
    beta: float = Field(ge=0, le=1e6)
    error: float = Field(default=0, ge=0)

    def seconds(self, size: np.ndarray) -> np.ndarray:
        """float64[...]: time of work of `size` (float64[...]); no work takes no time."""
        size = np.asarray(size, dtype=np.float64)
        return np.where(size > 0, self.alpha + self.beta * size, 0.0)


def fit_line(size: np.ndarray, seconds: np.ndarray) -> Line:
    """The line through measured points that is best in relative error, with neither coefficient negative.

    Relative, because sizes span decades and an absolute fit would only see the largest. Raises InputError for fewer than two
    different sizes, and for times with an infinite inverse.

    size: float64[point]
    seconds: float64[point] > 0
    """
    size, seconds = np.asarray(size, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if len(np.unique(size)) < 2:
        raise InputError("all measurements are of one size, which tells no start-up and no rate; measure at least two sizes")
    scale = size.max()
    with np.errstate(over="ignore"):
        terms = np.column_stack([1 / seconds, size / scale / seconds])
    if not np.isfinite(terms).all():
        raise InputError(f"{seconds.min():g} s is too short for a measured time")
    largest = terms.max(axis=0)
    terms /= largest
    alpha, beta = np.linalg.lstsq(terms, np.ones(len(size)))[0]
    if min(alpha, beta) < 0:  # then one of the best two is 0, as the error is convex
        alone = np.diag(terms.sum(axis=0) / (terms**2).sum(axis=0))
        alpha, beta = min(alone, key=lambda pair: ((terms @ pair - 1) ** 2).sum())
    line = Line(alpha=alpha / largest[0], beta=beta / largest[1] / scale)
    return line.model_copy(update={"error": float(np.mean(np.abs(line.seconds(size) / seconds - 1)))})


class CostProfile(Frozen):
    """Fitted lines of one kind of machine.

    With more ranks than processors the lines contain waiting, which `AlphaBeta` takes out again and adds when ranks really
    meet.

    gemm: over m·n·k, by GPU type
    gate: likewise for the router, with a softmax after its narrow GEMM; absent: as `gemm`
    memory: over bytes, by GPU type; no type at all: the datasheet counts
    network: over the bytes that one rank sends to the others while all ranks send; absent: the drawn bandwidths count
    all_reduce: over the bytes of the buffer, on `ranks` ranks; absent, or for another number of GPUs: a ring or tree on the
        network
    ranks, cores: that many ranks worked at once on that many processors while the lines were measured
    """

    name: str = Field(min_length=1, max_length=80)
    origin: str = Field(min_length=1, description="where and when it was measured")
    gemm: dict[str, Line] = Field(default_factory=dict)
    gate: dict[str, Line] = Field(default_factory=dict)
    memory: dict[str, Line] = Field(default_factory=dict)
    network: Line | None = None
    all_reduce: Line | None = None
    ranks: int = Field(default=1, ge=1)
    cores: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _has_lines(self) -> "CostProfile":
        if not self.gemm and self.network is None:
            raise ValueError("a profile needs lines of GEMMs (gemm), of the network (network) or of both")
        return self

    @property
    def lines(self) -> tuple[Line, ...]:
        """All lines."""
        tables = (self.gemm, self.gate, self.memory)
        lines = [line for table in tables for line in table.values()]
        return (*lines, *(line for line in (self.network, self.all_reduce) if line is not None))

    @property
    def alone(self) -> float:
        """Part of a line's time that is left for a rank with a processor of its own."""
        return min(1.0, self.cores / self.ranks)


@dataclass(frozen=True)
class AlphaBeta(CostModel):
    """Costs from a fitted profile."""

    profile: CostProfile

    @property
    def digest(self) -> str:
        return self.profile.digest

    @property
    def source(self) -> str:
        worst = max(line.error for line in self.profile.lines)
        rest = [] if self.profile.memory or not self.profile.gemm else ["memory by the datasheet"]
        rest += [] if self.profile.network else ["network as drawn"]
        fitted = f"α–β profile {self.profile.name} ({self.profile.origin}); fit error up to {share(worst)}"
        return "; ".join([fitted, *rest])

    def lacks_computation(self, cluster: Cluster) -> str | None:
        missing = sorted({gpu.type for gpu in cluster.gpus} - set(self.profile.gemm))
        if not missing:
            return None
        known = f"it has {', '.join(sorted(self.profile.gemm))}" if self.profile.gemm else "it has no GEMM times at all"
        return f"the cost profile {self.profile.name} has no times for {', '.join(missing)} ({known})"

    def _line(self, table: dict[str, Line], gpu: Gpu) -> Line:
        if gpu.type not in table:
            raise InputError(
                f"the cost profile {self.profile.name} has no times for {gpu.type} (it has {', '.join(sorted(table))}); "
                "use the datasheet costs or a profile measured on that GPU"
            )
        return table[gpu.type]

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        work = np.asarray(m, dtype=np.float64) * n * k
        return self._line(self.profile.gemm, gpu).seconds(work) * self.profile.alone

    def gate(self, gpu: Gpu, tokens: np.ndarray, model: MoEModel) -> np.ndarray:
        if not self.profile.gate:
            return super().gate(gpu, tokens, model)
        work = np.asarray(tokens, dtype=np.float64) * model.experts * model.d_model
        return self._line(self.profile.gate, gpu).seconds(work) * self.profile.alone

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        if not self.profile.memory:
            return super().memory_pass(gpu, size)
        return self._line(self.profile.memory, gpu).seconds(size) * self.profile.alone

    def together(self, seconds: np.ndarray) -> np.ndarray:
        """Processor sharing: while more ranks compute than there are processors, all get an equal part of them."""
        if self.profile.cores >= self.profile.ranks:
            return seconds
        order = np.argsort(seconds, axis=-1)
        ascending = np.take_along_axis(seconds, order, axis=-1)
        steps = np.diff(ascending, axis=-1, prepend=0.0)
        at_work = seconds.shape[-1] - np.arange(seconds.shape[-1])
        ends = np.cumsum(steps * np.maximum(1.0, at_work / self.profile.cores), axis=-1)
        shared = np.empty_like(seconds)
        np.put_along_axis(shared, order, ends, axis=-1)
        return shared

    def network(self, cluster: Cluster) -> Network:
        network = Network.of(cluster)
        if self.profile.network is None:
            return network
        return with_measured(network, self.profile.network.alpha, self.profile.network.beta)

    def all_reduce(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        if self.profile.all_reduce is None or len(cluster.gpus) != self.profile.ranks:
            return super().all_reduce(cluster, size)
        return self.profile.all_reduce.seconds(size)

"""Times read off measurements, with straight lines between the measured sizes (Lancet §3)."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.cluster import Cluster, Gpu
from engine.costs.alpha_beta import Line, fit_line
from engine.costs.base import CostModel, with_measured
from engine.costs.gemm_table import REACH, Curve, GemmTable
from engine.costs.measured import MeasuredTimes, medians, sent_line
from engine.errors import InputError
from engine.network import Network


@dataclass(frozen=True)
class Profiled(CostModel):
    """Costs from measured times.

    GEMMs measured on a grid of m, n and k, as `calibrate` does, are interpolated there (`engine.costs.gemm_table`). Others
    lie on curves over m, one a shape (n, k) of which two or more m were measured. A shape without one takes the curve of the
    nearest that has one (in the logarithms of n and k), with all of it but the shortest time ever measured, taken to be
    start-up, scaled by n·k: both arithmetic and weights grow so. Without any curve, a line fitted over m·n·k counts.

    Uneven all-to-alls run on a network of the bandwidth and start-up that the measured uniform one had.
    """

    measured: MeasuredTimes

    @property
    def digest(self) -> str:
        return self.measured.digest

    @property
    def source(self) -> str:
        parts = [f"measured times {self.measured.name} ({self.measured.origin}), linear between sizes"]
        if self.measured.gemm and not self.measured.memory:
            parts.append("memory by the datasheet")
        if self.measured.ranks_of("all_to_all"):
            even = [times for times in self.measured.collectives if times.operation == "all_to_all"]
            error = max(sent_line(times).error for times in even)
            parts.append(f"uneven all-to-alls by a line fitted to the even ones (error up to {error:.0%})")
            if not self.measured.ranks_of("all_reduce"):
                parts.append("all-reduce as a ring or tree on that network")
        return "; ".join(parts)

    def lacks_computation(self, cluster: Cluster) -> str | None:
        known = {gemm.gpu for gemm in self.measured.gemm}
        missing = sorted({gpu.type for gpu in cluster.gpus} - known)
        if not missing:
            return None
        has = f"it has {', '.join(sorted(known))}" if known else "it has no GEMM times at all"
        return f"{self.measured.name} has no times for {', '.join(missing)} ({has})"

    def lacks_network(self, cluster: Cluster) -> str | None:
        gpus, known = len(cluster.gpus), self.measured.ranks_of("all_to_all")
        if gpus == 1 or gpus in known:
            return None
        has = f"it has {', '.join(map(str, known))}" if known else "it has no all-to-all at all"
        return f"{self.measured.name} has no all-to-all over {gpus} GPUs ({has})"

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        m = np.asarray(m, dtype=np.float64)
        known = self._gemm_of(gpu, dtype)
        if (table := known.table) is not None:
            if m.max(initial=0) > REACH * table.m[-1]:
                raise InputError(
                    f"{self.measured.name}: GEMMs of {dtype} on {gpu.type} were measured up to m = {table.m[-1]:.3g} and "
                    f"{m.max():.3g} is asked for, more than {REACH:g} times that; measure larger ones, or use the datasheet or "
                    "an α–β profile for computation"
                )
            return table.over_rows(table.of_shape(n, k), m)
        if not known.curves:
            return known.line.seconds(m * n * k)
        near_n, near_k = known.nearest(n, k)
        what = f"{self.measured.name}: a GEMM of {dtype} on {gpu.type} with n = {near_n:g} and k = {near_k:g}"
        seconds = known.curves[near_n, near_k].at(m, what)
        scaled = known.start_up + (seconds - known.start_up) * (n * k / (near_n * near_k))
        return np.where(m > 0, scaled, 0.0)

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        if not self.measured.memory:
            return super().memory_pass(gpu, size)
        if gpu.type not in self._memory:
            raise InputError(f"{self.measured.name} has no memory times for {gpu.type}; measure them, or use the datasheet")
        return self._memory[gpu.type].at(size, f"{self.measured.name}: memory of {gpu.type}")

    def network(self, cluster: Cluster) -> Network:
        if reason := self.lacks_network(cluster):
            raise InputError(f"{reason}; add the datasheet or a measurement over as many GPUs as a source of the network")
        times = self.measured.collective("all_to_all", len(cluster.gpus))
        drawn = Network.of(cluster)
        if times is None:
            return drawn
        line = sent_line(times)
        return with_measured(drawn, line.alpha, line.beta)

    def all_to_all(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return self._collective("all_to_all", cluster, size, super().all_to_all)

    def all_reduce(self, cluster: Cluster, size: np.ndarray) -> np.ndarray:
        return self._collective("all_reduce", cluster, size, super().all_reduce)

    def _collective(self, operation: str, cluster: Cluster, size: np.ndarray, otherwise) -> np.ndarray:
        ranks = len(cluster.gpus)
        if (operation, ranks) not in self._collectives:
            return otherwise(cluster, size)
        what = f"{self.measured.name}: {operation.replace('_', '-')} over {ranks} GPUs"
        return self._collectives[operation, ranks].at(size, what)

    @cached_property
    def _collectives(self) -> dict[tuple[str, int], Curve]:
        return {(times.operation, times.ranks): Curve.through(times.points) for times in self.measured.collectives}

    @cached_property
    def _memory(self) -> dict[str, Curve]:
        return {times.gpu: Curve.through(times.points) for times in self.measured.memory}

    @cached_property
    def _gemm(self) -> dict[tuple[str, str], "_Gemms"]:
        """By GPU type and dtype."""
        return {(times.gpu, times.dtype): _Gemms(np.array(times.points)) for times in self.measured.gemm}

    def _gemm_of(self, gpu: Gpu, dtype: str) -> "_Gemms":
        alike = {"bf16": "fp16", "fp16": "bf16"}.get(dtype, dtype)
        for kind in (dtype, alike):
            if (gpu.type, kind) in self._gemm:
                return self._gemm[gpu.type, kind]
        known = ", ".join(sorted(f"{kind} on {name}" for name, kind in self._gemm)) or "none"
        raise InputError(
            f"{self.measured.name} has no GEMM times of {dtype} on {gpu.type} (it has: {known}); measure them, or use the "
            "datasheet or an α–β profile for computation"
        )


@dataclass(frozen=True, eq=False)
class _Gemms:
    """The GEMMs of one dtype on one type of GPU. points: float64[point, (m, n, k, seconds)]"""

    points: np.ndarray

    @cached_property
    def table(self) -> GemmTable | None:
        """The measured grid, None where the sizes form none."""
        return GemmTable.of(medians(self.points.tolist()))

    @cached_property
    def curves(self) -> dict[tuple[float, float], Curve]:
        """Seconds over m by shape (n, k), of the shapes with two or more m."""
        by_shape: dict[tuple[float, float], list[tuple[float, float]]] = {}
        for m, n, k, seconds in self.points.tolist():
            by_shape.setdefault((n, k), []).append((m, seconds))
        curves = {shape: Curve.through(points) for shape, points in by_shape.items()}
        return {shape: curve for shape, curve in curves.items() if len(curve.sizes) > 1}

    @cached_property
    def line(self) -> Line:
        """Seconds over m·n·k. Raises InputError when everything measured is of one size."""
        return fit_line(self.points[:, :3].prod(axis=1), self.points[:, 3])

    @property
    def start_up(self) -> float:
        """The shortest time measured."""
        return float(self.points[:, 3].min())

    def nearest(self, n: float, k: float) -> tuple[float, float]:
        """The shape with a curve that is nearest in the logarithms; the smallest of several."""
        if (n, k) in self.curves:
            return n, k
        shapes = np.array(sorted(self.curves))
        return tuple(shapes[np.abs(np.log(shapes / (n, k))).sum(axis=1).argmin()].tolist())

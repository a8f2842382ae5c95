"""Roofline times from the catalogue's peak rates (Williams et al., CACM 2009), with stated efficiencies."""

from dataclasses import dataclass

import numpy as np

from engine.cluster import BITS_PER_DTYPE, Gpu
from engine.costs.base import CostModel
from engine.units import share


@dataclass(frozen=True)
class Datasheet(CostModel):
    """A GEMM takes the longer of its arithmetic and its memory traffic, each at a share of the peak, plus a launch.

    The three numbers are assumptions in the range that libraries reach on large shapes, not measurements; a calibrated
    `AlphaBeta` profile replaces them.
    """

    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    launch: float = 5e-6

    @property
    def source(self) -> str:
        return (
            f"datasheet roofline: {share(self.compute_efficiency)} of peak FLOP/s, {share(self.memory_efficiency)} of memory "
            f"bandwidth, {self.launch * 1e6:g} µs per kernel (assumed)"
        )

    def gemm(self, gpu: Gpu, m: np.ndarray, n: int, k: int, dtype: str) -> np.ndarray:
        m = np.asarray(m, dtype=np.float64)
        arithmetic = 2.0 * m * n * k / (gpu.flops(dtype) * self.compute_efficiency)
        moved = (m * k + n * k + m * n) * BITS_PER_DTYPE[dtype] / 8
        memory = moved / (gpu.memory_bandwidth * self.memory_efficiency)
        return np.where(m > 0, np.maximum(arithmetic, memory) + self.launch, 0.0)

    def memory_pass(self, gpu: Gpu, size: np.ndarray) -> np.ndarray:
        size = np.asarray(size, dtype=np.float64)
        return np.where(size > 0, size / (gpu.memory_bandwidth * self.memory_efficiency) + self.launch, 0.0)

"""The file that `calibrate` writes: times measured on attached devices, their origin, and the errors of lines and
interpolation. As a source of costs it is its measured times, which lose nothing to a fit."""

from collections.abc import Mapping, Sequence
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from engine.cluster import any_gpus
from engine.costs.alpha_beta import Line, fit_line
from engine.costs.measured import CollectiveTimes, Dtype, GemmPoint, GemmTimes, MeasuredTimes, Point
from engine.costs.profiled import Profiled
from engine.schema import Frozen

Operation = Literal["gemm", "memory", "all_to_all", "exchange", "all_reduce"]


class Fit(Frozen):
    """The α–β line through the points of one operation, and the quality of points and line.

    The line's sizes are m·n·k of a GEMM, bytes moved of a pass over memory, bytes that one rank sends to the others in an
    all-to-all or to its peer in an exchange (which it also receives), and bytes of the buffer of an all-reduce.

    gpu, dtype: of a computation, absent for communication
    spread: median over the points of the distance between the quartiles of the repeats, relative to their median
    """

    operation: Operation
    gpu: str | None = None
    dtype: Dtype | None = None
    line: Line
    points: int = Field(ge=2)
    smallest: float = Field(gt=0)
    largest: float = Field(gt=0)
    spread: float = Field(ge=0)

    @property
    def rate(self) -> float | None:
        """FLOP/s or bytes/s that the line approaches; None for a line that does not rise."""
        return (2.0 if self.operation == "gemm" else 1.0) / self.line.beta if self.line.beta else None


class HeldOut(Frozen):
    """GEMMs of shapes that are not among the measured times.

    points: (m, n, k, seconds) as measured directly
    predicted: seconds that the measured times tell of the same shapes
    """

    gpu: str
    dtype: Dtype
    points: tuple[GemmPoint, ...] = Field(min_length=1)
    predicted: tuple[float, ...]

    @model_validator(mode="after")
    def _same_length(self) -> Self:
        if len(self.points) != len(self.predicted):
            raise ValueError(f"{len(self.predicted)} predictions for {len(self.points)} held-out shapes")
        return self

    @property
    def errors(self) -> np.ndarray:
        """float64[shape]: |predicted / measured - 1|."""
        return np.abs(np.array(self.predicted) / np.array(self.points)[:, 3] - 1)


class DeviceProfile(Frozen):
    """A sweep over the attached devices.

    made: its time, ISO 8601
    devices: the device of each rank, by rank
    versions: of the driver, PyTorch, CUDA …
    on: the network, "local" or the testbed's name
    exchange: (bytes one way, seconds) of ranks that trade with one peer each; its line begins at the start-up of a send
    held_out: the error of the measured times on GEMMs that are not among them
    """

    kind: Literal["calibration"] = "calibration"
    made: str = Field(min_length=1, max_length=40)
    devices: tuple[str, ...] = Field(min_length=1)
    versions: dict[str, str] = Field(default_factory=dict)
    backend: str
    on: str
    measured: MeasuredTimes
    exchange: tuple[Point, ...] = ()
    fits: tuple[Fit, ...]
    held_out: tuple[HeldOut, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @property
    def collectives(self) -> tuple[CollectiveTimes, ...]:
        """All that was sent, the sends to one peer included."""
        if not self.exchange:
            return self.measured.collectives
        traded = CollectiveTimes(operation="send_receive", ranks=self.ranks, points=self.exchange)
        return (*self.measured.collectives, traded)


def fits_of(
    measured: MeasuredTimes, exchange: Sequence[tuple[float, float]], spreads: Mapping[tuple[str, ...], float]
) -> tuple[Fit, ...]:
    """Lines through all measured points. Raises InputError when an operation was measured at one size only.

    spreads: by operation, and by its GPU type and dtype
    """
    timed = [(("gemm", times.gpu, times.dtype), times.points) for times in measured.gemm]
    timed += [(("memory", times.gpu), times.points) for times in measured.memory]
    for times in measured.collectives:
        points, ranks = np.array(times.points), times.ranks
        if times.operation == "all_to_all":
            points[:, 0] = points[:, 0] * (ranks - 1) / ranks
        timed.append(((times.operation,), points))
    timed += [(("exchange",), exchange)] if exchange else []
    fits = []
    for about, points in timed:
        *sides, seconds = np.array(points).T
        size = np.prod(sides, axis=0)
        of = dict(zip(("operation", "gpu", "dtype"), about, strict=False))
        sizes = {"points": len(size), "smallest": size.min(), "largest": size.max()}
        fits.append(Fit(**of, **sizes, line=fit_line(size, seconds), spread=spreads[about]))
    return tuple(fits)


def held_out_of(measured: MeasuredTimes, shapes: Sequence[GemmTimes]) -> tuple[HeldOut, ...]:
    """Shapes that were measured directly, with the prediction of the measured times for them."""
    cost = Profiled(measured)
    held_out = []
    for shape in shapes:
        # Only the type of a GPU is read: times come from the measurements.
        gpu = any_gpus(1).gpus[0].model_copy(update={"type": shape.gpu})
        predicted = [float(cost.gemm(gpu, m, int(n), int(k), shape.dtype)) for m, n, k, _ in shape.points]
        held_out.append(HeldOut(gpu=shape.gpu, dtype=shape.dtype, points=shape.points, predicted=predicted))
    return tuple(held_out)

"""A calibration without devices: planted lines as its measured times."""

from datetime import UTC, datetime
from itertools import product

import numpy as np

from engine.costs import CollectiveTimes, GemmTimes, Line, MeasuredTimes, MemoryTimes
from engine.costs.device_profile import DeviceProfile, fits_of, held_out_of

GEMM, MEMORY, ALL_TO_ALL = Line(alpha=4e-6, beta=2e-12), Line(alpha=3e-6, beta=1e-11), Line(alpha=2e-5, beta=3e-10)
ALL_REDUCE, EXCHANGE = Line(alpha=5e-5, beta=7e-10), Line(alpha=1e-5, beta=1e-10)
SIZES = [4.0**power * 1024 for power in range(8)]


def measured(gpu: str = "H200", ranks: int = 4, dtype: str = "bf16") -> MeasuredTimes:
    """All that a calibration measures, exactly on the planted lines."""
    grid = product((1, 16, 256, 4096), (8, 128, 2048), (128, 1024, 8192))
    sent, sizes = np.array(SIZES) * (ranks - 1) / ranks, np.array(SIZES)
    gemms = [(m, n, k, float(GEMM.seconds(m * n * k))) for m, n, k in grid]
    collectives = [
        CollectiveTimes(operation=name, ranks=ranks, points=np.stack([sizes, seconds], axis=1).tolist())
        for name, seconds in (("all_to_all", ALL_TO_ALL.seconds(sent)), ("all_reduce", ALL_REDUCE.seconds(sizes)))
        if ranks > 1
    ]
    return MeasuredTimes(
        name=f"{ranks} × {gpu}",
        origin="calibrated in a test",
        gemm=(GemmTimes(gpu=gpu, dtype=dtype, points=gemms),),
        memory=(MemoryTimes(gpu=gpu, points=np.stack([sizes, MEMORY.seconds(sizes)], axis=1).tolist()),),
        collectives=collectives,
    )


def device_profile(gpu: str = "H200", ranks: int = 4, dtype: str = "bf16") -> DeviceProfile:
    """With three held-out shapes: on the line, and a fifth faster and slower than it."""
    times = measured(gpu, ranks, dtype)
    exchange = [(size, float(EXCHANGE.seconds(size))) for size in SIZES] if ranks > 1 else []
    shapes = [(256.0, 128.0, 1024.0 * 8, 1.0), (256.0, 128.0, 1024.0 * 8, 0.8), (256.0, 128.0, 1024.0 * 8, 1.25)]
    points = [(m, n, k, factor * float(GEMM.seconds(m * n * k))) for m, n, k, factor in shapes]
    operations = ("gemm", gpu, dtype), ("memory", gpu), ("all_to_all",), ("exchange",), ("all_reduce",)
    spreads = {operation: 0.01 * (place + 1) for place, operation in enumerate(operations)}
    return DeviceProfile(
        made=datetime(2026, 1, 2, tzinfo=UTC).isoformat(),
        devices=(gpu,) * ranks,
        versions={"PyTorch": "2"},
        backend="nccl",
        on="local",
        measured=times,
        exchange=exchange,
        fits=fits_of(times, exchange, spreads),
        held_out=held_out_of(times, [GemmTimes(gpu=gpu, dtype=dtype, points=points)]),
    )

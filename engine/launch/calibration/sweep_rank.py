"""One rank of a calibration; started by torchrun with the folder as its only argument.

All ranks measure the same things at the same time, as they would work in a run: those that share processors slow each
other down. On GPUs, CUDA events give the time, and GEMMs and passes over memory are each GPU's own.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from engine.files import write_atomically
from engine.launch.calibration import sweep as sweeps
from engine.launch.rank.context import report_progress
from engine.launch.rank.instructions import writing
from engine.launch.rank.joining import joined, reporting_failure
from engine.launch.rank.settings import settle
from engine.parallel.processes import leave_with_parent
from engine.runtime.experts import TORCH_DTYPE, aggregate

ROOM = 0.4
"""Share of the free memory that may be used."""
CPU_CACHE = 2**26
"""Bytes, at least those of the caches of most processors."""
MOST_WINDOWS = 256
AGGREGATE_WIDTH, AGGREGATE_CHOICES = 1024, 4
"""d_model and experts per token of the passes over memory."""

Work = Callable[[], object]


def main(folder: Path) -> None:
    """Join the other ranks, measure, write `measured.json` (rank 0)."""
    leave_with_parent()
    with reporting_failure():
        sweep = sweeps.Sweep.from_json((folder / sweeps.REQUEST).read_text(), sweeps.REQUEST)
        settle(sweep.backend)
        rank, device = int(os.environ["RANK"]), torch.device("cpu")
        if sweep.backend == "nccl":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        with joined(sweep.backend, sweep.limit, device), torch.inference_mode():
            times = SweepRank(sweep, rank, device).measure()
        if rank == 0:
            with writing(folder):
                write_atomically(folder / sweeps.MEASURED, json.dumps(times))


class SweepRank:
    """One rank's part. Every method is called on all ranks in the same order."""

    def __init__(self, sweep: sweeps.Sweep, rank: int, device: torch.device) -> None:
        self.sweep, self.rank, self.device = sweep, rank, device
        self.on_gpu = device.type == "cuda"
        self.deadline, self.done = math.inf, 0.0
        free = torch.cuda.mem_get_info(device)[0] if self.on_gpu else psutil.virtual_memory().available / sweep.ranks
        self.room = -ROOM * self._slowest([-free])[0]  # of the rank that has least, so that all measure the same

    def measure(self) -> dict:
        """The input of `calibrate.read_measured`: points and their spreads, the computations by device."""
        computed: dict[str, list] = {}
        for dtype in self.sweep.dtypes:
            computed |= self._gemms(dtype)
        computed["memory"] = self._memory(TORCH_DTYPE[self.sweep.dtypes[0]])
        # Each kind of device's times on rank 0: medians over the ranks that have one, with their largest spread.
        everyone: list[tuple[str, dict[str, list]] | None] = [None] * self.sweep.ranks
        own = torch.cuda.get_device_name(self.device) if self.on_gpu else "CPU"
        dist.all_gather_object(everyone, (own, computed))
        names, by_device = [name for name, _ in everyone], {}
        for device in dict.fromkeys(names):
            same = [its for name, its in everyone if name == device]
            by_device[device] = {part: _merged([its[part] for its in same]) for part in same[0]}
        times: dict = {"computed": by_device, "devices": names}
        if self.sweep.ranks > 1:
            for operation in sweeps.COLLECTIVES:
                times[operation] = self._collective(operation)
        return times | {"torch": torch.__version__, "cuda": torch.version.cuda}

    def _gemms(self, dtype: str) -> dict[str, list]:
        """GEMMs of one dtype: {"gemm DTYPE": [[m, n, k, seconds, spread], ...], "held out DTYPE": the same}."""
        torch_dtype, share = TORCH_DTYPE[dtype], 1 / len(self.sweep.dtypes)
        speed = self._probe(torch_dtype)
        allowed = self.sweep.allowance("gemm") * share
        grid = sweeps.grid_for(speed, allowed, self.sweep.repeats, (self.room - self._cache) / torch_dtype.itemsize)
        gemms = _Gemms(grid, torch_dtype, self.device, self._cache, self.sweep.seed)
        self.deadline = time.monotonic() + allowed
        points, shapes = [], grid.shapes
        for at, (n, k) in enumerate(shapes):
            self._report(at / len(shapes) * allowed, f"GEMMs of {dtype}, {at + 1} of {len(shapes)} shapes")
            times = self.seconds_of([gemms.work(m, n, k) for m in grid.m], own=self.on_gpu)
            points += [[m, n, k, *seconds] for m, seconds in zip(grid.m, times, strict=True)]
        self.done += allowed
        allowed = self.sweep.allowance("held_out") * share
        self._report(0.0, f"GEMMs of {dtype} of held-out shapes")
        self.deadline = time.monotonic() + allowed
        wanted = sweeps.held_out_shapes(grid, self.sweep.held_out, self.sweep.seed)
        times = self.seconds_of([gemms.work(*shape) for shape in wanted], own=self.on_gpu)
        held_out = [[*shape, *seconds] for shape, seconds in zip(wanted, times, strict=True)]
        self.done += allowed
        return {f"gemm {dtype}": points, f"held out {dtype}": held_out}

    def _probe(self, dtype: torch.dtype) -> sweeps.Speed:
        """The slowest rank's speed, so that all ranks come to the same grid."""
        begin = time.monotonic()
        self.seconds_of([lambda: None])
        bookkeeping = time.monotonic() - begin
        start_up, each = math.inf, math.inf
        for side in sweeps.PROBES:
            cube = sweeps.Grid((side,), (side,), (side,))
            gemms = _Gemms(cube, dtype, self.device, 0, self.sweep.seed)
            ((seconds, _),) = self.seconds_of([gemms.work(side, side, side)])
            start_up, each = min(start_up, seconds), min(each, seconds / side**3)
            if seconds > sweeps.PROBE_SECONDS:
                break
        return sweeps.Speed(start_up, each, self._slowest([bookkeeping])[0])

    def _memory(self, dtype: torch.dtype) -> list[list[float]]:
        """[[bytes, seconds, spread], ...] of the sum that ends an MoE layer."""
        row = (AGGREGATE_CHOICES + 1) * AGGREGATE_WIDTH * dtype.itemsize

        def prepared(size: int) -> tuple[float, Work]:
            tokens = max(1, size // row)
            x = torch.ones((tokens, AGGREGATE_WIDTH), dtype=dtype, device=self.device)
            token = torch.arange(tokens, device=self.device).repeat(AGGREGATE_CHOICES)
            outputs, weight = x[token], torch.ones(len(token), dtype=dtype, device=self.device)
            return tokens * row, lambda: aggregate(x, outputs, weight, token)

        sizes = [size for size in sweeps.buffer_sizes() if size >= row]
        # The outputs are weighed before the sum, in memory of their own.
        return self._over_sizes("memory", "passes over memory", sizes, prepared, 2.5, self.on_gpu)

    def _collective(self, operation: str) -> list[list[float]]:
        """[[bytes, seconds, spread], ...]; bytes as in `engine.costs.device_profile.Fit`."""
        ranks, rank = self.sweep.ranks, self.rank

        def prepared(size: int) -> tuple[float, Work]:
            outgoing = torch.zeros(size // 4, device=self.device)
            incoming = torch.empty_like(outgoing)
            works: dict[str, Work] = {
                "all_to_all": lambda: dist.all_to_all_single(incoming, outgoing),
                "all_reduce": lambda: dist.all_reduce(outgoing),
                "exchange": lambda: _trade(outgoing, incoming, rank ^ 1, ranks),
            }
            return float(size), works[operation]

        # Each size in equal parts for all ranks, of whole numbers.
        sizes = sorted({max(1, size // 4 // ranks) * 4 * ranks for size in sweeps.buffer_sizes()})
        return self._over_sizes(operation, operation.replace("_", "-"), sizes, prepared, 2.0, False)

    def _over_sizes(
        self,
        part: str,
        name: str,
        sizes: Sequence[int],
        prepared: Callable[[int], tuple[float, Work]],
        memory: float,
        own: bool,
    ) -> list[list[float]]:
        """Measure ascending sizes until the part's time or the room is used up. memory: bytes needed per byte of size."""
        allowed, spent, per_byte, points = self.sweep.allowance(part), 0.0, 0.0, []
        self.deadline = time.monotonic() + allowed
        for size in sizes:
            # By times that all ranks know, so that all stop at the same size.
            expected = per_byte * size * (sweeps.WARM_UPS + self.sweep.repeats)
            enough = len(points) >= sweeps.LEAST_SIZES
            if enough and (spent + expected > allowed or size * memory > self.room):
                break
            self._report(min(spent, allowed), f"{name}, {size:,} bytes")
            moved, work = prepared(size)
            ((median, spread),) = self.seconds_of([work], own)
            points.append([moved, median, spread])
            (slowest,) = self._slowest([median])
            per_byte = slowest / size
            spent += slowest * sweeps.WARM_UPS + self.sweep.repeats * max(slowest, sweeps.BATCH_SECONDS)
        self.done += allowed
        return points

    def seconds_of(self, works: Sequence[Work], own: bool = False) -> list[tuple[float, float]]:
        """(median seconds, distance of the quartiles relative to it) of each work, all ranks at work. The slowest
        rank's time counts, unless each is to know its own."""
        first = []
        for work in works:
            work()  # loads kernels, takes memory, meets the peers
            first.append(self._elapsed(work, 1))
        *slowest, late = self._slowest([*first, float(time.monotonic() > self.deadline)])
        counts = [max(1, math.ceil(sweeps.BATCH_SECONDS / max(seconds, 1e-7))) for seconds in slowest]
        repeats = 1 if late else self.sweep.repeats
        dist.barrier()
        # Work after work and not repeat after repeat: a slow moment of the machine hits one reading of each.
        readings = [
            self._elapsed(work, count) / count for _ in range(repeats) for work, count in zip(works, counts, strict=True)
        ]
        if not own:
            readings = self._slowest(readings)
        quarter, median, rest = np.quantile(np.array(readings).reshape(repeats, len(works)), (0.25, 0.5, 0.75), axis=0)
        median = np.maximum(median, 1e-9)
        return list(zip(median.tolist(), ((rest - quarter) / median).tolist(), strict=True))

    def _elapsed(self, work: Work, times: int) -> float:
        if not self.on_gpu:
            begin = time.monotonic()
            for _ in range(times):
                work()
            return time.monotonic() - begin
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def _slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, one by one."""
        largest = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    @property
    def _cache(self) -> int:
        """Bytes that weights must exceed to come from memory, as those of a layer's experts do."""
        if not self.on_gpu:
            return CPU_CACHE
        return 2 * torch.cuda.get_device_properties(self.device).L2_cache_size

    def _report(self, more: float, message: str) -> None:
        """Report progress by the planned seconds of finished parts, and `more` seconds."""
        report_progress((self.done + more) / self.sweep.seconds, message)


class _Gemms:
    """GEMMs within a grid on numbers of its own. Every call takes other weights, one expert's after another's, so that
    they come from memory and not from a cache."""

    def __init__(self, grid: sweeps.Grid, dtype: torch.dtype, device: torch.device, cache: int, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        m, n, k = grid.m[-1], grid.n[-1], grid.k[-1]

        def random(numbers: int) -> torch.Tensor:
            return torch.randn(numbers, generator=generator, device=device, dtype=dtype)

        self.rows, self.weights = random(m * k), random(n * k + cache // dtype.itemsize)

    def work(self, m: int, n: int, k: int) -> Work:
        rows, numbers = self.rows[: m * k].view(m, k), n * k
        stride = math.ceil(numbers / 64) * 64
        windows = range(0, max(1, len(self.weights) - numbers + 1), stride)[:MOST_WINDOWS]
        weights: Iterator[torch.Tensor] = cycle([self.weights[at : at + numbers].view(k, n) for at in windows])
        return lambda: rows @ next(weights)


def _trade(outgoing: torch.Tensor, incoming: torch.Tensor, peer: int, ranks: int) -> None:
    """Swap buffers with a peer. The last of an odd number of ranks has none."""
    if peer >= ranks:
        return
    both = [dist.P2POp(dist.irecv, incoming, peer), dist.P2POp(dist.isend, outgoing, peer)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def _merged(parts: list[list[list[float]]]) -> list[list[float]]:
    """One list of points out of several of the same sizes; as many as the shortest has."""
    merged = []
    for points in zip(*parts, strict=False):
        *size, _, _ = points[0]
        merged.append([*size, float(np.median([point[-2] for point in points])), max(point[-1] for point in points)])
    return merged


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Errors of the cost sources against the measured tables: `python -m tests.benchmarks.bench_costs [GPU …]`.

Also the time of a whole table of GEMMs, and how well a size left out of the tables is met.
"""

import sys

import numpy as np

from engine.catalogue import gpu
from engine.costs import Datasheet, Silicon
from engine.costs.silicon import GEMM_DTYPES, MACHINES, gemm_table
from tests.benchmarks.shared import timed
from tests.costs.source_errors import cross_errors, left_out_errors


def main() -> None:
    print(Silicon().source)
    errors, seconds = timed(cross_errors, sys.argv[1:] or ["H100", "H200"])
    print(f"\nRelative errors ({seconds:.1f} s)")
    wide = errors.pivot(index=["gpu", "operation"], columns="source", values=["mean", "worst"])
    print(wide.map(lambda error: f"{error:.1%}" if np.isfinite(error) else "").to_string())

    print("\nGEMM sizes left out one by one: mean relative error over m, n, k")
    for kind in MACHINES:
        for dtype in ("bf16", "fp8"):
            if table := gemm_table(MACHINES[kind].folder, GEMM_DTYPES[dtype]):
                m, n, k = left_out_errors(table)
                print(f"  {kind:>8} {dtype:>5} {m:.3f} {n:.3f} {k:.3f}, mean {np.mean([m, n, k]):.3f}")

    rows = np.random.default_rng(0).uniform(0, 1000, (60, 64, 256))
    for cost in (Silicon(), Datasheet()):
        _, seconds = timed(cost.gemm, gpu("H100"), rows, 4096, 4096, "bf16")
        print(f"{rows.size} GEMMs by {type(cost).__name__}: {seconds * 1e3:.0f} ms")


if __name__ == "__main__":
    main()

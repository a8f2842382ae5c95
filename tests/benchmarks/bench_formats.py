"""How long a routing log of five million rows takes to read and check. Prints; run with
`python -m tests.benchmarks.bench_formats`."""

import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from engine.formats import check_recording, read_workload

TOKENS, LAYERS, K, EXPERTS = 40_000, 25, 5, 64


def long_table(shuffled: bool) -> pa.Table:
    """Five million rows `token, layer, expert, rank_in_topk`."""
    random = np.random.default_rng(0)
    token, layer, rank = (axis.ravel() for axis in np.indices((TOKENS, LAYERS, K)))
    first = random.integers(EXPERTS, size=(TOKENS, LAYERS, 1))
    expert = ((first + 7 * np.arange(K)) % EXPERTS).ravel()
    order = random.permutation(len(token)) if shuffled else slice(None)
    columns = {"token": token, "layer": layer, "expert": expert, "rank_in_topk": rank}
    return pa.table({name: column[order] for name, column in columns.items()})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        writers = {Path(folder, "log.csv"): pacsv.write_csv, Path(folder, "log.parquet"): pq.write_table}
        for shuffled in (False, True):
            table = long_table(shuffled)
            for path, write in writers.items():
                write(table, path)
                start = time.perf_counter()
                trace = read_workload(path)
                read = time.perf_counter() - start
                check_recording(trace)
                total = time.perf_counter() - start
                order = "shuffled" if shuffled else "sorted"
                print(
                    f"{table.num_rows / 1e6:.0f} M rows, {order:8} {path.suffix:8} "
                    f"{path.stat().st_size / 1e6:4.0f} MB: read {read:.2f} s, with checks {total:.2f} s"
                )


if __name__ == "__main__":
    main()

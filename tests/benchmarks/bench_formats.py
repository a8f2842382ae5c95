"""The time and memory of every reader of recordings: `python -m tests.benchmarks.bench_formats [ROWS [NAME …]]`.

ROWS, 1,000,000 unless said, are layers of tokens, each with its eight choices; of counts, layers of steps. A format is given
fewer where more would not be read, as the files would be too large. NAME picks the formats with it in their names. Files are
read in a process of its own that begins with nothing loaded but the readers; libraries that one of them loads are its own.
CPU seconds are of all threads, and tell more than seconds on a machine with other work.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from engine.formats import check_recording, read_workload
from engine.units import seconds, size
from engine.workload import RoutingTrace
from tests.benchmarks.recordings import LOADS, ROUTING, Recording
from tests.benchmarks.shared import columns, in_child

RECORDINGS = {recording.name: recording for recording in (*ROUTING, *LOADS)}
COLUMNS = {"": "26", "rows": "11", "files": "9", "read": "10", "CPU": "10", "rows/s": "12", "then checks": "13", "memory": "9"}


def peak() -> int:
    """The most bytes that this process held. `resource` would begin with those of the parent."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(name: str, folder: Path) -> dict[str, float]:
    """Seconds and CPU seconds to read, further seconds to check, bytes held at most while reading."""
    begin, cpu = time.perf_counter(), time.process_time()
    workload = read_workload(sorted(folder.iterdir()), **RECORDINGS[name].options)
    read, cpu, memory = time.perf_counter() - begin, time.process_time() - cpu, peak()
    check_recording(workload)
    checked = time.perf_counter() - begin - read
    rows = workload.experts.shape[0] * workload.experts.shape[1] if isinstance(workload, RoutingTrace) else 0
    return {"read": read, "cpu": cpu, "checked": checked, "memory": memory, "rows": rows}


def row_of(recording: Recording, rows: int) -> tuple[str, ...]:
    """The table's row of a format, measured in a child."""
    rows = min(rows, recording.most)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recording.write(folder, rows)
        length = sum(path.stat().st_size for path in folder.iterdir())
        answer = in_child("tests.benchmarks.bench_formats", recording.name, name)
    rows = answer["rows"] or rows
    read, cpu, checked = (seconds(answer[name]) for name in ("read", "cpu", "checked"))
    rate, memory = f"{rows / answer['read']:,.0f}", size(answer["memory"])
    return recording.name, f"{rows:,}", size(length), read, cpu, rate, checked, memory


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2], Path(sys.argv[3]))))
        return
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    row = columns(COLUMNS)
    for name, recording in RECORDINGS.items():
        if any(word in name for word in sys.argv[2:] or [""]):
            row(*row_of(recording, rows))


if __name__ == "__main__":
    main()

"""A rank of a launch that also says how much memory it took: `torchrun -m tests.launch.memory_ranks FOLDER`."""

import json
import os
import re
import sys
from pathlib import Path

from engine.launch import worker
from engine.launch.rank.context import RankContext


def resident(which: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most. `getrusage` would begin with those of the parent."""
    return 1024 * int(re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def main(folder: Path) -> None:
    """Run the rank and write `memory-RANK.json`: bytes of its process once it has joined, and at most."""
    run, joined = worker.run, []

    def noting(context: RankContext, folder: Path) -> None:
        joined.append(resident("VmRSS"))

        run(context, folder)

    worker.run = noting
    worker.main(folder)
    figures = {"joined": joined[0], "most": resident("VmHWM")}
    (folder / f"memory-{os.environ['RANK']}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

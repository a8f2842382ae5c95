"""A rank of a launch that also says how much memory it took at most: `torchrun -m tests.launch.memory_ranks FOLDER`."""

import json
import os
import re
import sys
from pathlib import Path

from engine.launch import worker


def resident(which: str) -> int:
    """Bytes of this process in memory: VmHWM at most, RssFile of files. `getrusage` would begin with those of the parent."""
    return 1024 * int(re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def main(folder: Path) -> None:
    """Run the rank and write the bytes that it had for itself, without code that it shares, at first and at most to
    `memory-RANK.json`."""
    own = [resident("VmHWM") - resident("RssFile")]
    worker.main(folder)
    own.append(resident("VmHWM") - resident("RssFile"))
    (folder / f"memory-{os.environ['RANK']}.json").write_text(json.dumps(own))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Shared by benchmarks: times, tables that are printed row by row, and DeepSeek-R1 on nodes of eight H100.

The recording is made by the studio's own generator (skew 0.6, affinity 0.3, seed 0): 16,384 tokens through 58 MoE layers of 256
experts, top-8. Nodes have links of 450 GB/s and ports of 50 GB/s.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from engine.catalogue import gpu, model_presets
from engine.cluster import Cluster, Node
from engine.compare.synthetic import Recipe

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Public recordings, where they are here."""
V2_LITE = DATA / "deepseek-v2-lite-routing.npz"
Answer = TypeVar("Answer")


def timed(work: Callable[..., Answer], *arguments: object) -> tuple[Answer, float]:
    """The answer of a function and the seconds that it took."""
    begin = time.perf_counter()
    return work(*arguments), time.perf_counter() - begin


def in_child(module: str, *words: object) -> Any:
    """The JSON that `python -m MODULE --child WORDS` prints last: of a process whose peak memory is its own."""
    command = [sys.executable, "-m", module, "--child", *map(str, words)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def columns(formats: dict[str, str], title: str = "") -> Callable[..., None]:
    """Print the heads of a table, and return a function that prints a row of it.

    formats: of each column by its head; the first is to the left, the others, texts too, to the right
    """

    def printed(values: list[object]) -> None:
        cells = [
            f"{value:{'>' if place else '<'}{(re.findall('[0-9]+', form) or [0])[0]}}"
            if isinstance(value, str)
            else f"{value:{form}}"
            for place, (value, form) in enumerate(zip(values, formats.values(), strict=True))
        ]
        print(*cells, flush=True)

    if title:
        print(f"\n{title}")
    printed(list(formats))
    return lambda *values: printed(list(values))


def run_parts(parts: dict[str, Callable[[], None]]) -> None:
    """Run the parts that the command line names, all of them if it names none."""
    for name in sys.argv[1:] or parts:
        parts[name]()


RECIPE = Recipe(tokens=16_384, skew=0.6, affinity=0.3)
MODEL = model_presets()["DeepSeek-R1"].model
ROOM = 4
"""Times the memory of an H100, so that the whole model fits eight of them; nothing else depends on it."""


def cluster_of(gpus: int) -> Cluster:
    card = gpu("H100", 50e9)
    card = card.model_copy(update={"memory": card.memory * ROOM})
    nodes = tuple(
        Node(name=f"node {index}", gpus=(card,) * 8, link_bandwidth=450e9, link_latency=2e-6) for index in range(gpus // 8)
    )
    return Cluster(name=f"{gpus} H100", nodes=nodes, latency=5e-6)

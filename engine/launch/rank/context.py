"""The context of every executor of a rank: its instructions, its place among the ranks, its clock and its weights."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from engine.launch.rank.difference import Difference
from engine.launch.rank.instructions import PROGRESS, RankInstructions, Tokens
from engine.launch.rank.layer import Weights
from engine.launch.rank.settings import threads
from engine.model import MoEModel
from engine.runtime.exchange.links import Links
from engine.runtime.exchange.recorder import Recorder, communication_device
from engine.runtime.experts import TORCH_DTYPE


@dataclass(frozen=True, eq=False)
class RankContext:
    """One rank's view of a launch.

    tokens: of the model and of a second one, none for a step without a recording
    links: of the ranks, once they have been measured
    """

    instructions: RankInstructions
    tokens: tuple[Tokens, ...]
    rank: int
    device: torch.device
    recorder: Recorder
    links: Links | None = None
    _weights: dict = field(default_factory=dict)
    _groups: list[dist.ProcessGroup] = field(default_factory=list)
    _streams: list[torch.cuda.Stream | None] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.instructions.ranks

    def groups(self, count: int) -> list[dist.ProcessGroup]:
        """Process groups of all ranks, the same ones at every call; their messages do not meet."""
        while len(self._groups) < count:
            self._groups.append(dist.new_group(timeout=timedelta(seconds=self.instructions.limit)))
        return self._groups[:count]

    def streams(self, count: int) -> list[torch.cuda.Stream | None]:
        """Streams in addition to that of the computation, the same ones at every call and for the whole launch: PyTorch
        hands out 32 in turn, so that with new ones for every pass two of a pass would be one, and wait for each other.
        None without a GPU."""
        while len(self._streams) < count:
            self._streams.append(torch.cuda.Stream(self.device) if self.device.type == "cuda" else None)
        return self._streams[:count]

    @property
    def communication_device(self) -> torch.device:
        """The device that tensors have to be on to be sent."""
        return communication_device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPE[self.instructions.model.dtype]

    def weights(self, model: MoEModel, layers: int) -> Weights:
        """The experts and routers of a model; all executors share them."""
        key = (model.digest, layers)
        if key not in self._weights:
            self._weights[key] = Weights(model, layers, self.instructions.seed, self.device, TORCH_DTYPE[model.dtype])
        return self._weights[key]

    def report(self, done: float, message: str) -> None:
        """Print a progress line for the process that started the launch; rank 0's are those of the whole launch."""
        report_progress(done, message)

    def use_all_cores(self) -> None:
        """Let PyTorch compute on every core of the machine, once the other ranks have nothing left to do."""
        torch.set_num_threads(threads())


def report_progress(done: float, message: str) -> None:
    """Print a progress line on standard output, for the process that started the ranks."""
    # In one write with its line end: unbuffered, `print` makes two, and other processes may share the stream.
    sys.stdout.write(PROGRESS + json.dumps({"done": done, "message": message}) + "\n")
    sys.stdout.flush()


class Executor(Protocol):
    """Runs one plan, pass after pass. Every method is called on all ranks in the same order."""

    def run(self, report: Callable[[float, str], None]) -> None:
        """Run one pass; its events go to the context's recorder. report: takes the share of the pass that is done, and
        a message."""

    def difference(self) -> Difference | None:
        """On rank 0, the difference of the last pass from the unplanned one on a single process; None on the others."""

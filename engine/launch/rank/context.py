"""The context of every executor of a rank: its instructions, its place among the ranks, its clock, its weights, and the
links between ranks."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from engine.costs import fit_line
from engine.launch.rank.difference import Difference
from engine.launch.rank.instructions import PROGRESS, RankInstructions, Tokens
from engine.launch.rank.layer import TORCH_DTYPE, Weights
from engine.launch.rank.recorder import Recorder, communication_device
from engine.launch.rank.settings import threads
from engine.model import MoEModel
from engine.network import Network
from engine.units import digits, seconds

UNSEEN = 1e13
"""Bytes/s, ten times those of the fastest port there is. A fit beyond it says that the time measured did not grow with
the bytes sent, not how fast the links are."""


@dataclass(frozen=True, eq=False)
class Links:
    """The links of the ranks.

    rates: float64[rank] bytes/s of every rank's link to the fabric in each direction
    start_up: seconds of a send in addition to its bytes
    node: int64[rank]
    near: float64[rank] bytes/s of its link to the other ranks of its node, 0 if it has none (default: all ranks meet on
        the fabric)
    """

    rates: np.ndarray
    start_up: float = 0.0
    node: np.ndarray | None = None
    near: np.ndarray | None = None

    @property
    def network(self) -> Network:
        """The links as a network of all ranks."""
        ranks = len(self.rates)
        node, near = (np.arange(ranks), np.zeros(ranks)) if self.near is None else (self.node, self.near)
        return Network(self.rates, self.rates, near, node, self.start_up, np.full(ranks, self.start_up))

    @property
    def slowest(self) -> float:
        """Bytes/s between the two ranks with the slowest link."""
        network = self.network
        out, into = network.ports(*np.nonzero(~np.eye(network.gpus, dtype=bool)))
        return float(network.capacity[np.concatenate([out, into])].min())

    @property
    def text(self) -> str:
        """The assumption of a prediction about the links, in words."""
        said = f"links of {_range(self.rates)}"
        if self.near is not None and self.near.any():
            said += f" (inside nodes {_range(self.near[self.near > 0])})"
        return f"{said}, a latency of {seconds(self.start_up)} per send"


def _range(rates: np.ndarray) -> str:
    if rates.max() >= UNSEEN:
        return "a rate too high to be seen in what was measured"
    slowest, fastest = (digits(rate * 8 / 1e6) for rate in (rates.min(), rates.max()))
    return f"{slowest if slowest == fastest else f'{slowest} to {fastest}'} Mbit/s"


def links_of(instructions: RankInstructions, measured: dict[str, list]) -> Links | None:
    """The links as known before the launch, or all alike (those inside nodes among themselves) and as fast as they were
    measured. None for a single rank. The start-up is that of a send to one peer, the cost of every phase and every send
    of a sequence; sends to all at once start together.

    measured: as returned by `measure_machine`
    """
    if not measured["network"]:
        return None
    links = _measured(instructions, measured) if instructions.bandwidth is None else known_links(instructions)
    sent, took = np.array(measured["phases"]).T
    return replace(links, start_up=max(0.0, float(np.median(took - sent / links.slowest))))


def known_links(instructions: RankInstructions, start_up: float = 0.0) -> Links:
    """The links of a testbed."""
    rates, tiers = np.array(instructions.bandwidth), instructions.tiers
    nodes = () if tiers is None else (np.array(tiers.node), np.array(tiers.link))
    return Links(rates, start_up, *nodes)


def _measured(instructions: RankInstructions, measured: dict[str, list]) -> Links:
    if "inside nodes" not in measured:
        return Links(np.full(instructions.ranks, _rate(measured["network"])))
    linked = np.array(instructions.tiers.link) > 0
    near = np.where(linked, _rate(measured["inside nodes"]), 0.0)
    rates = np.full(instructions.ranks, _rate(measured["between nodes"]))
    return Links(rates, node=np.array(instructions.tiers.node), near=near)


def _rate(measured: list[list[float]]) -> float:
    """Bytes/s of exchanges of [bytes, seconds]."""
    return 1 / max(fit_line(*np.array(measured).T).beta, 1 / UNSEEN)


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

"""The planned layers of a live model with a clock: what a rank does in a pass, one event after another.

All that is neither router, exchange nor expert counts as attention: attention itself, norms, dense layers, shared experts,
embedding and head. Exchanges are noted from the moment at which a rank is ready for one until its rows are there, so that
waiting for slower ranks is a part of them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from engine.runtime.exchange.recorder import Mark, Recorder
from engine.runtime.layer import PlannedExperts
from engine.runtime.layer_plan import LayerPlan
from engine.runtime.live import LiveExchange, Sizes
from engine.timeline import SIZES


class Watch:
    """The events of a rank's passes. Computations follow one another; while rows are on their way others may go on.

    label: of the events to come
    routing: the experts that tokens chose, int64[token, k] layer by layer, while it is a list
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.label = recorder, ""
        self.routing: list[torch.Tensor] | None = None
        self._since = recorder.mark()

    def begin(self, label: str) -> None:
        """Begin a part of a pass."""
        self.label, self._since = label, self.recorder.mark()

    def go_on(self) -> None:
        """Go on with computing: the rows that were waited for are there."""
        self._since = self.recorder.mark()

    def computed(self, kind: str, layer: int) -> Mark:
        """All since the last event was a computation of this kind. Returns the moment."""
        now = self.recorder.mark()
        self.recorder.log(kind, layer, self._since, now, label=self.label)
        self._since = now
        return now

    def sent(self, kind: str, layer: int, start: Mark, bytes: float) -> None:
        """An exchange is over. bytes: that this rank has sent to others"""
        now = self.recorder.mark()
        self.recorder.log(kind, layer, start, now, bytes=bytes, label=self.label)
        self._since = now


class WatchedExchange(LiveExchange):
    """A layer's exchanges, noted."""

    def __init__(self, way: LayerPlan, group: dist.ProcessGroup | None, watch: Watch) -> None:
        super().__init__(way, group)
        self.watch = watch

    def sizes(self, counts: torch.Tensor, parts_of_rank: list[int]) -> list[Sizes]:
        start = self.watch.computed("gate", self.way.layer)
        sizes = super().sizes(counts, parts_of_rank)
        if not self.alone:
            self.watch.sent(SIZES, self.way.layer, start, 0.0)
        return sizes

    def begin(self, kind: str, rows: torch.Tensor, sizes: Sizes) -> Callable[[], torch.Tensor]:
        start = self.watch.computed("gate" if kind == "dispatch" else "ffn", self.way.layer)
        arrive = super().begin(kind, rows, sizes)
        self.watch.go_on()
        leaving = sum(sizes.sent) - sizes.sent[self.way.rank]
        size = float(leaving * rows[:1].numel() * rows.element_size())

        def arrived() -> torch.Tensor:
            coming = arrive()
            if not self.alone:
                self.watch.sent(kind, self.way.layer, start, size)
            return coming

        return arrived


class WatchedExperts(PlannedExperts):
    """A planned layer, watched. watch: of all layers; the others as of `PlannedExperts`"""

    def __init__(self, experts: nn.Module, way: LayerPlan, group: dist.ProcessGroup | None, watch: Watch) -> None:
        super().__init__(experts, way, group)
        self.exchange, self.watch = WatchedExchange(way, group, watch), watch

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.watch.routing is not None:
            self.watch.routing.append(chosen.cpu())
        output = super().forward(x, chosen, weight)
        self.watch.computed("aggregate", self.way.layer)
        return output


class Some(nn.Module):
    """Some of a stack's experts in the place of a stack of their own, so that plans share the weights of what both hold.

    stack: of the experts that a rank holds for all plans
    places: theirs in the stack, ascending
    slots: of the stack
    """

    def __init__(self, stack: nn.Module, places: Sequence[int], slots: int) -> None:
        super().__init__()
        self.stack, self.places, self.slots = stack, places, slots

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """[row, d_model]: the outputs of the experts. rows: [row, d_model], ordered by slot; counts: rows of each"""
        of_stack = [0] * self.slots
        for place, count in zip(self.places, counts, strict=True):
            of_stack[place] = count
        return self.stack(rows, of_stack)

"""The worked example of Lina's paper: the backward pass of one MoE layer under five ways to share the network.

Figures 7 and 8 of the paper, read as follows (milliseconds as printed there):

* Gradients i, i-1 and i-2 are computed until 4.1; combine until 5.7; each all-to-all takes 7.6 alone, FFN 1.6, gate 2.1. The
  all-reduce of all three gradients in one bucket takes 7.9 alone (4.1 to 12.0 in 7b, 22.5 to 30.4 in 7c). The layer's
  gradients are complete when the gate is.
* 7a, sharing: at equal halves this would end at 30.9 like 7b, as the paper itself says of theory. It measured 29.0: the
  first all-to-all ends at 17.7 and the all-reduce at 14.7, so while both run they make 0.51 and 0.70 of their speeds. Two
  collectives that alone use 0.978 and 0.714 of the network do that; these two shares are fitted to these two times.
* 7b: one at a time, nothing held back. 7c: the all-reduce waits, by an edge, for the second all-to-all. Its bucket is ready
  before the pair is open, so the rule "between pairs" alone would start it at once.
* 8a and 8b: gradient i in three micro-ops and the others in one each; none starts during the combine.
* 8b: each all-to-all in five micro-ops, as many as the gradients have, with a fifth of the FFN between. Three all-reduces after
  the second all-to-all take 20.9 to 25.6, so 1.57 each, a fifth of the bucket; two run before the combine, since
  gradient i is ready after a third of the 4.1.
* 8a: three run before the combine, so gradient i must be ready before 0.9: another run than 8b. One fills the FFN's 1.6. Any
  shorter one leaves room to start the next before the FFN is over, and the second all-to-all then waits for that: with the 1.3
  that the figure's last micro-op takes (22.5 to 23.8) the rule gives 25.6 for the layer's gradients, with a fifth of the
  bucket, 1.58, it gives 26.2. The printed 24.6 so needs 1.6 here, and the last all-reduce ends at 24.1 instead of 23.8.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.errors import InputError
from engine.reproduce.exhibits import Chart, Claim, Exhibit
from engine.result import Stop
from engine.simulate.streams import ALL_REDUCE, ALL_TO_ALL, COMPUTE, Tasks, run_streams

MS = 1e-3
GRADIENTS, COMBINE, ALLTOALL, FFN, GATE, BUCKET = 4.1 * MS, 1.6 * MS, 7.6 * MS, 1.6 * MS, 2.1 * MS, 7.9 * MS
CHUNKS = (3, 1, 1)
"""Micro-ops of gradients i, i-1 and i-2."""
ALLTOALL_CHUNKS = 5
TOGETHER = 14.7 * MS - 5.7 * MS
ALLTOALL_RATE = (ALLTOALL - (17.7 * MS - 14.7 * MS)) / TOGETHER
ALLREDUCE_RATE = (BUCKET - (5.7 * MS - 4.1 * MS)) / TOGETHER
FITTED_USE = (0.5 / ALLTOALL_RATE, 0.5 / ALLREDUCE_RATE)
MICRO_OP = {"8a": FFN, "8b": (25.6 * MS - 20.9 * MS) / 3}
READY = {"8a": 0.8 * MS}
"""When gradient i is computed, where that is not after a third of the time of all three."""
FIGURES = ("7a", "7b", "7c", "8a", "8b")
PRINTED = {"7a": 29.0 * MS, "7b": 30.9 * MS, "7c": 24.6 * MS, "8a": 24.6 * MS, "8b": 23.0 * MS}
"""When the layer's gradients are complete."""
PRINTED_ALLREDUCE = {"7a": 14.7 * MS, "7b": 12.0 * MS, "7c": 30.4 * MS, "8a": 23.8 * MS, "8b": 25.6 * MS}
"""When the last all-reduce ends."""


@dataclass(frozen=True)
class Example:
    """One figure: tasks of one group with their names, and the policy and shares of the network for `run_streams`."""

    tasks: Tasks
    names: tuple[str, ...]
    policy: str
    use: tuple[float, float] = (1.0, 1.0)

    def end_of(self) -> dict[str, float]:
        """Seconds at which the tasks end, by name."""
        _, end = run_streams(self.tasks, self.policy, self.use)
        return dict(zip(self.names, end[:, 0].tolist(), strict=True))

    def milestones(self) -> tuple[float, float]:
        """When the layer's gradients are complete and when the last all-reduce ends, in seconds."""
        ends = self.end_of()
        return ends["gate"], max(end for name, end in ends.items() if name.startswith("all-reduce"))


def lina_example(figure: str, micro_op: float | None = None, use: tuple[float, float] = FITTED_USE) -> Example:
    """One of FIGURES. micro_op: seconds of an all-reduce micro-op in 8a and 8b instead of those read off.

    use: shares of the network in 7a (see `run_streams`). Raises InputError for another figure.
    """
    if figure not in FIGURES:
        raise InputError(f"figure '{figure}': wanted one of {', '.join(FIGURES)}")
    built = _Builder()
    cut = figure in MICRO_OP
    ready = READY.get(figure, GRADIENTS / 3)
    lengths = {"i": ready, "i-1": (GRADIENTS - ready) / 2, "i-2": (GRADIENTS - ready) / 2}
    gradients = [built.add(COMPUTE, seconds, f"gradient {which}") for which, seconds in lengths.items()]
    combine = built.add(COMPUTE, COMBINE, "combine", holds=cut)
    parts = ALLTOALL_CHUNKS if figure == "8b" else 1
    dispatch = [built.add(ALL_TO_ALL, ALLTOALL / parts, f"all-to-all 1.{part}", [combine]) for part in range(parts)]
    ffn = [built.add(COMPUTE, FFN / parts, f"ffn {part}", [exchange]) for part, exchange in enumerate(dispatch)]
    back = [
        built.add(ALL_TO_ALL, ALLTOALL / parts, f"all-to-all 2.{part}", [computation]) for part, computation in enumerate(ffn)
    ]
    built.add(COMPUTE, GATE, "gate", back)
    if cut:
        seconds = MICRO_OP[figure] if micro_op is None else micro_op
        for gradient, chunks in zip(gradients, CHUNKS, strict=True):
            for chunk in range(chunks):
                built.add(ALL_REDUCE, seconds, f"all-reduce {gradient}.{chunk}", [gradient])
    else:
        built.add(ALL_REDUCE, BUCKET, "all-reduce", gradients + (back if figure == "7c" else []))
    policy = {"7a": "fair", "7c": "fixed"}.get(figure, "priority")
    return Example(built.tasks(), tuple(built.names), policy, use if figure == "7a" else (1.0, 1.0))


class _Builder:
    """Collects the tasks of one group; both all-to-alls are one pair."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.rows: list[tuple[int, float, bool]] = []
        self.edges: list[tuple[int, int]] = []

    def add(self, stream: int, seconds: float, name: str, after: list[int] | None = None, holds: bool = False) -> int:
        task = len(self.rows)
        self.rows.append((stream, seconds, holds))
        self.names.append(name)
        self.edges += [(before, task) for before in after or []]
        return task

    def tasks(self) -> Tasks:
        stream, seconds, holds = (np.array(column) for column in zip(*self.rows, strict=True))
        pair = np.where(stream == ALL_TO_ALL, 0, -1)
        return Tasks(stream, seconds[:, None], np.array(self.edges), np.zeros(len(stream)), pair, holds)


FITTED = (
    "two shares of the network, {:.2f} and {:.2f} of their speeds while both run, are fitted to the ends at 14.7 and 17.7 ms"
)
READ = "the simulator's rules on the lengths that the figure prints; {}"
REASONS = {
    "7a": FITTED.format(ALLTOALL_RATE, ALLREDUCE_RATE),
    "7b": READ.format("one collective at a time, none held back"),
    "7c": READ.format("the all-reduce waits for the second all-to-all"),
    "8a": READ.format("a micro-op as long as the FFN, 1.6 ms, as the printed end of the layer needs (with 1.3 it is 25.6 ms)"),
    "8b": READ.format("micro-ops of 1.57 ms, from the three between 20.9 and 25.6"),
}


def timelines(figures: tuple[str, ...]) -> Callable[[Stop], Exhibit]:
    """The maker of an exhibit of these parts of Figure 7 or 8: their ends as claims, and every task as a row."""

    def make(stop: Stop) -> Exhibit:
        claims, rows = [], []
        for figure in figures:
            example = lina_example(figure)
            gradients, reduced = example.milestones()
            for name, printed, ours in (
                ("the layer's gradients are complete", PRINTED[figure], gradients),
                ("the last all-reduce ends", PRINTED_ALLREDUCE[figure], reduced),
            ):
                claims.append(Claim(quantity=f"{figure}: {name}, s", published=printed, ours=ours, why=REASONS[figure]))
            start, end = run_streams(example.tasks, example.policy, example.use)
            streams = ("compute", "all-to-all", "all-reduce")
            rows += [
                {"figure": figure, "stream": streams[stream], "task": name, "start": begin, "end": finish}
                for name, stream, begin, finish in zip(
                    example.names, example.tasks.stream.tolist(), start[:, 0].tolist(), end[:, 0].tolist(), strict=True
                )
            ]
        chart = Chart(kind="points", x="end", y="stream", facet="figure", x_title="end of a task, s", y_title="stream")
        return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart)

    return make

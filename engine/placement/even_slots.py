"""The nearest placement with as many slots on every GPU, for engines that know no other: few copies move, and balance is kept.

A GPU with too many copies gives some up, one with too few gets new ones, and no other copy moves. That is the fewest new copies
for a number of slots, unless so many are replicas that some must make room for experts that would else be on no GPU.
Which copies these are is chosen by the time of the slowest GPU, first greedily, then by exchanging new copies while that
helps: a heuristic without a bound.
"""

import numpy as np

from engine.errors import InputError
from engine.result import Bools, Floats

PASSES = 10
"""The most passes of exchanges over a layer's new copies: twice as many take twice as long for a few per cent of balance."""


def even_slots(held: Bools, load: Floats, speed: Floats, slots: int) -> Bools:
    """bool[layer, expert, gpu] with `slots` experts on every GPU in every layer, each on one GPU at least.

    held: bool[layer, expert, gpu], the placement now, every expert on one GPU at least
    load: float64[layer, expert], tokens, which replicas share equally
    speed: float64[gpu], tokens per second in any unit

    Raises InputError where the slots can not hold every expert, or a GPU would need an expert twice.
    """
    _, experts, gpus = held.shape
    if slots * gpus < experts:
        raise InputError(f"{slots} slots on each of {gpus} GPUs do not hold {experts} experts")
    if slots > experts:
        raise InputError(f"{slots} slots on a GPU are more than the {experts} experts; one would be there twice")
    return np.array([_Layer(now, tokens, speed, slots).even() for now, tokens in zip(held, load, strict=True)])


class _Layer:
    """One layer while copies are taken away and put elsewhere.

    held: bool[expert, gpu]
    copies: int64[expert]
    filled: int64[gpu], slots in use
    time: float64[gpu], of the copies' tokens
    """

    def __init__(self, before: Bools, tokens: Floats, speed: Floats, slots: int) -> None:
        self.before, self.held, self.tokens, self.speed, self.slots = before, before.copy(), tokens, speed, slots
        self.copies, self.filled = before.sum(axis=1), before.sum(axis=0)
        self.time = (tokens / self.copies) @ before / speed

    def even(self) -> Bools:
        while self.filled.max() > self.slots:
            self._drop(int(self.filled.argmax()))
        while np.count_nonzero(self.copies == 0) > (self.slots - self.filled).sum():
            # Room for a homeless expert: the lightest of the experts with replicas loses one, on its busiest GPU.
            share = np.where(self.copies > 1, self.tokens / np.maximum(self.copies, 1), np.inf)
            expert = int(share.argmin())
            self._take(expert, int(np.where(self.held[expert], self.time, -np.inf).argmax()))
        homeless = np.flatnonzero(self.copies == 0)
        for expert in homeless[np.argsort(-self.tokens[homeless], kind="stable")]:
            after = self.time + self.tokens[expert] / self.speed
            self._put(expert, int(np.where(self.filled < self.slots, after, np.inf).argmin()))
        while (room := self.filled < self.slots).any():
            gpu = int(np.where(room, self.time, np.inf).argmin())
            self._put(self._best_replica(gpu), gpu)
        for _ in range(PASSES):
            if not (self._refill() | self._swap()):
                break
        return self.held

    def _put(self, expert: int, gpu: int) -> None:
        self._share_among(expert, self.copies[expert] + 1)
        self.held[expert, gpu] = True
        self.filled[gpu] += 1
        self.time[gpu] += self.tokens[expert] / self.copies[expert] / self.speed[gpu]

    def _take(self, expert: int, gpu: int) -> None:
        self.time[gpu] -= self.tokens[expert] / self.copies[expert] / self.speed[gpu]
        self.held[expert, gpu] = False
        self.filled[gpu] -= 1
        self._share_among(expert, self.copies[expert] - 1)

    def _share_among(self, expert: int, copies: int) -> None:
        """Let those that hold an expert now serve their parts of so many copies."""
        if self.copies[expert] and copies:
            change = self.tokens[expert] / copies - self.tokens[expert] / self.copies[expert]
            self.time += self.held[expert] * change / self.speed
        self.copies[expert] = copies

    def _drop(self, gpu: int) -> None:
        """Give up the copy on a GPU that is missed least: the replica after which the slowest of its other hosts is done
        soonest; if there is none, the lightest expert, which will need another home."""
        mine = np.flatnonzero(self.held[:, gpu])
        replicas = mine[self.copies[mine] > 1]
        if not len(replicas):
            self._take(int(mine[self.tokens[mine].argmin()]), gpu)
            return
        more = self.tokens[replicas] * (1 / (self.copies[replicas] - 1) - 1 / self.copies[replicas])
        after = self.time + more[:, None] / self.speed
        others = self.held[replicas]
        others[:, gpu] = False
        self._take(int(replicas[np.where(others, after, 0.0).max(axis=1).argmin()]), gpu)

    def _best_replica(self, gpu: int) -> int:
        """The expert that a GPU with room takes a copy of: among those on the slowest GPU the one that leaves all GPUs done
        soonest; where none helps, the one with the most tokens a copy that does not make this GPU the slowest."""
        slowest = int(self.time.argmax())
        absent = ~self.held[:, gpu]
        new = self.tokens / (self.copies + 1)
        helping = np.flatnonzero(absent & self.held[:, slowest])
        if len(helping):
            less = self.tokens[helping] / self.copies[helping] - new[helping]
            after = self.time - self.held[helping] * (less[:, None] / self.speed)
            after[:, gpu] += new[helping] / self.speed[gpu]
            latest = after.max(axis=1)
            if latest.min() < self.time[slowest]:
                return int(helping[latest.argmin()])
        fits = absent & (self.time[gpu] + new / self.speed[gpu] <= self.time[slowest])
        if fits.any():
            return int(np.where(fits, new, -1.0).argmax())
        return int(np.where(absent, new, np.inf).argmin())

    def _refill(self) -> bool:
        """Take every new replica away once and put the best into its slot; True if the slowest GPU is done sooner."""
        slowest = self.time.max()
        for expert, gpu in np.argwhere(self.held & ~self.before):
            if self.copies[expert] > 1:
                latest = self.time.max()
                self._take(expert, gpu)
                self._put(other := self._best_replica(gpu), gpu)
                if self.time.max() > latest:
                    self._take(other, gpu)
                    self._put(expert, gpu)
        return bool(self.time.max() < slowest * (1 - 1e-9))

    def _swap(self) -> bool:
        """Let the slowest GPU exchange a new copy for one on another GPU, whichever helps most; True if any does."""
        new, share = self.held & ~self.before, self.tokens / self.copies
        worst = int(self.time.argmax())
        mine = np.flatnonzero(new[:, worst])
        theirs, other = np.nonzero(new & ~self.held[:, [worst]])
        first, second = (index.ravel() for index in np.meshgrid(np.arange(len(mine)), np.arange(len(theirs))))
        free = ~self.held[mine[first], other[second]]
        given, taken, partner = mine[first[free]], theirs[second[free]], other[second[free]]
        if not len(given):
            return False
        less = share[given] - share[taken]
        at_worst = self.time[worst] - less / self.speed[worst]
        later = np.maximum(at_worst, self.time[partner] + less / self.speed[partner])
        best = int(later.argmin())
        if later[best] >= self.time[worst] * (1 - 1e-9):
            return False
        for expert, source, target in ((given[best], worst, partner[best]), (taken[best], partner[best], worst)):
            self.held[expert, [source, target]] = False, True
            self.time[source] -= share[expert] / self.speed[source]
            self.time[target] += share[expert] / self.speed[target]
        return True

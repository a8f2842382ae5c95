"""Traffic that drifts: recordings in order of time, how a deployed plan ages over them, and when moving to a new one pays.

A history is cut into windows. At the start of every window but the first a policy may move to a plan that a system makes from
the windows before; the window then runs for so many passes under the plan in use. Nothing that a policy decides by is of the
window that it is judged on. A move costs the seconds of `migration`, all of them: serving is taken to stand still.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import numpy as np

from engine.compare.figures import migration
from engine.compare.held_out import Maker
from engine.compare.judge import Judge, ratio_gain
from engine.errors import InputError, StoppedError
from engine.parallel import reported
from engine.plan import Plan
from engine.result import Stop, never
from engine.schema import Frozen
from engine.serving.step import recording_of_step
from engine.systems.base import Report, silent
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload

PASSES = 1000
"""Passes between windows unless told otherwise: SGLang balances its experts anew after so many
(`--eplb-rebalance-num-iterations`)."""
MOST_PASSES = 10**12
FEWEST_WINDOWS, MOST_WINDOWS = 3, 64
EVERY = (1, 2, 3, 4, 6)
"""Numbers of windows between moves that are tried."""
WORSE = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares by which the plan in use may be slower than a new one before it is replaced, that are tried."""
LEAST_WEIGHT = 0.05
"""Windows that count for less in an average are left out."""

Rule = Literal["never", "every", "worse", "pays"]


@dataclass(frozen=True)
class Forecast:
    """A guess of the next window. title: in words, after "planned from"; weights: of the windows before, the newest first."""

    title: str
    weights: tuple[float, ...]

    def of(self, windows: Sequence[Workload]) -> Workload:
        """The windows seen so far as one recording, each by its weight."""
        return pooled(windows[::-1], self.weights)


def _average(keeps: float) -> Forecast:
    weights = tuple(keeps**age for age in range(MOST_WINDOWS) if keeps**age >= LEAST_WEIGHT)
    return Forecast(f"an exponential average ({keeps:g})", weights)


FORECASTS = (
    Forecast("the last window", (1.0,)),
    Forecast("the mean of 2 windows", (1.0,) * 2),
    Forecast("the mean of 4 windows", (1.0,) * 4),
    _average(0.5),
    _average(0.75),
)


def pooled(windows: Sequence[Workload], weights: Sequence[float]) -> Workload:
    """Recordings of one kind as one: of routing logs so large a share of the tokens of each, evenly spaced, of loads and
    traffic the weighted mean. The first window has weight 1; those beyond the weights count for nothing."""
    pairs = list(zip(windows, weights, strict=False))
    first = windows[0]
    if len(pairs) == 1:
        return first
    name, total = f"{len(pairs)} windows up to {first.name}"[:200], sum(weight for _, weight in pairs)

    def mean(part: str) -> np.ndarray | None:
        parts = [getattr(window, part) for window, _ in pairs]
        if any(array is None or array.shape != getattr(first, part).shape for array in parts):
            return None
        return sum(weight * array for array, (_, weight) in zip(parts, pairs, strict=True)) / total

    if isinstance(first, ExpertLoad):
        return replace(first, name=name, load=mean("load"), by_source=mean("by_source"), by_step=None)
    if isinstance(first, TrafficMatrix):
        return TrafficMatrix(name, mean("bytes"), first.bytes_per_token)
    taken = [window.spread(round(weight * window.tokens)) for window, weight in pairs]
    columns = {}
    for column in ("experts", "sequence", "source_rank", "phase", "scores"):
        parts = [getattr(window, column) for window in taken]
        known = all(part is not None for part in parts)
        if known and column == "sequence":  # no sequence goes on in another window
            apart = np.cumsum([0, *(part.max(initial=-1) + 1 for part in parts[:-1])])
            parts = [part + start for part, start in zip(parts, apart, strict=True)]
        columns[column] = np.concatenate(parts) if known else None
    return replace(first, name=name, **columns)


def in_parts(recording: Workload, count: int) -> tuple[Workload, ...]:
    """A recording cut into windows of about as many tokens (steps, of loads) each, in order of time: whole sequences where
    there are enough of them. Raises InputError where it has no order in time, or too little for so many."""
    if not FEWEST_WINDOWS <= count <= MOST_WINDOWS:
        raise InputError(f"{recording.name}: cut it into {FEWEST_WINDOWS} to {MOST_WINDOWS} windows, not {count}")
    if isinstance(recording, RoutingTrace):
        window = _window_of_token(recording, count)
        parts = [recording.part(window == place) for place in range(count)]
    elif isinstance(recording, ExpertLoad) and recording.by_step is not None and len(recording.by_step) >= count:
        parts = [
            replace(recording, load=steps.sum(axis=0), by_step=steps, by_source=None)
            for steps in np.array_split(recording.by_step, count)
        ]
    else:
        raise InputError(
            f"{recording.name} has no {count} steps that could be told apart; give a routing log, loads by step, or several "
            "recordings"
        )
    return tuple(replace(part, name=f"{recording.name[:180]} {place}/{count}") for place, part in enumerate(parts, 1))


def _window_of_token(trace: RoutingTrace, count: int) -> np.ndarray:
    """int64[token]: the window of each, by the middle of its sequence."""
    if trace.sequence is not None:
        number, tokens = np.unique(trace.sequence, return_inverse=True, return_counts=True)[1:]
        if len(tokens) >= count:
            middle = np.cumsum(tokens) - (tokens + 1) / 2
            return (middle * count // trace.tokens).astype(np.int64)[number]
    return np.arange(trace.tokens) * count // max(trace.tokens, 1)


class Moved(Frozen):
    """A move at the start of a window. window: its place among those judged; copies: that are new; seconds: of the busiest
    port."""

    window: int
    copies: int
    seconds: float


class Followed(Frozen):
    """A policy over the windows judged so far.

    name: in words; value: windows (every) or share (worse); forecast: the title of that which it plans from, None: never
    seconds: of each window, moves left out; total: of all, moves included
    """

    name: str
    rule: Rule
    value: float | None = None
    forecast: str | None = None
    seconds: tuple[float, ...]
    moves: tuple[Moved, ...] = ()
    total: float

    def part(self, first: int, end: int) -> float:
        """Seconds of some of the windows, moves included."""
        return sum(self.seconds[first:end]) + sum(move.seconds for move in self.moves if first <= move.window < end)


class WindowSeen(Frozen):
    """A judged window; seconds of a pass.

    deployed: of the plan deployed at first; own: of the plan made of this very window
    aged: by which share the deployed plan takes longer than its own
    limit: of the fastest of all plans made until then, and its own
    move_seconds: from the plan deployed at first to the one made from the window before
    pays_after: passes of this window after which that move has paid; None: never
    """

    name: str
    deployed: float
    own: float
    aged: float
    limit: float
    move_seconds: float
    pays_after: float | None


class Drift(Frozen):
    """Policies on a history, as far as it has been judged.

    system: its title; deployed: the name of the plan at first; unit: of a pass, in words; passes: of every window
    of: windows to be judged, all but the first
    policies: the fastest first
    limit: seconds that no schedule of the plans made here can be below, as it moves for nothing and knows each window before it
        comes; another optimiser's plans may be
    """

    system: str
    deployed: str
    unit: str
    passes: int
    of: int
    windows: tuple[WindowSeen, ...]
    policies: tuple[Followed, ...]
    limit: float
    cost_source: str

    @property
    def never(self) -> Followed:
        return next(policy for policy in self.policies if policy.rule == "never")

    @property
    def always(self) -> Followed:
        """Moves at every window to the plan made of the last one, as engines do."""
        first = FORECASTS[0].title
        return next(row for row in self.policies if (row.rule, row.value, row.forecast) == ("every", 1, first))

    @property
    def later(self) -> tuple[Followed, float] | None:
        """The policy that is fastest on the earlier half, and the share of the time of never moving that it saves on the later
        one, which did not choose it; None of a single window."""
        end, cut = len(self.windows), len(self.windows) // 2
        if not cut:
            return None
        chosen = min(self.policies, key=lambda policy: policy.part(0, cut))
        return chosen, _saved(chosen.part(cut, end), self.never.part(cut, end))

    @property
    def in_words(self) -> str:
        """The best policy, and the share of the time that it saves."""
        best, never, always = self.policies[0], self.never, self.always
        if best.rule == "never":
            return f"Never moving is best; moving at every window takes {_against(always.total, never.total, 'never moving')}."
        moves = f"its {len(best.moves)} move{'s' * (len(best.moves) > 1)} counted, it takes"
        text = f"Best: {best.name}; {moves} {_against(best.total, never.total, 'never moving')}"
        if best is not always:
            text += f", {_against(best.total, always.total, 'moving at every window to the plan of the last one')}"
        if self.later is not None:
            chosen, saved = self.later
            text += f". Chosen by the earlier half alone: {chosen.name}"
            if chosen.rule != "never":
                text += f", which takes {_against(1 - saved, 1, 'never moving on the later half')}"
        return f"{text}."


def _saved(seconds: float, of: float) -> float:
    return 1 - seconds / of if of else 0.0


def _against(seconds: float, other: float, name: str) -> str:
    """`3.2 % less than` another of that name, or `as long as` that."""
    saved = _saved(seconds, other)
    return f"{100 * abs(saved):.2g} % {'less' if saved > 0 else 'more'} than {name}" if saved else f"as long as {name}"


@dataclass(frozen=True, eq=False)
class Timed:
    """A plan, and its seconds of a pass in every window from `first` on."""

    plan: Plan
    first: int
    seconds: tuple[float, ...]

    def at(self, window: int) -> float:
        return self.seconds[window - self.first]


Moves = Callable[[Plan, Plan], tuple[int, float]]
"""Copies and seconds of a move from one plan to another."""


@dataclass(eq=False)
class _Policy:
    """A policy on its way: the plan in use, and all that has happened."""

    rule: Rule
    value: float | None
    forecast: Forecast | None
    use: Timed
    seconds: list[float] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)

    def wants(self, new: Timed, window: int, passes: int, moved: Moves) -> bool:
        """True if it moves to a new plan at the start of a window (1 …), by the window before it."""
        now, then = self.use.at(window - 1), new.at(window - 1)
        match self.rule:
            case "every":
                return (window - 1) % self.value == 0
            case "worse":
                return now > (1 + self.value) * then
            case "pays":
                return passes * (now - then) > moved(self.use.plan, new.plan)[1]
        return False

    def followed(self) -> Followed:
        total = sum(self.seconds) + sum(move.seconds for move in self.moves)
        title = self.forecast and self.forecast.title
        name = _in_words(self.rule, self.value) + (f", planned from {title}" if title else "")
        told = {"seconds": tuple(self.seconds), "moves": tuple(self.moves), "total": total}
        return Followed(name=name, rule=self.rule, value=self.value, forecast=title, **told)


def _in_words(rule: Rule, value: float | None) -> str:
    match rule:
        case "every":
            return "move at every window" if value == 1 else f"move every {value:g} windows"
        case "worse":
            return f"move when over {100 * value:g} % slower than a new plan"
        case "pays":
            return "move when a window pays for it"
    return "never move"


def drift(
    judge: Judge,
    windows: Sequence[Workload],
    maker: Maker,
    deployed: Plan | None = None,
    passes: int = PASSES,
    stop: Stop = never,
    report: Report = silent,
) -> Iterator[Drift]:
    """Every policy over a history, a window further with each answer; the last one is of the whole.

    windows: recordings in order of time; the first is only planned from
    maker: of the plans
    deployed: the plan at first; None: the one that is made of the first window
    passes: of every window, in the judge's unit

    Ends early when asked to stop. Raises InputError for too few or too many windows, for such as differ in kind, and where the
    system refuses.
    """
    _check(windows, passes)
    jobs = _jobs(len(windows), deployed)
    titles = [f"planning from window {job.window} of {len(windows)}" if job.plan is None else "timing" for job in jobs]
    made: dict[tuple[int, int], Timed] = {}
    seen: list[WindowSeen] = []
    policies: list[_Policy] = []
    moved = _moves(judge)
    for index, timed in reported(_timed, (judge, maker, tuple(windows), jobs), titles, stop, report):
        made |= dict.fromkeys(jobs[index].serves, timed)
        if len(made) < sum(len(job.serves) for job in jobs[: index + 1]):  # one before it was stopped midway
            return
        window = jobs[index].window - 1
        if index + 1 < len(jobs) and jobs[index + 1].window - 1 == window:
            continue
        if not policies:
            policies = _policies(made[0, 0], len(windows) - 1)
        if window:  # the plan made of it is there
            _step(policies, window, passes, made, moved)
            seen.append(_window_seen(windows[window], window, made, moved))
            yield _answer(judge, maker, made[0, 0].plan, passes, len(windows) - 1, seen, policies)


def _check(windows: Sequence[Workload], passes: int) -> None:
    if not FEWEST_WINDOWS <= len(windows) <= MOST_WINDOWS:
        raise InputError(f"drift takes {FEWEST_WINDOWS} to {MOST_WINDOWS} windows, not {len(windows)}")
    if not 1 <= passes <= MOST_PASSES:
        raise InputError(f"{passes} passes of a window are not between 1 and {MOST_PASSES:,}")
    for window in windows:
        if type(window) is not type(windows[0]):
            raise InputError(f"{window.name} and {windows[0].name} are of different kinds; give windows of one kind")
        if not window.load.any():
            raise InputError(f"{window.name} has no tokens; make fewer windows, or leave it out")


@dataclass(frozen=True, eq=False)
class _Job:
    """A plan to make and time. window: windows that are known by then; serves: (window at which it is new, place of the
    forecast) of all that are this recording, (0, 0) for the deployed one; plan: known, only to be timed."""

    window: int
    serves: tuple[tuple[int, int], ...]
    weights: tuple[float, ...] = (1.0,)
    plan: Plan | None = None


def _jobs(windows: int, deployed: Plan | None) -> tuple[_Job, ...]:
    """In order of time; forecasts that come to the same recording are one."""
    jobs = [] if deployed is None else [_Job(1, ((0, 0),), plan=deployed)]
    for window in range(1, windows + 1):
        same: dict[tuple[float, ...], list[tuple[int, int]]] = {}
        for place, forecast in enumerate(FORECASTS if window < windows else FORECASTS[:1]):
            same.setdefault(forecast.weights[:window], []).append((window, place))
        if window == 1 and deployed is None:
            same[1.0,].append((0, 0))
        jobs += [_Job(window, tuple(serves), weights) for weights, serves in same.items()]
    return tuple(jobs)


def _timed(common: tuple, index: int, stop: Stop, report: Report) -> Timed | None:
    """None when stopped."""
    judge, maker, windows, jobs = common
    job = jobs[index]
    try:
        plan = job.plan
        if plan is None:
            recording = Forecast("", job.weights).of(windows[: job.window])
            if judge.serving is not None:
                gpus = len(judge.problem.cluster.gpus)
                recording = recording_of_step(recording, judge.serving.step, judge.problem.model, gpus)
            plan = maker.plan((recording,), stop, report)
        first, seconds = job.window - 1, []
        for window in windows[first:]:
            if stop():
                return None
            seconds.append(judge.seconds(plan, window, stop))
        return None if stop() else Timed(plan, first, tuple(seconds))
    except StoppedError:
        return None


def _policies(deployed: Timed, judged: int) -> list[_Policy]:
    """All that are tried, the simplest first: of equals it is the best."""
    rules: list[tuple[Rule, float | None]] = [("every", count) for count in EVERY if count <= judged]
    rules += [("pays", None), *(("worse", share) for share in WORSE)]
    moving = [_Policy(rule, value, forecast, deployed) for rule, value in rules for forecast in FORECASTS]
    return [_Policy("never", None, None, deployed), *moving]


def _moves(judge: Judge) -> Moves:
    """Copies and seconds of a move between two plans, each found once."""
    known: dict[tuple[str, str], tuple[int, float]] = {}

    def moved(now: Plan, new: Plan) -> tuple[int, float]:
        key = now.placement.digest, new.placement.digest
        if key not in known:
            found = migration(now.placement, new.placement, judge.problem, 0.0, 0.0)
            known[key] = found.copies, found.seconds
        return known[key]

    return moved


def _step(policies: Sequence[_Policy], window: int, passes: int, made: dict, moved: Moves) -> None:
    """Let every policy decide at the start of a window, and run it."""
    for policy in policies:
        if policy.forecast is not None:
            new = made[window, FORECASTS.index(policy.forecast)]
            if new is not policy.use and policy.wants(new, window, passes, moved):
                copies, seconds = moved(policy.use.plan, new.plan)
                policy.use = new
                if copies:
                    policy.moves.append(Moved(window=window - 1, copies=copies, seconds=seconds))
        policy.seconds.append(passes * policy.use.at(window))


def _window_seen(recording: Workload, window: int, made: dict, moved: Moves) -> WindowSeen:
    deployed, new, own = made[0, 0], made[window, 0], made[window + 1, 0].at(window)
    there = [timed.at(window) for (since, _), timed in made.items() if since <= window]
    seconds, saved = moved(deployed.plan, new.plan)[1], deployed.at(window) - new.at(window)
    after = seconds / saved if saved > 0 else inf
    return WindowSeen(
        name=recording.name,
        deployed=deployed.at(window),
        own=own,
        aged=ratio_gain(deployed.at(window), own),
        limit=min(own, *there),
        move_seconds=seconds,
        pays_after=None if after == inf else after,
    )


def _answer(
    judge: Judge, maker: Maker, deployed: Plan, passes: int, of: int, seen: Sequence[WindowSeen], policies: Sequence[_Policy]
) -> Drift:
    return Drift(
        system=maker.system.title,
        deployed=deployed.name,
        unit=judge.unit,
        passes=passes,
        of=of,
        windows=tuple(seen),
        policies=tuple(sorted((policy.followed() for policy in policies), key=lambda policy: policy.total)),
        limit=passes * sum(window.limit for window in seen),
        cost_source=judge.problem.cost_source,
    )

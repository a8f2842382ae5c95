"""Policies on a history of windows: recomputed one by one, above the limit, and none knows the window that it is judged on."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from app.charts import what_if_studies as charts
from engine.compare.drift import EVERY, FORECASTS, WORSE, Drift, drift, in_parts, pooled
from engine.compare.held_out import Maker
from engine.compare.judge import Judge
from engine.compare.synthetic import Recipe, expert_of_rank, synthetic
from engine.costs import Datasheet
from engine.errors import InputError
from engine.placement.migration import transfers
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.simulate import simulate
from engine.systems import SYSTEMS, run, usual_plan
from engine.systems.registry import baseline_for
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload
from tests.strategies import cluster_of, make_gpu, make_model

MODEL = make_model(2, 8)
GREEDY = {"algorithm": "eplb"}


def history(windows: int, wander: float = 0.6, tokens: int = 150) -> tuple[Workload, ...]:
    trace = synthetic(MODEL, Recipe(tokens * windows, 1.0, 0.0, 3, wander, windows))
    return in_parts(trace, windows)


def problem_of(windows: tuple[Workload, ...]) -> Problem:
    return make_problem(windows[0], cluster_of(*[make_gpu()] * 4, latency=1e-5), MODEL, Datasheet())


def judged(windows: tuple[Workload, ...], passes: int, deployed: Plan | None = None, **more) -> list[Drift]:
    problem, system = problem_of(windows), SYSTEMS["eplb"]
    return list(drift(Judge(problem), windows, Maker(system, system.settings(GREEDY), problem), deployed, passes, **more))


class Again:
    """Everything once more from the engine's own parts, a plan, time or move at a time."""

    def __init__(self, windows: tuple[Workload, ...], passes: int) -> None:
        self.windows, self.problem, self.passes = windows, problem_of(windows), passes
        self.known: dict[tuple, Any] = {}

    def once(self, key: tuple, work: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = work()
        return self.known[key]

    def plan(self, window: int, weights: tuple[float, ...]) -> Plan:
        recording = pooled(self.windows[:window][::-1], weights)
        here = self.problem.with_workload(recording)
        return self.once((recording.digest,), lambda: run(SYSTEMS["eplb"], here, GREEDY).result.solution)

    def seconds(self, plan: Plan, window: int) -> float:
        here = self.problem.with_workload(self.windows[window])
        return self.once((id(plan), window), lambda: self.passes * simulate(plan, here).total)

    def move(self, now: Plan, new: Plan) -> float:
        held = [plan.placement.share > 0 for plan in (now, new)]
        size, network = self.problem.model.bytes_per_expert, self.problem.network
        return self.once((id(now), id(new), "move"), lambda: transfers(*held, size, network).seconds)

    def follow(self, plans: list[Plan]) -> float:
        """Seconds of a schedule: a plan for each window, the deployed one first."""
        moves = sum(self.move(now, new) for now, new in pairwise(plans))
        return moves + sum(self.seconds(plan, window) for window, plan in enumerate(plans[1:], 1))

    def family(self, deployed: Plan) -> dict[tuple, float]:
        """The total of every policy, by rule, value and forecast."""
        last = len(self.windows) - 1
        totals = {("never", None, None): self.follow([deployed] * (last + 1))}
        rules = [("every", count) for count in EVERY if count <= last] + [("worse", share) for share in WORSE]
        for (rule, value), forecast in product([*rules, ("pays", None)], FORECASTS):
            plans = [deployed]
            for window in range(1, last + 1):
                now, new = plans[-1], self.plan(window, forecast.weights)
                ahead = self.seconds(now, window - 1), self.seconds(new, window - 1)
                moves = {
                    "every": value and (window - 1) % value == 0,
                    "worse": value and ahead[0] / ahead[1] - 1 > value,
                    "pays": ahead[0] - ahead[1] > self.move(now, new),
                }[rule]
                plans.append(new if moves else now)
            totals[rule, value, forecast.title] = self.follow(plans)
        return totals


@pytest.mark.parametrize(("passes", "own"), [(1, False), (8, True), (500, False)])
def test_the_best_policy_is_that_of_an_enumeration_and_all_schedules_are_above_the_limit(passes: int, own: bool) -> None:
    windows = history(4)
    again = Again(windows, passes)
    deployed = usual_plan(baseline_for(again.problem), again.problem)[0] if own else again.plan(1, (1.0,))
    found = judged(windows, passes, deployed if own else None)[-1]
    totals = again.family(deployed)
    assert {(row.rule, row.value, row.forecast): row.total for row in found.policies} == pytest.approx(totals)
    assert found.policies[0].total == pytest.approx(min(totals.values()))
    assert [row.total for row in found.policies] == sorted(row.total for row in found.policies)
    made = [[deployed]] + [[again.plan(window, forecast.weights) for forecast in FORECASTS] for window in range(1, 4)]
    there = [list({id(plan): plan for plans in made[: window + 1] for plan in plans}.values()) for window in range(1, 4)]
    schedules = [again.follow([deployed, *chosen]) for chosen in product(*there)]
    assert found.limit <= min(schedules) * (1 + 1e-12) and min(schedules) <= found.policies[0].total * (1 + 1e-12)
    for window, seen in enumerate(found.windows, 1):
        assert seen.own == pytest.approx(again.seconds(again.plan(window + 1, (1.0,)), window) / passes)
        assert seen.deployed == pytest.approx(again.seconds(deployed, window) / passes)
        assert seen.limit <= min(seen.own, seen.deployed) and seen.aged == pytest.approx(seen.deployed / seen.own - 1)
        new = again.plan(window, (1.0,))
        saved = seen.deployed - again.seconds(new, window) / passes
        assert seen.move_seconds == pytest.approx(again.move(deployed, new))
        assert seen.pays_after == (pytest.approx(seen.move_seconds / saved) if saved > 0 else None)


def test_moving_is_best_where_it_costs_next_to_nothing_and_never_where_it_costs_most() -> None:
    windows = history(5, wander=0.3, tokens=600)
    often, seldom = judged(windows, 10**6)[-1], judged(windows, 1)[-1]
    assert seldom.policies[0] is seldom.never and seldom.in_words.startswith("Never moving is best")
    assert seldom.always.total > seldom.never.total and " % more than never moving." in seldom.in_words
    still = judged(windows[:1] * 3, 1)[-1]
    assert still.in_words == "Never moving is best; moving at every window takes as long as never moving."
    best = often.policies[0]
    assert best.moves and best.total < often.never.total and best.total <= often.always.total
    assert best.name in often.in_words and "% less than never moving" in often.in_words
    still = often.never.model_copy(update={"seconds": (0.0,) * 4})
    staying = tuple(still if row is often.never else row for row in often.policies)
    alone = often.model_copy(update={"policies": staying})
    assert alone.in_words.endswith("Chosen by the earlier half alone: never move.") and "on the later half" in often.in_words
    chosen, saved = often.later
    assert chosen.part(0, 2) == min(row.part(0, 2) for row in often.policies)
    assert chosen.part(0, 2) + chosen.part(2, 4) == pytest.approx(chosen.total)
    assert saved == pytest.approx(1 - chosen.part(2, 4) / often.never.part(2, 4))
    assert charts.drifting(often).layout.title.text.startswith("Best: move") and len(charts.drifting(seldom).data) == 5


def test_a_stop_is_heard_between_two_windows_that_a_plan_is_timed_on(monkeypatch) -> None:
    timed, seconds = [], Judge.seconds
    monkeypatch.setattr(
        Judge, "seconds", lambda judge, plan, window, *more: timed.append(1) or seconds(judge, plan, window, *more)
    )
    assert not judged(history(4, wander=0.3, tokens=200), 1, stop=lambda: bool(timed)) and len(timed) == 1


def test_no_policy_knows_the_window_that_it_is_judged_on_and_a_stopped_history_is_its_beginning() -> None:
    windows = history(5)
    answers = judged(windows, 8)
    assert [len(answer.windows) for answer in answers] == [1, 2, 3, 4] and {answer.of for answer in answers} == {4}
    other = judged((*windows[:-1], windows[0]), 8)
    assert answers[-2].policies == other[-2].policies and answers[-1].policies != other[-1].policies
    moves = [{row.name: row.moves for row in answer[-1].policies} for answer in (answers, other)]
    assert moves[0] == moves[1], "the last window changes times, not decisions"
    asked: list[int] = []
    stopped = judged(windows, 8, stop=lambda: len(asked) > 8, report=lambda done, said: ":" in said or asked.append(1))
    assert 0 < len(stopped) < 4 and stopped == answers[: len(stopped)]


def test_windows_are_whole_sequences_in_order_and_steps_of_loads() -> None:
    trace = synthetic(MODEL, Recipe(1200, 1.0, 0.5, 0, 0.5, 4))
    parts = in_parts(trace, 4)
    assert np.concatenate([part.experts for part in parts]).tolist() == trace.experts.tolist()
    assert [part.tokens for part in parts] == [300] * 4 and parts[1].name.endswith("2/4")
    assert not set(parts[0].sequence) & set(parts[1].sequence)
    bare = in_parts(replace(trace, sequence=None), 5)
    assert [part.tokens for part in bare] == [240] * 5
    steps = np.arange(7 * 2 * 8.0).reshape(7, 2, 8)
    loads = ExpertLoad("loads", steps.sum(axis=0), (1, 2), by_step=steps)
    assert [len(part.by_step) for part in in_parts(loads, 3)] == [3, 2, 2]
    assert (in_parts(loads, 3)[1].load == steps[3:5].sum(axis=0)).all()


def test_windows_are_pooled_by_their_weights() -> None:
    first, second = (replace(part, source_rank=np.zeros(part.tokens, np.int32)) for part in history(3)[:2])
    both = pooled((second, first), (1.0, 0.5))
    assert both.load == pytest.approx(second.load + first.spread(75).load) and both.tokens == 225
    assert len(np.unique(both.sequence)) == len(np.unique(second.sequence)) + len(np.unique(first.spread(75).sequence))
    assert both.source_rank is not None and pooled((second, replace(first, source_rank=None)), (1, 1)).source_rank is None
    assert pooled((second, first), (1.0,)) is second
    loads = [ExpertLoad(f"{scale}", np.full((2, 8), scale), (1, 2), np.full((4, 2, 8), scale / 4)) for scale in (1.0, 4.0)]
    mean = pooled(loads, (1.0, 0.5))
    assert (mean.load == 2).all() and (mean.by_source == 0.5).all() and mean.by_step is None
    traffic = [TrafficMatrix(f"{scale}", np.full((1, 4, 4), scale), 2.0) for scale in (1.0, 3.0)]
    assert (pooled(traffic, (1, 1)).bytes == 2).all()


@pytest.mark.parametrize(
    ("windows", "passes", "said"),
    [
        (history(4)[:2], 1, "3 to 64 windows, not 2"),
        (history(3), 0, "0 passes"),
        ((*history(3), ExpertLoad("loads", np.ones((2, 8)), (1, 2))), 1, "loads and .* are of different kinds"),
        ((*history(3), RoutingTrace("none", np.full((4, 2, 1), -1, np.int16), 8)), 1, "none has no tokens"),
    ],
)
def test_what_is_no_history_is_refused(windows: tuple[Workload, ...], passes: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        judged(windows, passes)


def test_what_cannot_be_cut_is_refused() -> None:
    loads = ExpertLoad("loads", np.ones((2, 8)), (1, 2), by_step=np.full((2, 2, 8), 0.5))
    for recording, count, said in ((loads, 3, "loads has no 3 steps"), (loads, 2, "3 to 64 windows, not 2")):
        with pytest.raises(InputError, match=said):
            in_parts(recording, count)


def test_popularity_wanders_as_far_as_drift_says_and_the_log_says_so() -> None:
    def apart(wander: float) -> list[float]:
        """Correlation of the loads of each window with the first one's."""
        loads = [
            part.load.ravel() for part in in_parts(synthetic(make_model(4, 16), Recipe(12_000, 1.0, 0.5, 1, wander, 6)), 6)
        ]
        return [float(np.corrcoef(loads[0], load)[0, 1]) for load in loads[1:]]

    still, slow, fast = apart(0.0), apart(0.2), apart(1.0)
    assert min(still) > 0.95 and max(map(abs, fast)) < 0.5 and 0.5 < slow[0] < 0.99 and slow[0] > slow[-1]
    trace = synthetic(MODEL, Recipe(100, 1.0, 0.5, 0, 0.25, 5))
    assert trace.name == "synthetic, skew 1, affinity 0.5, drift 0.25 in 5 steps, 100 tokens"
    first = in_parts(synthetic(MODEL, Recipe(9000, 2.0, 0.0, 0, 0.5, 3)), 3)[0]
    assert (first.load.argmax(axis=1) == expert_of_rank(2, 8, 0)[:, 0]).all(), (
        "the first step has the ranks of a log without drift"
    )
    for drift_and_steps, said in (((2.0, 5), "drift 2 is not"), ((0.5, 300), "steps 300")):
        with pytest.raises(InputError, match=said):
            Recipe(100, 1.0, 0.5, 0, *drift_and_steps)

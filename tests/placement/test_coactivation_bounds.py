"""Co-activation's bounds are under every placement, and its tables say what a swap saves."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.placement.coactivation import CoactivationInstance, coactivation
from engine.placement.coactivation.exact import fewest_rows
from engine.placement.coactivation.instance import nets_between, nets_of
from engine.placement.coactivation.relaxation import Relaxation, facets, tangent
from engine.placement.coactivation.search import Task, swap, tables_of
from tests.cases.examples import examples
from tests.placement.coactivation_cases import planted_tokens, random_tokens, topic_tokens

pytestmark = pytest.mark.slow


def rows_of(experts: np.ndarray, home: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Rows of every token to other groups: int64[token]."""
    reached = [{int(group[expert]) for expert in token if expert >= 0} for token in experts]
    return np.array([len(groups - {int(own)}) for groups, own in zip(reached, home, strict=True)])


@settings(max_examples=examples(30), deadline=None)
@given(
    st.sampled_from([(8, 4), (8, 2), (12, 3), (9, 3), (6, 6)]),
    st.integers(1, 6),
    st.integers(1, 60),
    st.integers(-1, 0),
    st.sampled_from([None, 1.0, 1.2]),
    st.integers(0, 2**32 - 1),
)
def test_no_step_of_the_bound_is_above_the_optimum(shape, choices, tokens, least_home, cap, seed):
    experts, groups = shape
    chosen = random_tokens(1, tokens, experts, min(choices, experts), seed, missing=0.15)[0]
    home = np.random.default_rng(seed).integers(least_home, groups, tokens)
    nets = nets_of(chosen, home, groups, experts)
    load = np.bincount(chosen[chosen >= 0], minlength=experts)
    most = int((cap or 0) * load.sum() / groups)
    place, most = fewest_rows(nets, Task(load, groups, 1, most, 0.0), cap is not None)
    optimum = rows_of(chosen, home, place).sum()
    relaxation = Relaxation(chosen, home, groups, experts, load / max(most, 1) if cap else None)
    for step in range(60):
        relaxation.iterate()
        if step % 6 == 0:
            assert relaxation.evaluate() <= optimum + 1e-6


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from([(12, 3), (8, 4), (12, 6), (16, 2)]), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_lines_are_under_every_placement_wherever_they_are_drawn(shape, choices, seed):
    """`tangent` at any matrix, even one that is no placement's."""
    experts, groups = shape
    rng = np.random.default_rng(seed)
    chosen = -np.sort(-random_tokens(1, 20, experts, choices, seed, missing=0.1)[0].astype(np.int32), axis=1)
    home = rng.integers(-1, groups, 20)
    vertices = experts + groups
    drawn_at = rng.random((vertices, vertices)) * rng.random()
    np.fill_diagonal(drawn_at, 1.0)
    slope = np.empty((vertices, vertices))
    lines = facets(choices, experts // groups, groups)
    own = np.where(home < 0, -1, home + experts)
    constant = tangent(chosen, own, np.ones(20), drawn_at, lines, slope)
    for _ in range(20):
        group = np.append(rng.permutation(experts) % groups, np.arange(groups))
        same = group[:, None] == group
        assert constant - slope[same].sum() <= rows_of(chosen, home, group).sum() + 1e-6


def test_lines_of_whole_tokens_touch_every_way_to_divide_few_experts():
    """Six experts that no home has, two to a group: three groups; all in one group: one."""
    lines = facets(6, 8, 8)[6]
    for pairs, rows in ((0, 6), (3, 3), (6, 2), (15, 1)):
        assert (lines[:, 0] + lines[:, 1] * pairs).max() == pytest.approx(rows, abs=1e-6)


@pytest.mark.parametrize(("kind", "worst"), [("planted", 0.0), ("topics", 0.25), ("outside", 0.15), ("capped", 0.2)])
def test_the_gap_is_as_small_as_it_was(kind, worst):
    chosen = planted_tokens(2000, 64, 8, 6, 0.0)[0] if kind == "planted" else topic_tokens(2000, 64, 6, topics=20)
    source = np.arange(2000) % 8 if kind == "topics" else np.full(2000, -1)
    cap = 1.2 if kind == "capped" else None
    instance = CoactivationInstance(chosen[None], source, 8, cap=cap, expert_count=64)
    result = coactivation(instance, time_limit=20, wall_limit=200)
    assert 0 <= result.gap <= worst


@pytest.mark.parametrize(("experts", "groups", "choices"), [(12, 4, 4), (8, 2, 3), (6, 6, 5)])
def test_tables_after_many_swaps_are_those_made_anew(experts, groups, choices):
    rng = np.random.default_rng(0)
    instance = CoactivationInstance(
        random_tokens(1, 80, experts, choices, 1, missing=0.1),
        rng.integers(-1, groups, 80),
        groups,
        expert_count=experts,
    )
    nets = nets_between(instance, 0)
    tables = tables_of(nets, rng.permutation(experts) % groups)
    for _ in range(200):
        i, j = rng.choice(experts, 2, replace=False)
        if tables.group[i] != tables.group[j]:
            swap(tables, nets, i, j)
    for ours, anew in zip(tables, tables_of(nets, tables.group), strict=True):
        assert (ours == anew).all()


def test_tables_say_what_every_swap_costs():
    rng = np.random.default_rng(2)
    instance = CoactivationInstance(random_tokens(1, 60, 12, 4, 1), rng.integers(0, 4, 60), 4)
    nets, place = nets_between(instance, 0), rng.permutation(12) % 4
    tables, rows = tables_of(nets, place), instance.rows(place[None])[0]
    assert nets.rows(place) == rows
    for i, j in combinations(range(12), 2):
        g, h = place[i], place[j]
        if g != h:
            trial = place.copy()
            trial[[i, j]] = h, g
            change = tables.joining[g, j] - tables.alone[i] + tables.shared[i, j]
            change += tables.joining[h, i] - tables.alone[j] + tables.shared[j, i]
            assert instance.rows(trial[None])[0] - rows == change

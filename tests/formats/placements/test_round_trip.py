"""Every writer against the engine's rules, and what is written is read back as it was."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.formats.placements import TARGETS, recognise, write_placement
from tests.cases.examples import examples
from tests.formats.placements.cases import NAMES, SINGLE, check, even_cases, held_by, model_of, placed

KEEPS_ORDER = set(TARGETS) - {"exflow"}


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_what_is_written_keeps_the_rules_and_is_read_back(target, data):
    model, placement = data.draw(even_cases(replicas=target not in SINGLE))
    for name in NAMES[target]:
        (content,) = write_placement(target, placement, model, name).files.values()
        back = recognise(Path(name), content).deployed(model, placement.gpus)
        if target in KEEPS_ORDER:
            assert back.placement == placement
            assert check(target, content, model, placement.gpus) == held_by(placement)
        else:
            sorted_rows = [[sorted(held) for held in row] for row in held_by(placement)]
            assert held_by(back.placement) == check(target, content, model, placement.gpus) == sorted_rows
        assert back.notes == ()


@given(st.lists(st.lists(st.sets(st.integers(0, 4), max_size=5), min_size=3, max_size=3), min_size=1, max_size=3))
@settings(max_examples=examples(50), deadline=None)
def test_a_table_carries_uneven_placements_and_empty_gpus(rows):
    model = model_of(len(rows) + 1, (0,), 5)
    rows = [[sorted(held) for held in row[:-1]] + [sorted(row[-1] | set(range(5)).difference(*row))] for row in rows]
    placement = placed(*rows, model=model)
    (content,) = write_placement("csv", placement, model, "plan.csv").files.values()
    assert recognise(Path("plan.csv"), content).deployed(model, 3).placement == placement
    assert check("csv", content, model, 3) == rows


def test_the_rows_of_dense_layers_change_nothing_for_sglang():
    """They are full and valid, and what is in them is not read."""
    model = model_of(4, (0, 2), 6)
    placement = placed([[0, 1, 2], [3, 4, 5]], [[5, 1, 3], [0, 2, 4]], model=model)
    (content,) = write_placement("sglang", placement, model).files.values()
    other = content.replace(b"[0, 1, 2, 3, 4, 5]", b"[5, 4, 3, 2, 1, 0]")
    assert other != content and held_by(recognise(Path("x"), other).deployed(model, 2).placement)[1] == [
        [5, 1, 3],
        [0, 2, 4],
    ]

"""What was imported is walked through once, and garbage is still found."""

import gc
import sys
import types
import weakref

import pytest

from app import warm_up


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warm_up, "_seen", 0)
    yield
    gc.unfreeze()


def test_only_new_modules_are_worth_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up.spare()
    frozen = gc.get_freeze_count()
    assert frozen > 10_000 and len(gc.get_objects()) < frozen
    held = [[] for _ in range(1000)]
    warm_up.spare()
    assert gc.get_freeze_count() <= frozen, "nothing was imported"
    for number in range(warm_up.MANY):
        monkeypatch.setitem(sys.modules, f"new_{number}", types.ModuleType(f"new_{number}"))
    warm_up.spare()
    assert gc.get_freeze_count() >= frozen + len(held)


def test_garbage_of_a_later_run_is_collected() -> None:
    class Part:
        pass

    warm_up.spare()
    part = Part()
    part.itself, alive = part, weakref.ref(part)
    del part
    gc.collect()
    assert alive() is None

"""What was imported is walked through once, and garbage is still found."""

import gc
import sys
import types
import weakref

import pytest

from app import collector


@pytest.fixture(autouse=True)
def thawed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collector, "_seen", 0)
    yield
    gc.unfreeze()


def test_only_new_modules_are_worth_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    collector.spare()
    frozen = gc.get_freeze_count()
    assert frozen > 10_000 and len(gc.get_objects()) < frozen
    held = [[] for _ in range(1000)]
    collector.spare()
    assert gc.get_freeze_count() <= frozen, "nothing was imported"
    for number in range(collector.MANY):
        monkeypatch.setitem(sys.modules, f"new_{number}", types.ModuleType(f"new_{number}"))
    collector.spare()
    assert gc.get_freeze_count() >= frozen + len(held)


def test_garbage_of_a_later_run_is_collected() -> None:
    class Part:
        pass

    collector.spare()
    part = Part()
    part.itself, alive = part, weakref.ref(part)
    del part
    gc.collect()
    assert alive() is None

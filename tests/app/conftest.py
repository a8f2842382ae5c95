"""What the tests of the pages share."""

import pytest

from engine.jobs import runner
from tests.app import warm


@pytest.fixture
def warm_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs start in a moment, where how they start is not the point."""
    monkeypatch.setattr(runner, "_spawn", warm.spawn)

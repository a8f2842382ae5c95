"""What every test shares: a data folder of its own, and a plain word at the end on what was not run."""

from collections import Counter
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`SWITCHYARD_DATA` inside the test's temporary folder, for this process and for those that it starts."""
    folder = tmp_path / "data"
    monkeypatch.setenv("SWITCHYARD_DATA", str(folder))
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were skipped and why: a skip that nobody reads is a hole in the suite."""
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        terminalreporter.write_line("Nothing was skipped.")
        return
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    terminalreporter.write_line(f"{len(skipped)} skipped:")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} × {reason}")

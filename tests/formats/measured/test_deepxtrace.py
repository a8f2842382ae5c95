"""Logs of DeepXTrace, written by hand as its logger formats them and as the pull request of DeepEP prints them."""

from pathlib import Path

import pytest

from engine.formats import findings_of_times, identify, read_costs
from engine.formats.measured.deepxtrace import read_waits
from tests.formats.faults import refused as refused_by

HEAD = (
    "[2026-01-19T17:40:46.123] [Diagnose] InstanceID: a36ddd16-a8d0-43bf-9e8a-f196f23010d5 EPSize: 4, diagnose: "
    "{{'abnormal_cols': [], 'abnormal_rows': [], 'abnormal_points': []}}, "
    "{part} Wait Recv Cost Per Token Matrix[src_rank, dst_rank]"
)
STEADY = ((16, 13, 10, 17), (10, 19, 11, 18), (18, 18, 12, 10), (13, 18, 16, 12))
SLOW = ((16, 13, 10, 1170), (10, 19, 11, 1180), (18, 18, 12, 1100), (13, 18, 16, 1120))


def log(part: str, rows, bare: bool = False) -> str:
    lines = [HEAD.format(part=part) + (":" if bare else "")]
    for rank, row in enumerate(rows):
        cells = f"[{' '.join(f'{value:8d}' for value in row)}]"
        lines.append(cells if bare else f"[2026-01-19T17:40:46.124] rank={rank} {cells}")
    return "\n".join(lines) + "\n"


def saved(folder: Path, text: str) -> Path:
    path = folder / "diagnose_rank0.log"
    path.write_text(text)
    return path


@pytest.mark.parametrize("bare", [False, True])
def test_windows_and_who_is_waited_for(tmp_path, bare):
    path = saved(tmp_path, log("Dispatch", STEADY, bare) + log("Combine", STEADY, bare) + log("Dispatch", SLOW, bare))
    assert identify(path).name == "deepxtrace"
    windows = read_waits(path)
    assert [window.part for window in windows] == ["dispatch", "combine", "dispatch"]
    assert windows[0].ticks.tolist() == [list(map(float, row)) for row in STEADY]
    assert not windows[0].slow() and not windows[0].waiting()
    ((rank, times),) = windows[2].slow()
    assert (rank, times) == (3, pytest.approx(4 * 4570 / (4570 + 57 + 68 + 49)))
    assert not windows[2].waiting()


def test_a_rank_that_waits_for_all(tmp_path):
    (window,) = read_waits(saved(tmp_path, log("Combine", list(zip(*SLOW, strict=True)))))
    assert [rank for rank, _ in window.waiting()] == [3]


def test_it_is_no_time_to_plan_with_but_says_who_is_slow(tmp_path):
    path = saved(tmp_path, log("Dispatch", SLOW) + log("Combine", STEADY))
    said = refused_by(path, "a log of DeepXTrace", "all wait for rank 3 (3.9 times the mean)", read=read_costs)
    assert "last combine over 4 ranks: no rank is slow" in said
    (finding,) = findings_of_times(path)
    assert finding.severity == "error" and "rank 3" in finding.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (HEAD.format(part="Dispatch"), "DEEPEP_DIAGNOSE_LOG_DETAILS=1"),
        (log("Dispatch", STEADY[:3]), "no rows of waits"),
        (log("Dispatch", STEADY).replace("17]", "17 1]"), "5 waits in a row of 4 ranks"),
        (log("Dispatch", STEADY).replace("EPSize: 4", "EPSize: 99999"), "between 2 and 1024 ranks"),
        (log("Dispatch", STEADY).replace("17]", "9" * 5000 + "]"), "damaged"),
    ],
)
def test_damaged_logs_are_refused(tmp_path, text, says):
    refused_by(saved(tmp_path, text), says, read=read_costs)

"""The suite itself: its lists name files that exist, and a process that a test forgets is found."""

import subprocess
import sys

from tests import everything, run, spent


def test_files_that_only_everything_runs_and_those_with_a_budget_of_their_own_exist_and_say_why():
    assert all((everything.HERE / path).exists() for path in everything.PATHS)
    for file, (units, reason) in run.BUDGETS.items():
        assert (run.HERE / file).is_file() and units > run.BUDGET and reason, file


def test_the_longest_files_begin_first(tmp_path, monkeypatch):
    (tmp_path / "durations.json").write_text('{"test_docs.py": 40.0, "test_suite.py": 30.0, "test_plan.py": 0.1}')
    monkeypatch.setattr(run, "DURATIONS", tmp_path / "durations.json")
    listed = run.files()
    assert listed[:2] == ["test_docs.py", "test_suite.py"] and listed[-1] == "test_plan.py"
    assert ("test_cli_dask.py" in listed) == everything.WANTED


def test_a_process_that_is_left_over_is_named(monkeypatch):
    monkeypatch.setattr(spent, "GRACE", 0)
    monkeypatch.setenv(spent.RUN, "a run of this test")
    assert spent.left_over() == []
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={spent.RUN: "a run of this test"}
    ) as process:
        (found,) = spent.left_over()
        assert found == f"{process.pid}: {sys.executable} -c input()"
        process.communicate(b"\n")


def test_seconds_of_processes_that_have_ended_count():
    before = spent.so_far()
    subprocess.run([sys.executable, "-S", "-c", "sum(range(10_000_000))"], check=True)
    assert spent.so_far() > before + 0.02

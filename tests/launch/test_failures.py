"""Launches that fail: each ends in time, names the cause in one line, and leaves no process, no namespace and no torn file."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from engine import store
from engine.jobs import runner
from engine.jobs.protocol import Context, latest_progress
from engine.jobs.runner import State
from engine.launch.places.testbed import Testbed
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.rank.instructions import MACHINE_TIMES, REPORT, writing
from engine.launch.running import local, processes
from engine.launch.running.local import run_here
from engine.result import never
from engine.runtime.exchange.recorder import Recorder
from engine.systems.base import silent
from tests import warm
from tests.cases.jobs import until
from tests.cases.launches import BIG, launch_arguments, prepare
from tests.cases.processes import processes_of, workers_of
from tests.cases.refusals import refusal
from tests.cases.testbeds import MBIT, needs_testbed, nothing_left
from tests.faults import small_files

pytestmark = pytest.mark.usefixtures("warm_python")
__all__ = ["nothing_left"]  # a fixture
ASLEEP = "import time; time.sleep(600)"


def message_of(run: Callable[[], object]) -> str:
    """The message of a launch that fails, checked to be one line and no traceback."""
    text = refusal(run)
    assert "Traceback" not in text and len(text) < 300
    return text


def fail_on_testbed(launch: PreparedLaunch, folder: Path, act: Callable[[], object]) -> str:
    """The message of a launch in which something happens once all its ranks work; none of its processes may run on."""
    working, acted = threading.Event(), threading.Event()

    def report(done, message, *more) -> None:
        if message.startswith("warm-up"):
            working.set()

    def stop() -> bool:
        if working.is_set() and not acted.is_set():
            acted.set()
            act()
        return False

    launch = launch.on_testbed(Testbed(np.full(launch.instructions.ranks, 1000 * MBIT)))
    text = message_of(lambda: run_here(launch, folder, stop, report))
    until(lambda: not processes_of(folder), 2)
    return text


# Ranks that do not come, or go.
def test_who_never_joins_is_named_by_torchruns_ranks(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$RANK" = 1 ] && exec {warm.INTERPRETER} -c "{ASLEEP}" "$@"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(python))
    launch = prepare(ranks=2)
    launch = replace(launch, instructions=launch.instructions.model_copy(update={"limit": 1.0}))
    text = message_of(lambda: run_here(launch, tmp_path / "run", never, silent))
    assert text == "the launch failed: rank 1 did not join within 1 s"
    until(lambda: not processes_of(tmp_path / "run"), 2)


@needs_testbed
def test_a_rank_that_hangs_ends_the_launch_at_its_limit_and_is_named(tmp_path, monkeypatch, capsys, cold_python):
    late, folder = [], tmp_path / "run"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6 * len(late), sleep=time.sleep)
    monkeypatch.setattr(processes, "time", clock)

    def act() -> None:
        hanging = next(rank for rank in workers_of(folder) if rank.environ()["RANK"] == "1")
        hanging.suspend()
        until(lambda: hanging.status() == psutil.STATUS_STOPPED, 5)
        late.append(True)

    text = fail_on_testbed(prepare(ranks=2, repeats=100), folder, act)
    assert text == "the launch was ended: not finished after 900 s; rank 1 is suspended"
    # The other rank has said where it was waiting.
    assert "[rank 0]   File" in capsys.readouterr().out


# Disks.
@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[..., Path]]:
    """Mounts small disks."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no room on the disk of a folder."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_ends_a_launch_job_with_a_word_on_it_and_keeps_what_was_there(disk, monkeypatch):
    data = disk("size=16m")
    monkeypatch.setenv("SWITCHYARD_DATA", str(data))
    arguments = launch_arguments(BIG, repeats=50, tokens=1000) | {"ranks": 1}
    digest = store.load_workload(arguments["workload"]).digest
    job = runner.start("launch", arguments, data)
    try:
        until(lambda: job.progress and job.progress.done >= 0.1, 120)  # all ranks at work
        fill(data)  # at once: the passes take a second
        history = job.history
        assert runner.wait(job, 30) is State.FAILED
        assert "disk" in job.error and "\n" not in job.error, job.error
        assert job.history[: len(history)] == history
        assert store.load_workload(arguments["workload"]).digest == digest
        assert job.request.arguments == arguments and not list(job.folder.rglob(".events-*"))
        until(lambda: not processes_of(job.folder), 2)
    finally:
        runner.cancel(job, grace=0)
        runner.wait(job, 5)


def test_a_disk_that_cannot_be_written_is_named_before_anything_starts(disk, monkeypatch):
    data = disk("size=1m,ro")
    monkeypatch.setenv("SWITCHYARD_DATA", str(data))
    for run in (lambda: run_here(prepare(), data / "run", never, silent), lambda: local.temporary_folder().__enter__()):
        assert message_of(run).startswith(f"the folder {data} cannot be written (Read-only file system)")


def test_a_job_says_that_the_disk_is_full_also_when_nothing_else_can_be_written(disk):
    data = disk("size=1m")
    job = runner.start("fill", {}, data, module="tests.jobs.handlers")
    assert runner.wait(job, 30) is State.FAILED
    assert job.error == f"{job.folder}: No space left on device" and job.result == {"reached": 1}


def test_work_goes_on_when_its_log_finds_the_disk_full(tmp_path):
    log = Path("/dev/full").open("w")  # noqa: SIM115
    with contextlib.redirect_stdout(log):
        Context(tmp_path).report(0.5, "half")
    with pytest.raises(OSError, match="No space left"):
        log.close()
    assert latest_progress(tmp_path).done == 0.5


def recorder_with(events: int) -> Recorder:
    recorder = Recorder(0, torch.device("cpu"))
    recorder.begin(0, 1)
    for _ in range(events):
        recorder.log("ffn", 0, recorder.mark(), recorder.mark())
    recorder.end()
    return recorder


def test_events_are_saved_whole_or_not_at_all(tmp_path):
    path = tmp_path / "events-0.npz"
    recorder_with(1).save(path)
    before = path.read_bytes()

    def save() -> None:
        with small_files(1000), writing(tmp_path):
            recorder_with(2000).save(path)

    assert message_of(save).startswith(f"the folder {tmp_path} cannot be written (File too large)")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]

    def save_where_nothing_is() -> None:
        with writing(gone):
            recorder_with(1).save(gone / "events-0.npz")

    gone, why = tmp_path / "gone", "(No such file or directory)"
    assert message_of(save_where_nothing_is).startswith(f"the folder {gone} cannot be written {why}")


@pytest.mark.parametrize("name", [REPORT, MACHINE_TIMES, "events-0.npz", "events-1.npz"])
@pytest.mark.parametrize("keep", [None, 0, 0.5, 0.99])
def test_what_a_rank_left_torn_or_not_at_all_is_named(tmp_path, monkeypatch, name, keep):
    """keep: share of the file that is there."""

    def leave(commands, ranks, limit, folder, stop, report) -> None:
        (folder / REPORT).write_text(json.dumps({"differences": [[0.0, 1e-4]], "device": "CPU", "clock_error": 0.0}))
        points = [[1.0, 1e-6], [2.0, 2e-6], [3.0, 3e-6]]
        (folder / MACHINE_TIMES).write_text(json.dumps(dict.fromkeys(("gemm", "gate", "memory", "network"), points)))
        for number in (0, 1):
            recorder_with(50).save(folder / f"events-{number}.npz")
        whole = (folder / name).read_bytes()
        (folder / name).unlink()
        if keep is not None:
            (folder / name).write_bytes(whole[: int(keep * len(whole))])

    monkeypatch.setattr(local, "run_processes", leave)
    text = message_of(lambda: run_here(prepare(ranks=2), tmp_path / "run", never, silent))
    why = "No such file or directory" if keep is None else "it is torn"
    assert text == f"the measurements in {tmp_path / 'run' / name} cannot be read ({why}); launch again"

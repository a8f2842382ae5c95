"""Launches on clusters from their submission to their results. The schedulers are small stand-ins, of which the one for Slurm
answers as the real one was seen to, on which `tests.slurm` launches; a pod's ranks are real."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from engine.errors import InputError
from engine.launch.rank.instructions import REPORT
from engine.launch.running import clusters, slurm
from engine.launch.running.processes import ROOT
from engine.launch.running.slurm import MaybeSubmittedError
from engine.launch.running.torchx_application import dry_run
from tests import warm
from tests.cases.cluster_launches import destination, hold_results, launch_for, shared_folder
from tests.cases.refusals import refusal
from tests.launch.cluster_fakes import JOB_NUMBER, Kubernetes, as_kubelet_expands, install_slurm

HANDLE = f"slurm://switchyard/{JOB_NUMBER}"


@pytest.fixture
def shared(tmp_path) -> Path:
    return shared_folder(tmp_path)


@pytest.fixture
def kubernetes(tmp_path, monkeypatch) -> Iterator[Kubernetes]:
    """A cluster that answers, and credentials for it."""
    cluster = Kubernetes()
    cluster.write_credentials(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield cluster
    cluster.close()


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    """The folder of a Slurm that answers."""
    return install_slurm(tmp_path, monkeypatch)


def written(scheduler: str, shared: Path, **more):
    """A launch for two ranks on CPUs, its destination, and its run folder."""
    where = destination(scheduler, shared, **{"gpus": 0} | more)
    launch = launch_for(where)
    clusters.write(launch, shared / "run")
    return launch, where, shared / "run"


def finish(command: list[str], **more) -> None:
    """Run a command to its good end. Nothing of it is left when it has none: ranks leave with their torchrun."""
    talk = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, start_new_session=True, **talk, **more)
    try:
        said, _ = process.communicate(timeout=150)
        assert process.returncode == 0, said.decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# Run for real, see also `tests.slurm`.
def test_a_pod_runs_with_nothing_but_the_project_and_the_run_folder(shared, tmp_path, warm_process):
    (claim := tmp_path / "as $(PATH) the pod has it").mkdir()
    launch, _, folder = written("kubernetes", shared, nodes=1, ranks_per_node=2, cpus_per_node=2, seen_as=str(claim))
    (task,) = yaml.safe_load(dry_run(launch, folder))["spec"]["tasks"]
    (container,) = task["template"]["spec"]["containers"]
    folder.rename(claim / "run")  # the claim's files at the pod's place; this machine's are out of reach
    own = {variable["name"]: variable["value"] for variable in container["env"]}
    python, *words = [as_kubelet_expands(word, own | {"PATH": "/bin"}) for word in container["command"]]
    assert python == "python"
    image = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": "/nowhere", "TMPDIR": str(claim)}
    finish([str(warm.PYTHON), *words], env=image | own | {warm.ADDRESS: str(warm_process)}, cwd="/")
    (claim / "run").rename(folder)
    hold_results(clusters.collect(folder), launch)


# Slurm.
def test_what_is_submitted_to_slurm_is_what_was_shown(shared, state):
    (state / "several").touch()
    launch, _, folder = written("slurm", shared, partition="gpu", account="team")
    shown = dry_run(launch, folder)
    handle = clusters.submit(launch, folder)
    assert handle == HANDLE == clusters.read_job(folder).handle
    words = json.loads((state / "sbatch.json").read_text())
    inside = str(folder).replace("%", "%%")
    assert words == ["--parsable", f"--chdir={folder}", f"--output={inside}/slurm-%j.out"]
    assert shown == (state / "script.sh").read_text()
    (state / "sbatch.json").unlink()
    assert f"submitted as {HANDLE}" in refusal(clusters.submit, launch, folder)
    (folder / clusters.SUBMISSION).unlink()  # as of a version that made none
    assert f"submitted as {HANDLE}" in refusal(clusters.submit, launch, folder)
    assert not (state / "sbatch.json").exists()


@pytest.mark.parametrize(
    ("accounting", "queue", "said", "over"),
    [
        ("COMPLETED\nCOMPLETED\n", None, "succeeded: COMPLETED", True),
        ("FAILED\nCOMPLETED\n", None, "failed", True),
        ("RUNNING\nFAILED\nRUNNING\n", None, "running, FAILED", False),  # the logs of the others are not complete
        (None, "FAILED\nCOMPLETING\n", "failed", True),  # on a node that died that may take minutes
        (None, "COMPLETING NonZeroExitCode\nFAILED NonZeroExitCode\n", "failed (NonZeroExitCode)", True),
        ("COMPLETED\nRUNNING\nPENDING\n", None, "running", False),
        ("CANCELLED by 1000\nCOMPLETED\n", None, "cancelled", True),
        ("TIMEOUT\nTIMEOUT\n", None, "failed: TIMEOUT", True),
        ("NEWLY_INVENTED\n", None, "unknown: NEWLY_INVENTED", False),
        (None, "RUNNING None\n", "running", False),
        (None, "RUNNING None\nNODE_FAIL NodeDown\n", "running, NODE_FAIL (NodeDown)", False),
        (None, "COMPLETING\nCOMPLETING\n", "running: COMPLETING", False),
        ("", "PENDING None\n", "pending", False),  # accounting hears of a job a moment later
        (None, "PENDING Resources\nPENDING Resources\n", "pending (Resources)", False),
        (None, "COMPLETED\nCOMPLETED\n", "succeeded: COMPLETED", True),
        (None, "TIMEOUT TimeLimit\nTIMEOUT TimeLimit\n", "failed: TIMEOUT (TimeLimit)", True),
        (None, "CANCELLED\nCOMPLETING\n", "cancelled", True),
        ("COMPLETED\n", "COMPLETING\n", "running: COMPLETING", False),  # its files are not all there yet
        (None, None, "gone: its scheduler does not know it any more", True),
    ],
)
def test_how_a_job_on_slurm_stands_and_why(state, accounting, queue, said, over):
    for name, text in (("accounting", accounting), ("queue", queue)):
        if text is not None:
            (state / name).write_text(text)
    status = clusters.status(HANDLE)
    assert status.text == said and status.state == re.match("[a-z]+", said)[0] and status.over == over


def test_a_controller_that_is_away_says_nothing_of_the_job(shared, state):
    _, _, folder = written("slurm", shared)
    clusters._save(folder, clusters.read_job(folder).model_copy(update={"handle": HANDLE}))
    (state / "queue").write_text("RUNNING")
    (state / "away").touch()
    assert refusal(clusters.status, HANDLE).startswith("Slurm does not answer: Unable to contact slurm controller")
    assert "its scheduler cannot be asked (Slurm does not answer" in refusal(clusters.collect, folder)
    (state / "accounting").write_text("RUNNING\nRUNNING\n")  # which another daemon keeps
    assert clusters.status(HANDLE).state == "running"
    (state / "away").unlink()
    assert f"has no {REPORT} yet: {HANDLE} is running" in refusal(clusters.collect, folder)


PARTITIONS = """\
main*|infinite|2|16|64000|(null)
main*|infinite|1|64|256000|gpu:h100:8(S:0-1)
night|1-12:00:00|40|16|1|gpu:a100:4,shard:8
short|30:00|9|16|64000|(null)
"""


@pytest.mark.parametrize(
    ("asked", "minutes", "fault"),
    [
        ({"nodes": 3}, 600, None),
        ({"nodes": 4}, 600, "main has 3 nodes, 3 of them with 8 CPUs and 16 GiB, and the job needs 4"),
        ({"nodes": 2, "cpus_per_node": 17}, 600, "main has 3 nodes, 1 of them with 17 CPUs"),
        ({"nodes": 1, "gpus": 8}, 600, None),
        ({"nodes": 2, "gpus": 8}, 600, "main has 3 nodes, 1 of them with 8 CPUs, 8 GPUs and 16 GiB"),
        ({"partition": "night", "gpus": 4, "nodes": 40}, 36 * 60, None),  # its nodes do not tell their memory
        ({"partition": "night"}, 2161, "night lets a job run for 2160 minutes, and this one has a limit of 2161"),
        ({"partition": "short", "nodes": 9}, 30, None),
        ({"partition": "short,night", "nodes": 9}, 31, None),
        ({"partition": "short,main", "nodes": 9}, 31, r"short lets a job run for 30 .*; the partition main has 3 nodes"),
        ({"partition": "hidden", "nodes": 900}, 600, None),  # left to Slurm
    ],
)
def test_what_could_never_start_is_not_submitted(shared, state, asked, minutes, fault):
    (state / "partitions").write_text(PARTITIONS)
    where = destination("slurm", shared, **{"gpus": 0} | asked)
    if fault is None:
        slurm.refuse_impossible(where, 60.0 * minutes)
    else:
        message = refusal(slurm.refuse_impossible, where, 60.0 * minutes)
        assert re.match(f"Slurm could never start this job: the partition .*{fault}", message)


def test_a_command_that_says_nothing_is_not_waited_for(shared, state, monkeypatch):
    launch, _, _ = written("slurm", shared)
    for name in ("squeue", "sbatch"):
        (state.parent / "bin" / name).write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm, "ANSWER_LIMIT", 0.05)
    monkeypatch.setattr(clusters, "refuse_impossible", lambda *_: None)
    assert refusal(clusters.status, HANDLE).startswith("squeue has said nothing for 0.05 s")
    with pytest.raises(MaybeSubmittedError, match="may have been submitted"), clusters.new_run_folder(launch) as folder:
        clusters.submit(launch, folder)
    assert folder.exists()  # the job may need it
    assert "is being submitted, or has been" in refusal(clusters.submit, launch, folder)


def test_a_job_on_slurm_is_cancelled_once(state):
    (state / "queue").write_text("RUNNING\nRUNNING\n")
    clusters.cancel(HANDLE)
    assert clusters.status(HANDLE).state == "cancelled"
    (state / "queue").write_text("COMPLETED\n")
    clusters.cancel(HANDLE)
    assert clusters.status(HANDLE).state == "succeeded"


def test_slurm_refuses_or_is_not_here(shared, state, monkeypatch):
    (state / "refuse").touch()
    launch = launch_for(destination("slurm", shared, gpus=0))
    with pytest.raises(InputError, match=r"^Slurm refused the job"), clusters.new_run_folder(launch) as folder:
        clusters.submit(launch, folder)
    assert not list(shared.iterdir()), "a failure before the submission leaves no folder"
    launch, _, folder = written("slurm", shared)
    assert re.match("Slurm refused the job: .*Invalid partition name", refusal(clusters.submit, launch, folder))
    assert clusters.read_job(folder).handle is None
    monkeypatch.setenv("PATH", str(shared))
    for command, *ask in (("sinfo", clusters.submit, launch, folder), ("squeue", clusters.status, HANDLE)):
        assert refusal(*ask).startswith(f"{command}, a command of Slurm, is not on this machine")
    assert dry_run(launch, folder)  # takes none of it


def test_a_handle_is_told_also_when_it_cannot_be_kept(shared, state, monkeypatch):
    launch, _, folder = written("slurm", shared)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(clusters, "write_atomically", lambda *_: (_ for _ in ()).throw(full))
    assert re.search(
        f"submitted as {HANDLE}, but .*job.json cannot be written: No space left", refusal(clusters.submit, launch, folder)
    )
    assert (state / "script.sh").exists()


# Kubernetes.
def test_what_is_submitted_to_kubernetes_is_what_was_shown(kubernetes, shared):
    launch, _, folder = written("kubernetes", shared, namespace="research")
    shown = dry_run(launch, folder)
    assert not kubernetes.jobs
    handle = clusters.submit(launch, folder)
    (((namespace, name), body),) = kubernetes.jobs.items()
    assert handle == f"kubernetes://switchyard/research:{name}" and namespace == "research"
    assert body == yaml.safe_load(shown)
    kubernetes.log = "one\nprogress {}\n"
    assert list(clusters.log_lines(folder, 1)) == ["one\n", "progress {}\n"]
    assert kubernetes.asked.startswith(f"/api/v1/namespaces/research/pods/{name}-switchyard-1-0/log")
    kubernetes.log_status = 400  # the container is being created
    assert list(clusters.log_lines(folder, 0)) == []
    phases = {
        "Pending": "pending",
        "Completing": "running",
        "Completed": "succeeded",
        "Terminated": "failed",
        "Running": "running",
    }
    for phase, stands in phases.items():
        kubernetes.phase = {"phase": phase, "message": "why"}
        over = stands in ("succeeded", "failed")
        assert clusters.status(handle) == clusters.Status(stands, f"{phase}: why", over)
    clusters.cancel(handle)
    assert not kubernetes.jobs and clusters.status(handle).state == "gone"
    with pytest.raises(InputError, match="does not know this job"):
        list(clusters.log_lines(folder, 0))


def test_kubernetes_refuses_or_is_not_there(kubernetes, shared, tmp_path):
    launch, _, folder = written("kubernetes", shared)
    for status, word in ((401, "credentials"), (403, "may not"), (404, "Volcano"), (500, "refused")):
        kubernetes.status = status
        with pytest.raises(InputError, match=rf"\({status}\): .*{word}" if status != 500 else word):
            clusters.submit(launch, folder)
    kubernetes.close()
    assert "cannot be reached" in refusal(clusters.submit, launch, folder)
    (tmp_path / "kubeconfig").unlink()
    assert "no credentials for a Kubernetes cluster" in refusal(clusters.submit, launch, folder)
    assert clusters.read_job(folder).handle is None
    assert dry_run(launch, folder)


# Anywhere.
def test_a_launch_that_cannot_work_is_not_submitted(shared, state, tmp_path):
    launch, where, folder = written("slurm", shared)
    shutil.copytree(folder, tmp_path / "copy")
    shared.chmod(0o500)
    if os.access(shared, os.W_OK):  # root may write anywhere
        shutil.rmtree(shared)
    assert "pre-flight: shared folder" in refusal(clusters.submit, launch, folder)
    assert not list(state.iterdir()) and "not the run folder" in refusal(clusters.collect, tmp_path)
    assert clusters.read_job(tmp_path / "copy").destination == where


def test_only_handles_of_jobs_are_asked_about(state):
    handles = [f"slurm://switchyard/{path}" for path in ("--help", "4242\n", "1/2")]
    for handle in (*handles, "", "local_cwd://switchyard/4242", "kubernetes://switchyard/a:b:c"):
        for ask in (clusters.status, clusters.cancel):
            with pytest.raises(InputError, match="is no handle"):
                ask(handle)


def test_without_torchx_one_line_says_what_to_do(shared, monkeypatch):
    launch, _, folder = written("slurm", shared)
    monkeypatch.setitem(sys.modules, "torchx", None)
    monkeypatch.delitem(sys.modules, "engine.launch.running.schedulers", raising=False)
    monkeypatch.delattr("engine.launch.running.schedulers", raising=False)
    assert "requirements-no-deps.txt" in refusal(dry_run, launch, folder)

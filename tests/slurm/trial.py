"""`python -m tests.slurm.trial`: eight ranks over the two nodes of a real Slurm, one fault after the other, with the message
of each and the expected one. It takes some minutes and is no part of the suite."""

import contextlib
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from engine.errors import InputError
from engine.launch.preparation.launch import PreparedLaunch
from engine.launch.running import clusters, local
from engine.launch.running.local import run_on_cluster
from engine.launch.running.processes import WORKER
from engine.result import never
from tests.cases.cluster_launches import destination, launch_for
from tests.slurm.real import NODES, TO_REST, Cluster, missing, until

AWAY = 20.0
"""Seconds for which the controller is away."""


@dataclass
class Trial:
    """A cluster, the folder that it shares, and the lines of the table."""

    cluster: Cluster
    shared: Path
    right: bool = True

    def launch(self, limit: float = 600.0, **more) -> PreparedLaunch:
        size = {"gpus": 0, "ranks_per_node": 4, "cpus_per_node": 4, "memory_per_node": 4 * 2.0**30}
        return launch_for(destination("slurm", self.shared, **size | more), limit)

    def row(self, fault: str, expected: str, happens: Callable[[], str]) -> None:
        """Let a fault happen and print its line. expected: a pattern of the right message."""
        began = time.monotonic()
        said = happens()
        passed = bool(re.search(expected, said))
        self.right &= passed
        print(
            f"| {fault} | {expected} | {said} | {time.monotonic() - began:.0f} s | {'yes' if passed else 'NO'} |",
            flush=True,
        )
        for job in self.cluster.say("squeue", "-h", "-o", "%A").split():
            self.cluster.say("scancel", job)
        until(self.cluster.idle, TO_REST, "idle cluster")

    def run(self, launch: PreparedLaunch, act: Callable[[str], object] = bool) -> str:
        """The last message of a launch. act: reacts to its reports."""
        with tempfile.TemporaryDirectory() as seen, contextlib.redirect_stdout(sys.stderr):
            try:
                finished = run_on_cluster(launch, Path(seen) / "seen", never, lambda done, message, *_: act(message))
            except InputError as error:
                return str(error).replace(str(self.shared), "SHARED")
        (measured,) = finished.runs
        ratio = measured.measured.total / measured.predicted.total
        return (
            f"predicted {measured.predicted.total * 1e3:.1f} ms, measured {measured.measured.total * 1e3:.1f} ms "
            f"({ratio:.2f} ×); {measured.predicted.cost_source}"
        )

    def submitted(self, launch: PreparedLaunch) -> str:
        """The message of a submission, and the files that it leaves."""
        try:
            with clusters.new_run_folder(launch) as folder:
                said = clusters.submit(launch, folder)
        except InputError as error:
            said = str(error)
        jobs = self.cluster.say("squeue", "-h").splitlines()
        return f"{said}; folders: {len(list(self.shared.iterdir()))}, jobs: {len(jobs)}"

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        for name in NODES:
            for process in self.cluster.processes(name):
                with contextlib.suppress(psutil.Error):
                    if WORKER in process.cmdline() and process.environ().get("RANK") == str(rank):
                        process.send_signal(number)


def once(when: str, act: Callable[[], object]) -> Callable[[str], None]:
    """Act at the first report that has these words."""
    done: list[str] = []

    def report(message: str) -> None:
        if when in message and not done:
            done.append(message)
            act()

    return report


def waits_ten_times_longer(launch: PreparedLaunch) -> PreparedLaunch:
    """The same with ranks that wait for each other beyond the job's time limit."""
    return replace(launch, instructions=launch.instructions.model_copy(update={"limit": 10 * launch.limit}))


def twice(trial: Trial) -> str:
    """Two threads submit one folder."""
    launch = trial.launch()
    clusters.write(launch, folder := trial.shared / "one")

    def submit(_: int) -> str:
        try:
            return clusters.submit(launch, folder)
        except InputError as error:
            return str(error).replace(str(trial.shared), "SHARED")

    with ThreadPoolExecutor(2) as threads:
        said = sorted(threads.map(submit, range(2)))
    jobs = {part.partition("+")[0] for part in trial.cluster.say("squeue", "-h", "-o", "%i").split()}
    return f"{' and '.join(said)}; jobs: {len(jobs)}"


def away(trial: Trial) -> Callable[[str], None]:
    """Stops the controller when ranks compute, and starts it after a while."""
    gone: list[float] = []

    def act(message: str) -> None:
        if not gone and "measuring" in message:
            trial.cluster.stop_controller()
            gone.append(time.monotonic())
        elif "no answer" in message and time.monotonic() - gone[0] > AWAY and "slurmctld" not in trial.cluster.daemons:
            trial.cluster.start_controller()

    return act


def try_all(trial: Trial) -> None:
    """Every fault, one after the other."""
    cluster, launch, run = trial.cluster, trial.launch, trial.run
    print("| what happens | should be said | said | took | right |\n|---|---|---|---|---|")
    trial.row("nothing, 2 nodes of 1 rank", "predicted .* measured", lambda: run(launch(ranks_per_node=1)))
    trial.row("nothing, 2 nodes of 4 ranks", "predicted .* measured", lambda: run(launch()))
    trial.row(
        "rank 6 is killed",
        r"failed \(NonZeroExitCode\); rank 6 was killed by signal 9",
        lambda: run(launch(), once("measuring", lambda: trial.signal_rank(6, signal.SIGKILL))),
    )
    node_dies(trial)
    trial.row(
        "rank 5 hangs to the time limit",
        r"failed: TIMEOUT \(TimeLimit\); what its nodes",
        lambda: run(
            waits_ten_times_longer(launch(60.0)), once("measuring", lambda: trial.signal_rank(5, signal.SIGSTOP))
        ),
    )
    trial.row("the controller is away for 20 s", "predicted .* measured", lambda: run(launch(), away(trial)))
    trial.row(
        "somebody cancels it",
        "cancelled; what its nodes",
        lambda: run(
            launch(),
            once(
                "measuring",
                lambda: [cluster.say("scancel", job) for job in cluster.say("squeue", "-h", "-o", "%A").split()],
            ),
        ),
    )
    trial.row(
        "nodes do not see the folder",
        "left no log .* do not see it as /nowhere",
        lambda: run(launch(seen_as="/nowhere")),
    )
    trial.row("ranks see no GPU", "rank . sees no GPU on", lambda: run(launch(gpus=4)))
    for old in trial.shared.iterdir():
        shutil.rmtree(old)
    nothing = "folders: 0, jobs: 0"
    trial.row("4 nodes of 2", f"needs 4 .*{nothing}", lambda: trial.submitted(launch(nodes=4, ranks_per_node=2)))
    trial.row(
        "a limit above the partition's", f"for 2 minutes.*{nothing}", lambda: trial.submitted(launch(partition="short"))
    )
    trial.row("no such partition", f"Slurm refused .*{nothing}", lambda: trial.submitted(launch(partition="nowhere")))
    trial.row("two threads submit one folder", r"submit.* and slurm://\S+; jobs: 1", lambda: twice(trial))


def node_dies(trial: Trial) -> None:
    """Its daemon and its ranks are killed; afterwards it is there again."""
    cluster = trial.cluster

    def happens() -> str:
        said = trial.run(trial.launch(), once("measuring", lambda: cluster.kill_node(NODES[1])))
        cluster.start_node(NODES[1])
        return said

    trial.row("a node dies", f"failed: NODE_FAIL .*Node failure on {re.escape(NODES[1])}", happens)


def main() -> int:
    if reason := missing():
        print(reason)
        return 1
    local.POLL = 0.5
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (shared := Path(folder) / "shared").mkdir()
        cluster = Cluster(Path(folder), patience=10)
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        try:
            cluster.start()
            trial = Trial(cluster, shared)
            try_all(trial)
        finally:
            cluster.stop()
    return 0 if trial.right else 1


if __name__ == "__main__":
    sys.exit(main())

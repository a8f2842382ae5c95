"""Why a job on a cluster failed, by what its nodes have printed."""

import pytest

from engine.launch.rank.failure import RankFailure
from engine.launch.running.clusters import cause, node_lines
from tests.launch.launches_for_clusters import destination

HANDLE = "slurm://switchyard/7"
LOST = RankFailure(0, "rank 0 lost another rank: closed", True).line
MEMORY = RankFailure(5, "rank 5 is out of memory", False).line
FIRST = "E1123 15:48:02.869 17128 api.py:1002] failed (exitcode: {}) local_rank: {} (pid: 171) of binary: python\n"
SIGNALLED = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 23729 got signal: 15\n"
STEP = "srun: error: 127.0.0.3: task 0: {}\n"
CANCELLED = "slurmstepd-127.0.0.2: error: *** STEP 2.0 ON 127.0.0.2 CANCELLED AT 2026-11-23T15:40:54 ***\n"


@pytest.mark.parametrize(
    ("first", "second", "batch", "wanted"),
    [
        # torchrun counts the ranks of its node; the nodes are numbered by their names, not in the order they were asked for.
        ("[rank 4] x\n" + FIRST.format(-9, 1), f"[rank 0] {LOST}", "", "rank 5 was killed by signal 9 (SIGKILL, which"),
        (
            f"[rank 0] {LOST}" + FIRST.format(1, 0),
            "[rank 6] x\n" + FIRST.format(-11, 2),
            "",
            "rank 6 was killed by signal 11",
        ),
        (f"[rank 0] {LOST}", f"[rank 5] {MEMORY}", "", "rank 5 is out of memory"),
        (
            f"[rank 0] {LOST}",
            "[rank 4] x\n" + FIRST.format(-15, 0),
            STEP.format("Killed"),
            "Slurm says '127.0.0.3: task 0: Killed'; rank 0 lost another rank",
        ),
        # What the scheduler ends is no cause, nor what it says of that.
        (
            "[rank 0] x\n" + FIRST.format(-15, 0),
            SIGNALLED,
            CANCELLED + STEP.format("Terminated"),
            "what its nodes printed is in {folder}",
        ),
        (
            "[rank 0] x\n",
            "",
            STEP.format("Exited with exit code 1") + STEP.format("Killed"),
            "Slurm says '127.0.0.3: task 0: Killed'",
        ),
        (
            "",
            "",
            "slurmstepd-127.0.0.2: error: execve(): /gone/python: No such file or directory\n",
            "Slurm says 'execve(): /gone/python: No such file",
        ),
        ("", "", "+ srun --output=x\n", "what its nodes printed is in {folder}"),
        (
            None,
            None,
            None,
            "its nodes have left no log in {folder}: they have not run, or they do not see it as /scratch/run (--seen-as",
        ),
    ],
)
def test_the_cause_is_told_as_far_as_the_nodes_tell_it(tmp_path, first, second, batch, wanted):
    where = destination("slurm", tmp_path, gpus=0, ranks_per_node=4, seen_as="/scratch")
    (folder := tmp_path / "run").mkdir()
    names = ("slurm-7-switchyard-0.out", "slurm-7-switchyard-1.out", "slurm-7.out")
    for name, text in zip(names, (first, second, batch), strict=True):
        if text is not None:
            (folder / name).write_text(text)
    said = cause(folder, HANDLE, where)
    assert said.startswith(wanted.format(folder=folder))
    assert said.endswith(f"what its nodes printed is in {folder}") == (first is not None)
    assert list(node_lines(folder, HANDLE, where, 1)) == (second or "").splitlines(keepends=True)

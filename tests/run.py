"""All tests, by half as many processes again as there are processors: `make test`, and `make everything`.

Browsers, ranks and jobs let their processes wait about as long as they let them work.

The files are dealt out one by one, those that took longest before the others, so that no processor is left alone with a long
file at the end. A file that takes more processor time than its budget fails the run.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import everything, in_turn, spent, warm

HERE = Path(__file__).parent
DURATIONS = HERE / "durations.json"
"""Processor seconds of each file, as last recorded, in units of `spent.loop_seconds`."""
BUDGET = 60.0
"""Units that a file may take: 34 s on a machine that needs 0.57 s for the loop. A new clone also compiles what numba has not
compiled ahead."""
BROWSER = "Chromium draws without a graphics card"
PAGES = "runs whole pages and the jobs that they start"
RANKS = "launches ranks, which are processes with PyTorch"
PLANS = "plans, or runs commands, over and over"
BUDGETS: dict[str, tuple[float, str]] = {
    "app/test_affinity_page.py": (100, PAGES),
    "app/test_capacity_page.py": (100, PAGES),
    "app/test_goal_pages.py": (200, PAGES),
    "app/test_launch_page.py": (160, PAGES),
    "app/test_optimise_page.py": (200, PAGES),
    "app/test_review_links.py": (100, PAGES),
    "app/test_review_page.py": (120, PAGES),
    "app/test_state.py": (100, PAGES),
    "app/test_verdict_page.py": (100, PAGES),
    "app/test_welcome.py": (100, PAGES),
    "app/test_what_if_page.py": (160, PAGES),
    "app/test_workload_page.py": (140, PAGES),
    "browser/test_access.py": (150, BROWSER),
    "browser/test_cluster.py": (250, BROWSER),
    "browser/test_login.py": (100, BROWSER),
    "browser/test_main_job.py": (200, BROWSER),
    "browser/test_review.py": (110, BROWSER),
    "cli/test_commands.py": (100, PLANS),
    "launch/test_clusters.py": (200, RANKS),
    "launch/test_failures.py": (100, RANKS),
    "launch/test_local.py": (200, RANKS),
    "launch/test_memory.py": (100, RANKS),
    "launch/test_step.py": (150, RANKS),
    "launch/test_two_nodes.py": (220, RANKS),
    "placement/test_best.py": (100, PLANS),
    "placement/test_coactivation.py": (100, PLANS),
    "placement/test_grouped_assignment.py": (100, PLANS),
    "runtime/test_models.py": (100, RANKS),
    "runtime/test_script.py": (100, RANKS),
    "systems/test_best.py": (100, PLANS),
    "systems/test_exflow.py": (100, PLANS),
    "systems/test_joint.py": (100, PLANS),
    "systems/test_systems.py": (100, PLANS),
    "test_docs.py": (250, PLANS),
    "test_faults.py": (100, PLANS),
    "test_start.py": (100, PLANS),
    "test_words.py": (100, PLANS),
}
"""Files that may take more, with the reason."""
NO_TESTS = 5
"""The exit code of a process of pytest that came too late to get a file."""
NEWS = 30
"""Seconds between two lines about how far the run is."""
ADDRESS = "warm"
"""The socket of the one process of `tests.warm`, in the folder of the run."""
UNKNOWN = 5.0
"""Units that are expected of a file that nobody recorded."""


def budget_of(file: str) -> float:
    """Units that a file may take, by its path relative to `tests`."""
    if everything.WANTED:
        return float("inf")  # full examples, and whatever is slow on purpose
    return BUDGETS.get(file, (BUDGET,))[0]


def files() -> list[str]:
    """All files of this run relative to `tests`, those that took longest first."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    found = [str(path.relative_to(HERE)) for path in HERE.rglob("test_*.py") if not everything.is_left_out(path)]
    return sorted(found, key=lambda file: (-known.get(file, UNKNOWN), file))


def start(folder: Path, number: int, more: list[str]) -> subprocess.Popen:
    """A warm process of pytest, with more arguments, that takes files from the folder and writes `NUMBER.txt` there."""
    environment = os.environ | {in_turn.FOLDER: str(folder), warm.ADDRESS: str(folder / ADDRESS)}
    command = [str(warm.PYTHON), "-m", "pytest", "-p", "tests.in_turn", "-p", "no:cacheprovider", "-p", "no:anyio", *more]
    command += ["-o", "console_output_style=classic"]
    with (folder / f"{number}.txt").open("w") as output:
        return subprocess.Popen(command, cwd=HERE.parent, env=environment, stdout=output, stderr=subprocess.STDOUT)


def main() -> int:
    """Run the tests; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=os.cpu_count() * 3 // 2, help="of pytest at once")
    parser.add_argument("--record", action="store_true", help="write what every file took into durations.json")
    chosen, more = parser.parse_known_args()
    begun, unit = time.monotonic(), spent.loop_seconds()
    os.environ |= {spent.RUN: str(os.getpid())} | spent.ONE_THREAD | os.environ
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        listed = files()
        (folder / in_turn.FILES).write_text("\n".join(f"{HERE.name}/{file}" for file in listed))
        with warm.serving(folder / ADDRESS):
            processes = [start(folder, number, more) for number in range(chosen.processes)]
            try:
                for process in processes:
                    while process.poll() is None:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(NEWS)
                        taken = sum(1 for _ in folder.glob("*.taken"))
                        print(f"{taken} of {len(listed)} files begun after {time.monotonic() - begun:.0f} s", flush=True)
            finally:
                for process in processes:
                    process.terminate()
                    process.wait()
        for number in range(chosen.processes):
            lines = (folder / f"{number}.txt").read_text().splitlines()
            print(*(line for line in lines if line.strip(".sRF")), sep="\n")  # all but its lines of dots
        usage = folder / in_turn.USAGE
        rows = [json.loads(line) for line in usage.read_text().splitlines()] if usage.exists() else []
    unit = max(unit, spent.loop_seconds())
    rows = [row for row in rows if not row["again"]]
    took = {row["file"].removeprefix(f"{HERE.name}/"): row["seconds"] / unit for row in rows}
    if chosen.record:
        DURATIONS.write_text(json.dumps({file: round(took[file], 2) for file in sorted(took)}, indent=1) + "\n")
    over = {file: units for file, units in took.items() if units > budget_of(file)}
    for file, units in sorted(over.items()):
        print(f"{file} took {units * unit:.1f} s of processor time, its budget is {budget_of(file) * unit:.1f} s")
    forgotten = spent.left_over()
    for process in forgotten:
        print(f"Still runs after the tests: {process}")
    seconds = time.monotonic() - begun
    print(f"{len(listed)} files in {seconds:.0f} s, {seconds / unit:.0f} times the loop of {unit:.2f} s")
    failed = any(process.returncode not in (0, NO_TESTS) for process in processes)
    return int(failed or bool(over or forgotten))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the run ends its processes too
    sys.exit(main())

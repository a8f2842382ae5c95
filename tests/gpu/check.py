"""All that needs a GPU, in one go: `python -m tests.gpu.check` (`make gpu`), on any machine with NVIDIA GPUs.

Prints a line for everything that was tried: whether it holds, and the figure; keeps them as JSON. Exit code 1 when something
does not hold, and when the machine has a GPU that PyTorch cannot use; 0 otherwise, also without any GPU, where there is nothing
to check. Takes some minutes. docs/first-gpu.md says how to read it.

The tests run its launches over Gloo on processors and everything round them with made-up machines; NCCL, CUDA's clock and
memory need a GPU.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

from engine.errors import one_line
from engine.files import data_folder, write_atomically
from engine.launch.places.devices import Devices, attached
from tests.gpu.attached import discovery, seen_without_torch, topology, why_unusable
from tests.gpu.gemms import calibrate_quickly, gemms
from tests.gpu.launches import CASES, counts, launched
from tests.gpu.table import CheckError, Finding, Row, SkipError, document

Check = Callable[[], Sequence[Finding]]

FOUND = "GPUs found (NVML, PyTorch)"
SHARING = 4
"""Ranks that share one GPU, over Gloo."""


def checks_for(devices: Devices) -> dict[str, Check]:
    """Checks by name, the quick and telling ones first."""
    checks: dict[str, Check] = {FOUND: discovery, "nvidia-smi topo -m": topology}
    for ranks in counts(len(devices.gpus)):
        for case in CASES:
            name = f"{case}, {ranks} rank{'s' if ranks > 1 else ''}, NCCL"
            checks[name] = partial(launched, case, ranks, "nccl", devices)
    if len(devices.gpus) == 1:
        checks["2 ranks and more, NCCL"] = one_gpu_only
    for case in CASES:
        checks[f"{case}, {SHARING} ranks on one GPU, Gloo"] = partial(shared, case)
    checks["calibrate --quick"] = calibrate_quickly
    checks["calibrated GEMMs against direct ones"] = gemms
    return checks


def one_gpu_only() -> list[Finding]:
    raise SkipError("there is one GPU here, and NCCL gives every rank its own")


def shared(case: str) -> list[Finding]:
    """A launch on ranks that share one GPU, the only one that they see."""
    devices = attached()
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=first):
        return launched(case, SHARING, "gloo", replace(devices, gpus=devices.gpus[:1], memory=devices.memory[:1]))


def main(arguments: Sequence[str] = ()) -> int:
    """Run every check, whatever becomes of the others; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.check")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the table is kept (default: in the data folder)")
    kept = parser.parse_args(arguments).json or data_folder() / "gpu.json"
    if not os.access(kept.parent, os.W_OK):  # which is better known before than after half an hour
        parser.error(f"the folder {kept.parent} is not there, or cannot be written")
    devices = attached()
    if seen := seen_without_torch(devices):
        rows = [Row("FAIL", FOUND, one_line(f"{seen}, but PyTorch can use none: {why_unusable(devices)}"))]
        print(rows[0].line)
        return finish(rows, devices, kept)
    if not devices.gpus:
        print("There is no GPU here, so there is nothing to check. " + "; ".join(devices.notes))
        return 0
    return finish(run_all(checks_for(devices), devices, kept), devices, kept)


def run_all(checks: Mapping[str, Check], devices: Devices, kept: Path) -> list[Row]:
    """The rows of all checks, printed and kept one by one: an early end of the run leaves those before."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, SWITCHYARD_DATA=folder):
        for name, check in checks.items():
            print(f"{name} ...", file=sys.stderr, flush=True)
            for row in tried(name, check, Path(folder) / "log.txt"):
                print(row.line, flush=True)
                rows.append(row)
            write_atomically(kept, document(rows, devices))
    return rows


def finish(rows: Sequence[Row], devices: Devices, kept: Path) -> int:
    """Say how it went and where it is kept; returns the exit code."""
    write_atomically(kept, document(rows, devices))
    results = [row.result for row in rows]
    print(", ".join(f"{results.count(result)} {result}" for result in ("ok", "FAIL", "skip")) + f"; kept in {kept}")
    return int("FAIL" in results)


def tried(name: str, check: Check, log: Path) -> list[Row]:
    """The outcome of a check. The output of its ranks is shown when it fails."""
    try:
        with log.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            findings = check()
    except SkipError as reason:
        return [Row("skip", name, one_line(str(reason)))]
    except Exception as error:
        if not isinstance(error, CheckError):
            print(log.read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
            traceback.print_exc()
        return [Row("FAIL", name, one_line(str(error) or type(error).__name__))]
    return [Row("ok", ": ".join(filter(None, (name, part.name))), part.text, part.figures) for part in findings]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

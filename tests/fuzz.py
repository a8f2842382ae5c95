"""All fuzz targets for a given time: `make fuzz SECONDS=600`.

A target is a property test of a reader or a kernel that takes any input, see `TARGETS`. Each gets an equal part of the time and
begins with the good files or instances that its strategies change; past failures are tried first (`.hypothesis`).
"""

import argparse
import inspect
import os
import sys
import tempfile
import time
import traceback
from functools import wraps
from pathlib import Path

import pytest

TARGETS = ("tests/formats", "tests/solve/test_fuzz.py", "tests/validate/test_tampered.py")
FUZZED = ("test_fuzz", "test_tampered")
"""The beginning of the names of files with targets."""
BATCH = 20
"""Inputs between two looks at the clock."""


class _Collected:
    """A plugin of pytest that keeps the targets among the collected tests."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        named = [item for item in session.items if item.path.name.startswith(FUZZED)]
        self.items = [item for item in named if getattr(getattr(item, "obj", None), "is_hypothesis_test", False)]


def fuzz(item: pytest.Function, seconds: float, folder: Path) -> tuple[int, str | None]:
    """Return the number of inputs that a target took in these seconds, and its failure, if any. A target that asks for
    `tmp_path` gets the folder."""
    ends, counts = time.monotonic() + seconds, [0]
    handle = item.obj.hypothesis

    @wraps(handle.inner_test)
    def once(*arguments: object, **named: object) -> None:
        counts[0] += 1
        handle.inner_test(*arguments, **named)

    test, handle.inner_test = handle.inner_test, once
    parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    if "tmp_path" in inspect.signature(item.obj).parameters:
        parameters["tmp_path"] = folder
    try:
        while time.monotonic() < ends:
            item.obj(**parameters)
    except Exception:
        return counts[0], traceback.format_exc()
    finally:
        handle.inner_test = test
    return counts[0], None


def main() -> int:
    parser = argparse.ArgumentParser(description="Run all fuzz targets for a given time.")
    parser.add_argument("--seconds", type=float, default=600.0, help="of all targets together (default 600)")
    parser.add_argument("--only", default="", help="targets with this in their name")
    options = parser.parse_args()
    os.environ["SWITCHYARD_FUZZ"] = str(BATCH)  # which also lets every run try other inputs
    collected = _Collected()
    pytest.main(["--collect-only", "-qqq", "-p", "no:cacheprovider", "--no-summary", *TARGETS], [collected])
    items = [item for item in collected.items if options.only in item.nodeid]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SWITCHYARD_DATA"] = folder
        for item in items:
            inputs, fault = fuzz(item, options.seconds / len(items), Path(folder))
            print(f"{inputs:8,} inputs  {'FAILED' if fault else 'ok    '}  {item.nodeid}", flush=True)
            if fault:
                failed += 1
                print(fault, file=sys.stderr, flush=True)
    print(f"{len(items)} targets, {failed} failed")
    return 1 if failed or not items else 0


if __name__ == "__main__":
    sys.exit(main())

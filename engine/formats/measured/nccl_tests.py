"""Times of `alltoall_perf`, `all_reduce_perf` and `sendrecv_perf` of nccl-tests, as costs. Other tests in a log are left out,
with a note. How the text is laid out is in `nccl_log`."""

from pathlib import Path

from engine.costs.measured import CollectiveTimes, MeasuredTimes
from engine.formats.format import Format
from engine.formats.measured import nccl_pairs
from engine.formats.measured.nccl_log import is_log, usable_tests


def read_nccl_tests(path: Path) -> MeasuredTimes:
    """The times in the text, with notes on what was left out; raises InputError. Sizes with a time of 0 (below a byte for each
    GPU) are left out."""
    tests, notes = usable_tests(path)
    collectives = [
        CollectiveTimes(operation=test.operation(path), ranks=len(test.ranks), points=tuple(test.rows))
        for test in tests
    ]
    names = {rank.device for test in tests for rank in test.ranks}
    devices = ", ".join(sorted(names)) or "GPUs that are not named"
    nodes = max(len({rank.host for rank in test.ranks}) for test in tests)
    origin = f"nccl-tests on {devices}, {nodes} node{'s' if nodes > 1 else ''}"
    measured = {"name": path.stem[:80], "origin": origin[:300], "collectives": collectives}
    return MeasuredTimes.from_dict(measured | ({"notes": notes} if notes else {}), path.name)


FORMATS = (Format("nccl-tests", "what nccl-tests prints", "measurements", is_log, together=nccl_pairs.SET),)

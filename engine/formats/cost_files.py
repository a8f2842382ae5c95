"""Measured times and fitted lines out of files: the reader of every format that has times."""

from collections.abc import Callable
from pathlib import Path

from engine.costs import CollectiveTimes, CostProfile, MeasuredTimes
from engine.costs.device_profile import DeviceProfile
from engine.errors import InputError
from engine.formats.measured import aiconfigurator, deepep_tests, deepxtrace, kineto, nccl_pairs, serving_rows, times_table
from engine.formats.recognition import identify, opened
from engine.formats.source import MAX_FILE_BYTES, error, fault, ok, read_json_object, warning
from engine.workload import Finding

OF_ONE_PAIR = "tests between two GPUs: with the logs of other pairs they are a cluster; drop all of them together on any page"


def _calibration(path: Path) -> DeviceProfile:
    return DeviceProfile.from_dict(read_json_object(path, MAX_FILE_BYTES), path.name)


_READERS: dict[str, Callable[[Path], CostProfile | MeasuredTimes]] = {
    "aiconfigurator-gemm": aiconfigurator.read_gemms,
    "aiconfigurator-nccl": aiconfigurator.read_collectives,
    **{f"aiconfigurator-{name}": aiconfigurator.refuse for name, *_ in aiconfigurator.NAMED},
    "calibration": lambda path: _calibration(path).measured,
    "cost-profile": lambda path: CostProfile.from_dict(read_json_object(path), path.name),
    "csv": times_table.read_measurements,  # which says what columns are missing
    "deepep-test": deepep_tests.read_deepep_tests,
    "deepxtrace": deepxtrace.refuse,
    "measured-times": lambda path: MeasuredTimes.from_dict(read_json_object(path), path.name),
    "measured-times-table": times_table.read_measurements,
    "nccl-tests": nccl_pairs.read_nccl_tests,
    "profiler-trace": kineto.read_kineto,
}
"""By the name of the format."""


def read_costs(path: Path) -> CostProfile | MeasuredTimes:
    """Fitted lines or measured times, told by content: either of them as saved, a calibration that `calibrate` wrote, measured
    times as a table, the text that nccl-tests prints, a trace of the PyTorch profiler, or tables of aiconfigurator. Raises
    InputError."""
    with opened(path) as path:
        format = identify(path)
        if format.name not in _READERS:
            raise fault(path, f"is {format.title}, which has no times to plan with; {format.belongs}")
        return _READERS[format.name](path)


def read_collectives(path: Path) -> tuple[CollectiveTimes, ...]:
    """The collectives of measured times in any form that `read_costs` takes, of a calibration also the sends to one peer.
    Raises InputError."""
    with opened(path) as path:
        if identify(path).name == "calibration":
            return _calibration(path).collectives
        measured = read_costs(path)
        if isinstance(measured, CostProfile):
            raise fault(path, "a profile of fitted lines does not say how many sends met; give the measured times")
        return measured.collectives


def findings_of_times(path: Path) -> list[Finding]:
    """Findings on a file of times: the parts that were left out and the collectives of tests, or the reason why nothing can be
    read off it."""
    try:
        with opened(path) as path:
            if identify(path).name == "measured-steps":
                return serving_rows.findings(path)
            return _found(read_costs(path), path)
    except InputError as refused:
        return [error("no-times", str(refused))]


def _found(costs: CostProfile | MeasuredTimes, path: Path) -> list[Finding]:
    notes = list(costs.notes or ()) if isinstance(costs, MeasuredTimes) else []
    place = {"nccl-tests": ", out of place", "deepep-test": ""}.get(identify(path).name)
    held = [
        f"{times.operation.replace('_', '-')} over {times.ranks} GPUs: {number} size{'s' * (number > 1)}{place}"
        for times in (() if place is None else costs.collectives)
        if (number := len(times.points))
    ]
    if is_of_one_pair(path):
        notes.append(f"{OF_ONE_PAIR}, or give them to detect --pairs")
    flawed = [any(word in note for word in nccl_pairs.FLAWED) for note in notes]
    found = [(warning if flaw else ok)("times", note) for flaw, note in zip(flawed, notes, strict=True)]
    return [*found, *(ok("collectives", text) for text in held)]


def is_of_one_pair(path: Path) -> bool:
    """True if a file has nccl-tests between two GPUs, which draw a cluster together with those of other pairs."""
    return identify(path).name == "nccl-tests" and bool(nccl_pairs.pairs_in(path))

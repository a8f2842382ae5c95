"""The output of DeepEP's own tests as times of all-to-alls, where its lines say enough for that.

* `tests/elastic/test_ep.py`: every rank prints `* EP: R/N | dispatch: … GB/s (SO), … GB/s (SU), T us, B bytes | copy: …` and
  `@ EP: … combine: …`. T is of the kernel that exchanges, and B what came from the GPUs of its scale-up domain, the rank itself
  among them unless `--ignore-local-traffic` was set: the rows that the lines of `Config:` lead to expect tell which. Between
  domains (SO) rows go in two hops.
* `tests/legacy/test_low_latency.py`: every rank prints `[rank R] Dispatch bandwidth: … GB/s, avg_t=T us | Combine bandwidth:
  …`. The bytes, rate times T, are of all copies that it sends, one for each chosen expert. Only the lines tell how many ranks
  ran.
* `tests/legacy/test_intranode.py`: the first rank prints `[tuning] Best dispatch (FP8): …, … GB/s (NVL), t: T us` and `Best
  combine`; the bytes, rate times T, are those of the rows that it received, itself among the senders. GPUs are not counted in
  it, but each token of k random choices comes to n (1 - C(E - E/n, k) / C(E, k)) of n GPUs, so that the rows do.
* `tests/legacy/test_internode.py`: rows go in two hops, once to each node and then over NVLink.

Buffers of nccl-tests have own parts in them too. Without times, as older versions print, or in two hops, the rates are
named and nothing is timed by them.
"""

import re
from collections import Counter
from math import comb, sqrt
from pathlib import Path

import numpy as np

from engine.costs.measured import MeasuredTimes
from engine.errors import InputError
from engine.formats.format import Format
from engine.formats.source import fault, plain

Point = tuple[float, float]
"""(bytes of a GPU's buffer, seconds)."""
APART = 1.1
"""Factor between sizes that are two points: ranks get slightly different numbers of rows."""
LOCAL, DEVIATIONS = (2, 4, 8), 4
"""Numbers of GPUs that the kernels within a node know, and standard deviations that rows of random choices may be off."""
UNEVEN = 0.03
"""Share of rows that are missing from those of even choices, from which choices were not even."""
EXPERTS = (32, 64, 128, 256, 512)
SCALED = (1 + 4 / 128) / 2
"""Bytes of a row with a scale for every 128 numbers, over those at 16 bits."""
INDEX, WEIGHT = 8, 4
"""Bytes of a choice and of its weight."""

_N = r"(\d{1,9}(?:\.\d{1,6})?)"
_MARK = re.compile(
    rb"\[tuning\] (?:Best|SMs) |\[layout\] Kernel performance|\[config\] num_tokens=\d+, hidden=|GB/s \(SO\)|"
    rb"\[rank \d+\] Dispatch(?: \+ combine)? bandwidth: "
)
_RUN = re.compile(r"(?=\[config\] num_tokens=)|(?=Config:\s)")
_CONFIG = re.compile(r"\[config\] (num_tokens=(\d{1,9}), hidden=(\d{1,9}), (?:num_topk_groups=\d+, )?num_topk=(\d{1,4}))")
_ELASTIC = re.compile(
    r"> Ranks: (\d{1,6}) x (\d{1,6})\s.*?> Experts: (\d{1,4})/(\d{1,6})\s"
    r".*?> Tokens: \d+ \(max: (\d{1,9})\), hidden: (\d{1,9})",
    re.S,
)
_EP = re.compile(
    rf"EP: +(\d{{1,6}})/ *(\d{{1,6}}) \| (dispatch|combine): {_N} GB/s \(SO\), {_N} GB/s \(SU\), {_N} us"
    r"(?:, (\d{1,15}) bytes)?"
)
_LOW = re.compile(
    rf"\[rank (\d{{1,6}})\] Dispatch bandwidth: {_N} GB/s, avg_t={_N} us(?: \| Combine bandwidth: {_N} GB/s, avg_t={_N} us)?"
)
_LOCAL = re.compile(rf"Best (dispatch|combine)(?: \((FP8|BF16)\))?: SMs \d+, NVL chunk \d+[,:] {_N} GB/s \(NVL\), t: {_N} us")
_BEST = re.compile(r"\[tuning\] (Best (?:dispatch|combine)[^\n]*)")


def read_deepep_tests(path: Path) -> MeasuredTimes:
    """The all-to-alls of all runs in a log, bytes of a GPU's buffer with its own part; raises InputError, which names the
    rates, where the lines do not say enough."""
    text = plain(path.read_text(encoding="utf-8", errors="replace"))
    points: dict[int, list[Point]] = {}
    notes, reasons = [], []
    for run in _RUN.split(text):
        for read in (_elastic, _low_latency, _intranode):
            try:
                gpus, times, note = read(run)
            except InputError as refused:
                reasons.append(str(refused))
                continue
            if times := [time for time in times if min(time) > 0]:
                points.setdefault(gpus, []).extend(times)
                notes.append(note)
    if not points:
        config, said = _CONFIG.search(text), [found[1].strip() for found in _BEST.finditer(text)][-3:]
        said += [f"{found[3]} {found[4]} GB/s (SO), {found[5]} GB/s (SU), {found[6]} us" for found in _EP.finditer(text)][-2:]
        if parts := [part for part in ("dispatch", "combine") if part not in text.lower() or not said]:
            reasons.append(f"no result of {' and '.join(parts)}: the test broke off")
        because = reasons[0] if reasons else "rows go in two hops" if "(RDMA)" in text else "it prints no times"
        rates = "; ".join([*([config[1]] if config else []), *said])[:600]
        raise fault(
            path,
            f"is the output of a test of DeepEP that times no all-to-all: {because}{f' ({rates})' if rates else ''}; choose "
            "the cost deepep, or time an all-to-all with nccl-tests",
        )
    if missing := [part for part in ("dispatch", "combine") if not re.search(rf"{part}[^\n]* GB/s", text, re.I)]:
        notes.append(f"no result of {missing[0]}: the test broke off")
    notes += [f"left out of a run: {reason}" for reason in dict.fromkeys(reasons)]
    notes.append("times are of the kernels alone, with random choices: nearly even loads")
    collectives = [
        {"operation": "all_to_all", "ranks": gpus, "points": _merged(times)} for gpus, times in sorted(points.items())
    ]
    origin = "a test of DeepEP on GPUs that are not named"
    content = {"name": path.stem[:80], "origin": origin, "collectives": collectives, "notes": list(dict.fromkeys(notes))}
    return MeasuredTimes.from_dict(content, path.name)


def _rows_of_a_token(gpus: int, choices: int, experts: int) -> float:
    """GPUs to which a token goes on average."""
    return gpus * (1 - comb(experts - experts // gpus, choices) / comb(experts, choices))


def _elastic(run: str) -> tuple[int, list[Point], str]:
    """(GPUs, times, note) of a run of test_ep; raises InputError if they are no plain all-to-all."""
    if not (lines := [found.groups() for found in _EP.finditer(run)]):
        return 0, [], ""
    if (config := _ELASTIC.search(run)) is None:
        raise InputError("the lines of 'Config:' are missing; keep the whole output")
    domains, gpus, choices, experts, tokens, width = map(int, config.groups())
    if domains > 1 or any(float(line[3]) for line in lines):
        raise InputError(f"rows go in two hops, between {domains} domains and within them")
    if any(line[6] is None for line in lines):
        raise InputError("the lines of ranks have no bytes; run the newest test_ep")
    if not (2 <= gpus <= experts and 0 < choices <= experts and width and tokens >= gpus) or any(
        int(line[1]) != gpus for line in lines
    ):
        raise InputError(f"it names {gpus} GPUs and {experts} experts, the lines of ranks others")
    combined = [int(line[6]) for line in lines if line[2] == "combine"]
    if not combined:
        raise InputError("no result of combine: the test broke off")
    rows = np.mean(combined) / (2 * width + WEIGHT * choices)
    expected = _rows_of_a_token(gpus, choices, experts) * (tokens - (gpus - 1) / 2)  # rank r has r fewer
    own = min((1.0, 1 - 1 / gpus), key=lambda share: abs(rows / expected / share - 1))
    if abs(rows / expected / own - 1) > UNEVEN:
        raise InputError(f"{rows:.0f} rows came to a rank, of even choices {expected:.0f} do: it did not choose evenly")
    times = [(int(line[6]) / own, float(line[5]) * 1e-6) for line in lines]
    return gpus, times, f"test_ep over {gpus} GPUs of one domain; copies after the exchange are not in its times"


def _low_latency(run: str) -> tuple[int, list[Point], str]:
    """(GPUs, times, note) of the runs of test_low_latency; raises InputError if lines of ranks are missing."""
    lines = [found.groups() for found in _LOW.finditer(run)]
    printed = Counter(int(line[0]) for line in lines)
    if not printed:
        return 0, [], ""
    gpus = max(printed) + 1
    if len(printed) < max(gpus, 2):
        raise InputError(f"{len(printed)} of {gpus} ranks or more printed; put the output of all nodes into one file")
    if len({*printed.values()}) > 1:
        raise InputError("some ranks printed more lines than others; keep one run to a file, and all of it")
    parts = [part for line in lines for part in (line[1:3], line[3:5]) if part[0]]
    times = [(float(rate) * 1e3 * float(micros), float(micros) * 1e-6) for rate, micros in parts]
    return gpus, times, f"test_low_latency: the {gpus} ranks that printed are taken for all; if other nodes ran too, add theirs"


def _intranode(run: str) -> tuple[int, list[Point], str]:
    """(GPUs, times, note) of a run of test_intranode; raises InputError if its rows do not tell how many GPUs there were."""
    lines, config = [found.groups() for found in _LOCAL.finditer(run)], _CONFIG.search(run)
    tokens, width, choices = map(int, config.groups()[1:]) if config else (0, 0, 0)
    if not lines or not (tokens and width and choices):
        return 0, [], ""
    times = [(float(rate) * 1e3 * float(micros), float(micros) * 1e-6) for _, _, rate, micros in lines]
    part = [size / (SCALED if line[1] == "FP8" else 1.0) for line, (size, _) in zip(lines, times, strict=True)]
    rows = np.mean(part) / (2 * width)
    fits = []
    for gpus in LOCAL:
        few = [_rows_of_a_token(gpus, choices, count) for count in EXPERTS if count >= choices]
        chance = DEVIATIONS * sqrt(tokens * gpus) / 2  # of a binomial, at most
        if few and min(few) * tokens - chance <= rows <= max(few) * tokens + chance:
            fits.append(gpus)
    if len(fits) != 1:
        counts = " or ".join(map(str, fits)) or "none of 2, 4 and 8"
        raise InputError(f"it does not say how many GPUs ran, and {rows / tokens:.2f} rows a token fit {counts}")
    return (
        fits[0],
        times,
        f"test_intranode at its best settings, over {fits[0]} GPUs by its {rows / tokens:.2f} rows a token; it does not print "
        "their number",
    )


def _merged(times: list[Point]) -> list[Point]:
    """One point for all times of nearly one size: their means."""
    merged: list[list[Point]] = []
    for size, seconds in sorted(times):
        if merged and size < merged[-1][0][0] * APART:
            merged[-1].append((size, seconds))
        else:
            merged.append([(size, seconds)])
    return [tuple(np.mean(part, axis=0).tolist()) for part in merged]


FORMATS = (
    Format(
        *("deepep-test", "the output of a test of DeepEP, how fast its kernels were", "measurements"),
        lambda glance: glance.is_text and _MARK.search(glance.beginning) is not None,
    ),
)

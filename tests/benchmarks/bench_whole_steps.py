"""Whole steps of serving engines, ours and aiconfigurator's, on the same measured rows that nothing was fitted to:
`python -m tests.benchmarks.bench_whole_steps [ROWS] [--theirs FOLDER]`; with `--fit` the factors of ours
are made anew.

ROWS (200) are evenly spaced over the half that was held out. The EP32 rows of DeepSeek-R1 on GB200 and GB300 come on top, ours
by factors that were fitted without that deployment. Theirs is `cli_estimate` of the pinned package in an environment of its
own, in FOLDER or a temporary one. It is given the row's own columns, which have the names of its arguments and are what its
`config_adapter` makes of such records; database `SILICON` at its current version, and `HYBRID` for rows that this refuses.
Without the package only ours is printed.
"""

import argparse
import contextlib
import csv
import json
import platform
import select
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine import serving
from engine.catalogue.packaged import installed_folder
from engine.compare.trust.whole_steps import fit, fit_with_margins, is_fitted, known_model, measured_steps, table_of
from engine.serving.deployment import MeasuredStep
from engine.serving.forecast import Factors, fitted, forecast
from tests.benchmarks.shared import columns

PINNED, LIMIT = "aiconfigurator==0.12.0", 60.0
"""The package, and seconds that it has for a row."""
OWN = {"id", "silicon_data_source", "backend", "backend_version", "system", "precision", "silicon_ttft_ms", "silicon_tpot_ms"}
"""Columns that are no argument of theirs, or have another name there."""
WORKER = """
import json, logging, os, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from aiconfigurator.cli.api import cli_estimate
logging.disable(logging.CRITICAL)
for line in sys.stdin:
    begin, answer = time.perf_counter(), {}
    for mode in ("SILICON", "HYBRID"):
        try:
            found = cli_estimate(database_mode=mode, **json.loads(line))
            answer = {"mode": mode, "token": found.tpot / 1e3, "first_token": found.ttft / 1e3}
            break
        except Exception as error:
            answer = {"why": f"{type(error).__name__}: {error}"[:90]}
    print(json.dumps(answer | {"seconds": time.perf_counter() - begin}), file=answers, flush=True)
"""


class Answer(NamedTuple):
    """Seconds to the first token and per token, and those that answering took; mode: theirs, of its data"""

    first_token: float
    token: float
    seconds: float
    mode: str = ""


class Theirs:
    """A process of theirs that answers row after row; a new one after a row that took too long."""

    def __init__(self, python: Path) -> None:
        self.python, self.process, self.refused = python, None, []

    def answer(self, step: MeasuredStep, row: dict[str, str]) -> Answer | None:
        """None for a row that is refused or takes too long."""
        if self.process is None:
            command, pipe = [self.python, "-c", WORKER], subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        given = {"system_name": row["system"], "backend_name": row["backend"]}
        for name, value in row.items():
            if value and name not in OWN:
                given[name] = int(float(value)) if name.endswith(("_size", "_workers", "sl")) else value
        with contextlib.suppress(BrokenPipeError):  # a process that has ended gives no answer below
            self.process.stdin.write(json.dumps(given) + "\n")
            self.process.stdin.flush()
        in_time = select.select([self.process.stdout], [], [], LIMIT)[0]
        line = self.process.stdout.readline() if in_time else ""
        if not line:
            self.close()
        found = json.loads(line) if line else {"why": "its process ended" if in_time else f"not in {LIMIT:.0f} s"}
        if why := found.pop("why", None):
            self.refused.append(why)
            return None
        return Answer(**found)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="?", type=int, default=200)
    parser.add_argument("--theirs", type=Path, help="folder of the environment that aiconfigurator is in, or comes into")
    parser.add_argument("--fit", action="store_true", help="write the factors that come with Switchyard anew, and end")
    options = parser.parse_args()
    if options.fit:
        factors = Path(serving.__file__).parent / "factors.json"
        factors.write_text(fit_with_margins().to_json() + "\n", encoding="utf-8")
        return
    held = [step for step in measured_steps() if not is_fitted(step.id)]
    places = np.unique(np.linspace(0, len(held) - 1, min(options.rows, len(held))).round().astype(int))
    chosen, wide = [held[place] for place in places], [step for step in measured_steps() if is_wide(step)]
    table = table_of(measured_steps())
    rows = [at for at, step in enumerate(table.steps) if is_fitted(step.id) and not is_wide(step)]
    unfitted = fit(table, np.array(rows))
    ours = {step.id: our_answer(step, unfitted if is_wide(step) else fitted()) for step in (*chosen, *wide)}
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(f"{len(chosen)} of {len(held)} held-out rows, {time.strftime('%F')}, {machine}")
    with tempfile.TemporaryDirectory() as folder:
        theirs, refused = their_answers([*chosen, *wide], options.theirs or Path(folder))
    formats = {"rows": "30", "": "18", "answered": "9", "TPOT median": "12.1%", "mean": "8.1%", "TTFT median": "12.1%"}
    show = columns(formats | {"s a row": "9.3f"})
    for name, steps in groups(chosen, wide):
        both = [step for step in steps if theirs.get(step.id)]
        lines = {"aiconfigurator": (theirs, both), "ours, the same": (ours, both), "ours, all": (ours, steps)}
        for who, (answers, some) in lines.items():
            if some:
                show(name, who, f"{len(some)}/{len(steps)}", *errors(some, answers))
    modes = [answer.mode for answer in theirs.values() if answer]
    print("\naiconfigurator's answers by database:", *(f"{mode} {modes.count(mode)}" for mode in sorted(set(modes))))
    for why, times in Counter(refused).most_common():
        print(f"refused, {times} rows: {why}")


def is_wide(step: MeasuredStep) -> bool:
    """True for DeepSeek-R1 in fp8 by SGLang with its experts on 32 GPUs of racks, 1024 tokens in and out."""
    deployment, demand = step.deployment, step.demand
    shape = deployment.engine, deployment.precision, deployment.decode.expert, demand.prompt, demand.output
    return shape == ("sglang", "fp8", 32, 1024, 1024) and step.id.startswith("dsr1") and deployment.gpu in ("GB200", "GB300")


def our_answer(step: MeasuredStep, factors: Factors) -> Answer:
    begin = time.perf_counter()
    found = forecast(step.deployment, step.demand, *known_model(step.deployment.checkpoint), factors)
    return Answer(found.first_token, found.token, time.perf_counter() - begin)


def their_answers(steps: list[MeasuredStep], folder: Path) -> tuple[dict[str, Answer | None], list[str]]:
    """By id; and why others were refused. None at all where the package cannot be installed."""
    python = folder / "bin" / "python"
    make = [] if python.exists() else [[sys.executable, "-m", "venv", folder]]
    for command in (*make, [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PINNED]):
        told = subprocess.run(command, capture_output=True, text=True)
        if told.returncode:
            why = (told.stderr or told.stdout).strip().splitlines() or ["its environment cannot be made"]
            print(f"no {PINNED}, so ours alone: {why[-1]}")
            return {}, []
    with (installed_folder("measured steps") / "systems" / "silicon_sample.csv").open(encoding="utf-8", newline="") as file:
        of_id = {row["id"]: row for row in csv.DictReader(file)}
    theirs = Theirs(python)
    try:
        return {step.id: theirs.answer(step, of_id[step.id]) for step in steps}, theirs.refused
    finally:
        theirs.close()


def groups(chosen: list[MeasuredStep], wide: list[MeasuredStep]) -> Iterator[tuple[str, list[MeasuredStep]]]:
    yield "held out", chosen
    for engine in sorted({step.deployment.engine for step in chosen}):
        yield engine, [step for step in chosen if step.deployment.engine == engine]
    yield "EP32, GB200 and GB300", wide


def errors(steps: list[MeasuredStep], answers: dict[str, Answer]) -> tuple[float, float, float, float]:
    """Without sign: median and mean of a token's time, median of the first one's; seconds that a row took in the mean."""
    token = np.abs([answers[step.id].token / step.token - 1 for step in steps if step.token])
    first = np.abs([answers[step.id].first_token / step.first_token - 1 for step in steps if step.first_token])
    took = np.mean([answers[step.id].seconds for step in steps])
    return float(np.median(token)), float(token.mean()), float(np.median(first)), float(took)


if __name__ == "__main__":
    main()

"""Jobs on attached devices: launches of plans, and calibrations."""

import contextlib
import json
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import Field, PlainSerializer, SkipValidation

from engine.costs import CostProfile
from engine.costs.device_profile import DeviceProfile
from engine.errors import InputError
from engine.files import write_atomically
from engine.goal import Goal
from engine.jobs.kinds import Answer, Ask, Document
from engine.jobs.protocol import LOST_TEXTS, Context
from engine.jobs.runner import Job
from engine.jobs.runtimes import Estimate, Took, expect, work_of
from engine.launch.calibration.calibrate import calibrate, plan_sweep
from engine.launch.places.devices import attached
from engine.launch.places.testbed import Testbed
from engine.launch.preparation.launch import Launch, On, PreparedLaunch, plans_in
from engine.launch.preparation.prepare import prepare
from engine.launch.rank.instructions import BEGINS, COMPARED
from engine.launch.results.comparison import compare
from engine.launch.results.own import Generated, OwnFacts
from engine.launch.results.preference import prefer
from engine.launch.results.run import MeasuredPlan, Run
from engine.launch.results.scheduled import Scheduled
from engine.launch.running.local import run
from engine.runtime.checkpoint import listed
from engine.schema import Frozen
from engine.timeline import Timeline
from engine.units import digits, seconds, share, size
from engine.validate import refuse_broken_launch

RUN = "run"
"""Folder in a job's folder: the ranks' own. For a launch on a cluster it has the signs of the job there."""

BRIEF = "brief.json"


class Brief(Frozen):
    """The line of a launch in a list; its result is large. predicted, measured: seconds of each plan, once known; smaller,
    routing: the words on a model that was shrunk and on tokens that were not recorded; took: of one that has ended here."""

    plans: tuple[str, ...]
    on: On
    ranks: int | None = None
    tokens: int | None = None
    predicted: tuple[float, ...] = ()
    measured: tuple[float, ...] = ()
    smaller: str = ""
    routing: str = ""
    took: Took | None = None


class LaunchAsk(Ask):
    """A launch as `Launch.to_arguments` writes it. plan: of the first version, which ran one; own: without its texts, which are
    handed over (`Context.handed`), or with them."""

    plans: tuple[Document, ...] = ()
    plan: Document | None = None
    workload: str
    model: Document
    second: Document | None = None
    on: str = "local"
    ranks: int | None = None
    tokens: int | None = None
    repeats: int = 3
    limit: float = 900.0
    dtype: str | None = None
    scale: float | None = None
    cluster: Document | None = None
    destination: Document | None = None
    step: Document | None = None
    own: Document | None = None

    def launch(self) -> Launch:
        """The launch with its recordings. Raises InputError if one is lost or a part does not fit."""
        return Launch.from_arguments(self.model_dump(exclude_unset=True))


def _without_nulls(document: Frozen) -> Document:
    return document.model_dump(mode="json", exclude_none=True)


Numbers = tuple[float | None, ...]


class ByKind(Frozen):
    """Seconds of every kind of step, a column a field; ratio: measured / predicted, None: nothing was predicted."""

    kind: tuple[str, ...]
    predicted: Numbers
    measured: Numbers
    ratio: Numbers


class ByLayer(Frozen):
    """The same of every MoE layer."""

    layer: tuple[int, ...]
    predicted: Numbers
    measured: Numbers
    ratio: Numbers


TimelineJson = Annotated[Document, SkipValidation]
"""A `Timeline` as JSON. It is opened when it is drawn: it may have millions of events."""


class KeptScheduler(Answer):
    """The work of a plan's scheduler in words, and the seconds of its pieces, a column a field; see `Scheduled`."""

    text: str
    piece: tuple[str, ...]
    predicted: Numbers
    measured: Numbers


class LaunchedPlan(Answer):
    """One plan as predicted and as measured. Fields that may be None are not in answers of every version.

    plan: id; waiting_seconds, predicted_waiting_seconds: see `launch.results.comparison`; pass_seconds: of every timed pass
    difference: largest difference of the output from the unplanned computation, relative to its largest number; None: of a
        model that was too large to be run without a plan
    allowed_difference: that rounding explains
    scheduler: the work of its scheduler, if one ran
    generated: by a person's own model; None: tokens were replayed
    """

    plan: str | None = None
    name: str = ""
    predicted: TimelineJson | None = None
    measured: TimelineJson | None = None
    by_kind: ByKind
    by_layer: ByLayer | None = None
    predicted_seconds: float
    measured_seconds: float
    waiting_seconds: float
    predicted_waiting_seconds: float = 0.0
    pass_seconds: tuple[float, ...]
    difference: float | None
    allowed_difference: float | None = None
    scheduler: KeptScheduler | None = Field(default=None, exclude_if=lambda scheduler: scheduler is None)
    generated: Generated | None = Field(default=None, exclude_if=lambda generated: generated is None)

    def timelines(self) -> tuple[Timeline, Timeline]:
        """The predicted and the measured timeline."""
        return Timeline.from_dict(self.predicted), Timeline.from_dict(self.measured)


class KeptPreference(Answer):
    """Plans by measured time, see `Preference.to_dict`; order: places in `runs`, fastest first; lines: sentences."""

    order: tuple[int, ...]
    pairs: tuple[Document, ...]
    decided: bool
    ranked_alike: bool | None
    lines: tuple[str, ...]


class Links(Answer):
    """Links of a testbed: bandwidth: bytes/s of every rank, each way; near: inside nodes; scale: drawn / emulated."""

    name: str
    scale: float
    bandwidth: tuple[float, ...]
    near: tuple[float, ...] | None = Field(default=None, exclude_if=lambda near: near is None)


class LaunchAnswer(Answer):
    """A finished launch. The first version had one plan and no `runs`.

    preference: None: of a single plan; clock_error: seconds by which ranks' clocks may differ, 0: they share one
    profile: costs that were measured at the start; routing: the words on tokens that were not recorded
    own: of a person's own model; its tokens are those that go through it in a pass
    """

    runs: tuple[LaunchedPlan, ...] = ()
    preference: KeptPreference | None = None
    device: str
    tokens: int
    clock_error: float | None = None
    profile: Annotated[CostProfile, PlainSerializer(_without_nulls)]
    routing: str = Field(default="", exclude_if=lambda routing: not routing)
    testbed: Links | None = Field(default=None, exclude_if=lambda testbed: testbed is None)
    own: OwnFacts | None = Field(default=None, exclude_if=lambda own: own is None)

    @property
    def is_of_now(self) -> bool:
        """True if this version can show it."""
        return "preference" in self.model_fields_set and all(run.by_layer is not None for run in self.runs)


def launch(ask: LaunchAsk, context: Context) -> LaunchAnswer:
    """Run plans as a real job. Raises InputError for a model's folder that the operator has not listed."""
    if ask.own is not None and not ask.own["prompts"]:
        if not (texts := context.handed()):
            raise InputError(LOST_TEXTS)
        ask = ask.model_copy(update={"own": ask.own | {"prompts": json.loads(texts)}})
    asked = ask.launch()
    if asked.own is not None:
        listed(Path(asked.own.folder))
    prepared = prepare(asked)
    refuse_broken_launch(asked.plans, asked.workload, asked.model, asked.cluster, asked.second, asked.step)
    names = tuple(plan.name for plan in asked.plans)
    said = {"tokens": prepared.tokens, "smaller": prepared.smaller, "routing": prepared.routing}
    brief = Brief(plans=names, on=asked.on, ranks=prepared.instructions.ranks, **said)
    write_atomically(context.folder / BRIEF, brief.to_json())
    clock = _Clock(context, expect(prepared, past_times(context.folder.parent)), prepared)
    answer = describe_run(run(prepared, context.folder / RUN, context.stop, clock.report), prepared.testbed)
    figures = {
        "predicted": tuple(launched.predicted_seconds for launched in answer.runs),
        "measured": tuple(launched.measured_seconds for launched in answer.runs),
        "took": clock.took(),
    }
    write_atomically(context.folder / BRIEF, brief.model_copy(update=figures).to_json())
    return answer


def past_times(jobs: Path) -> Iterator[Took]:
    """The launches that have ended here, newest first. jobs: the folder of all jobs"""
    for path in sorted(jobs.glob(f"*/{BRIEF}"), reverse=True):
        with contextlib.suppress(OSError, InputError):
            if took := Brief.from_json(path.read_bytes(), BRIEF).took:
                yield took


class _Clock:
    """Passes a launch's reports on, with the share of its time that is expected to be over, and times its three parts."""

    def __init__(self, context: Context, expected: Estimate | None, launch: PreparedLaunch) -> None:
        self._context, self._work = context, work_of(launch)
        self._expected = None if expected is None or expected.least else expected
        self._ends = (0.0, BEGINS, COMPARED[launch.instructions.goal is Goal.TRAINING], 1.0)
        self._began = [time.monotonic()]
        if self._work is not None:
            self.report(0.0, "starting the ranks")

    def report(self, done: float | None, message: str, incumbent: float | None = None, bound: float | None = None) -> None:
        """As `Context.report`."""
        if done is None or self._work is None:
            self._context.report(done, message, incumbent, bound)
            return
        part = min(bisect_right(self._ends, done), 3) - 1
        while len(self._began) <= part:
            self._began.append(time.monotonic())
        share, whole = done, None if self._expected is None else self._expected.seconds
        if whole:
            inside = (done - self._ends[part]) / (self._ends[part + 1] - self._ends[part])
            share = (sum(self._expected[:part]) + self._expected[part] * inside) / whole
        self._context.report(share, message, incumbent, bound, whole)

    def took(self) -> Took | None:
        """The times of a launch that has just ended; None if it did not come to its comparison."""
        if self._work is None or len(self._began) < 3:
            return None
        start, passes, check = np.diff([*self._began, time.monotonic()]).tolist()
        return Took(work=self._work, start=start, passes=passes, check=check)


def brief_of(job: Job) -> Brief | None:
    """The brief that a launch noted; without one, or if it is damaged, its question in brief; None if no version since knows
    how that was asked."""
    with contextlib.suppress(OSError, InputError):
        return Brief.from_json((job.folder / BRIEF).read_bytes(), BRIEF)
    asked = job.request.arguments
    try:
        names = tuple(plan["name"] for plan in plans_in(asked))
        return Brief(plans=names, on=asked.get("on", "local"), ranks=asked.get("ranks"), tokens=asked.get("tokens"))
    except (KeyError, TypeError, ValueError):
        return None


def run_folder(job: Job) -> Path:
    """The folder of a job's launch."""
    return job.folder / RUN


def describe_run(finished: Run, testbed: Testbed | None = None) -> LaunchAnswer:
    """A finished launch for its report: for every plan both timelines and their comparison, and the links of a testbed."""
    return LaunchAnswer(
        runs=tuple(_describe_plan(measured) for measured in finished.runs),
        preference=prefer(finished.runs).to_dict() if len(finished.runs) > 1 else None,
        device=finished.device,
        tokens=finished.tokens,
        clock_error=finished.clock_error,
        profile=finished.profile,
        routing=finished.routing,
        testbed=None if testbed is None else testbed.to_dict(),
        own=finished.own,
    )


def _columns(table: pd.DataFrame) -> dict[str, list]:
    """A table by column, with None for missing numbers."""
    return table.astype(object).where(table.notna(), None).to_dict("list")


def _describe_plan(measured: MeasuredPlan) -> LaunchedPlan:
    comparison, difference = compare(measured.predicted, measured.measured), measured.difference
    return LaunchedPlan(
        plan=measured.plan.id,
        name=measured.plan.name,
        predicted=measured.predicted.to_dict(),
        measured=measured.measured.to_dict(),
        by_kind=_columns(comparison.by_kind),
        by_layer=_columns(comparison.by_layer),
        predicted_seconds=comparison.predicted,
        measured_seconds=comparison.measured,
        waiting_seconds=comparison.waiting,
        predicted_waiting_seconds=comparison.predicted_waiting,
        pass_seconds=tuple(measured.totals),
        difference=None if difference is None else difference.error,
        allowed_difference=None if difference is None else difference.allowed,
        scheduler=None if measured.scheduled is None else _describe_scheduler(measured.scheduled),
        generated=measured.generated,
    )


def _describe_scheduler(scheduled: Scheduled) -> KeptScheduler:
    piece, predicted, measured = zip(*scheduled.pieces, strict=True)
    return KeptScheduler(text=scheduled.in_words, piece=piece, predicted=predicted, measured=measured)


NAMES = {
    "gemm": "GEMM",
    "memory": "memory",
    "all_to_all": "all-to-all",
    "exchange": "exchange with a peer",
    "all_reduce": "all-reduce",
}


class CalibrateAsk(Ask):
    """ranks, dtypes, quick: see `plan_sweep`; type: of GPUs that are not known by name."""

    ranks: int | None = None
    dtypes: tuple[str, ...] = ()
    quick: bool = False
    type: str | None = None


class FitFigures(Answer):
    """The line through one operation's points, see `Fit`; start_up: seconds; rate: FLOP/s or bytes/s; error: of the line."""

    operation: str
    gpu: str | None
    dtype: str | None
    points: int
    smallest: float
    largest: float
    spread: float
    start_up: float
    rate: float | None
    error: float


class HeldOutFigures(Answer):
    """Relative errors on shapes that were measured directly and not used for the fit; shapes: their number."""

    gpu: str
    dtype: str
    shapes: int
    mean: float
    worst: float


class CalibrateAnswer(Answer):
    """The profile as `calibration`, and its fits and errors as figures for people."""

    name: str
    origin: str
    fits: tuple[FitFigures, ...]
    held_out: tuple[HeldOutFigures, ...]
    calibration: Annotated[DeviceProfile, PlainSerializer(_without_nulls)]


def calibrate_devices(ask: CalibrateAsk, context: Context) -> CalibrateAnswer:
    """Measure the attached devices."""
    sweep = plan_sweep(attached(), ask.ranks, ask.dtypes, ask.quick)
    return describe_calibration(calibrate(sweep, context.folder / RUN, context.stop, context.report, ask.type))


def describe_calibration(profile: DeviceProfile) -> CalibrateAnswer:
    """A calibration with its figures for people."""
    told = {"operation", "gpu", "dtype", "points", "smallest", "largest", "spread"}
    return CalibrateAnswer(
        name=profile.measured.name,
        origin=profile.measured.origin,
        fits=tuple(
            FitFigures(**fit.model_dump(include=told), start_up=fit.line.alpha, rate=fit.rate, error=fit.line.error)
            for fit in profile.fits
        ),
        held_out=tuple(
            HeldOutFigures(
                gpu=shapes.gpu,
                dtype=shapes.dtype,
                shapes=len(shapes.points),
                mean=float(shapes.errors.mean()),
                worst=float(shapes.errors.max()),
            )
            for shapes in profile.held_out
        ),
        calibration=profile,
    )


def table_of(profile: DeviceProfile) -> list[dict[str, str]]:
    """The fits for people: one row each, by column."""
    return [
        {
            "operation": " ".join(filter(None, (NAMES[fit.operation], fit.dtype, fit.gpu))),
            "latency α": seconds(fit.line.alpha),
            "rate 1/β": ""
            if fit.rate is None
            else f"{digits(fit.rate / 1e9)} {'GFLOP/s' if fit.operation == 'gemm' else 'GB/s'}",
            "line's error": share(fit.line.error),
            "spread": share(fit.spread),
            "points": str(fit.points),
            "up to": f"m·n·k = {fit.largest:.1e}" if fit.operation == "gemm" else size(fit.largest),
        }
        for fit in profile.fits
    ]

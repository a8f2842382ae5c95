"""Seconds of plans on recordings: of a whole step of serving where one is known, else of a pass through the MoE layers."""

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from engine.compare.what_if import is_quick, least
from engine.plan import Plan
from engine.problem import Problem
from engine.result import Floats, Stop, never
from engine.serving.step import Phase, load_of_step
from engine.simulate import simulate
from engine.simulate.serving import Serving, are_measured, with_fused_experts
from engine.simulate.work import loads_of
from engine.systems.eplb import speed_of_gpu
from engine.workload import ExpertLoad, TrafficMatrix, Workload

RESAMPLES = 24
"""Draws behind a standard error. With 24 it is itself known to about a seventh: 1 / √(2 · 23)."""
FEWEST_SEQUENCES = 16
"""Sequences from which on whole ones are drawn; of fewer, too few different draws could be made."""
BLOCK = 64
"""Tokens that are drawn together where there are too few sequences: neighbours resemble each other."""
CONFIDENCE = 0.95
"""That a gain lies in its interval, unless another one is asked for."""


PASS = "one pass"
"""The beginning of the unit of a pass."""


def is_pass(unit: str) -> bool:
    """True if `Judge.unit` is of a pass, not of a step."""
    return unit.startswith(PASS)


@dataclass(frozen=True, eq=False)
class Judge:
    """Times plans for inference of one model on any recording of it. problem: cluster, model and costs."""

    problem: Problem
    serving: Serving | None = None

    @property
    def unit(self) -> str:
        """The unit of the seconds, in words: which step or pass, and how it is timed."""
        if self.serving is None:
            ports = "" if is_quick(self.problem) else ", every all-to-all at its busiest port"
            return f"{PASS} through the MoE layers, without attention and dense layers{ports}"
        step = self.serving.step
        return f"a whole {step.phase} step of {step.sequences} sequences per GPU"

    @property
    def phase(self) -> Phase | None:
        """The phase of the step; None of a pass."""
        return None if self.serving is None else self.serving.step.phase

    def seconds(self, plan: Plan, recording: Workload, stop: Stop = never) -> float:
        """Seconds of a step or pass; raises InputError when the plan does not fit. A pass on very many GPUs is not simulated
        send by send but taken at its busiest ports, see `least`."""
        problem = self.problem.with_workload(recording)
        if self.serving is None:
            return simulate(plan, problem, stop).total if is_quick(problem) else least(plan, problem).total
        return self.serving.seconds(plan, problem, stop)

    def with_sequences(self, sequences: int) -> "Judge":
        """A judge of the same step with so many sequences on every GPU."""
        step = self.serving.step.model_copy(update={"sequences": sequences})
        return replace(self, serving=replace(self.serving, step=step))

    def layer_seconds(self, plan: Plan, recording: Workload) -> np.ndarray:
        """float64[layer]: of the MoE layers alone, without simulating a send, see `least`."""
        problem = self.problem.with_workload(recording)
        if self.serving is not None:
            step, model, gpus = self.serving.step, self.problem.model, len(self.problem.cluster.gpus)
            problem = self.problem.with_workload(
                load_of_step(recording, step, model, gpus, self.serving.dealt(self.problem, plan))
            )
            if are_measured(self.serving.source, problem.cluster):
                problem = with_fused_experts(problem, plan, step)
        return least(plan, problem).layers

    def bytes_beside(self, plan: Plan | None = None) -> Floats:
        """float64[gpu]: bytes besides experts, as far as they are known: in a serving step all other weights, and keys and
        values of its sequences."""
        return (
            np.zeros(len(self.problem.cluster.gpus)) if self.serving is None else self.serving.bytes_beside(self.problem, plan)
        )

    def memory_shares(self, plan: Plan) -> np.ndarray:
        """float64[gpu]: part of each GPU's memory that the plan's experts and `bytes_beside` take."""
        held = self.problem.held_bytes(plan.placement) + self.bytes_beside(plan)
        return held / self.problem.cluster.values("memory")


@dataclass(frozen=True)
class Gain:
    """seconds_now, seconds: of both plans; error: standard error of the gain, from the recording being a sample."""

    seconds_now: float
    seconds: float
    error: float

    @property
    def gain(self) -> float:
        """The gain in steps in the same time, as a share: 0.1 is 10 % more."""
        return ratio_gain(self.seconds_now, self.seconds)


@dataclass(frozen=True, eq=False)
class Timing:
    """Times of a plan on a recording.

    seconds: of a step or pass
    redrawn: float64[draw], seconds on other recordings that could as well have been made, as far as they are known
    """

    seconds: float
    redrawn: np.ndarray


def ratio_gain(seconds_now: float, seconds: float) -> float:
    """Seconds now / seconds then - 1; 0 where nothing takes time under any plan."""
    return seconds_now / seconds - 1 if seconds else 0.0


def interval(gain: float, error: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """In which a gain lies as far as its recordings are samples, by its standard error."""
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * error
    return gain - reach, gain + reach


def gain_of(judge: Judge, now: Plan, new: Plan, recording: Workload, seed: int = 0, stop: Stop = never) -> Gain:
    """The gain of one plan over another on a recording.

    Its standard error is that of a bootstrap over `RESAMPLES` draws of the recording (`redrawn_loads`), the same ones for both
    plans, each timed as `timing` says. Costs and cluster are taken as certain. Raises InputError when a plan does not fit.
    """
    if same_work(now, new):
        seconds_now = judge.seconds(now, recording, stop)
        return Gain(seconds_now, seconds_now, 0.0)
    loads = redrawn_loads(recording, seed, stop)
    timed_now, timed = (timing(judge, plan, recording, loads, stop) for plan in (now, new))
    return Gain(timed_now.seconds, timed.seconds, deviation(redrawn_gains(timed_now, timed)))


def redrawn_gains(now: Timing, new: Timing) -> np.ndarray:
    """float64[draw]: the gain of one plan over another in every draw; both were timed on the same ones."""
    return np.array([ratio_gain(*pair) for pair in zip(now.redrawn, new.redrawn, strict=True)])


def deviation(values: np.ndarray) -> float:
    """The standard deviation of float64[draw], which is the standard error of the figure they are draws of; 0 of fewer than
    two."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def timing(judge: Judge, plan: Plan, recording: Workload, loads: np.ndarray, stop: Stop = never) -> Timing:
    """Seconds of a plan on a recording, and in every draw of it.

    loads: float64[draw, layer, expert], see `redrawn_loads`. In a draw every layer is taken to last longer or shorter as its
    busiest GPU's share of the tokens is larger or smaller; time that does not grow with tokens is thereby counted as if it did,
    so that errors are rather too large.
    """
    seconds, layers = judge.seconds(plan, recording, stop), judge.layer_seconds(plan, recording)
    speed = speed_of_gpu(judge.problem.with_workload(recording))
    here = judge.problem.with_workload(recording)
    shares = _shares(plan, here)
    recorded, *redrawn = _busiest(shares, np.concatenate([recording.load[None], loads]), speed)
    longer = [float((layers * (busiest / recorded - 1)).sum()) for busiest in redrawn]
    return Timing(float(seconds), seconds + np.array(longer))


def _shares(plan: Plan, problem: Problem) -> np.ndarray:
    """float64[layer, expert, gpu]: the part of an expert's tokens that each GPU serves; as `Load.served` has it where copies
    do not have equal shares."""
    load = loads_of(plan, problem)[0]
    if not load.has_rule:
        return plan.placement.share
    total = load.served.sum(axis=2, keepdims=True)
    return np.where(total > 0, load.served / np.where(total > 0, total, 1.0), plan.placement.share)


def _busiest(shares: np.ndarray, loads: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """float64[draw, layer]: most of a layer's tokens on a GPU by its speed, as a share of them all; 1 in one without tokens.

    shares: see `_shares`; loads: float64[draw, layer, expert]; speed: float64[gpu]
    """
    total = loads.sum(axis=2)
    of_gpu = np.matmul(loads.swapaxes(0, 1), shares).swapaxes(0, 1) / speed
    return np.where(total > 0, of_gpu.max(axis=2) / np.where(total > 0, total, 1.0), 1.0)


def same_work(now: Plan, new: Plan) -> bool:
    """True if two plans do the same, whatever they are called."""
    return all(
        getattr(now, part) == getattr(new, part) for part in ("placement", "send_order", "execution", "travel", "token_gpus")
    )


def redrawn_loads(recording: Workload, seed: int = 0, stop: Stop = never) -> np.ndarray:
    """float64[draw, layer, expert]: loads of `RESAMPLES` other recordings that could as well have been made, see `resampled`;
    asked to stop, of fewer."""
    rng = np.random.default_rng(seed)
    loads = [resampled(recording, rng).load for _ in range(RESAMPLES) if not stop()]
    return np.array(loads).reshape(-1, *recording.load.shape)


def resampled(recording: Workload, rng: np.random.Generator) -> Workload:
    """Another recording that could as well have been made, of as many sequences (blocks of tokens, token copies).

    From a routing log whole sequences are drawn with replacement, or blocks of `BLOCK` tokens where it has few sequences. In
    loads and traffic, with counts that are taken to be of independent token copies, every count is drawn from Poisson's
    distribution; tokens of one text are not independent, so that this tells too little noise rather than too much.
    """
    if isinstance(recording, ExpertLoad):
        return replace(recording, load=rng.poisson(recording.load).astype(np.float64), by_source=None, by_step=None)
    if isinstance(recording, TrafficMatrix):
        size = recording.bytes_per_token
        return replace(recording, bytes=rng.poisson(recording.bytes / size) * size)
    unit = np.arange(recording.tokens) // BLOCK
    if recording.sequence is not None:
        sequence = np.unique(recording.sequence, return_inverse=True)[1]
        if sequence.max(initial=0) + 1 >= FEWEST_SEQUENCES:
            unit = sequence
    count = int(unit.max(initial=-1)) + 1
    copies = np.bincount(rng.integers(count, size=count), minlength=count) if count else np.zeros(0, np.int64)
    return recording.part(np.repeat(np.arange(recording.tokens), copies[unit]))

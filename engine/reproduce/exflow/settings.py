"""ExFlow's experiments as problems: its models (Table II) on Wilkes3 nodes (§V-A), and passes with and without it in seconds.

The paper says neither batch nor phase. An all-to-all over several nodes that takes ten times as long as one inside a node
(Figure 9) is one of many tokens: here every GPU has eight prompts of 256. Its traces are not public. Tokens are drawn by the
generator, all experts alike popular (§V-F: load is balanced), and go on to their expert's follower as often as it takes to
keep as many on four GPUs as the recording `alpha-code` has: nothing is fitted to the paper. Plans are made from other tokens
than those that are timed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from engine.catalogue import cluster_presets, model_presets
from engine.cluster import Cluster, Efficiency
from engine.compare.synthetic import Recipe, synthetic
from engine.costs import Datasheet
from engine.formats import read_workload
from engine.placement.affinity.kernel import AffinityInstance, affinity
from engine.placement.transitions import kept, transitions
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.reproduce.exhibits import each, go_on
from engine.result import Guard, Ints, Limits, Stop
from engine.serving.roofline import RooflineOperators
from engine.serving.sizes import TransformerSizes
from engine.serving.step import ServingStep, seconds_of
from engine.simulate import simulate
from engine.systems import SYSTEMS, run
from engine.systems.exflow import ExFlowOptions
from engine.workload import ExpertLoad, RoutingTrace

RECORDINGS = Path(__file__).parents[3] / "sample_traces" / "tiny-moe"
STEP = ServingStep(phase="prefill", sequences=8, context=256)
PROFILED = 5000
"""Tokens that a plan is made from (§V-G: 3000 are enough)."""
GPUS_OF_MODEL = {
    "350M-8": (4, 8),
    "350M-16": (4, 8, 16),
    "350M-32": (4, 8, 16, 32),
    "350M-64": (4, 8, 16, 32, 64),
    "470M-32": (8, 16),
    "590M-32": (8, 16),
    "1.3B-16": (8, 16),
}
"""The seven models of Figure 10 by their end in the catalogue, and the GPUs that they are timed on."""
SEARCH = Limits(0.5, wall=math.inf)
ATTENTION_HEAD, VOCABULARY = 64, 50_304
"""Width of a head, and tokens known: usual for GPT of these sizes."""


@cache
def recording(name: str) -> RoutingTrace:
    """A shipped recording, such as `alpha-code`."""
    return read_workload(RECORDINGS / f"{name}.npz")


def wilkes3(gpus: int) -> Cluster:
    """So many GPUs of the paper's cluster, four a node."""
    return cluster_presets()[f"exflow-{gpus // 4}-node{'s' * (gpus > 4)}"].cluster


def recorded_problem(name: str, gpus: int = 8) -> Problem:
    """A shipped recording on the paper's cluster, with its own narrow model."""
    return make_problem(recording(name), wilkes3(gpus), model_presets()[f"tiny-moe-{name.split('-')[0]}"].model, Datasheet())


class Unhurried(ExFlowOptions):
    """ExFlow's options with a time limit of work alone, so that no machine is too busy for the same plan."""

    def guard(self, stop: Stop) -> Guard:
        return Guard(stop, math.inf)


def planned(system: str, problem: Problem) -> Plan:
    """The plan of `linear` or `exflow`."""
    if system == "linear":
        return run(SYSTEMS[system], problem).result.solution
    unhurried = replace(SYSTEMS[system], options=Unhurried)
    return run(unhurried, problem, {"time_limit": SEARCH.seconds}).result.solution


def place(trace: RoutingTrace, gpus: int, gpus_per_node: int | None = None) -> Ints:
    """int64[layer, expert]: the GPU of every expert by §IV, on nodes in two stages."""
    counts = transitions(trace.experts, trace.num_experts)
    return affinity(AffinityInstance(counts, gpus, gpus_per_node), SEARCH, staged=gpus_per_node is not None).solution


def stays(placed: Ints, trace: RoutingTrace, gpus_per_part: int = 1) -> float:
    """Share of a trace's hops that stay on their GPU, or with the GPUs of a node as `gpus_per_part` on their node."""
    return kept(placed // gpus_per_part, transitions(trace.experts, trace.num_experts))


@cache
def alpha_stays(gpus: int, name: str = "alpha-code") -> float:
    """Share of a recording's tokens that stay on one of so many GPUs, under a plan made from the other half of it."""
    first, second = recording(name).halves()
    return stays(place(first, gpus), second)


@cache
def strength() -> float:
    """The generator's affinity: a token of it stays on one of four GPUs as often as one of `alpha-code` under a plan made from
    other tokens. Experts that follow one another share a GPU, so a token stays with `affinity` and else by chance."""
    return (4 * alpha_stays(4) - 1) / 3


@dataclass(frozen=True)
class Setting:
    """A model on so many GPUs, each with so many prompts. model: as in `GPUS_OF_MODEL`"""

    model: str
    gpus: int
    prompts: int = STEP.sequences

    @property
    def step(self) -> ServingStep:
        return STEP.model_copy(update={"sequences": self.prompts})

    @cached_property
    def problems(self) -> tuple[Problem, Problem]:
        """The tokens that are timed, and those that plans are made from."""
        model = model_presets()[f"MoE-GPT-{self.model}"].model
        timed = self.step.tokens * self.gpus
        trace = synthetic(model, Recipe(PROFILED + timed, 0.0, strength()))
        profile, rest = trace.part(np.s_[:PROFILED]), trace.part(np.s_[PROFILED:])
        rank = (np.arange(timed) // self.step.tokens).astype(np.int32)
        rest = replace(rest, sequence=None, source_rank=rank, name=f"{model.name}, {trace.name}")
        problem = make_problem(rest, wilkes3(self.gpus), model, Datasheet(), serving_step=self.step)
        return problem, problem.with_workload(replace(profile, sequence=None))

    @property
    def problem(self) -> Problem:
        """The tokens that are timed."""
        return self.problems[0]

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """Plans made from other tokens: `vanilla`, contiguous blocks; `coherent`, the same run context-coherently (§V-B);
        `exflow`."""
        vanilla = planned("linear", self.problems[1])
        coherent = vanilla.model_copy(update={"execution": "context-coherent", "claim": None})
        return {"vanilla": vanilla, "coherent": coherent, "exflow": planned("exflow", self.problems[1])}

    def prepare(self) -> None:
        """Make the plans, which are kept."""
        _ = self.plans

    @cached_property
    def outside(self) -> float:
        """Seconds of attention, dense layers, embedding and head at home, by the datasheet; the same for every plan."""
        model = self.problem.model
        heads = {"heads": model.d_model // ATTENTION_HEAD, "kv_heads": model.d_model // ATTENTION_HEAD}
        sizes = TransformerSizes(
            **heads, head_size=ATTENTION_HEAD, value_size=ATTENTION_HEAD, dense_d_ff=model.d_ff, vocabulary=VOCABULARY
        )
        return seconds_of(RooflineOperators(model, sizes, self.problem.cluster.gpus[0]).operators(self.step))

    def place_of(self, plan: str) -> Ints:
        """int64[layer, expert] of a plan."""
        return self.plans[plan].placement.gpu_of_expert.astype(np.int64)

    def seconds(self, plan: str, rate: float = 1.0, padded: tuple[float, ...] | None = None) -> dict[str, float]:
        """Seconds of a step by kind, with `outside`, and their `total`, in which the first all-gather does not count (Table I).

        rate: share of the line rate that ports to the fabric reach
        padded: rows of every layer that experts get for a token, again from the first where there are more layers; None: one
        """
        problem = self.problem
        if rate < 1:
            slower = problem.cluster.model_copy(update={"efficiency": Efficiency(fabric=((1, rate),))})
            problem = replace(problem, cluster=slower)
        if padded is not None:
            rows = np.resize(padded, problem.workload.layers) * problem.workload.tokens / problem.workload.num_experts
            load = np.repeat(rows[:, None], problem.workload.num_experts, axis=1)
            problem = problem.with_workload(ExpertLoad("padded", load, problem.model.moe_layers))
        timeline = simulate(self.plans[plan], problem)
        kinds = timeline.seconds_of_kind() | {"outside": self.outside}
        return kinds | {"total": timeline.total - kinds["prompt_gather"] + self.outside}


@cache
def setting(model: str, gpus: int) -> Setting:
    """A setting that all exhibits share."""
    return Setting(model, gpus)


def settings(stop: Stop, models: tuple[str, ...] = tuple(GPUS_OF_MODEL), least: int = 4) -> Iterator[Setting]:
    """The settings of models on at least so many GPUs, planned; raises StoppedError once the stop is True."""
    go_on(stop)
    strength()
    for model in models:
        for gpus in each(GPUS_OF_MODEL[model], stop):
            if gpus >= least:
                one = setting(model, gpus)
                one.prepare()
                go_on(stop)
                yield one


@cache
def fullest() -> tuple[float, ...]:
    """The rows of every layer that eight GPUs send for a token of `alpha-code` if each pads what it has for an expert to the
    most that any GPU has for any: DeepSpeed-MoE's all-to-all with its variable token capacity."""
    demand = recording("alpha-code").demand(8)
    return tuple((demand.max(axis=(1, 2)) * demand[0].size / demand.sum(axis=(1, 2))).tolist())


def exchanged(seconds: dict[str, float]) -> float:
    """Seconds of all-to-alls in a step."""
    return math.fsum((seconds["dispatch"], seconds["combine"]))

"""Lancet's evaluation (§7) on our simulated step: its two models on its two clusters, against its baselines."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import pandas as pd

from engine.catalogue import model_presets, node_types
from engine.cluster import Cluster
from engine.compare.figures import metrics
from engine.costs import CostModel, Datasheet
from engine.overlap.weight_gradients import schedule_weight_gradients
from engine.problem import Problem, make_problem
from engine.result import Stop, never
from engine.simulate.training import price_step
from engine.systems import TRAINING, run
from engine.systems.pieces import linear_placement
from engine.systems.training.lancet import weight_gradient_problem
from engine.training import Gate, TrainingStep, balanced_load

MODELS = ("GPT2-S-MoE", "GPT2-L-MoE")
NODES = ("p4de.24xlarge", "p3dn.24xlarge")
EXPERTS_ON_A_GPU = 2
BATCH = {
    ("GPT2-S-MoE", "p4de.24xlarge"): 24,
    ("GPT2-L-MoE", "p4de.24xlarge"): 48,
    ("GPT2-S-MoE", "p3dn.24xlarge"): 16,
    ("GPT2-L-MoE", "p3dn.24xlarge"): 8,
}
"""Sequences on each GPU (§7, "Benchmark Models and Datasets")."""

BASELINES = ("deepspeed", "tutel", "raf")
PAPER = {
    "p4de.24xlarge": {"speedup": 1.21, "mean": 1.17, "raf": 0.69, "tutel": 0.66},
    "p3dn.24xlarge": {"speedup": 1.30, "mean": 1.22, "raf": 0.83, "tutel": 0.77},
}
"""§7.1, Switch gate: largest and mean speedup over the baselines, and the largest share of RAF's and of Tutel's exposed
communication that Lancet hides."""


@dataclass(frozen=True)
class Setting:
    """One bar of the paper's Figure 11 or 12. The paper does not say in which numbers it computed."""

    model: str
    node: str
    nodes: int
    gate: Gate = "switch"
    dtype: Literal["fp16", "fp32"] = "fp16"

    def problem(self, cost: CostModel) -> Problem:
        """The step as the paper configures it; sizes that it does not give are in the catalogue's notes."""
        kind = node_types()[self.node]
        machines = tuple(kind.node(f"{kind.name}-{index}") for index in range(self.nodes))
        cluster = Cluster(name=f"{self.nodes} × {self.node}", nodes=machines, latency=kind.fabric_latency)
        experts = EXPERTS_ON_A_GPU * len(cluster.gpus)
        model = model_presets()[self.model].model.model_copy(update={"experts": experts, "dtype": self.dtype})
        batch = BATCH[self.model, self.node]
        step = TrainingStep(batch=batch, sequence_length=512, heads=model.d_model // 64, dense_d_ff=model.d_ff, gate=self.gate)
        return make_problem(balanced_load(model), cluster, model, cost, step=step)


def settings(
    nodes: tuple[int, ...] = (2, 4, 8), gates: tuple[Gate, ...] = ("switch",), dtype: Literal["fp16", "fp32"] = "fp16"
) -> list[Setting]:
    """All bars of Figure 11 (and 12), smallest cluster first."""
    return [Setting(model, node, count, gate, dtype) for gate, node, model, count in product(gates, NODES, MODELS, nodes)]


def evaluate(chosen: list[Setting], cost: CostModel | None = None, stop: Stop = never) -> Iterator[dict]:
    """One row a setting: seconds and exposed communication of Lancet and its baselines, and how long Lancet's planning took.

    Columns: model, node, gpus, gate, dtype, planning, bound, and for every system its seconds and, with `exposed_` before it,
    its exposed communication.
    """
    for setting in chosen:
        if stop():
            return
        problem = setting.problem(cost or Datasheet())
        row = {
            "model": setting.model,
            "node": setting.node,
            "gpus": len(problem.cluster.gpus),
            "gate": setting.gate,
            "dtype": setting.dtype,
        }
        for name in ("lancet", *BASELINES):
            outcome = run(TRAINING[name], problem)
            figures = metrics(outcome.result.solution, problem, outcome.timeline)
            row |= {name: figures.total, f"exposed_{name}": figures.exposed_communication}
            if name == "lancet":
                row |= {"planning": outcome.result.runtime, "bound": figures.order_bound}
        yield row


def against_the_paper(rows: pd.DataFrame) -> pd.DataFrame:
    """By node type: largest and mean speedup over DeepSpeed and Tutel, and the largest share of RAF's and of Tutel's exposed
    communication that Lancet hides, with the paper's figures."""
    summaries = []
    for node, own in rows.groupby("node", sort=False):
        speedups = pd.concat([own[name] / own["lancet"] for name in ("deepspeed", "tutel")])
        hidden = {name: (1 - own["exposed_lancet"] / own[f"exposed_{name}"]).max() for name in ("raf", "tutel")}
        paper = PAPER[node]
        summary = {
            "node": node,
            "speedup, largest": speedups.max(),
            "paper's largest": paper["speedup"],
            "speedup, mean": speedups.mean(),
            "paper's mean": paper["mean"],
            "of RAF's exposed communication": hidden["raf"],
            "paper's, RAF": paper["raf"],
            "of Tutel's exposed communication": hidden["tutel"],
            "paper's, Tutel": paper["tutel"],
        }
        summaries.append(summary)
    return pd.DataFrame(summaries)


def weight_gradient_gaps(chosen: list[Setting], cost: CostModel | None = None) -> pd.DataFrame:
    """The part of the backward all-to-alls that the paper's greedy hides and that is possible, one row a setting: seconds
    hidden by `greedy` and `best`, the proven `bound`, seconds of the proof, and the numbers of all-to-alls and dW."""
    rows = []
    for setting in chosen:
        problem = setting.problem(cost or Datasheet())
        both = weight_gradient_problem(price_step(problem, linear_placement(problem), irregular=True))
        greedy = schedule_weight_gradients(both.instance, algorithm="greedy")
        best = schedule_weight_gradients(both.instance)
        row = {
            "model": setting.model,
            "node": setting.node,
            "gpus": len(problem.cluster.gpus),
            "dtype": setting.dtype,
            "all-to-alls": len(both.exchanges),
            "dW": len(both.gradients),
            "seconds": both.instance.alltoall.sum(),
            "greedy": greedy.objective,
            "best": best.objective,
            "bound": best.bound,
            "greedy / best": greedy.objective / best.objective,
            "status": best.status.value,
            "runtime": best.runtime,
        }
        rows.append(row)
    return pd.DataFrame(rows)

"""Lina's communication scheduler in training (§7.2.2, Figures 14 and 15) on our simulated step."""

from collections.abc import Iterable

import pandas as pd

from engine.catalogue import cluster_presets
from engine.costs import CostModel, Datasheet
from engine.model import MoEModel
from engine.problem import Problem, make_problem
from engine.simulate.metrics import metrics
from engine.systems import TRAINING, run
from engine.training import TrainingStep, balanced_load

MODELS = {"GPT-2": (12, 768), "BERT2GPT2": (12, 768), "Transformer-XL": (24, 1024)}
"""Layers (§7.1) and width. The paper gives no widths: those of the base models are taken. An encoder-decoder's layers count
as plain ones here."""

DESIGNS = {
    "fixed": {"policy": "fixed", "pipelining": False, "packing": "off"},
    "priority": {"policy": "naive", "pipelining": False, "packing": "off"},
    "+ micro-ops": {"policy": "priority", "pipelining": False, "packing": "off"},
    "+ pipelining": {"policy": "priority", "pipelining": True, "packing": "off"},
    "+ packing": {"policy": "priority", "pipelining": True, "packing": "best"},
    "+ packing, the paper's rule": {"policy": "priority", "pipelining": True, "packing": "lina"},
}
PAPER = {"priority": (1.24,), "+ micro-ops": (1.36, 1.42), "+ packing": (1.37, 1.73)}
"""Speedups over the baseline that the text quotes: of priority on average, of micro-ops by number of experts, and of all by
number of experts (§7.2)."""

SIZES_MB = (5.0, 10.0, 20.0, 30.0, 50.0, 70.0, 100.0, 200.0)


def paper_problem(model: str, cost: CostModel | None = None, batch: int = 8) -> Problem:
    """One of Lina's training tasks: 16 experts on 16 A100, top-2, every FFN an MoE layer. Numbers and tokens are not in the
    paper; 32 bits and 8 × 512 tokens give about its times of one all-to-all (7.6 ms, Figure 7) and its share of the step
    (a good third, Table 1). Matrix products of 32-bit numbers ran in TF32, the default of its PyTorch 1.10 (§6): Figure 7 has
    experts that take 0.2 of an all-to-all, on CUDA cores they would take as long as one."""
    layers, width = MODELS[model]
    moe = MoEModel(
        name=model,
        layers=layers,
        experts=16,
        experts_per_token=2,
        d_model=width,
        d_ff=4 * width,
        ffn_matrices=2,
        dtype="tf32",
    )
    step = TrainingStep(
        batch=batch, sequence_length=512, heads=width // 64, dense_d_ff=4 * width, gate="top-k", tied_embeddings=True
    )
    return make_problem(
        balanced_load(moe), cluster_presets()["lina-4-nodes"].cluster, moe, cost or Datasheet(), step=step
    )


def design_choices(models: Iterable[str] = MODELS) -> pd.DataFrame:
    """Figure 14 and our packing: speedup of the step over the baseline (fair sharing, nothing cut), one row a model."""
    rows = []
    for model in models:
        problem = paper_problem(model)
        baseline = run(TRAINING["deepspeed"], problem).result.objective
        row = {"model": model, "baseline": baseline}
        row |= {
            name: baseline / run(TRAINING["lina"], problem, options).result.objective
            for name, options in DESIGNS.items()
        }
        rows.append(row)
    return pd.DataFrame(rows)


def partition_sizes(model: str, sizes_mb: Iterable[float] = SIZES_MB) -> pd.DataFrame:
    """Figure 15: seconds of the step and of exposed communication by micro-op size, without packing."""
    problem, rows = paper_problem(model), []
    for size in sizes_mb:
        outcome = run(TRAINING["lina"], problem, DESIGNS["+ pipelining"] | {"micro_op_mb": size})
        figures = metrics(outcome.result.solution, problem, outcome.timeline)
        rows.append({"MB": size, "seconds": figures.total, "exposed": figures.exposed_communication})
    return pd.DataFrame(rows)

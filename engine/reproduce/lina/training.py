"""Lina in training (§7.2): Figures 10, 14 and 15, on the simulated step of its three models.

The paper prints neither widths nor tokens. Table 1 gives those of Transformer-XL: from 4 to 16 experts its parameters grow by
2 · 512 · 2048 for each expert, and the rest is attention of that width and a vocabulary of letters; 15 × 512 tokens on a GPU
then make one all-to-all the 7.6 ms of Figure 7. The others have the widths of their base models, and 20 × 512 tokens, which
fill about the memory of Table 4. Numbers have 32 bits and are multiplied in TF32, the default of its PyTorch 1.10 (§6): Figure
7's experts take 0.21 of an all-to-all, on the CUDA cores they would take as long as one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import numpy as np

from engine.catalogue import cluster_presets
from engine.cluster import Cluster
from engine.costs import CostModel, Datasheet
from engine.costs.scaled import Scaled
from engine.model import MoEModel
from engine.overlap.operator_graph import Operator
from engine.plan import Plan
from engine.problem import Problem, make_problem
from engine.reproduce.exhibits import Chart, Claim, Exhibit, Opening, each, go_on
from engine.reproduce.lina.example import BUCKET, COMBINE, FFN, GATE, GRADIENTS
from engine.result import Provenance, Stop
from engine.simulate.streams import run_streams
from engine.simulate.training import price_step, simulate_step
from engine.simulate.training.program import program_of
from engine.systems import TRAINING, run
from engine.systems.pieces import linear_placement
from engine.systems.training.lina import LinaOptions, packed_placement, scheduled
from engine.timeline import Timeline
from engine.training import TrainingStep, balanced_load


@dataclass(frozen=True)
class Task:
    """layers, width: of the model, an encoder-decoder's layers as plain ones; vocabulary: rows of its embeddings, summed over
    two of them; sequences: of 512 tokens on each GPU"""

    layers: int
    width: int
    vocabulary: int
    sequences: int


TASKS = {
    "Transformer-XL": Task(24, 512, 204, 15),
    "GPT-2": Task(12, 768, 50257, 20),
    "BERT2GPT2": Task(12, 768, 30522 + 50257, 20),
}
TABLE_1 = Task(12, 512, 204, 15)
"""The 419M model of Table 1 and Figure 7."""
LINK = 0.75 * 15 * 512 * 2 * 512 * 4 / (0.259 / 48)
"""Bytes/s between the GPUs of a node by Table 1: on four GPUs its 12 layers have 48 all-to-alls in 259 ms, which NVLink would
carry in 4."""
PCIE = 11e9
"""Bytes/s between the GPUs of a node if they are cards on PCIe, as A100 with 40 GB also come: a copy from card to card through
the host's bridges, assumed. The paper does not say how its GPUs are joined."""
EXPERTS = (2, 4, 8, 16)
"""Experts of a layer, and as many GPUs (§7.1)."""

OFF = {"packing": "off", "pipelining": False}
DESIGNS: Mapping[str, Mapping] = {
    "fixed": OFF | {"policy": "fixed"},
    "priority": OFF | {"policy": "naive"},
    "+ micro-ops": OFF | {"policy": "priority"},
    "+ pipelining": {"policy": "priority", "packing": "off"},
    "+ packing": {"policy": "priority", "packing": "best"},
    "+ packing, the paper's rule": {"policy": "priority", "packing": "lina"},
}
STEP = {2: 1.71, 4: 1.37, 8: 1.73, 16: 1.47}
"""Figure 10: mean speedup of the step over the three models, by experts."""
PRIORITY = 1.24
MICRO_OPS = {2: 1.36, 4: 1.36, 8: 1.41, 16: 1.42}
"""Figure 14: mean speedups, of priority in all cases and of micro-ops by experts."""
SIZES_MB = (10.0, 20.0, 30.0, 50.0, 70.0, 100.0)
PACKED = {"Transformer-XL": 4, "GPT-2": 2, "BERT2GPT2": 2}
"""Experts on a GPU that the paper found best with 16 (§7.2, Table 3)."""

GAP = (
    "two collectives share the network without loss here; with Figure 7's times and both at 1/4.14, Figure 3's largest "
    "slowdown, priority is 1.22 and micro-ops are 1.26 (next exhibit)"
)


def testbed(gpus: int, link: float | None = None) -> Cluster:
    """The first GPUs of its four nodes of four (§7.1).

    link: bytes/s between the GPUs of a node; None: NVLink, as the catalogue has it
    """
    cluster = cluster_presets()["lina-4-nodes"].cluster.part(list(range(gpus)))
    if link is None:
        return cluster
    nodes = tuple(node.model_copy(update={"link_bandwidth": link}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def paper_problem(
    model: str | Task,
    experts: int = 16,
    cost: CostModel | None = None,
    dtype: str = "tf32",
    sequences: int | None = None,
    link: float | None = None,
) -> Problem:
    """One of Lina's training tasks: top-2, every FFN an MoE layer, as many A100 as experts.

    model: of TASKS, or a task of its own
    sequences: on each GPU; None: the task's
    link: see `testbed`
    """
    task = TASKS[model] if isinstance(model, str) else model
    width = task.width
    sizes = {"d_model": width, "d_ff": 4 * width, "ffn_matrices": 2, "dtype": dtype}
    name = model if isinstance(model, str) else "Transformer-XL, 419M"
    moe = MoEModel(name=name, layers=task.layers, experts=experts, experts_per_token=2, **sizes)
    step = TrainingStep(
        batch=sequences or task.sequences,
        sequence_length=512,
        heads=width // 64,
        dense_d_ff=4 * width,
        vocabulary=task.vocabulary,
        gate="top-k",
        tied_embeddings=True,
    )
    return make_problem(balanced_load(moe), testbed(experts, link), moe, cost or Datasheet(), step=step)


@cache
def timeline(
    model: str, experts: int, design: str, micro_op_mb: float = 30.0, link: float | None = None, compute: float = 1.0
) -> Timeline:
    """The step of a design, or of a baseline by its name. micro_op_mb: of a design; link: see `paper_problem`; compute: so many
    times the seconds of all computation"""
    problem = paper_problem(model, experts, Scaled(Datasheet(), compute=1 / compute), link=link)
    if design in DESIGNS:
        return run(TRAINING["lina"], problem, {**DESIGNS[design], "micro_op_mb": micro_op_mb}).timeline
    return run(TRAINING[design], problem).timeline


def packed(problem: Problem, experts_per_gpu: int) -> Plan:
    """Lina with so many experts on every GPU, whatever a rule would choose."""
    draft = scheduled(problem, packed_placement(problem, experts_per_gpu), LinaOptions())
    return draft.plan(f"{experts_per_gpu} experts on a GPU", Provenance(optimiser="lina"))


def seconds_under(
    problem: Problem, plan: Plan, compute: float = 1.0, reduce: float = 1.0, together: tuple[float, float] = (0.5, 0.5)
) -> float:
    """Seconds of the step of a plan with the times of computations and of all-reduces multiplied, and an all-to-all and an
    all-reduce in flight together at these speeds."""
    tasks = program_of(plan, problem, price_step(problem, plan.placement), known=True).tasks
    factor = np.choose(tasks.stream, [compute, 1.0, reduce, 1.0, 1.0, 1.0])[:, None]
    changed = replace(tasks, seconds=tasks.seconds * factor)
    return float(run_streams(changed, plan.priority.policy, together=together)[1].max())


@cache
def factors_of_figure_7() -> tuple[float, float]:
    """Figure 7's computation in a layer's backward pass over ours, and its all-reduce over ours."""
    problem = paper_problem(TABLE_1)
    priced = price_step(problem, linear_placement(problem))

    def of_layer(wanted: tuple[str, ...]) -> float:
        def counts(operator: Operator) -> bool:
            return (
                operator.layer == TABLE_1.layers // 2
                and operator.phase in wanted
                and operator.kind not in ("dispatch", "combine")
            )

        pairs = zip(priced.graph.operators, priced.seconds, strict=True)
        return float(sum(seconds[0].max() for operator, seconds in pairs if counts(operator)))

    computed, reduced = of_layer(("dx", "dw")), of_layer(("all_reduce",))
    return (GRADIENTS + COMBINE + FFN + GATE) / computed, BUCKET / reduced


def experts_packed(model: str, experts: int) -> int:
    """Experts on a GPU that the paper found best (§7.2)."""
    return PACKED[model] if experts == 16 else 2


@cache
def packed_timeline(model: str, experts: int, link: float | None = None, compute: float = 1.0) -> Timeline:
    """The step with experts packed as in the paper; see `timeline`."""
    problem = paper_problem(model, experts, Scaled(Datasheet(), compute=1 / compute), link=link)
    return simulate_step(packed(problem, experts_packed(model, experts)), problem)


def step_time(stop: Stop) -> Exhibit:
    """Figure 10."""
    rows = []
    for experts, model in product(EXPERTS, TASKS):
        if stop():
            break
        base = timeline(model, experts, "deepspeed").total
        row = {"model": model, "experts": f"{experts} experts", "baseline, s": base, "published": STEP[experts]}
        row["speedup"] = base / packed_timeline(model, experts).total
        go_on(stop)
        row["best packing"] = base / timeline(model, experts, "+ packing").total
        go_on(stop)
        row["over Tutel"] = row["speedup"] * timeline(model, experts, "tutel").total / base
        rows.append(row)
    claims = []
    for experts, published in STEP.items():
        chosen = [row for row in rows if row["experts"] == f"{experts} experts"]
        if len(chosen) == len(TASKS):
            speedup, best = (float(np.mean([row[name] for row in chosen])) for name in ("speedup", "best packing"))
            quantity = f"speedup of the step over DeepSpeed, {experts} experts, mean of three models"
            why = _why_packed(experts, best, stop)
            claims.append(Claim(quantity=quantity, published=published, ours=speedup, neutral=1.0, why=why))
    chart = Chart(
        kind="bars",
        x="experts",
        y="speedup",
        series="model",
        published="published",
        x_title="experts and GPUs",
        y_title="speedup of the step",
    )
    note = (
        "Packed as in the paper; the fewest seconds that packing reaches here are another column. Published marks are means of "
        "the three models."
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=note)


def _why_packed(experts: int, best: float, stop: Stop) -> str:
    """An assumption changed, and the speedup with it."""

    def changed(**changes: float) -> float:
        gains = [
            timeline(model, experts, "deepspeed", **changes).total / packed_timeline(model, experts, **changes).total
            for model in each(TASKS, stop)
        ]
        return float(np.mean(gains))

    cards = f"with cards on PCIe, 11 GB/s between two, it is {changed(link=PCIE):.2f}"
    if experts < 8:
        return (
            f"over NVLink, as the catalogue has it, a node's all-to-alls take 3 to 7 % of a step; {cards}; at 4.4 GB/s, as "
            f"Table 1's four GPUs have it, {changed(link=LINK):.2f}"
        )
    if experts == 8:
        compute = factors_of_figure_7()[0]
        return (
            f"packed experts exchange inside a node, over NVLink; {cards}; with computation as long as in Figure 7, "
            f"{compute:.1f} times ours, {changed(compute=compute):.2f}"
        )
    return f"packing alone makes it, as far fewer bytes cross the fabric; packed as is best here it is {best:.2f}; {cards}"


def designs(stop: Stop) -> Exhibit:
    """Figure 14."""
    rows = []
    for experts, model in product(EXPERTS, TASKS):
        if stop():
            break
        base = timeline(model, experts, "deepspeed").total
        for name in each(list(DESIGNS)[:4], stop):
            row = {"model": model, "experts": experts, "design": name, "speedup": base / timeline(model, experts, name).total}
            rows.append(row | {"published": {"priority": PRIORITY, "+ micro-ops": MICRO_OPS[experts]}.get(name)})

    def mean(name: str, experts: int | None = None) -> float:
        return float(np.mean([row["speedup"] for row in rows if row["design"] == name and experts in (None, row["experts"])]))

    found, claims = {row["experts"] for row in rows}, []
    if rows:
        claims = [Claim(quantity="speedup of priority, mean", published=PRIORITY, ours=mean("priority"), neutral=1.0, why=GAP)]
    claims += [
        Claim(
            quantity=f"speedup of priority and micro-ops, {experts} experts, mean of three models",
            published=published,
            ours=mean("+ micro-ops", experts),
            neutral=1.0,
            why=GAP,
        )
        for experts, published in MICRO_OPS.items()
        if experts in found
    ]
    chart = Chart(
        kind="bars",
        x="model",
        y="speedup",
        series="design",
        facet="experts",
        published="published",
        x_title="model",
        y_title="speedup of the step",
    )
    note = "Published marks are means over the three models."
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart, note=note)


def partition_sizes(stop: Stop) -> Exhibit:
    """Figure 15."""
    rows = []
    for model in TASKS:
        for size in SIZES_MB:
            if stop():
                break
            seconds = timeline(model, 16, "+ pipelining", size).total
            rows.append({"model": model, "MB": size, "seconds": seconds})
    claims = []
    for model in ("Transformer-XL", "BERT2GPT2"):
        taken = {row["MB"]: row["seconds"] for row in rows if row["model"] == model}
        if len(taken) == len(SIZES_MB):
            largest = max(size for size, seconds in taken.items() if seconds <= taken[30.0] * (1 + 1e-9))
            shortest = min(taken, key=lambda size: taken[size])
            spread = max(taken.values()) / min(taken.values()) - 1
            why = f"the step is shortest with {shortest:g} MB here; all sizes lie within {spread:.1%}"
            quantity = f"largest partition that is no slower than 30 MB, MB, {model}"
            claims.append(Claim(quantity=quantity, published=50.0, ours=largest, why=why))
    chart = Chart(
        kind="lines", x="MB", y="seconds", series="model", x_title="partition size, MB", y_title="step, s", log_x=True
    )
    return Exhibit(claims=tuple(claims), rows=tuple(rows), chart=chart)


OPENINGS = tuple(
    Opening(f"{model}, {experts} experts", partial(paper_problem, model, experts), "lina")
    for model in TASKS
    for experts in (8, 16)
)

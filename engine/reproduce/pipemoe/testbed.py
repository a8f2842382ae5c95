"""PipeMoE's testbed, its lines of Figure 6, and its models as training steps that our engine plans and simulates."""

from engine.catalogue import node_types
from engine.cluster import Cluster
from engine.costs import CostModel, Datasheet
from engine.model import MoEModel
from engine.problem import Problem, make_problem
from engine.reproduce.exhibits import Opening
from engine.training import TrainingStep, balanced_load

CHOICES = 2
"""Experts of a token: the paper does not say; its authors' program is called with two."""
ALPHA_GEMM, BETA_GEMM = 6.19e-5, 4.1e-14
LINES = {16: (1.72e-5, 2.96e-10), 32: (2.09e-4, 3.54e-10), 64: (7.83e-4, 3.84e-10)}
"""Figure 6: alpha in seconds and beta in seconds per element, by GPUs."""
WIDTH = 2.0
"""Bytes of a number."""

MODELS = {"TM": (12, 512, 1024, 8, 10_000, 4, 256), "RM": (12, 768, 3072, 12, 50_265, 2, 64)}
"""Layers, M, H, heads, vocabulary, sequences of a GPU and their length (Table V). Layers, heads and vocabulary are not in the
paper; they are those of fairseq's Transformer for IWSLT, encoder and decoder together, and of RoBERTa-base."""
EXAMPLE = (2, 2048, 4096, 8192, 2)
"""B, L, H, M and E/P of the layer of §V-E."""
HEAD, TIMES = 64, 3
"""Width of a head of attention, and layers, of the step in which the layer of §V-E stands; neither is in the paper."""


def cluster(gpus: int, part: float = 1.0) -> Cluster:
    """So many GPUs of the paper's testbed (Table III). part: of the datasheet's rates that the network reaches"""
    kind = node_types()["rtx2080ti-pcie"]
    kind = kind.model_copy(update={"bandwidth": part * kind.bandwidth, "link_bandwidth": part * kind.link_bandwidth})
    nodes = tuple(kind.node(f"node {index}") for index in range(gpus // kind.count))
    return Cluster(name=f"{gpus} × RTX 2080 Ti", nodes=nodes, latency=kind.fabric_latency)


def model_step(name: str, gpus: int, dtype: str = "fp16", part: float = 1.0) -> Problem:
    """A training step of TM-1, TM-2, RM-1 or RM-2; the digit is the number of experts of a GPU. part: as of `cluster`"""
    layers, width, inner, heads, vocabulary, batch, length = MODELS[name[:2]]
    experts = int(name[-1]) * gpus
    sizes = {"layers": layers, "experts": experts, "experts_per_token": CHOICES, "d_model": width, "d_ff": inner}
    model = MoEModel(name=name, ffn_matrices=2, dtype=dtype, **sizes)
    sizes = {"batch": batch, "sequence_length": length, "heads": heads, "dense_d_ff": inner, "vocabulary": vocabulary}
    step = TrainingStep(gate="top-k", capacity_factor=1, **sizes)
    return make_problem(balanced_load(model), cluster(gpus, part), model, Datasheet(), step=step)


def example_step(gpus: int = 64, cost: CostModel | None = None) -> Problem:
    """A training step of some layers as that of §V-E, with attention between them: its gradients are reduced."""
    batch, length, inner, width, local = EXAMPLE
    sizes = {"layers": TIMES, "experts": local * gpus, "experts_per_token": CHOICES, "d_model": width, "d_ff": inner}
    model = MoEModel(name=f"{TIMES} layers of §V-E", ffn_matrices=2, dtype="fp16", **sizes)
    sizes = {"batch": batch, "sequence_length": length, "heads": width // HEAD, "dense_d_ff": inner, "vocabulary": 1000}
    step = TrainingStep(gate="top-k", capacity_factor=1, **sizes)
    return make_problem(balanced_load(model), cluster(gpus), model, cost or Datasheet(), step=step)


def openings(name: str, gpus: int) -> tuple[Opening, ...]:
    """A step to be planned, with the degrees of each layer by itself and with those of the whole step."""

    def problem() -> Problem:
        return model_step(name, gpus) if name[:2] in MODELS else example_step(gpus)

    return (
        Opening(f"{name} on {gpus} GPUs", problem, "pipemoe"),
        Opening(f"{name} on {gpus} GPUs, degrees of the whole step", problem, "pipemoe", {"algorithm": "step"}),
    )

"""Lina's two-phase scheduling, as in the paper's table 5: `python -m tests.benchmarks.bench_lina [GPUS …]`.

By default on 16 and 8 GPUs. The recordings are the sample ones: 8 layers of 16 experts, one expert per token. They stand in for
the paper's models on the paper's testbed: hidden and inner width 512 and 2048 (they give the 419 M parameters of its 12 layers
with 16 experts), 64 copies of every recorded token (a batch of 131 072 tokens, with two all-to-alls about as long as in its
table 1), and 17 ms a layer outside the experts' part (the rest of that table without all-to-all; in the paper a part of it is
expert computation, which suffers from imbalance too). Longer paths start later, so rows of table 5 are over different layers.
"""

import sys
from dataclasses import replace

import numpy as np

from engine.catalogue import cluster_presets, model_presets
from engine.cluster import Cluster
from engine.costs import Datasheet
from engine.problem import Problem
from engine.reproduce.lina import serving
from engine.reproduce.lina.routing import half, shuffled
from engine.simulate.scheduler import PAPER_CHECK, PAPER_SCHEDULE, TwoPhaseOptions
from engine.simulate.two_phase import two_phase
from tests.benchmarks.shared import columns, timed
from tests.cases.samples import sample

NAMES = ("alpha-code", "alpha-prose", "alpha-man")
OPTIONS = TwoPhaseOptions(copies=64.0, other_seconds=0.017, schedule_seconds=PAPER_SCHEDULE, check_seconds=PAPER_CHECK)
CHANGES = {
    "path length 1": {"path_length": 1},
    "path length 3": {"path_length": 3},
    "path length 6": {"path_length": 6},
    "best hosting": {"packing": "best"},
    "truncation to the letter": {"renormalise": False},
    "top-2 of each path": {"top_k": 2},
    "whole distribution of each path": {"top_k": 16},
    "lists in order": {"check": "order"},
    "only the experts' part, no copies": {"copies": 1.0, "other_seconds": 0.0},
}
"""Table 5, and then other answers to what the paper leaves open, with paths of length 3."""


def scheduling(gpus: int) -> None:
    testbed = cluster_presets()["lina-4-nodes"].cluster
    cluster = Cluster(name=f"{gpus} GPUs", nodes=testbed.nodes[: gpus // 4], latency=testbed.latency)
    model = model_presets()["tiny-moe-alpha"].model.model_copy(update={"d_model": 512, "d_ff": 2048})
    pairs = {name: (half(sample(name), 0), half(sample(name), 1)) for name in NAMES}
    pairs["code -> prose"] = sample("alpha-code"), sample("alpha-prose")
    for name, (train, test) in pairs.items():
        problem = Problem(shuffled(test, OPTIONS.batch_tokens), cluster, model, Datasheet())
        formats = {"Lina": "34", "median": "7.2f", "95th": "7.2f", "tuned": "6.1%", "right as a set": "14.1%"}
        row = columns(formats | {"in order": "8.1%", "seconds": "7.2f"}, f"{name} on {gpus} GPUs: inference over ideal")
        for label, change in CHANGES.items():
            result, seconds = timed(two_phase, problem, train, replace(OPTIONS, **change))
            figures = result.figures("lina")
            right = (result.fine_tuning_rate, result.accuracy(), result.accuracy("order"))
            row(label, figures.median_inference, figures.tail_inference, *right, seconds)


def where_it_pays() -> None:
    """Lina with its scheduler over hosting once, on the same batches: whole distributions, all layers hosted by popularity
    first, a reaction priced on the cluster and one that takes what the paper measured."""
    own = (("alpha-code", 1), ("alpha-prose", 1), ("alpha-man", 1), ("beta-code", 2), ("beta-prose", 2))
    served = [(name, None, choices) for name, choices in own]
    served += [("alpha-prose", "alpha-code", 1), ("alpha-man", "alpha-prose", 1)]
    formats = {"tokens of a GPU": "16", "ideal layer, ms": "15.2f", "priced": "7.3f", "95th": "7.3f"}
    formats |= {"as measured": "12.3f", "95th ": "7.3f"}
    for model in serving.MODELS:
        for name, learnt, choices in served:
            of = f", learnt from {learnt}" if learnt else ""
            row = columns(formats, f"{model}, {name}{of}")
            for tokens in (256, 1024, 2048, 7680, 30720):
                asked = {"top_k": 16, "start": "popularity", "choices": choices, "check_experts": 2 * choices}
                asked["copies"] = tokens * 16 / 2048
                results = [serving.simulated(model, 16, name, learnt=learnt, **asked, **more) for more in (serving.PRICED, {})]
                parts = ("median_inference", "tail_inference")
                times = [serving.gain(result, part, "static", "lina") for result in results for part in parts]
                row(str(tokens), 1e3 * float(np.median(results[0].schemes["ideal"].layer)), *times)


if __name__ == "__main__":
    where_it_pays()
    for gpus in sys.argv[1:] or ("16", "8"):
        scheduling(int(gpus))

"""JSON lines of the simulator moe-balance, one a batch and layer: `{"layer", "batch_id", "origin_rows", "topk_experts"}`."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.formats.writers.writer import Writer, unsaid
from engine.model import MoEModel
from engine.workload import RoutingTrace

MOST_TOKENS = 1 << 18
"""Of a batch: a line is parsed whole."""


def write_batches(trace: RoutingTrace, path: Path, _model: MoEModel | None = None) -> tuple[str, ...]:
    """A batch a sequence, in the order in which sequences begin; `origin_rows` are the source ranks, [] where they are not
    known. Layers are the model's where the recording says them, else they count from 0.

    Cannot carry: how many experts there are, phases, the numbers of sequences and how their tokens were interleaved. Without
    sequences the recording is one batch, which is read back as one sequence.
    """
    layers = trace.model_layers or range(trace.layers)
    batches = list(_batches(trace))
    with path.open("w", encoding="utf-8") as file:
        for number, tokens in enumerate(batches):
            rows = [] if trace.source_rank is None else trace.source_rank[tokens].tolist()
            for place, layer in enumerate(layers):
                line = {"layer": layer, "batch_id": number, "origin_rows": rows}
                line["topk_experts"] = trace.experts[tokens, place].tolist()
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return tuple(_lost(trace, batches))


def _batches(trace: RoutingTrace) -> Iterator[np.ndarray]:
    """int64[...]: the tokens of each batch."""
    if trace.sequence is None:
        order, starts = np.arange(trace.tokens), np.array([0])
    else:
        order = np.argsort(trace.sequence, kind="stable")
        starts = np.unique(trace.sequence[order], return_index=True)[1]
    for tokens in sorted(np.split(order, starts[1:]), key=lambda tokens: tokens[0]):
        yield from np.split(tokens, range(MOST_TOKENS, len(tokens), MOST_TOKENS))


def _lost(trace: RoutingTrace, batches: list[np.ndarray]) -> Iterator[str]:
    if trace.experts.max() + 1 < trace.num_experts:
        yield "how many experts a layer has"
    if trace.sequence is None:
        yield f"that sequences are not known: the recording is {len(batches)} batch{'es'[: 2 * (len(batches) > 1)]}"
    else:
        if (np.diff(np.concatenate(batches)) < 0).any():
            yield "how tokens of several sequences were interleaved"
        if len(batches) > len(np.unique(trace.sequence)):
            yield f"which batches were one sequence: those of more than {MOST_TOKENS:,} tokens are several"
        elif any(trace.sequence[tokens[0]] != number for number, tokens in enumerate(batches)):
            yield "the numbers of the sequences, which count from 0"
    yield from unsaid(trace, phase="which tokens were prefill and which decode")


WRITERS = (Writer("moe-balance", ".jsonl", "JSON lines of moe-balance", (RoutingTrace,), write_batches),)

"""The tokens that a launch replays: those of a recording, or made for a workload that has none.

A **traffic matrix** becomes rows: as many between every rank and expert as its bytes are, to a row, each the choice of one
expert. With k choices to a token, ranks gate as many tokens as the simulation counts. Its columns stand for the experts of one
GPU (Aurora §4), so that a token may have several choices in one.

**Expert loads** become drawn tokens with k different experts each, under which every expert has its load, scaled to the tokens
that are launched and rounded to whole copies. Of all such draws each is as likely, layer by layer: tokens trade their experts
pair by pair (the curveball algorithm, Strona et al. 2014, Nature Communications 5:4114), which changes no count. That is the
draw which `engine.communication.travel` expects rows of. Popular pairs and paths between layers are lost: loads do not tell
them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from engine.errors import InputError
from engine.launch.places.fold import fold_trace, rank_of_gpu
from engine.launch.preparation.launch import ROUTING, Check
from engine.model import MoEModel
from engine.plan import Plan
from engine.units import digits, size
from engine.workload import ExpertLoad, RoutingTrace, TrafficMatrix, Workload

SEED = 0
TRADES = 8
"""Times that every token trades: the rows of 256, 64 and 16 experts then are within 1 % of those that chance expects."""
USUAL_DRAWN, MOST_DRAWN = 2**14, 2**17
"""Tokens drawn for loads unless a person says otherwise, and at most: 58 layers of 8 choices take 3 and 21 s."""
MOST_MADE = 2**20
"""Tokens made of a matrix, which is scaled to them if it has more."""


@dataclass(frozen=True, eq=False)
class Supply:
    """The tokens that a workload has for the ranks of a launch.

    tokens: of the whole workload; of loads as many as k different experts of each need
    copies: token copies of all its layers
    usual, most: tokens to replay unless a person says otherwise, and at most
    part: makes the trace of a part of the workload (1: all of it), with the rank of every token
    """

    tokens: float
    copies: float
    usual: int
    most: int
    part: Callable[[float], RoutingTrace]

    def part_of(self, tokens: int) -> float:
        """The part of the workload that is so many tokens: 1 also if the last one has fewer experts."""
        return 1.0 if tokens == int(np.ceil(self.tokens)) else tokens / self.tokens


def supply_of(workload: Workload, model: MoEModel, gpus: int, ranks: int, token_gpus: tuple[int, ...] | None = None) -> Supply:
    """The tokens of a workload, folded onto the ranks. Raises InputError if there are none.

    model: in the number format and width of the launch, which say how many rows a matrix is
    gpus, token_gpus: see `fold_trace`
    """
    if isinstance(workload, RoutingTrace):
        if not workload.tokens:
            raise InputError(f"{workload.name} has no tokens to replay")

        def of_recording(part: float) -> RoutingTrace:
            folded = fold_trace(workload, gpus, ranks, token_gpus)
            return folded.spread(max(1, round(workload.tokens * part)))

        tokens = workload.tokens
        return Supply(tokens, tokens * workload.layers * workload.k, tokens, tokens, of_recording)
    k, is_matrix = model.experts_per_token, isinstance(workload, TrafficMatrix)
    by_rank, most = _tells_ranks(workload, gpus), MOST_MADE if is_matrix else MOST_DRAWN
    copies = _of_ranks(workload, model, gpus, ranks, token_gpus) if by_rank else workload.load[:, None, :]
    if not copies.any():
        raise InputError(f"{workload.name} has nothing to launch: all its {'bytes' if is_matrix else 'loads'} are 0")
    tokens = _tokens(copies, k, not is_matrix).sum()

    def made(part: float) -> RoutingTrace:
        # Summed up over experts a rank's bytes are right; over ranks every expert's load is.
        counts = _whole(copies * part, 1 if by_rank and not is_matrix else 2)
        experts, source = _routing(counts, k, not is_matrix)
        if not len(experts):
            raise InputError(f"{workload.name} has less than a row of {model.bytes_per_token:,.0f} bytes to send")
        trace = RoutingTrace(workload.name, experts, workload.num_experts)
        return replace(trace, source_rank=source) if by_rank else fold_trace(trace, gpus, ranks, token_gpus)

    usual = int(np.ceil(tokens))
    if is_matrix:
        return Supply(tokens, copies.sum(), min(usual, most), min(usual, most), made)
    return Supply(tokens, copies.sum(), min(max(usual, ranks), USUAL_DRAWN), most, made)


def routing_of_step(workload: Workload, model: MoEModel, gpus: int, ranks: int, tokens: int) -> RoutingTrace:
    """A trace for a training step that is routed as recorded, of a workload without tokens: every rank's share of each expert
    as the workload has it, on so many tokens a rank. Ranks without any are balanced, as in `engine.simulate.training.pricing`.

    model: of the layers that are launched
    """
    k, is_matrix, by_rank = model.experts_per_token, isinstance(workload, TrafficMatrix), _tells_ranks(workload, gpus)
    copies = _of_ranks(workload, model, gpus, ranks) if by_rank else workload.load[:, None, :]
    held, total = copies.sum(axis=2, keepdims=True), tokens * k * (1 if by_rank else ranks)
    share = np.where(held > 0, copies / np.where(held > 0, held, 1.0), 1 / workload.num_experts)
    experts, source = _routing(_whole(total * share, 2), k, not is_matrix)
    if not by_rank:
        source = (np.arange(len(experts)) * ranks // len(experts)).astype(np.int32)
    return RoutingTrace(workload.name, experts, workload.num_experts, source_rank=source)


def check_plan_for(workload: Workload, plan: Plan) -> None:
    """Raise InputError for a plan that needs more of a workload without tokens than it tells."""
    if isinstance(workload, RoutingTrace):
        return
    if plan.execution != "vanilla":
        raise InputError(
            f"the plan {plan.name} follows every token from layer to layer, but {workload.name} has no tokens; launch it with "
            "a routing log"
        )
    if isinstance(workload, TrafficMatrix) and plan.travel is not None and plan.travel.unit != "copies":
        raise InputError(
            f"in the plan {plan.name} tokens travel {plan.travel.in_words}, but {workload.name} does not tell which rows would "
            "be one; launch a plan with --travel copies"
        )


def in_words(asked: Sequence[Workload], replayed: Sequence[RoutingTrace]) -> str:
    """The tokens that were made or drawn for a launch, and those that were recorded, by workload. replayed: of each"""
    how = {RoutingTrace: "recorded", ExpertLoad: "drawn"}
    counted = zip(asked, replayed, strict=True)
    return " and ".join(f"{trace.tokens:,} {how.get(type(workload), 'made of bytes')}" for workload, trace in counted)


def routing_checks(asked: Sequence[Workload], replayed: Sequence[RoutingTrace], models: Sequence[MoEModel]) -> Iterator[Check]:
    """A line on each workload whose tokens were made for the launch.

    replayed: of each
    models: as launched
    """
    for workload, trace, model in zip(asked, replayed, models, strict=False):
        if isinstance(workload, RoutingTrace):
            continue
        copies, row = trace.load.sum(), model.bytes_per_token
        if isinstance(workload, TrafficMatrix):
            part = copies * row / workload.bytes.sum()
            scaled = "" if part > 0.999 else f", times {digits(part)}"
            text = f"made of the bytes of {workload.name}{scaled}: {size(copies * row)} with those that stay on their rank, in "
            text += f"rows of {row:,.0f} bytes, between every rank and expert to within a row"
        else:
            part = copies / workload.load.sum()
            scaled = "" if abs(part - 1) < 1e-9 else f" times {digits(part)}, rounded"
            text = f"drawn, not recorded (seed {SEED}): every expert has its load of {workload.name}{scaled}; which experts "
            text += "share a token, and what it takes next, is chance"
            if short := int((trace.experts < 0).any(axis=(1, 2)).sum()):
                text += f"; {short:,} of {trace.tokens:,} have fewer than {trace.k} in some layer, as the loads add up"
        yield Check(ROUTING, True, text)


def _tells_ranks(workload: ExpertLoad | TrafficMatrix, gpus: int) -> bool:
    """True if a workload tells which of so many GPUs its copies come from."""
    return isinstance(workload, TrafficMatrix) or (workload.by_source is not None and len(workload.by_source) == gpus)


def _of_ranks(
    workload: ExpertLoad | TrafficMatrix, model: MoEModel, gpus: int, ranks: int, token_gpus: tuple[int, ...] | None = None
) -> np.ndarray:
    """float64[layer, rank, expert]: token copies from every rank, which stands for the GPUs that it has."""
    if isinstance(workload, TrafficMatrix):
        workload = replace(workload, bytes_per_token=model.bytes_per_token)
    demand = workload.demand(gpus)
    start = np.arange(gpus) if token_gpus is None else np.array(token_gpus)
    copies = np.zeros((workload.layers, ranks, workload.num_experts))
    np.add.at(copies, (slice(None), rank_of_gpu(gpus, ranks)[start]), demand)
    return copies


def _whole(copies: np.ndarray, axis: int) -> np.ndarray:
    """int64[layer, rank, expert]: whole numbers, each within one of its own; along an axis their sums are rounded too, and
    whole numbers stay."""
    # Always up: rounded to the even one, a whole number behind a half would come out one larger or smaller.
    return np.diff(np.floor(np.cumsum(copies, axis=axis) + 0.5).astype(np.int64), axis=axis, prepend=0)


def _tokens(copies: np.ndarray, k: int, different: bool) -> np.ndarray:
    """[rank]: the fewest tokens that have these copies in every layer. different: true if a token has no expert twice"""
    fewest = copies.sum(axis=2) / k
    return (np.maximum(fewest, copies.max(axis=2)) if different else fewest).max(axis=0)


def _routing(counts: np.ndarray, k: int, different: bool) -> tuple[np.ndarray, np.ndarray]:
    """(int16[token, layer, k] experts, -1 = none; int32[token] ranks) with these counts, int64[layer, rank, expert]; the last
    ones are kept, as a form asks for them at every change."""
    return _routed(np.ascontiguousarray(counts).tobytes(), counts.shape, k, different)


@lru_cache(maxsize=4)
def _routed(content: bytes, shape: tuple[int, int, int], k: int, different: bool) -> tuple[np.ndarray, np.ndarray]:
    counts = np.frombuffer(content, dtype=np.int64).reshape(shape)
    tokens = np.ceil(_tokens(counts, k, different)).astype(np.int64)
    experts = np.full((tokens.sum(), shape[0], k), -1, dtype=np.int16)
    rng, ends = np.random.default_rng(SEED), np.cumsum(tokens)
    laid = partial(_drawn, rng=rng) if different else _in_a_row
    for layer, of_layer in enumerate(counts):
        for own, first, end in zip(of_layer, ends - tokens, ends, strict=True):
            experts[first:end, layer] = laid(own, int(end - first), k)
    experts.setflags(write=False)  # whoever asks again gets the same
    return experts, np.repeat(np.arange(shape[1], dtype=np.int32), tokens)


def _in_a_row(counts: np.ndarray, tokens: int, k: int) -> np.ndarray:
    """int16[token, k]: one expert after another, token after token, the last tokens without any."""
    line = np.full(tokens * k, -1, dtype=np.int16)
    line[: counts.sum()] = np.repeat(np.arange(len(counts)), counts)
    return line.reshape(tokens, k)


def _drawn(counts: np.ndarray, tokens: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """int16[token, k] experts by chance, none twice in a token.

    counts: int64[expert], none above the number of tokens, together at most k times that
    """
    line, order = np.full(k * tokens, -1, dtype=np.int16), rng.permutation(len(counts))
    line[: counts.sum()] = np.repeat(order, counts[order])
    # An expert's copies follow one another, so that they go to tokens that do.
    chosen = np.ascontiguousarray(line.reshape(k, tokens).T)
    half = tokens // 2
    for _ in range(TRADES):
        first, second = rng.permutation(tokens)[: 2 * half].reshape(2, half)
        mine, other = chosen[first], chosen[second]
        both_have = mine[:, :, None] == other[:, None, :]
        # What both have stays at its end; the rest is dealt out anew, to each as many as it had.
        key = rng.random((half, 2 * k), dtype=np.float32)
        key[:, :k][both_have.any(axis=2)] -= 2
        key[:, k:][both_have.any(axis=1)] += 2
        dealt = np.take_along_axis(np.concatenate([mine, other], axis=1), np.argsort(key, axis=1), axis=1)
        chosen[first], chosen[second] = dealt[:, :k], dealt[:, k:]
    return chosen

"""From arrays to workloads, with the checks that every format shares; from loads of physical slots, which hold copies of
experts, to loads of experts; and from recorded layers to the open model's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from engine import units
from engine.formats.source import Source, ok, quoted
from engine.model import MoEModel
from engine.workload import ExpertLoad, Origin, RoutingTrace, TrafficMatrix, Workload

MAX_EXPERTS = 4096
"""Experts of a layer, as `MoEModel` allows: eight times as many as any published model has. Affinity needs a number for every
pair, and ids are int16."""
MAX_SLOTS = 32768
"""Slots of a layer in which a load balancer gave experts copies."""
MAX_LAYERS = 1000
MAX_K = 64
MAX_RANKS = 4096
MAX_TOKENS = 2**26
"""Each token has a sequence, a source rank and a phase, which may be compressed to almost nothing."""
MAX_AMOUNTS = 2**25
"""Numbers of loads or traffic: few rows may name large ranks, and compressed ones take almost no room in a file."""
MAX_SPLIT = 2**24
"""Numbers in loads that are kept apart by source or span of time."""

Place = Callable[[tuple[int, ...]], str]
"""From the index of a faulty number to its place in the file, in words."""


def place_in(*axes: str) -> Place:
    """Places such as `token 17, layer 3` for an array with axes of these names; further axes are left out."""
    return lambda index: ", ".join(f"{axis} {at}" for axis, at in zip(axes, index, strict=False))


def first(faulty: np.ndarray) -> tuple[int, ...]:
    """Index of the first true value of bool[...]."""
    return tuple(int(at) for at in np.unravel_index(int(faulty.argmax()), faulty.shape))


def whole_numbers(source: Source, numbers: np.ndarray, what: str, place: Place) -> np.ndarray:
    """`numbers` as integers (any shape); raises InputError at the first float with a fraction."""
    if numbers.dtype.kind in "iu":
        return numbers
    if numbers.dtype.kind != "f":
        raise source.fault(f"{what} must be integers, not {numbers.dtype}")
    with np.errstate(all="ignore"):
        faulty = ~(np.abs(numbers) < 2**53) | (numbers != np.rint(numbers))
    if faulty.any():
        at = first(faulty)
        raise source.fault(f"{what} must be whole numbers, not {numbers[at]}", place(at))
    return numbers.astype(np.int64)


def routing_trace(
    source: Source,
    experts: np.ndarray,
    sequence: np.ndarray | None = None,
    source_rank: np.ndarray | None = None,
    recorded_experts: int | None = None,
    place: Place | None = None,
) -> RoutingTrace:
    """A trace from int[token, layer, k], or int[token, layer] for top-1; -1 = no choice.

    sequence, source_rank: int[token] or None
    recorded_experts: logical experts per layer as the file says; without it and without `source.num_experts` it is
        the largest id + 1
    place: from (token, layer, choice) to its place in the recording
    """
    experts = experts[:, :, None] if experts.ndim == 2 else experts
    if experts.ndim != 3 or 0 in experts.shape:
        raise source.fault(f"experts must be [tokens, layers, k] with at least one of each, not {list(experts.shape)}")
    tokens, layers, k = experts.shape
    if layers > MAX_LAYERS or k > MAX_K:
        raise source.fault(
            f"experts is {list(experts.shape)}: that would be {layers} layers and {k} experts per token "
            f"(at most {MAX_LAYERS} and {MAX_K}); the axes must be [tokens, layers, k]"
        )
    if tokens > MAX_TOKENS:
        raise source.fault(f"experts is {list(experts.shape)}, at most {MAX_TOKENS:,} tokens are read")
    place = place or place_in("token", "layer")
    experts = whole_numbers(source, experts, "experts", place)
    num_experts = _experts_of(source, experts, recorded_experts, place)
    return RoutingTrace(
        source.name,
        np.ascontiguousarray(experts, dtype=np.int16),
        num_experts,
        None if sequence is None else _per_token(source, sequence, tokens, "sequence"),
        None if source_rank is None else _per_token(source, source_rank, tokens, "source_rank"),
    )


def _experts_of(source: Source, experts: np.ndarray, recorded: int | None, place: Place) -> int:
    """The ids per layer; raises InputError unless every id is one of them, or -1. Those after the experts, of choices without
    computation, count too where the recording has any."""
    wanted, spare = source.num_experts, source.zero_experts
    if wanted is not None and recorded is not None and recorded not in (wanted, wanted + spare):
        raise source.fault(f"recorded with {recorded} experts, but the model has {wanted}")
    if recorded is not None and recorded > MAX_EXPERTS:
        raise source.fault(f"num_experts is {recorded}; at most {MAX_EXPERTS} experts per layer are possible")
    known = wanted if wanted is not None else recorded
    limit = MAX_EXPERTS if known is None else known + spare * (spare > 0 and known == source.model.experts)
    lowest, highest = int(experts.min()), int(experts.max())
    if lowest < -1:
        at = first(experts < -1)
        raise source.fault(f"expert {experts[at]} is negative (−1 alone may be, for no choice)", place(at))
    if highest < 0:
        raise source.fault("every choice is −1: no token chose any expert")
    if highest >= limit:
        at = first(experts >= limit)
        hint = "" if known is not None else "; if this is a traffic matrix, save it as float64"
        raise source.fault(f"expert {experts[at]} is out of range, experts are 0 … {limit - 1}{hint}", place(at))
    if known is None:
        of_model = source.model and experts.shape[1] in (source.model.layers, len(source.model.moe_layers))
        return max(highest + 1, source.model.experts if of_model else 0)
    return known if highest < known else limit


def of_computing_experts(workload: Workload, model: MoEModel | None) -> Workload:
    """The workload without the ids that a model has after those of its experts, for choices without computation: of a trace
    they become -1, of loads they go. Their share is a finding. One with further ids, which are slots, stays as it is."""
    if model is None or isinstance(workload, TrafficMatrix):
        return workload
    experts, choices = model.experts, model.router_choices
    if not experts < workload.num_experts <= choices or workload.k not in (None, model.experts_per_token):  # of another model
        return workload
    share = workload.load[:, experts:].sum() / max(workload.load.sum(), 1)
    if isinstance(workload, RoutingTrace):
        chosen = np.where(workload.experts < experts, workload.experts, np.int16(-1))
        cut = replace(workload, experts=chosen, num_experts=experts)
    else:
        counts = {name: getattr(workload, name) for name in ("load", "by_source", "by_step")}
        cut = replace(workload, **{name: count[..., :experts] for name, count in counts.items() if count is not None})
    said = ok(
        "zero-experts",
        f"{units.share(share)} of the choices are ids {experts} … {choices - 1}, which {model.name} has for choices "
        "without computation: they are no load and no traffic, and a token has fewer copies on the wire by as much.",
    )
    origin = workload.origin or Origin(format="recording")
    return replace(cut, origin=origin.model_copy(update={"findings": (*origin.findings, said)}))


def _per_token(source: Source, column: np.ndarray, tokens: int, what: str) -> np.ndarray:
    """A column as int32[token]; raises InputError."""
    if column.shape != (tokens,):
        raise source.fault(f"{what} must have one entry per token, [{tokens}], not {list(column.shape)}")
    column = whole_numbers(source, column, what, place_in("token"))
    faulty = (column < 0) | (column >= 2**31)
    if faulty.any():
        at = first(faulty)
        raise source.fault(f"{what} {column[at]} is out of range, it counts from 0", f"token {at[0]}")
    return column.astype(np.int32)


def expert_load(
    source: Source,
    load: np.ndarray,
    model_layers: tuple[int, ...],
    place: Place | None = None,
    by_source: np.ndarray | None = None,
    by_step: np.ndarray | None = None,
) -> ExpertLoad:
    """Loads with the rows of zeros, which are dense layers, left out.

    load: float64[layer, expert]; token copies
    model_layers: the number of every row
    by_source, by_step: float64[rank, layer, expert] and float64[step, layer, expert] that add up to `load`, or None
    """
    check_amounts(source, load, "a load", place or place_in("layer", "expert"))
    wanted = source.num_experts
    if wanted is not None and load.shape[1] not in (wanted, wanted + source.zero_experts):
        raise source.fault(f"has loads of {load.shape[1]} experts, but the model has {wanted}")
    moe = np.flatnonzero(load.any(axis=1))
    if not len(moe):
        raise source.fault("every load is 0: no layer has any tokens")
    return ExpertLoad(
        source.name,
        load[moe],
        tuple(int(model_layers[layer]) for layer in moe),
        None if by_source is None else by_source[:, moe],
        None if by_step is None else by_step[:, moe],
    )


def traffic_matrix(source: Source, amounts: np.ndarray, place: Place | None = None) -> TrafficMatrix:
    """Traffic from float64[layer, src, dst], or float64[src, dst] for one layer, in bytes."""
    if place is None:
        place = place_in("row", "column") if amounts.ndim == 2 else place_in("layer", "row", "column")
    if amounts.ndim not in (2, 3) or amounts.shape[-1] != amounts.shape[-2] or 0 in amounts.shape:
        raise source.fault(
            f"a traffic matrix must be square, [n, n] or [layers, n, n], not {list(amounts.shape)}; "
            "a routing log must be integers"
        )
    check_ranks(source, amounts.shape[-1])
    check_amount(source, "traffic", amounts.shape)
    amounts = amounts.astype(np.float64)
    check_amounts(source, amounts, "a byte count", place)
    return TrafficMatrix(source.name, amounts.reshape(-1, *amounts.shape[-2:]), source.bytes_per_token)


def check_ranks(source: Source, ranks: int) -> None:
    """Raise InputError if a traffic matrix has fewer or more ranks than can be planned for."""
    if not 2 <= ranks <= MAX_RANKS:
        raise source.fault(f"a traffic matrix needs 2 … {MAX_RANKS} ranks, this one has {ranks}")


def check_amount(source: Source, what: str, shape: tuple[int, ...]) -> None:
    """Raise InputError for more numbers than are computed with."""
    if math.prod(shape) > MAX_AMOUNTS:
        raise source.fault(f"{what} is {list(shape)}, at most {MAX_AMOUNTS:,} numbers are read")


def check_amounts(source: Source, amounts: np.ndarray, what: str, place: Place) -> None:
    """Raise InputError unless every number is finite and not negative."""
    faulty = ~(np.isfinite(amounts) & (amounts >= 0))
    if faulty.any():
        at = first(faulty)
        raise source.fault(f"{what} must be a number of at least 0, not {quoted(amounts[at])}", place(at))


def fold_slots(counts: np.ndarray, physical_to_logical: np.ndarray, experts: int) -> np.ndarray:
    """The loads of experts, float64[..., layer, expert]: the sums over the slots of each.

    counts: number[..., layer, slot]
    physical_to_logical: int[layer, slot]; the expert in every slot
    experts: of a layer
    """
    layers = len(physical_to_logical)
    key = (np.arange(layers)[:, None] * experts + physical_to_logical).ravel()
    folded = [np.bincount(key, row, layers * experts) for row in counts.reshape(-1, key.size)]
    return np.reshape(folded, (*counts.shape[:-1], experts))


def model_layers_of(source: Source, layers: int) -> tuple[int, ...] | None:
    """The model layer of each of `layers` recorded layers, which are all MoE layers or all decoder layers of the open model;
    None without a model, or with one of other numbers of layers."""
    if source.model is None:
        return None
    if layers == len(source.model.moe_layers):
        return source.model.moe_layers
    return tuple(range(layers)) if layers == source.model.layers else None


def model_layers_named(source: Source, numbers: Sequence[int]) -> tuple[int, ...] | None:
    """The model layer of each recorded layer by its number in the recording, which counts MoE layers or decoder layers; None
    without a model, and if both ways of counting would fit or neither does."""
    if source.model is None:
        return None
    moe, decoder = source.model.moe_layers, set(source.model.moe_layers)
    if len(moe) == source.model.layers and decoder.issuperset(numbers):
        return tuple(numbers)
    of_moe_layers = all(0 <= number < len(moe) for number in numbers)
    of_decoder_layers = decoder.issuperset(numbers)
    if tuple(numbers) == moe or (of_decoder_layers and not of_moe_layers):
        return tuple(numbers)
    if of_moe_layers and (not of_decoder_layers or len(numbers) == len(moe)):
        return tuple(moe[number] for number in numbers)
    return None

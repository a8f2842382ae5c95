"""Which pipeline stage each rank of a Megatron-Core trace belongs to, and which layers its numbers mean.

Two numberings share one schema: forward hooks write the module's index, from 0 within the pipeline stage; the routing-replay
sink writes `layer_number`, from 1 through all stages. Pipeline parallelism is the outermost in Megatron's order of ranks
(tp-cp-ep-dp-pp), so with P stages the first of P equal blocks of ranks is the first stage. What the recording or the model
proves is taken; what they leave open is asked for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.formats.megatron.records import Records
from engine.formats.source import Source
from engine.model import MoEModel

_TELLING = 64
"""Choices in a row that two different layers do not make alike by chance."""


@dataclass(frozen=True)
class Stages:
    """layers: those recorded in each stage, ascending, as numbered there; model_layers: of all stages in order, None where the
    recording does not tell"""

    layers: tuple[tuple[int, ...], ...]
    model_layers: tuple[int, ...] | None


def pipeline_stages(source: Source, ranks: Sequence[Records]) -> Stages:
    """The stages of ranks, which ascend; raises InputError with what decides where the recording leaves it open."""
    possible = {len(stages): stages for stages in _possible(ranks)}
    if source.stages is not None:
        if source.stages not in possible:
            can = " or ".join(map(str, possible)) or "no number"
            raise source.fault(f"{source.stages} pipeline stages do not fit its {len(ranks)} ranks; {can} would")
        possible = {source.stages: possible[source.stages]}
    if source.model is not None:
        return _of_model(source, possible, source.model)
    if len(possible) > 1:
        possible = {count: stages for count, stages in possible.items() if _counted_through(stages)} or possible
    if len(possible) != 1:
        raise source.fault(_open(possible, ranks))
    ((stages),) = possible.values()
    known = stages[0] if len(stages) == 1 and stages[0][0] == 0 else None
    return Stages(stages, known)


def _of_model(source: Source, possible: dict[int, tuple[tuple[int, ...], ...]], model: MoEModel) -> Stages:
    explained = [
        Stages(stages, layers) for stages in possible.values() if (layers := _layers_in(stages, model)) is not None
    ]
    if not explained:
        recorded = sorted({layer for stages in possible.values() for stage in stages for layer in stage})
        seen = f"layers {recorded[0]} … {recorded[-1]}" if recorded else "different layers on its ranks"
        raise source.fault(
            f"has {seen}, which no number of pipeline stages makes the {len(model.moe_layers)} MoE layers of {model.name}; "
            "give the files of all ranks, and the model that was recorded"
        )
    if len(explained) > 1:
        raise source.fault(_open(possible, ()))
    return explained[0]


def _open(possible: dict[int, object], ranks: Sequence[Records]) -> str:
    if not possible:
        return f"its {len(ranks)} ranks recorded different layers, in no order of pipeline stages; give the files of all ranks"
    counts = " or ".join(map(str, possible))
    return (
        f"may be of {counts} pipeline stages: its layers may be counted within a stage; say how many there were (--stages, "
        "pipeline-model-parallel-size), or open the model (--model)"
    )


def _possible(ranks: Sequence[Records]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The layers of every stage, for each number of stages that the recording does not rule out."""
    layers = [tuple(np.unique(records.layer[~records.is_mtp]).tolist()) for records in ranks]
    whole = [records.rank for records in ranks] == list(range(len(ranks)))
    with_mtp = [place for place, records in enumerate(ranks) if records.is_mtp.any()]
    for count in (1, *range(2, len(ranks) + 1 if whole else 0)):
        if len(ranks) % count:
            continue
        width = len(ranks) // count
        blocks = [set(layers[at : at + width]) for at in range(0, len(ranks), width)]
        if any(len(block) != 1 or () in block for block in blocks):
            continue
        if with_mtp and with_mtp != list(range(len(ranks) - width, len(ranks))):
            continue  # the MTP layers are on the last stage
        if all(_one_token_stream([ranks[at] for at in range(place, len(ranks), width)]) for place in range(width)):
            yield tuple(block.pop() for block in blocks)


def _one_token_stream(stages: Sequence[Records]) -> bool:
    """Whether these ranks may be stages that the same tokens went through: as many of them in every step, and other choices."""
    first = {}
    for records in stages:
        lowest = np.flatnonzero((records.layer == records.layer[~records.is_mtp].min()) & ~records.is_mtp)
        tokens: dict[int, list[int]] = {}
        for step, number in zip(records.step[lowest].tolist(), records.tokens[lowest].tolist(), strict=True):
            tokens.setdefault(step, []).append(number)
        start, number = records.start[lowest[0]], records.tokens[lowest[0]]
        choices = records.experts[start : start + number]
        for others, same in first.values():
            if any(_differ(tokens[step], others[step]) for step in tokens.keys() & others.keys()):
                return False
            if choices.size >= _TELLING and np.array_equal(choices, same):
                return False  # the same layer of the same tokens
        first[records.rank] = tokens, choices
    return True


def _differ(tokens: list[int], others: list[int]) -> bool:
    """Whether micro-batches of a step differ in size. The last ones may be missing where a run was stopped."""
    return any(mine != theirs for mine, theirs in zip(tokens, others, strict=False))


def _counted_through(stages: tuple[tuple[int, ...], ...]) -> bool:
    """Whether layers are counted through all stages: consecutive, and without 0. Counted within stages, each would have to
    begin with dense layers of its own."""
    numbers = [layer for stage in stages for layer in stage]
    return numbers[0] > 0 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def _layers_in(stages: tuple[tuple[int, ...], ...], model: MoEModel) -> tuple[int, ...] | None:
    """The model layers that the stages recorded, None where they are not all MoE layers of the model."""
    numbers, moe = tuple(layer for stage in stages for layer in stage), model.moe_layers
    if numbers == tuple(layer + 1 for layer in moe):
        return moe
    taken, end = 0, 0
    for stage in stages:
        own = moe[taken : taken + len(stage)]
        if len(own) < len(stage):
            return None
        offset = own[0] - stage[0]
        # Stages begin after the last layer of the one before, the first at the model's first layer.
        if offset < end or (not taken and offset) or tuple(layer - offset for layer in own) != stage:
            return None
        taken, end = taken + len(stage), own[-1] + 1
    return moe if taken == len(moe) else None

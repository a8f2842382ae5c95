"""The settings that every launch decides first: the GPUs of its plans, its ranks, its passes and its number format,
with their lines of the pre-flight check."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cluster import Cluster
from engine.errors import InputError, UndecidedError
from engine.launch.places.devices import MOST_RANKS, Devices
from engine.launch.places.fold import nearest_ranks
from engine.launch.preparation.launch import SMALLER, Check, Launch
from engine.launch.rank.instructions import MAX_PLANS, MAX_REPEATS, RankInstructions, uses_nodes
from engine.model import MoEModel
from engine.plan import Plan
from engine.workload import Workload


@dataclass(frozen=True, eq=False)
class Attempt:
    """A launch's model and step at one size. replayed: of the model and of a second one; memory: lines of the check on it;
    kept: model layers, if some are left out."""

    instructions: RankInstructions
    replayed: tuple[Workload, ...]
    memory: tuple[Check, ...]
    kept: tuple[int, ...] = ()


def gpus_of(plans: Sequence[Plan]) -> int:
    """The GPUs that all plans are for."""
    if not 1 <= len(plans) <= MAX_PLANS:
        raise InputError(f"{len(plans)} plans: a launch compares 1 to {MAX_PLANS}")
    for plan in plans[1:]:
        if plan.placement.gpus != plans[0].placement.gpus:
            raise InputError(
                f"the plan {plan.name} is for {plan.placement.gpus} GPUs, {plans[0].name} for {plans[0].placement.gpus}; "
                "one launch compares plans for the same cluster"
            )
    return plans[0].placement.gpus


def ranks_of(launch: Launch, devices: Devices) -> int:
    """Number of ranks of a launch, by default one that suits the devices. Raises InputError for a number that no plan
    for so many GPUs has, and UndecidedError if none that suits the devices can carry out the plans."""
    gpus = gpus_of(launch.plans)
    if launch.ranks is None:
        return usual_ranks(launch.plans, launch.cluster, devices.default_ranks(gpus))
    if not 1 <= launch.ranks <= gpus:
        raise InputError(f"{launch.ranks} ranks: choose between 1 and {gpus}, the GPUs of the plan")
    return launch.ranks


def usual_ranks(plans: Sequence[Plan], cluster: Cluster | None, suitable: int) -> int:
    """Number of ranks of plans for one cluster unless a person says otherwise: as many as suit the place, or the
    nearest number that they can be folded onto. Raises UndecidedError if that is far more."""
    ranks = nearest_ranks(plans, cluster, suitable)
    if ranks > max(suitable, MOST_RANKS):
        plan = next(filter(uses_nodes, plans))
        raise UndecidedError(
            f"{relays_of(plan)}, so that no rank can stand for GPUs of several nodes; that takes at least {ranks} ranks, "
            "each a process: say how many"
        )
    return ranks


def relays_of(plan: Plan) -> str:
    """The demand on ranks of a plan that uses nodes, as the beginning of a sentence."""
    if plan.send_order.mode != "two-tier":
        return f"in the plan {plan.name} a token goes once to a node, whose GPUs pass it on to each other"
    return f"the plan {plan.name} has a two-tier order, in which the GPUs of a node relay for each other"


def check_passes(repeats: int, limit: float) -> None:
    """Raise InputError for a number of timed passes or a time limit (seconds) that makes no sense."""
    if not 1 <= repeats <= MAX_REPEATS:
        raise InputError(f"{repeats} timed passes: choose between 1 and {MAX_REPEATS}")
    if not limit > 0:  # a NaN compares false
        raise InputError(f"the time limit must be above 0 s, not {limit:g}")


def computed_in(model: MoEModel, dtype: str | None, on_gpus: bool, training: bool = False) -> MoEModel:
    """The model in the number format of the launch: fp8 becomes bf16 and TF32 real fp32, which ranks have PyTorch keep
    to; in a training step fp16 becomes bf16 too, as no gradients are scaled. Weights are of that format
    whatever the checkpoint's are, and latent experts get tokens of their own width."""
    if dtype not in (None, "fp32", "bf16"):
        raise InputError(f"{dtype}: a launch computes in fp32 or bf16")
    usual = {"fp8": "bf16", "tf32": "fp32"} | ({"fp16": "bf16"} if training else {})
    own = usual.get(model.dtype, model.dtype) if on_gpus else "fp32"
    own_numbers = dict.fromkeys(("expert_width", "expert_bits", "expert_biases"))
    return model.model_copy(update={"dtype": dtype or own, "d_model": model.row_width, **own_numbers})


NARROWER = (1, 2, 4, 8, 16, 32, 64)
"""Divisors of a model's widths that are tried until it fits; weights and their FLOP fall with the square."""
FEWEST = 2
"""MoE layers, with the dense ones before each, that a training step keeps at least."""


def parts_of_layers(model: MoEModel) -> Iterator[tuple[int, ...]]:
    """Model layers to keep, ever fewer: all, then half of the MoE layers, a quarter, …, spread over the model with the first
    and the last among them, each with the dense layers before it."""
    moe, ends = model.moe_layers, [*model.moe_layers[:-1], model.layers - 1]
    begins = [0, *(end + 1 for end in ends[:-1])]
    count = len(moe)
    while True:
        chosen = np.unique(np.linspace(0, len(moe) - 1, count).round().astype(int))
        yield tuple(layer for at in chosen for layer in range(begins[at], ends[at] + 1))
        if count // 2 < FEWEST:
            return
        count //= 2


def of_model_layers(model: MoEModel, kept: Sequence[int]) -> MoEModel:
    """The model with these layers alone, counted anew; itself if these are all."""
    if len(kept) == model.layers:
        return model
    dense = tuple(at for at, layer in enumerate(kept) if layer in set(model.dense_layers))
    attention = model.attention_layers and min(model.attention_layers, len(kept))
    return model.model_copy(update={"layers": len(kept), "dense_layers": dense, "attention_layers": attention})


def narrowed(model: MoEModel, divisor: int, heads: int = 1) -> MoEModel:
    """The model with its widths divided, and rows that still divide into the heads. Layers, experts and choices stay, and
    with them who sends how many rows to whom."""
    widths = {"d_model": heads * max(1, model.d_model // heads // divisor), "d_ff": max(1, model.d_ff // divisor)}
    if model.shared_d_ff is not None:
        widths["shared_d_ff"] = max(1, model.shared_d_ff // divisor)
    return model if divisor == 1 else model.model_copy(update=widths)


def first_that_fits(attempts: Iterator[Attempt]) -> tuple[Attempt, tuple[Check, ...]]:
    """The first attempt that fits into memory, with its lines; the very first one if none does. A smaller one than asked
    for is told in a line of its own."""
    whole = None
    for attempt in attempts:
        whole = whole or attempt
        if all(check.passed for check in attempt.memory):
            return attempt, (*_smaller(whole, attempt), *attempt.memory)
    return whole, whole.memory


def _smaller(whole: Attempt, small: Attempt) -> Iterator[Check]:
    if small is whole:
        return
    short = next(check for check in whole.memory if not check.passed)
    changed, stay = [], ["experts", "routing"]
    if small.kept:
        which = f"{len(small.kept)} of {whole.instructions.model.layers} layers"
        changed.append(f"{which} ({ranges_in_words(small.kept)}; counted anew from 0)")
    else:
        stay.insert(0, "layers")
    for (name, before), (_, after) in zip(_widths(whole.instructions), _widths(small.instructions), strict=True):
        if before != after:
            changed.append(f"{name} {after:,} of {before:,} wide")
    need = f"all of it needs more {short.name.lower()} than there is: {short.text.partition(': ')[0]}"
    same = f"{', '.join(stay[:-1])} and {stay[-1]}".capitalize()
    text = f"{', '.join(changed)}; {need}. {same} stay; predicted and measured times are of this smaller model"
    yield Check(SMALLER, True, text, warning=True)


def ranges_in_words(numbers: Sequence[int]) -> str:
    """Ascending numbers in a few words: `0 to 3, 8, 10, 11`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _widths(instructions: RankInstructions) -> list[tuple[str, int]]:
    widths = []
    for which, model in (("", instructions.model), ("second model's ", instructions.model_b)):
        if model is not None:
            widths += [(f"{which}rows", model.d_model), (f"{which}experts", model.d_ff)]
    if instructions.step is not None:
        widths += [("dense FFNs", instructions.step.dense_d_ff), ("vocabulary", instructions.step.vocabulary)]
    return widths


def instructions_of(launch: Launch, devices: Devices, ranks: int, **more: Any) -> RankInstructions:
    """Instructions for `ranks` ranks on these devices, with the launch's passes and time limit. more: the other fields."""
    gpus = min(len(devices.gpus), ranks)
    settled = {"ranks": ranks, "backend": devices.backend(ranks), "gpus": gpus}
    return RankInstructions(**settled, repeats=launch.repeats, limit=launch.limit, **more)


def rank_check(instructions: RankInstructions, gpus: int) -> Check:
    """The line on the plan's GPUs per rank."""
    each = "one rank each" if instructions.ranks == gpus else f"folded onto {instructions.ranks} ranks"
    return Check("Ranks", True, f"{gpus} GPUs of the plan, {each}")


def backend_check(instructions: RankInstructions, devices: Devices) -> Check:
    """The line on the backend and the devices."""
    if instructions.backend == "nccl":
        where = "NCCL: one GPU per rank"
    elif instructions.gpus:
        gpus = f"{instructions.gpus} GPU{'s' if instructions.gpus > 1 else ''}"
        where = f"Gloo, through host memory: {instructions.ranks} ranks on {gpus} in turn"
    else:
        where = f"Gloo: CPU, {devices.cores} cores for {instructions.ranks} ranks"
    return Check("Backend", True, where)

"""The instructions of a launch's ranks, one JSON file and one array file in the run folder, with the ranks' nodes and links;
and which all-to-alls of two models NCCL lets run at the same time."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from engine.errors import InputError
from engine.files import make_folder, open_atomically, write_atomically
from engine.goal import Goal, goal_of
from engine.model import MoEModel
from engine.plan import Plan
from engine.runtime.exchange.links import Tiers
from engine.schema import Frozen
from engine.training import TrainingStep
from engine.workload import RoutingTrace, Workload


def uses_nodes(plan: Plan) -> bool:
    """True if ranks of a node pass rows on to each other, so that all ranks have to know the nodes."""
    return plan.send_order.mode == "two-tier" or (plan.travel is not None and plan.travel.unit == "node")


def slots_to_fetch(plan: Plan) -> int:
    """Slots of a rank for weights that a plan's scheduler has it fetch: for both hostings of a layer, and for the plan's own; 0
    without a scheduler."""
    if plan.reaction is None:
        return 0
    hosted = max(2 * plan.reaction.max_experts_per_device, int(plan.placement.slots.max()))
    return min(plan.placement.experts, hosted)


INSTRUCTIONS, TRACE, REPORT, MACHINE_TIMES = "spec.json", "trace.npz", "report.json", "calibration.json"
"""Files in the run folder: the input of the ranks, and the output of rank 0."""

ROUTING_OF_RANK = "routing-{}.npz"
"""File with the routing of a rank's own model, an array a pass."""

COMPARED_PASSES = 8
"""Most passes of a person's own model of which all logits are kept for the comparison, evenly spread from first to last."""

MAX_REPEATS, MAX_PLANS = 100, 8
POOL_STRIDE = 1009
"""Offset between the windows of two experts in the pool of weights: prime, so that no two experts see equal rows."""
BEGINS = 0.05
"""The part of a launch that is done when the first pass begins, after the machine was measured."""
COMPARED = {False: 0.85, True: 0.2}
"""The part that is done when the comparison begins: of a training step one process does the work of all ranks, one tensor
after another. Measured with two plans of GPT2-S-MoE at half its width on two cores: 26 of 157 s."""
PROGRESS = "progress "
"""Beginning of a line that reports progress on a rank's standard output; JSON follows."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens replayed for one model.

    experts: int16[token, layer, k], -1 = none
    source: int32[token], the rank that holds a token
    importance: float64[token, layer], see `RoutingTrace.importance`; None where no scores were recorded
    profile: int16[token, layer, k], others of the recording, which a scheduler at run time has learnt from; None: there is none
    """

    experts: np.ndarray
    source: np.ndarray
    importance: np.ndarray | None = None
    profile: np.ndarray | None = None


class OwnModel(Frozen):
    """A person's own model and the texts that it runs on: prefill, then tokens chosen greedily, whatever ends a sequence.

    folder: with its config.json, and safetensors files; without those its weights are random
    prompts: the ids of the tokens of each text; texts are dealt to the ranks in turn
    new_tokens: generated of each; the last one is never computed with
    compared: True if rank 0 also runs the model without a plan, to compare with
    """

    folder: str
    prompts: tuple[tuple[int, ...], ...] = Field(min_length=1)
    new_tokens: int = Field(ge=1)
    compared: bool = True

    @property
    def tokens(self) -> int:
        """Those of the texts and the new ones."""
        return sum(map(len, self.prompts)) + len(self.prompts) * self.new_tokens

    def computed(self, ranks: int) -> int:
        """Tokens of the first pass of all ranks, with those that fill up the shorter texts of a rank."""
        return sum(len(batch) * max(map(len, batch)) for batch in (self.batch(rank, ranks) for rank in range(ranks)))

    def padded(self, ranks: int) -> int:
        """Tokens among those that are none of a text."""
        return self.computed(ranks) - sum(map(len, self.prompts))

    def batch(self, rank: int, ranks: int) -> tuple[tuple[int, ...], ...]:
        """The texts of a rank. One without any computes with a token of any kind, since all ranks call the model alike."""
        return self.prompts[rank::ranks] or ((0,),)


class RankInstructions(Frozen):
    """The work of the ranks: plans for exactly `ranks` ranks, compared in one job, and a model in the dtype that will be used.

    model_b: a second model that shares the ranks
    step: a training step instead of a forward pass through the MoE layers
    own: a whole model of a person instead, of which `model` has the sizes
    gpus: GPUs that the ranks compute on, in turn if they are fewer than the ranks; 0: all compute on the CPU
    bandwidth: bytes/s of every rank's link in each direction, if known beforehand (a testbed)
    tiers: the ranks' nodes, for plans in which they pass rows on to each other, and of a testbed with node links of its
        own
    limit: seconds for which a rank waits for another
    """

    plans: tuple[Plan, ...] = Field(min_length=1, max_length=MAX_PLANS)
    model: MoEModel
    model_b: MoEModel | None = None
    step: TrainingStep | None = None
    own: OwnModel | None = None
    ranks: int = Field(ge=1, le=1024)
    backend: str = Field(pattern="^(gloo|nccl)$")
    gpus: int = Field(default=0, ge=0)
    repeats: int = Field(default=3, ge=1, le=MAX_REPEATS)
    bandwidth: tuple[float, ...] | None = None
    tiers: Tiers | None = None
    limit: float = Field(default=900.0, gt=0)
    seed: int = 0

    @property
    def goal(self) -> Goal:
        """The goal of the plans that the ranks run."""
        return goal_of(training=self.step is not None, two_models=self.model_b is not None)

    @property
    def device(self) -> str:
        """The kind of device that the ranks compute on: "cuda" or "cpu"."""
        return "cuda" if self.gpus else "cpu"


def write_instructions(
    folder: Path, instructions: RankInstructions, workloads: Sequence[Workload], profile: RoutingTrace | None = None
) -> None:
    """Write the two files. Raises InputError if the folder cannot be written.

    workloads: of the model and of a second one; only a routing log has tokens
    profile: tokens that a scheduler at run time has learnt from
    """
    arrays = {} if profile is None else {"profile_0": profile.experts}
    for index, trace in enumerate(workloads):
        if isinstance(trace, RoutingTrace):
            arrays |= {f"experts_{index}": trace.experts, f"source_{index}": trace.rank_of_token(instructions.ranks)}
            if instructions.step is not None and trace.importance is not None:
                arrays[f"importance_{index}"] = trace.importance
    with writing(folder):
        make_folder(folder)
        with open_atomically(folder / TRACE) as file:
            np.savez_compressed(file, **arrays)
        write_atomically(folder / INSTRUCTIONS, instructions.to_json())


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a full disk, a missing permission or a folder that is gone into an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"the folder {folder} cannot be written ({error.strerror or error}); make room there, or set SWITCHYARD_DATA to "
            "another one"
        ) from None


def read_instructions(folder: Path) -> tuple[RankInstructions, tuple[Tokens, ...]]:
    """Read the files of `write_instructions`."""
    with np.load(folder / TRACE, allow_pickle=False) as arrays:
        names = ("experts", "source", "importance", "profile")
        known = (tuple(arrays.get(f"{name}_{index}") for name in names) for index in range(2))
        tokens = tuple(Tokens(*parts) for parts in known if parts[0] is not None)
    return RankInstructions.from_json((folder / INSTRUCTIONS).read_text(), INSTRUCTIONS), tokens


def left_open(instructions: RankInstructions, plan: Plan) -> bool:
    """True if the meetings that end the exchanges of both models are handed over after both exchanges.

    Over NCCL, kernels start in the order in which the host hands them over (see `settings`): a kernel handed over behind an
    exchange waits until the last batch of that exchange has begun. The meeting that ends an exchange of model a begins only
    when that exchange has ended, so handed over before the exchange of b it delays b until all ranks have ended a's. If both
    are one batch, the meeting comes behind the exchange of b, which then begins as soon as all ranks have finished the step
    that feeds it. With phases nothing is won: those of b begin with the last one of a at the earliest, and behind those of b
    the meeting would keep a's computation waiting for the last of them. So it stays before them, and the network serves one
    all-to-all after the other. Both meetings come before a's combine in any case, as b's experts would otherwise wait for those
    of a on all ranks.

    Only a GPU shows that kernels start as NCCL says; the order in which they are handed over is tested without one.
    """
    by_node = plan.travel is not None and plan.travel.unit == "node"  # step by step
    in_one_batch = plan.send_order.mode == plan.send_order_b.mode == "concurrent" and not by_node
    return instructions.backend == "nccl" and in_one_batch


def in_turn(instructions: RankInstructions, plan: Plan) -> frozenset[tuple[str, int]]:
    """The all-to-alls of a layer, (kind, model), that begin only when the previous one has ended on all ranks."""
    if instructions.backend != "nccl":
        return frozenset()
    if left_open(instructions, plan):
        return frozenset({("combine", 0)})
    return frozenset({("dispatch", 1), ("combine", 0), ("combine", 1)})

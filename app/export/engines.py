"""What a plan can be taken out as: the files of serving engines, a trace, a table."""

import re
from dataclasses import dataclass

from engine.formats.placements import Export, Target, write_placement
from engine.model import MoEModel
from engine.plan import Plan

PERFETTO = "perfetto"


@dataclass(frozen=True)
class Taker:
    """What takes a plan. target: of `write_placement`, or PERFETTO; suffix: of the file's name; about: who reads it."""

    title: str
    target: Target | str
    suffix: str
    about: str


TAKERS = (
    Taker("SGLang, JSON", "sglang", ".json", "SGLang reads it at start-up; experts stay where the file has them."),
    Taker("SGLang, .pt", "sglang", ".pt", "The same map as SGLang saves its own, for tools that load tensors."),
    Taker("TensorRT-LLM", "trtllm", ".yaml", "A static load balancer that moe_config points to."),
    Taker(
        "vLLM", "vllm", ".jsonl", "The initial mapping of vLLM's pull request #41141; releases without it read none."
    ),
    Taker("vLLM-Ascend", "vllm-ascend", ".json", "For its first model runner only; the second (MRv2) refuses maps."),
    Taker("Megatron-Core, DeepSpeed", "megatron", ".json", "A permutation of experts to reorder a checkpoint by."),
    Taker("ExFlow", "exflow", ".csv", "The table that ExFlow's own code reads: one GPU for every expert."),
    Taker("Table (CSV)", "csv", ".csv", "Every slot of every GPU in a row, for a spreadsheet or a script."),
    Taker("Perfetto", PERFETTO, ".json", "The timeline as a trace, for ui.perfetto.dev."),
)


def file_name(plan: Plan, taker: Taker) -> str:
    """A name that every file system takes, and that command lines need not quote."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", plan.name).strip("-").lower()[:60] or "plan"
    return f"{name}-{plan.id[:8]}-{taker.target}{taker.suffix}"


def exported(plan: Plan, model: MoEModel, taker: Taker, mtp: bool) -> Export:
    """The plan's placement for an engine. Raises InputError where the engine can not load it."""
    return write_placement(taker.target, plan, model, file_name(plan, taker), mtp)


def without_flags(text: str) -> str:
    """A sentence of the command line without the flags that it names: here they are on the page."""
    return re.sub(r" \(--[\w-]+\)", "", text)

"""Plans of serving engines, in and out: the places of their experts, with a module for each outside format.

A file is told by its content. Layers are counted as each engine does, over all decoder layers or over MoE layers; the MTP
layer, which a `MoEModel` does not have, is left out with a note.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engine.errors import IllegalError, InputError
from engine.formats import torch_files
from engine.formats.arrays import MAX_EXPERTS
from engine.formats.format import Format, Glance
from engine.formats.placements import exflow, megatron, sglang, table, tensorrt_llm, vllm
from engine.formats.placements.export import Export, Written, not_carried
from engine.formats.placements.plan_source import MAX_JSON_BYTES, WORDS, Deployed, PlanSource, default_layout, parse_json
from engine.formats.placements.training_step import STEP_TARGETS
from engine.formats.source import MAGIC, MAX_FILE_BYTES, fault, one_clear_line, quoted
from engine.model import MoEModel
from engine.plan import Placement, Plan
from engine.workload import Finding

Target = Literal["sglang", "trtllm", "vllm", "vllm-ascend", "megatron", "exflow", "csv"]

_WRITERS: dict[Target, Callable[[Placement, MoEModel, str], Written]] = {
    "sglang": sglang.write,
    "trtllm": partial(tensorrt_llm.write, mtp=False),
    "vllm": vllm.write,
    "vllm-ascend": vllm.write_ascend,
    "megatron": megatron.write,
    "exflow": exflow.write,
    "csv": table.write,
}
TARGETS: tuple[Target, ...] = tuple(_WRITERS)
OF_TRAINING: tuple[Target, ...] = ("megatron", "csv")
"""Those that a plan for a training step goes to as well, beside `STEP_TARGETS`."""

MAX_TEXT_BYTES = 32 * 1024**2
"""Limit of a table."""
_Reader = Callable[[PlanSource], Deployed]
_KNOWN = "of the studio, SGLang, vLLM, vLLM-Ascend, TensorRT-LLM or ExFlow, permutation for Megatron-Core, table of slots"


@dataclass(frozen=True)
class PlanFile:
    """A plan file that has been told by its content, but not read for a model yet.

    plan: the whole plan, for a file of the studio
    read: reads the placement
    """

    path: Path
    plan: Plan | None
    read: _Reader

    def deployed(self, model: MoEModel, gpus: int | None) -> Deployed:
        """The placement for a model on so many GPUs (None: see `PlanSource`); raises InputError if it does not fit them."""
        with one_clear_line(self.path):
            return self.read(PlanSource(self.path, model, gpus))


def read_deployed(source: Path | str, model: MoEModel, gpus: int) -> Placement:
    """The placement that runs now: from a plan file of the studio or of a serving engine, or by word, `linear` or
    `round-robin`, as vLLM lays experts out by default. Raises InputError that names the file, the place and the rule."""
    return open_plan_file(source).deployed(model, gpus).placement


def open_plan_file(source: Path | str) -> PlanFile:
    """The file, or the default layout of that word, told by its content; raises InputError."""
    path = Path(source)
    if str(source) in WORDS:
        return PlanFile(path, None, lambda source: default_layout(str(source.path), source.model, source.gpus or 1))
    with one_clear_line(path):
        if not path.is_file():
            raise fault(path, "is a folder; give a file" if path.is_dir() else "there is no such file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise fault(path, f"is larger than {MAX_FILE_BYTES // 1024**2} MB")
        return recognise(path, path.read_bytes())


def facts_of_log(path: Path) -> list[Finding]:
    """Findings on the facts in a log of vLLM, on ranks and balance; raises InputError."""
    with one_clear_line(path):
        return vllm.facts_of_server_log(path.read_bytes())


def recognise(path: Path, data: bytes) -> PlanFile:
    """The plan in these bytes. Raises InputError, also for a file that is no plan. path: its name in messages"""
    with one_clear_line(path):
        return PlanFile(path, *_recognise(path, data))


def _recognise(path: Path, data: bytes) -> tuple[Plan | None, _Reader]:
    if not data:
        raise fault(path, "the file is empty")
    if data.startswith(b"PK"):
        content = _content_of_torch(path, data)
        if isinstance(content, np.ndarray):
            return None, lambda source: vllm.read_expert_map(source, content)
        return None, _reader_of_map(path, content)
    if data.startswith(b"\x80"):
        raise fault(path, "is a pickle, which is never unpickled; save the map of experts with torch.save or as JSON")
    if kind := next((words for magic, words in MAGIC.values() if data.startswith(magic)), None):
        raise fault(path, f"is {kind}, not a plan")
    data = data.removeprefix(b"\xef\xbb\xbf")
    if vllm.is_log(data):
        return None, lambda source: vllm.read(source, data)
    if vllm.is_server_log(data):
        return None, lambda source: vllm.read_server_log(source, data)
    if data.lstrip()[:1] in (b"{", b"["):
        return _recognise_json(path, data)
    if len(data) > MAX_TEXT_BYTES:
        raise fault(path, f"is longer than {MAX_TEXT_BYTES // 1024**2} MB, as no plan is")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise fault(path, "is not UTF-8 text; save it as UTF-8") from None
    first_line = text.lstrip().split("\n", 1)[0]
    if exflow.is_table(first_line):
        return None, lambda source: exflow.read(source, text)
    if table.is_table(first_line):
        return None, lambda source: table.read(source, text)
    if tensorrt_llm.ASSIGNMENTS in text:
        content = tensorrt_llm.parse(path, text)
        return None, lambda source: tensorrt_llm.read(source, content)
    raise fault(path, f"is no plan that is known here ({_KNOWN})")


def _content_of_torch(path: Path, data: bytes) -> dict[str, Any] | np.ndarray:
    """The dict that `torch.save` wrote, with SGLang's map as lists, or the numbers of a tensor of three axes; raises
    InputError."""
    content = torch_files.load(path, io.BytesIO(data))
    if getattr(content, "ndim", None) == 3:
        return torch_files.array_of(path, content, "the map of experts")
    if not isinstance(content, dict):
        raise fault(path, f"holds a {type(content).__name__}, not a dict with a map of experts")
    for key in (sglang.KEY, sglang.DUMPED):
        if not isinstance(content.get(key, []), list):
            slots = torch_files.array_of(path, content[key], key)
            if slots.dtype.kind not in "iu":
                raise fault(path, f"must be whole numbers, not {slots.dtype}", key)
            if slots.ndim != 2:
                raise fault(path, f"must be [layers, slots], not {list(slots.shape)}", key)
            content[key] = slots.tolist()
    return content


def _recognise_json(path: Path, data: bytes) -> tuple[Plan | None, _Reader]:
    ours = b'"send_order"' in data  # a plan of the studio may have millions of sends, in columns
    content = parse_json(path, data, most_bytes=MAX_FILE_BYTES if ours else MAX_JSON_BYTES)
    if isinstance(content, list):
        return None, lambda source: megatron.read(source, content)
    if {"placement", "send_order"} <= set(content):
        plan = Plan.from_dict(content, path.name)
        return plan, partial(_read_ours, plan.placement)
    if vllm.LAYERS in content:
        return None, lambda source: vllm.read_ascend(source, content)
    if vllm.MAPS in content:
        return None, lambda source: vllm.read_plugin(source, content)
    return None, _reader_of_map(path, content)


def _reader_of_map(path: Path, content: dict[str, Any]) -> _Reader:
    """The reader of a dict with SGLang's keys; raises InputError for another one."""
    if not sglang.is_map(content):
        if "logical_count" in content:
            raise fault(path, "holds the loads of experts (logical_count): a recording, not a plan")
        keys = ", ".join(quoted(key) for key in list(content)[:6]) or "no keys"
        raise fault(path, f"is no plan that is known here ({_KNOWN}); it has {keys}")
    return lambda source: sglang.read(source, content)


def _read_ours(placement: Placement, source: PlanSource) -> Deployed:
    for noun, mine, theirs in (
        ("GPUs", placement.gpus, source.gpus),
        ("MoE layers", placement.layers, len(source.model.moe_layers)),
        ("experts", placement.experts, source.model.experts),
    ):
        if mine != theirs:
            raise source.fault(f"is for {mine} {noun}, but there are {theirs}")
    return Deployed(placement, "plan of the studio")


def write_placement(
    target: Target, plan: Plan | Placement, model: MoEModel, name: str = "plan.json", mtp: bool = False
) -> Export:
    """A plan's placement as an engine reads it, with the lines to add to the engine's command line. Of two models it is the
    first. The file has been read back and is the same. Raises InputError for a plan that the engine can not load, with the
    layers and GPUs at fault.

    target: the engine
    name: the file's, which gives some engines the format and stands in all lines to add
    mtp: with the MTP layer too, for TensorRT-LLM alone
    """
    if mtp and target != "trtllm":
        raise InputError("only TensorRT-LLM's placement has a layer for MTP (--mtp)")
    if isinstance(plan, Plan) and plan.priority is not None and target not in OF_TRAINING:
        raise InputError(
            f"{plan.name} is for a training step, {target} for serving; export it to {', '.join(STEP_TARGETS[:-1])} or "
            f"{STEP_TARGETS[-1]}"
        )
    placement = plan.placement if isinstance(plan, Plan) else plan
    travel = plan.travel if isinstance(plan, Plan) else None
    rule = travel.replicas if travel else None
    write = partial(tensorrt_llm.write, mtp=True) if mtp else _WRITERS[target]
    write = partial(sglang.write, travel=travel) if target == "sglang" else write
    written = write(placement, model, name)
    file = Path(name)
    back = recognise(file, written.content).deployed(model, placement.gpus).placement
    if [[sorted(held) for held in row] for row in back.experts_of_gpu] != [
        [sorted(held) for held in row] for row in placement.experts_of_gpu
    ]:
        raise IllegalError(f"{file.name}: what was written for {target} is another placement when it is read back")
    runs = placement.single or rule in {"sglang": tuple(sglang.ALGORITHMS), "vllm-ascend": ("fixed",)}.get(target, ())
    left = not_carried(plan, runs) if isinstance(plan, Plan) else ()
    if target == "vllm-ascend" and not placement.single:
        said = (
            "predictions count on --tensor-parallel-size 1: with more, vLLM-Ascend gives ranks other copies"
            if runs
            else "vLLM-Ascend gives every rank one fixed copy of an expert, up to a quarter off equal shares: plan for that "
            "rule (--travel copies:::fixed)"
        )
        left = (said, *left)
    return Export({file.name: written.content}, written.lines, (*written.notes, *left))


def _tells(glance: Glance) -> bool:
    if glance.is_json:
        return (
            bool({sglang.KEY, vllm.MAPS, vllm.LAYERS} & glance.keys)
            or glance.record.get("record_type") == vllm.MAPPING
            or _is_permutation(glance)
        )
    if not glance.is_text:
        return sglang.KEY.encode() in glance.pickled
    return table.is_table(glance.first_line) or tensorrt_llm.ASSIGNMENTS.encode() in glance.head


def _is_server_log(glance: Glance) -> bool:
    return glance.is_text and not glance.is_json and vllm.is_server_log(glance.beginning)


def _is_permutation(glance: Glance) -> bool:
    """True if a list of lists has every expert once in each layer, as Megatron-Core's has; loads never do."""
    if len(glance.shape) != 2 or not 2 <= glance.shape[1] <= MAX_EXPERTS:
        return False
    experts = list(range(glance.shape[1]))
    return all(
        isinstance(row, list) and len(row) == len(experts) and all(type(id) is int for id in row) and sorted(row) == experts
        for row in glance.json
    )


FORMATS = (
    Format("exflow-plan", "an ExFlow placement", "plan", lambda glance: exflow.is_table(glance.first_line)),
    Format("engine-plan", "a plan of a serving engine", "plan", _tells),
    Format("vllm-log", "a log of vLLM with the experts of its ranks", "plan", _is_server_log),
)

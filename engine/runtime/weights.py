"""Weights of a model out of a folder of safetensors files, slice by slice: a rank reads its own experts and the tensors that
all ranks have, and never holds another one."""

import logging
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.errors import InputError, StoppedError
from engine.formats.source import fault
from engine.plan import Plan
from engine.program import how_to_get_models
from engine.result import Stop
from engine.runtime.adapters import family_of
from engine.runtime.adapters.adapter import Block
from engine.runtime.adapters.families import Family
from engine.runtime.apply import check_plan, place_experts
from engine.runtime.checkpoint import Checkpoint, Reader
from engine.runtime.exchange.links import Tiers
from engine.runtime.memory import check_memory, weight_memory
from engine.runtime.ranks import all_or_none, check_device, ranks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger("switchyard.runtime")
_OLD_BUFFERS = r"rotary_emb\.inv_freq"
"""Names that old checkpoints have, and that models compute themselves."""


@dataclass(frozen=True)
class Loading:
    """The way that weights are loaded.

    dtype: number format of the weights; None: the config's
    device: the device of this rank
    seed: of random weights
    stop, report: as everywhere; report takes the share that is done and a line about it
    """

    dtype: torch.dtype | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009, a device cannot be changed
    seed: int = 0
    stop: Stop = lambda: False
    report: Callable[[float, str], None] = lambda share, line: None


def load_planned(
    folder: Path | str,
    plan: Plan,
    group: dist.ProcessGroup | None = None,
    loading: Loading | None = None,
    tiers: Tiers | None = None,
) -> "PreTrainedModel":
    """The model in a folder, under a plan: `apply_plan` without ever having the experts of other ranks. Every rank of the group
    calls it. A folder with a config alone gives random weights, the same under every plan, and a warning in the log.

    folder: with config.json and safetensors files
    plan, group, tiers: as for `apply_plan`

    Raises InputError, on all ranks and before any weight is loaded, if the folder's tensors are not those of its config, if the
    plan does not fit, or if the weights do not fit into memory. If a rank fails later, all raise.
    """
    loading = loading or Loading()
    group, _, rank = ranks_of(group)
    if group is not None:
        check_device(group, loading.device)
    with all_or_none(group, loading.device, "checked the folder"):
        checkpoint, family, model, sources = opened(folder, loading.dtype)
        check_plan(model, plan, family, family.blocks(model))
        memory = weight_memory(model, family, plan.placement)
        placed = place_experts(model, plan, group, family, tiers)
    check_memory(memory.peak, group, loading.device)
    stacks = [(one.block, one.stack, one.way.held) for one in placed]
    with all_or_none(group, loading.device, "loaded its weights"):
        if checkpoint.empty and rank == 0:
            _log.warning("%s has no weights: random ones of its config", folder)
        _fill(model, stacks, checkpoint, sources, family, loading)
    return model


def load_model(folder: Path | str, loading: Loading | None = None) -> "PreTrainedModel":
    """The model in a folder as it is, with all experts in this process: `load_planned` without a plan."""
    loading = loading or Loading()
    checkpoint, family, model, sources = opened(folder, loading.dtype)
    check_memory(weight_memory(model, family, None).peak, None, loading.device)
    if checkpoint.empty:
        _log.warning("%s has no weights: random ones of its config", folder)
    blocks = family.blocks(model)
    stacks = [(block, block.module.experts, range(family.experts(block))) for block in blocks]
    _fill(model, stacks, checkpoint, sources, family, loading)
    return model


class Piece(NamedTuple):
    """A part of an expert's slice of a parameter. name: of the tensor on disk; row: of it, None for all; begin, end: rows of
    the slice that it fills"""

    name: str
    row: int | None
    begin: int
    end: int


class Sources:
    """The place on disk of every tensor of a model; making it checks that the checkpoint has them all, in their shapes, and
    none besides."""

    def __init__(self, checkpoint: Checkpoint, model: "PreTrainedModel", family: Family) -> None:
        self._checkpoint, self._family = checkpoint, family
        self._missing, self._claimed = [], set()
        self.names: dict[str, str] = {}
        self.pieces: dict[tuple[str, str, int], list[Piece]] = {}
        blocks = family.blocks(model)
        routed = {f"{block.name}.experts.{tensor}" for block in blocks for tensor in family.tensors}
        tied = set(model.all_tied_weights_keys)
        for name, tensor in model.state_dict().items():
            if name not in routed and (found := self._find(family.on_disk(name), tuple(tensor.shape), name in tied)):
                self.names[name] = found
        for block in blocks:
            for tensor in family.tensors:
                self._experts(block, tensor, tuple(getattr(block.module.experts, tensor).shape))
        ignored = "|".join([*(model._keys_to_ignore_on_load_unexpected or ()), _OLD_BUFFERS])
        extra = [name for name in checkpoint.entries if name not in self._claimed and not re.search(ignored, name)]
        for names, text in ((self._missing, "lacks"), (extra, "has, and its config.json does not,")):
            if names:
                more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
                raise InputError(f"{checkpoint.folder}: the checkpoint {text} the tensor {names[0]}{more}")

    def _find(self, names: Sequence[str], shape: tuple[int, ...], optional: bool = False) -> str | None:
        """The one of these names that the checkpoint has, in this shape."""
        found = next((name for name in names if name in self._checkpoint.entries), None)
        if found is None:
            self._missing += [] if optional else [names[-1]]
            return None
        entry = self._checkpoint.entries[found]
        if entry.shape != shape:
            raise InputError(
                f"{self._checkpoint.folder}: the tensor {found} is {list(entry.shape)}, by config.json it is {list(shape)}"
            )
        if not entry.bytes and shape:
            raise InputError(f"{self._checkpoint.folder}: the tensor {found} is in a number format that is not computed in")
        self._claimed.add(found)
        return found

    def _experts(self, block: Block, tensor: str, shape: tuple[int, ...]) -> None:
        """Find the pieces of all experts, also of those that other ranks hold. shape: [expert, …]"""
        whole = self._family.on_disk(f"{block.name}.experts.{tensor}")
        parts = self._family.parts.get(tensor, ())
        if not parts or any(name in self._checkpoint.entries for name in whole):
            found = self._find(whole, shape)
            for expert in range(shape[0] if found else 0):
                self.pieces[block.name, tensor, expert] = [Piece(found, expert, 0, shape[1])]
            return
        rows = shape[1] // len(parts)
        for expert in range(shape[0]):
            names = self._family.pieces(block, tensor, expert)
            found = [self._find(each, (rows, *shape[2:])) for each in names]
            own = [Piece(name, None, place * rows, (place + 1) * rows) for place, name in enumerate(found) if name]
            self.pieces[block.name, tensor, expert] = own


def opened(folder: Path | str, dtype: torch.dtype | None) -> tuple[Checkpoint, Family, "PreTrainedModel", Sources | None]:
    """The checkpoint, its family, the model without numbers, and the place of its tensors; None if the folder has none."""
    folder = Path(folder)
    checkpoint, path = Checkpoint(folder), folder / "config.json"
    family = family_of(checkpoint.config.get("model_type"), path.name)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    except ImportError:
        raise InputError(f"models out of folders need transformers; {how_to_get_models()}") from None
    known = {name: value for name, value in checkpoint.config.items() if name not in ("auto_map", "model_type")}
    try:
        config = AutoConfig.for_model(checkpoint.config["model_type"], **known)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype or config.dtype or torch.float32, trust_remote_code=False
            )
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        _widen(model)
    except Exception as error:  # of any kind: which value is wrong shows in the midst of a model's own code
        raise fault(path, f"transformers cannot build the model of it: {error}") from None
    chosen = getattr(config, "num_experts_per_tok", 0)
    if any(chosen > (least := family.experts(block)) for block in family.blocks(model)):
        raise fault(path, f"a token chooses {chosen} experts (num_experts_per_tok), and there are only {least}")
    return checkpoint, family, model.eval(), None if checkpoint.empty else Sources(checkpoint, model, family)


def _widen(model: "PreTrainedModel") -> None:
    """Make those tensors fp32 that a model keeps so whatever its number format, such as DeepSeek-V3's biases of routing."""
    wide = set(model._keep_in_fp32_modules_strict or ())
    if model.dtype == torch.float16:
        wide |= set(model._keep_in_fp32_modules or ())
    for name, tensor in list(_named(model)):
        if tensor.is_floating_point() and wide & set(name.split(".")):
            tensor.data = tensor.data.float()


def _fill(
    model: "PreTrainedModel",
    stacks: Sequence[tuple[Block, nn.Module, Sequence[int]]],
    checkpoint: Checkpoint,
    sources: Sources | None,
    family: Family,
    loading: Loading,
) -> None:
    """Give every tensor of a model on the "meta" device its numbers.

    stacks: blocks, the modules with parameters [slot, …] of their experts, and the experts in the slots
    sources: None: random numbers
    """
    routed = {id(parameter) for _, stack, _ in stacks for parameter in stack.parameters()}
    tied = set(model.all_tied_weights_keys)
    shared = [(name, tensor) for name, tensor in _named(model) if id(tensor) not in routed and name not in tied]
    total = sum(tensor.nbytes for _, tensor in shared)
    total += sum(parameter.nbytes for _, stack, _ in stacks for parameter in stack.parameters())
    done = 0

    def passed(tensor: Tensor) -> None:
        nonlocal done
        if loading.stop():
            raise StoppedError("stopped while weights were loaded")
        done += tensor.nbytes
        loading.report(done / max(total, 1), f"weights: {done / 2**30:.2f} of {total / 2**30:.2f} GiB")

    with checkpoint.reading() as reader:
        for block, stack, held in stacks:
            for name in family.tensors:
                tensor = _placed(stack, name, loading.device)
                tensor._is_hf_initialized = True  # `initialize_weights` leaves it alone
                for slot, expert in enumerate(held):
                    if sources is None:
                        _random(tensor[slot], model.config.initializer_range, (loading.seed, block.layer, expert), name)
                    else:
                        _read(reader, tensor[slot], sources.pieces[block.name, name, expert])
                    passed(tensor[slot])
        for name, _ in shared:
            owner, _, last = name.rpartition(".")
            tensor = _placed(model.get_submodule(owner), last, loading.device)
            if sources is not None and name in sources.names:
                reader.copy(sources.names[name], tensor)
                tensor._is_hf_initialized = True
            passed(tensor)
    with torch.random.fork_rng(devices=[]), torch.device(loading.device):
        torch.manual_seed(loading.seed)
        model.initialize_weights()  # buffers that no file has, and without files everything that all ranks have
    model.tie_weights()


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _placed(owner: nn.Module, name: str, device: torch.device) -> Tensor:
    """The tensor `name` of a module, with memory on a device in place of "meta"."""
    old = getattr(owner, name)
    new = torch.empty_like(old, device=device)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    setattr(owner, name, new)
    return new


def _read(reader: Reader, place: Tensor, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        reader.copy(piece.name, place[piece.begin : piece.end], piece.row)


def _random(place: Tensor, spread: float, seed: tuple[int, int, int], name: str) -> None:
    """Random numbers of one expert, the same on every rank that holds it. seed: seed, layer, expert"""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    with torch.no_grad():
        place.copy_(torch.randn(place.shape, generator=generator) * (0.0 if name.endswith("_bias") else spread))

"""Recording the routing of any PyTorch MoE model with forward hooks.

    model = AutoModelForCausalLM.from_pretrained("an-moe-model")
    with RoutingRecorder(model) as recorder:
        for input_ids in batches:               # int [batch, seq]; pass attention_mask if there is padding
            model(input_ids=input_ids)
    trace = recorder.trace("my text")           # RoutingTrace, int16 [token, layer, k]
    recorder.save("my-text.npz")

Routers that return or keep the experts they chose are found by themselves: those of Hugging Face's Mixtral, Qwen-MoE, DeepSeek,
gpt-oss, OLMoE and most others. Name them with `routers` if that fails, and give `k` if a router returns nothing but logits.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from engine.errors import InputError
from engine.workload import RoutingTrace

CHOICE_NAMES = (
    *("topk_idx", "topk_ids", "topk_index", "topk_indices", "top_k_index", "top_k_indices", "topk_experts"),
    *("selected_experts", "router_indices", "expert_indices", "expert_index", "routed_experts"),
)
EXPERT_COUNT_NAMES = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts")
# Attention indexers return integer tensors too, so a tensor without a telling name only counts from these modules.
ROUTER_CLASS = re.compile(r"Rout(er|ing)|Gating|Gate$|TopK", re.IGNORECASE)
ROUTER_NAME = re.compile(r"(.*_)?(router|gate|gating|wg)")


class RoutingRecorder:
    """Records which experts every token chose, in every forward pass of `model` inside the `with` block.

    model: the module that is called; passes of its parts alone are not recorded, so that gradient checkpointing, which
        runs the layers again, does not count tokens twice
    routers: a regular expression over module names (`re.search`); default: found automatically
    k: take the k largest logits of routers that return no choice; wrong for routers that choose within expert groups

    Tokens follow each other batch by batch, sequence by sequence; padding according to `attention_mask` is recorded as
    -1. Every sequence of a batch gets the next free number, except in a pass that continues the one before it with
    `past_key_values`. Inputs and mask must lead with the batch ([batch, seq]) and the mask be passed by name. Only
    int16 copies in main memory are kept.
    """

    def __init__(self, model: nn.Module, routers: str | None = None, k: int | None = None) -> None:
        self._model = model
        self._k = k
        self._named = routers is not None
        self._candidates = _matching(model, routers) if routers is not None else dict(model.named_modules())
        self._handles: list[Any] = []
        self._running = False
        self._passes = 0
        self._sequences = 0
        self._batch = 0
        self._continued = False
        self._pending: dict[str, list[Tensor]] = {}
        self._chosen: dict[str, list[np.ndarray]] = {}
        self._experts: dict[str, int | None] = {}
        self._sequence: list[np.ndarray | None] = []
        self._only_logits: list[str] = []

    def __enter__(self) -> Self:
        self._handles.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        for name, module in self._candidates.items():
            self._handles.append(module.register_forward_hook(self._watch(name)))
        self._handles.append(self._model.register_forward_hook(self._finish, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running = False

    @property
    def routers(self) -> tuple[str, ...]:
        """Module names of the routers, one per MoE layer, in the order of their first call."""
        return tuple(self._chosen)

    def trace(self, name: str, num_experts: int | None = None) -> RoutingTrace:
        """The recording so far. Raises InputError if nothing was recorded, or if layers differ in tokens, k or experts.

        num_experts: experts of a layer; default: as the routers or the model's config have it
        """
        if not self._chosen:
            raise InputError(self._nothing())
        layers = {router: _joined(router, parts) for router, parts in self._chosen.items()}
        first, experts = next(iter(layers.items()))
        for router, chosen in layers.items():
            if chosen.shape != experts.shape:
                raise InputError(
                    f"{name}: layer {router} has {len(chosen)} tokens × {chosen.shape[1]} experts, layer {first} "
                    f"{len(experts)} × {experts.shape[1]}; choose routers that see the same tokens with routers=…"
                )
        stacked = np.stack(list(layers.values()), axis=1)
        count = num_experts or self._expert_count(name)
        if stacked.max() >= count:
            layer = list(layers)[int(stacked.max(axis=(0, 2)).argmax())]
            raise InputError(f"{name}: layer {layer} chose expert {stacked.max()}, but there are only {count} experts")
        known = [part for part in self._sequence if part is not None]
        sequence = np.concatenate(known) if len(known) == len(self._sequence) else None
        return RoutingTrace(name, stacked, count, sequence)

    def save(self, path: str | Path, num_experts: int | None = None) -> None:
        """Write `experts` int16 [token, layer, k], `num_experts` and, if known, `sequence` int32 [token] as `.npz`."""
        trace = self.trace(Path(path).stem, num_experts)
        arrays = {"experts": trace.experts, "num_experts": np.int64(trace.num_experts)}
        if trace.sequence is not None:
            arrays["sequence"] = trace.sequence
        np.savez_compressed(path, **arrays)

    def _begin(self, _model: nn.Module, _inputs: tuple, kwargs: dict) -> None:
        self._running = True
        self._pending = {}
        # Asked now because the pass itself fills the cache.
        past = kwargs.get("past_key_values")
        self._continued = past is not None and (not hasattr(past, "get_seq_length") or past.get_seq_length() > 0)
        """True if this goes on with the sequences of the previous pass, as every step of text generation does."""

    def _watch(self, name: str) -> Callable[[nn.Module, object, object], None]:
        """A forward hook that notes the choice of the module `name`."""

        def hook(module: nn.Module, inputs: tuple, output: object) -> None:
            # Children report before their parents: a module that holds a router, such as the MoE block, is none.
            if not self._running or any(_holds(name, router) for router in self._pending):
                return
            count = _attribute(module, EXPERT_COUNT_NAMES, int) or _configured_experts(self._model)
            router = bool(ROUTER_CLASS.search(type(module).__name__) or ROUTER_NAME.fullmatch(name.rpartition(".")[2]))
            tokens = _tokens_of(inputs)
            logits = _logits(output, count, tokens) if router or self._named else None
            chosen = _choice(module, output, count, router or self._named, tokens)
            if chosen is None and logits is not None and self._k is None:
                self._only_logits.append(name)
            elif chosen is None and logits is not None:
                chosen, router = logits.topk(min(self._k, logits.shape[-1]), dim=-1).indices, True
            if chosen is not None:
                # Other outputs of a module may be as wide as a hidden vector; a router's widest are its logits.
                self._experts[name] = count or (logits.shape[-1] if router and logits is not None else None)
                flat = chosen.detach().reshape(-1, chosen.shape[-1])
                self._pending.setdefault(name, []).append(flat.to("cpu", torch.int16, copy=True))

        return hook

    def _finish(self, _model: nn.Module, inputs: tuple, kwargs: dict, _output: object) -> None:
        self._running = False
        self._passes += 1
        passed = {name: torch.cat(parts).numpy() for name, parts in self._pending.items()}
        if not passed:
            return
        tokens = len(next(iter(passed.values())))
        batch, length = _batch_shape(inputs, kwargs) or (0, 0)
        mask = kwargs.get("attention_mask")
        if batch * length == tokens and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= length:
            padding = (mask[:, -length:] == 0).reshape(-1).cpu().numpy()
            for chosen in passed.values():
                if len(chosen) == tokens:
                    chosen[padding] = -1
        for name, chosen in passed.items():
            self._chosen.setdefault(name, []).append(chosen)
        if batch * length != tokens:
            self._sequence.append(None)
            return
        if not (self._continued and batch == self._batch):
            self._sequences += batch
        self._batch = batch
        first = self._sequences - batch
        self._sequence.append(np.repeat(np.arange(first, first + batch, dtype=np.int32), length))

    def _expert_count(self, name: str) -> int:
        counts = {self._experts[router] for router in self._chosen}
        if len(counts) > 1 or None in counts:
            sizes = ", ".join(f"{router}: {self._experts[router] or 'unknown'}" for router in self._chosen)
            raise InputError(f"{name}: how many experts a layer has is unclear ({sizes}); give num_experts=…")
        return counts.pop()

    def _nothing(self) -> str:
        """The reason why there is no recording."""
        if not self._passes:
            return "no forward pass was recorded; call the model that the recorder was given inside the with block"
        if self._only_logits:
            return (
                f"the router {self._only_logits[0]} returns logits but not the experts it chose; give k=… to take the "
                f"k largest, or name the modules that know the choice with routers=…"
            )
        where = "the modules that routers=… names" if self._named else "this model"
        return f"found no router that returns or keeps expert indices in {where}; name them with routers=…"


def _matching(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise InputError(f"routers={pattern!r} is not a regular expression: {error}") from None
    matching = {name: module for name, module in model.named_modules() if wanted.search(name)}
    if not matching:
        names = [name for name, _ in model.named_modules() if name]
        raise InputError(f"routers={pattern!r} matches no module; names look like {', '.join(names[-3:])}")
    return matching


def _joined(router: str, parts: list[np.ndarray]) -> np.ndarray:
    """int16[token, k]: the choices of one router in all passes."""
    widths = {part.shape[1] for part in parts}
    if len(widths) > 1:
        raise InputError(f"layer {router} chose {min(widths)} experts in one pass and {max(widths)} in another")
    return np.concatenate(parts)


def _holds(name: str, router: str) -> bool:
    """True if the module `name` contains the module `router`."""
    return name != router and (name == "" or router.startswith(name + "."))


def _tokens_of(inputs: tuple) -> int | None:
    """Number of tokens whose states, float [..., width], a module was given first; None if it shows no such input."""
    first = inputs[0] if inputs else None
    if not isinstance(first, Tensor) or not first.dtype.is_floating_point or first.dim() < 2:
        return None
    return first.numel() // max(first.shape[-1], 1)


def _choice(module: nn.Module, output: object, experts: int | None, trusted: bool, tokens: int | None) -> Tensor | None:
    """The chosen experts, integer [..., k], that a module returned or keeps, turned round if it has them as [k, token], as
    DeepSpeed's gate does; None if there are none."""
    named = dict(output) if isinstance(output, Mapping) else {}
    named = {**vars(module), **module._buffers, **named}
    candidates = [named[key] for key in CHOICE_NAMES if key in named]
    if trusted or _attribute(module, EXPERT_COUNT_NAMES, int):
        candidates += _tensors(output)
    for tensor in candidates:
        if not isinstance(tensor, Tensor) or tensor.dtype.is_floating_point or tensor.dim() < 2 or not tensor.numel():
            continue
        # A mask has a 0 or 1 per expert on its last axis (Switch Transformer) instead of k expert ids: ids that fill the axis
        # would be a permutation and reach beyond 1, unless there are but two experts.
        if tensor.shape[-1] == experts and (tensor.dtype == torch.bool or (experts > 2 and int(tensor.max()) <= 1)):
            k = max(int(tensor.sum(dim=-1).max()), 1)
            there, index = tensor.to(torch.uint8).topk(k, dim=-1)
            return index.masked_fill(there == 0, -1)  # -1 if a token has fewer than k experts
        if tensor.dtype != torch.bool:
            return tensor.T if tensor.dim() == 2 and tensor.shape[0] != tokens == tensor.shape[1] else tensor
    return None


def _logits(output: object, experts: int | None, tokens: int | None) -> Tensor | None:
    """Router logits or probabilities, float [..., experts], among the outputs of a module: the widest (with `experts`
    known, one just as wide) with a row for every token; None if there are none."""
    floats = [tensor for tensor in _tensors(output) if tensor.dtype.is_floating_point and tensor.dim() >= 2]
    rows = [tensor for tensor in floats if tensor.shape[:-1].numel() == (tokens or tensor.shape[:-1].numel())]
    fitting = [tensor for tensor in rows if tensor.shape[-1] == (experts or tensor.shape[-1]) > 1]
    return max(fitting, key=lambda tensor: tensor.shape[-1], default=None)


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (tensor for part in output.values() for tensor in _tensors(part))
    elif isinstance(output, tuple | list):
        yield from (tensor for part in output for tensor in _tensors(part))


def _attribute(owner: object, names: tuple[str, ...], kind: type) -> Any:
    """The first of the attributes `names` that `owner` has with that type, or None."""
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, kind)), None)


def _configured_experts(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    return _attribute(getattr(config, "text_config", config), EXPERT_COUNT_NAMES, int)


def _batch_shape(inputs: tuple, kwargs: dict) -> tuple[int, int] | None:
    """(sequences, tokens of each) of a forward pass's input, or None if it shows no such shape."""
    first = next((kwargs[key] for key in ("input_ids", "inputs_embeds") if kwargs.get(key) is not None), None)
    first = inputs[0] if first is None and inputs else first
    if not isinstance(first, Tensor) or first.dim() != 2 + first.dtype.is_floating_point:
        return None
    return first.shape[0], first.shape[1]

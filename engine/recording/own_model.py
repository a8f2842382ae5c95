"""A recording from a model that runs here: texts through a model out of a folder, and the experts that their tokens chose.
Texts go no further than the tokenizer; only routing is kept."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine import formats
from engine.errors import InputError, StoppedError
from engine.formats.source import MAX_FILE_BYTES, fault
from engine.model import MoEModel
from engine.program import how_to_get_models
from engine.recording.estimate import Estimate, estimate
from engine.recording.per_request import MAX_RECORDED_BYTES, Prompt, Report, time_left
from engine.result import Stop
from engine.workload import DECODE, PREFILL, RoutingTrace

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

    from engine.routing_recorder import RoutingRecorder

LOADING = 0.3
"""Share of the progress that is loading weights."""


@dataclass(frozen=True)
class Texts:
    """Texts as a model takes them.

    ids: the tokens of each
    model: its sizes
    size: the recording's, estimated
    cut: texts that were longer than the model takes
    """

    ids: list[list[int]]
    model: MoEModel
    size: Estimate
    cut: int


def tokenised(folder: Path, prompts: Sequence[Prompt], new_tokens: int) -> Texts:
    """`read_texts`, for a recording. Raises InputError also if that would be too large to read."""
    texts = read_texts(folder, prompts, new_tokens)
    if texts.size.bytes > MAX_RECORDED_BYTES:
        raise InputError(
            f"the recording would be larger than a file of {MAX_FILE_BYTES // 1024**2} MB ({texts.size.sum}); take fewer texts"
        )
    return texts


def read_texts(folder: Path, prompts: Sequence[Prompt], new_tokens: int) -> Texts:
    """The tokens of texts by the folder's `tokenizer.json`, and the size of a recording of them, before any weight is read.

    new_tokens: generated of each text

    Raises InputError if the folder has no config of a known family or no tokenizer, or a token is none of the model's.
    """
    # With PyTorch, which no other way to record needs.
    from engine.runtime.adapters import family_of
    from engine.runtime.checkpoint import read_config

    config = read_config(folder)
    family_of(config.get("model_type"), "config.json")
    model = formats.read_model(folder / "config.json")
    words, most = config.get("vocab_size"), config.get("max_position_embeddings")
    room = most - new_tokens if isinstance(most, int) else None
    if room is not None and room < 1:
        raise InputError(f"{new_tokens:,} new tokens of each text do not fit into the model's {most:,} positions")
    tokenizer = _tokenizer(folder) if any(isinstance(prompt, str) for prompt in prompts) else None
    every = [tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt for prompt in prompts]
    for number, ids in enumerate(every, start=1):
        if isinstance(words, int) and max(ids, default=0) >= words:
            raise InputError(
                f"text {number} has token {max(ids)}, and the model knows {words:,}: the tokenizer is another model's"
            )
    kept = [ids[:room] for ids in every if ids]
    if not kept:
        raise InputError("the texts have no tokens")
    size = estimate("pytorch", model, sum(map(len, kept)) + len(kept) * max(new_tokens - 1, 0))
    return Texts(kept, model, size, sum(len(ids) > len(own) for ids, own in zip(filter(None, every), kept, strict=True)))


def record_texts(
    model: "PreTrainedModel",
    texts: Texts,
    new_tokens: int,
    batch: int,
    ranks: int | None,
    name: str,
    stop: Stop,
    report: Report,
) -> tuple[RoutingTrace, str]:
    """The routing of texts and of the tokens that follow, chosen greedily; and why it ended before the last text, "" if it
    did not. Tokens are in the order of sequences, and of positions in each; padding is left out.

    new_tokens: generated of each text at most; the last one is never computed with
    batch: texts at a time
    ranks: those that the sequences are dealt to in turn, which makes the source ranks; None: there are none in the recording
    name: of the recording

    Raises StoppedError if nothing was recorded.
    """
    # With PyTorch, as nothing else here.
    from engine.routing_recorder import RoutingRecorder
    from engine.runtime.generation import passes

    begin, phases, ended = time.monotonic(), [], ""
    total, done = sum(map(len, texts.ids)), 0
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or []
    # Long texts first would save padding, but leave none of the short ones when it is stopped.
    with RoutingRecorder(model) as recorder, _stopping(model, stop):
        try:
            for first in range(0, len(texts.ids), batch):
                some = texts.ids[first : first + batch]
                for step, _ in enumerate(passes(model, some, new_tokens, ends=ends)):
                    tokens, phase = (len(some), DECODE) if step else (len(some) * max(map(len, some)), PREFILL)
                    phases.append(np.full(tokens, phase, dtype=np.int8))
                done += sum(map(len, some))
                left = (time.monotonic() - begin) / done * (total - done)
                report(done / total, f"{first + len(some):,} of {len(texts.ids):,} texts, about {time_left(left)}")
        except StoppedError:
            ended = "stopped"
    if not phases:
        raise StoppedError("nothing was recorded: stopped before the first pass")
    return _trace(recorder, phases, texts.model, ranks, name), ended


@contextmanager
def _stopping(model: "torch.nn.Module", stop: Stop) -> Iterator[None]:
    """Let a pass end at the next module of the model when `stop` becomes true: a whole one may take too long to wait for."""

    def look(*_: object) -> None:
        if stop():
            raise StoppedError("stopped in a pass")

    handles = [module.register_forward_pre_hook(look) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _trace(
    recorder: "RoutingRecorder", phases: list[np.ndarray], model: MoEModel, ranks: int | None, name: str
) -> RoutingTrace:
    """The recording in the order of sequences and positions, without padding."""
    whole = recorder.trace(name, model.router_choices)
    phase = np.concatenate(phases)
    real = np.flatnonzero((whole.experts >= 0).any(axis=(1, 2)))
    order = real[np.argsort(whole.sequence[real], kind="stable")]
    sequence = whole.sequence[order]
    source = None if ranks is None else (sequence % ranks).astype(np.int32)
    return RoutingTrace(name, whole.experts[order], whole.num_experts, sequence, source, phase[order], model.moe_layers)


def _tokenizer(folder: Path) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError(f"texts for a model need tokenizers; {how_to_get_models()}") from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise fault(path, "there is no such file; without it texts have to be lists of token ids (.jsonl)")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise fault(path, f"is no tokenizer: {error}") from None

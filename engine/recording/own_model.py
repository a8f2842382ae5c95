"""A recording from a model that runs here: texts through a model out of a folder, and the experts that their tokens chose.
Texts go no further than the tokenizer; only routing is kept."""

import threading
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
from engine.recording.per_request import MAX_RECORDED_BYTES, Prompt, Report
from engine.result import Stop
from engine.runtime.checkpoint import read_config
from engine.workload import DECODE, PREFILL, RoutingTrace

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel

    from engine.routing_recorder import RoutingRecorder

LOADING = 0.3
"""Share of the progress that is loading weights."""
PATIENCE = 0.5
"""Seconds that a pass is given to end by itself when it is stopped: one product of large matrices may take longer."""
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Texts:
    """Texts as a model takes them.

    ids: the tokens of each that has any
    model: its sizes
    size: the recording's, estimated
    cut: texts that were longer than the model takes
    empty: texts without a token
    """

    ids: list[list[int]]
    model: MoEModel
    size: Estimate
    cut: int
    empty: int

    def notes_on_texts(self) -> list[str]:
        """Facts about them that a reader should know."""
        cut = f"{self.cut:,} of the texts longer than the model takes, and cut"
        empty = f"{self.empty:,} of the texts without a token for the model's tokenizer, and left out"
        return [note for note, count in ((cut, self.cut), (empty, self.empty)) if count]

    def notes(self, folder: Path) -> list[str]:
        """Facts about a recording of them that a reader should know. folder: of the model"""
        notes = self.notes_on_texts()
        if not any(folder.glob("*.safetensors")):
            notes.append("the folder has no weights: the routing is of random ones, and says nothing about the model")
        return notes


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

    Raises InputError if the folder has no config of an MoE model or no tokenizer, or a token is none of the model's. PyTorch is
    not needed, so a family without an adapter is found by `load_model`.
    """
    config = read_config(folder)
    model = formats.read_model(folder / "config.json")
    words, most = config.get("vocab_size"), config.get("max_position_embeddings")
    room = most - max(new_tokens - 1, 0) if isinstance(most, int) else None  # the last token is never computed with
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
    cut = sum(len(ids) > len(own) for ids, own in zip(filter(None, every), kept, strict=True))
    return Texts(kept, model, size, cut, len(every) - len(kept))


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

    recorder, phases, faults = RoutingRecorder(model), [], []
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or []

    def run() -> None:
        done, total = 0, sum(map(len, texts.ids))
        try:
            # Long texts first would save padding, but leave none of the short ones when it is stopped.
            with _stopping(model, stop), recorder:
                for first in range(0, len(texts.ids), batch):
                    some = texts.ids[first : first + batch]
                    for step, _ in enumerate(passes(model, some, new_tokens, ends=ends)):
                        tokens, phase = (len(some), DECODE) if step else (len(some) * max(map(len, some)), PREFILL)
                        phases.append(np.full(tokens, phase, dtype=np.int8))
                    done += sum(map(len, some))
                    report(done / total, f"{first + len(some):,} of {len(texts.ids):,} texts")
        except Exception as fault:
            faults.append(fault)

    # In a thread, so that nobody waits for one product of large matrices. A daemon: it ends with the process at the latest.
    running = threading.Thread(target=run, daemon=True)
    running.start()
    while running.is_alive() and not stop():
        running.join(_LOOK_SECONDS)
    running.join(PATIENCE if stop() else None)
    if faults and not isinstance(faults[0], StoppedError):
        raise faults[0]
    if not phases:
        raise StoppedError("nothing was recorded: stopped before the first pass")
    return _trace(recorder, phases, texts.model, ranks, name), "stopped" if faults or running.is_alive() else ""


@contextmanager
def _stopping(model: "torch.nn.Module", stop: Stop) -> Iterator[None]:
    """Let a pass end at the next module of the model when `stop` becomes true: a whole one may take too long to wait for. At
    its end it is looked at once more, before anything else that waits for that end: no pass comes in late."""

    def look(*_: object) -> None:
        if stop():
            raise StoppedError("stopped in a pass")

    handles = [module.register_forward_pre_hook(look) for module in model.modules()]
    handles.append(model.register_forward_hook(look))
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

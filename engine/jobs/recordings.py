"""The job that records a person's own model. Its texts are handed over as the ids of their tokens (`Context.handed`), in no
file; the recording that comes of it is kept like one from a file."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine import store
from engine.errors import InputError
from engine.formats.source import warning
from engine.jobs.kinds import Answer, Ask
from engine.jobs.protocol import LOST_TEXTS, Context
from engine.model import MoEModel
from engine.recording.own_model import LOADING, Texts, record_texts, tokenised
from engine.workload import Origin

MOST_AT_ONCE = 256
"""Most texts in a batch."""


class RecordAsk(Ask):
    """A recording to make.

    folder: of the model, in one that the operator has listed
    name: of the recording
    new_tokens: generated of each text
    batch: texts at a time
    ranks: those that the texts are dealt to, None: no ranks are recorded
    cut, empty: texts that were cut, and left out, when they were made into tokens
    """

    folder: str
    name: str
    new_tokens: int = 0
    batch: int = 8
    ranks: int | None = None
    cut: int = 0
    empty: int = 0


class RecordAnswer(Answer):
    """A recording that was made.

    workload: its digest; config: source of the model's `config.json`, as `store.save_config` keeps it
    texts: all that were given; recorded: those that any token is of
    """

    workload: str
    name: str
    model: MoEModel
    config: str
    tokens: int
    texts: int
    recorded: int
    notes: tuple[str, ...] = ()


def handed_over(texts: Texts) -> bytes:
    """Texts as a job is handed them."""
    return json.dumps(texts.ids, separators=(",", ":")).encode()


def record(ask: RecordAsk, context: Context) -> RecordAnswer:
    """Record texts in the model of a folder, and keep the recording; also the one so far when it is stopped.

    Raises InputError if the texts are gone or the model cannot be run, StoppedError if nothing was recorded.
    """
    content = context.handed()
    if not content:
        raise InputError(LOST_TEXTS)
    # After the texts are read: PyTorch takes seconds to import.
    from engine.runtime.checkpoint import listed
    from engine.runtime.weights import Loading, load_model

    folder = listed(Path(ask.folder))
    texts = replace(tokenised(folder, json.loads(content), ask.new_tokens), cut=ask.cut, empty=ask.empty)
    context.report(0.0, f"about {texts.size.bytes / 1024**2:.1f} MB to record: {texts.size.sum}")
    loading = Loading(stop=context.stop, report=lambda share, line: context.report(LOADING * share, line))
    model = load_model(folder, loading)
    trace, ended = record_texts(
        *(model, texts, ask.new_tokens, ask.batch, ask.ranks, ask.name, context.stop),
        lambda share, line: context.report(LOADING + (1 - LOADING) * share, line),
    )
    notes = (*(["stopped before the last text"] if ended else []), *texts.notes(folder))
    trace = replace(trace, origin=Origin(format="own model", findings=tuple(warning("own-model", note) for note in notes)))
    return RecordAnswer(
        workload=store.save_workload(trace),
        name=trace.name,
        model=texts.model,
        config=store.save_config(folder / "config.json"),
        tokens=trace.tokens,
        texts=len(texts.ids),
        recorded=len(np.unique(trace.sequence)),
        notes=notes,
    )

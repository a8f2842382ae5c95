"""`record`: a recording from a running server, or from a model that runs here."""

import argparse
import signal
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from engine import formats
from engine.cli.output import answer, check_output, progress, stopped_by_signals
from engine.errors import InputError, StoppedError
from engine.files import replace_atomically
from engine.formats.writers import write_npz
from engine.recording import sglang, vllm
from engine.recording.own_model import LOADING, record_texts, tokenised
from engine.recording.per_request import Recorded, read_prompts, record_requests, save_requests, time_left
from engine.recording.server import Server, check_url

MAX_CONCURRENCY, MAX_RANKS = 256, 100_000
HANG_UP = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
"""Signals of a closed terminal, which must not leave a server recording; none under nohup."""


def run_record(options: argparse.Namespace) -> int:
    _check(options)
    if options.text is not None:
        return _from_model(options)
    return _from_recorder(options) if options.prompts is None else _from_answers(options)


def _check(options: argparse.Namespace) -> None:
    """Raise InputError for options that do not go together, before any server is asked."""
    if not 1 <= options.concurrency <= MAX_CONCURRENCY:
        raise InputError(f"--concurrency {options.concurrency}: choose between 1 and {MAX_CONCURRENCY}")
    if options.max_tokens is None:
        options.max_tokens = 64 if options.text is None else 0
    if options.max_tokens < (options.text is None):
        least = "at least one is needed" if options.text is None else "it cannot be negative"
        raise InputError(f"--max-tokens {options.max_tokens}: {least}")
    for name in ("seconds", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= 7 * 86400:
            raise InputError(f"--{name} {value:g}: choose between 0 and 604,800 s, a week")
    if options.text is not None and (wrong := [name for name in ("prompts", "from_folder") if getattr(options, name)]):
        raise InputError(f"--{wrong[0].replace('_', '-')} is of a server; a model that runs here takes --text")
    if options.text is not None and options.model is None:
        raise InputError("--model is missing: the folder of the model that --text is run through")
    if options.ranks is not None and (options.text is None or not 1 <= options.ranks <= MAX_RANKS):
        raise InputError(f"--ranks goes with --text, from 1 to {MAX_RANKS:,}")
    if options.prompts is not None or options.text is not None:
        if options.from_folder:
            raise InputError("--prompts takes routing from answers, --from-folder from SGLang's recorder; name one of them")
        if options.output.suffix.lower() != ".npz":
            raise InputError(f"{options.output}: the recording is an .npz; give it a name that ends so")
        check_output(options.output)
    elif options.vllm:
        raise InputError("vLLM has no recorder to start: it returns routing with each answer; name the --prompts to send")
    elif options.seconds is None:
        raise InputError("--seconds is missing: how long is SGLang's recorder to run? (or --prompts: which ones to send)")


def _from_recorder(options: argparse.Namespace) -> int:
    """Run SGLang's recorder for a time, and copy its files if they can be reached."""
    server = Server(check_url(options.sglang), options.timeout)
    if options.from_folder:
        sglang.check_folders(options.from_folder, options.output)
    recorder = sglang.recorder_of(server, sglang.read_info(server))
    before = set(sglang.dumps_in(options.from_folder)) if options.from_folder else set()
    with stopped_by_signals(*HANG_UP) as stop, progress() as report:
        seconds = sglang.record_window(server, options.seconds, stop, report)
    content: dict[str, Any] = {"engine": "sglang", "from": "recorder", "mode": recorder.mode, "seconds": seconds}
    content |= {"files": [], "expected_files": recorder.files, "copy_from": None, "notes": []}
    if recorder.metrics:
        content["notes"].append("the server's balancedness metrics use the same recorder and rest until it is started again")
    if options.from_folder:
        # A new handler: the first Ctrl-C ended the recording but keeps it, a further one ends the wait.
        with stopped_by_signals() as stop:
            written = sglang.wait_for_dumps(options.from_folder, before, recorder.files, options.timeout, stop)
        content["files"] = [str(path) for path in sglang.copy_dumps(written, options.output)]
        if len(written) < recorder.files:
            content["notes"].append(
                f"{len(written)} of {recorder.files} files, one a rank: the others are on the machines of their ranks"
            )
    else:
        host = urlsplit(server.url).hostname
        content["copy_from"] = f"{host}:{sglang.USUAL_FOLDER}/{sglang.PATTERN}"
    answer(options, content, _recorder_as_text)
    return 0


def _recorder_as_text(content: dict[str, Any]) -> str:
    lines = [f"recorded for {content['seconds']:.1f} s in the mode {content['mode']}"]
    lines += [f"saved: {file}" for file in content["files"]]
    if content["copy_from"]:
        count = content["expected_files"]
        lines.append(
            f"the server wrote {count} file{'s' * (count > 1)} on its own machine, which HTTP does not give out. Copy "
            f"{content['copy_from']}, or what lies where its {sglang.FOLDER_VARIABLE} says: the newest, with several nodes "
            "from each. Next time --from-folder does it, where that folder can be reached from here"
        )
    return "\n".join(lines + [f"note: {note}" for note in content["notes"]])


def _from_answers(options: argparse.Namespace) -> int:
    """Write the routing that answers to the prompts carry as one file."""
    prompts = read_prompts(options.prompts)
    model = formats.read_model(options.model) if options.model else None
    server, metrics = Server(check_url(options.sglang or options.vllm), options.timeout), {}
    if options.sglang:
        info = sglang.read_info(server)
        model = model or sglang.model_served(server, info)
        ask = sglang.asker(server, info, model, options.max_tokens)
    else:
        ask = vllm.asker(server, vllm.served_model(server), model, options.max_tokens)
        metrics = vllm.read_metrics(server)
    with stopped_by_signals(*HANG_UP) as stop, progress() as report:
        recorded = record_requests(ask, prompts, options.concurrency, options.seconds, stop, report)
    experts = save_requests(options.output, recorded, model.router_choices if model else None)
    content: dict[str, Any] = {
        "engine": "sglang" if options.sglang else "vllm",
        "from": "answers",
        "saved": str(options.output),
        "prompts": len(prompts),
        "answered": len(recorded.rows),
        "refused": len(recorded.refused),
        "tokens": experts.shape[0],
        "layers": experts.shape[1],
        "k": experts.shape[2],
        "metrics": {},
        "notes": _notes(recorded, experts),
    }
    if metrics:
        after = vllm.read_metrics(server)
        content["metrics"] = {name: [metrics.get(name), value] for name, value in after.items()}
    answer(options, content, _answers_as_text)
    if recorded.fault:
        raise InputError(f"{recorded.fault}; what was recorded before is in {options.output}")
    return 0


def _from_model(options: argparse.Namespace) -> int:
    """Write the routing of texts in a model that runs here as one file."""
    prompts = read_prompts(options.text)  # whose faults need not wait until PyTorch is imported
    from engine.runtime.adapters import family_of
    from engine.runtime.checkpoint import listed, read_config
    from engine.runtime.weights import Loading, load_model

    folder = listed(options.model)
    family_of(read_config(folder).get("model_type"), "config.json")
    texts = tokenised(folder, prompts, options.max_tokens)
    end = time.monotonic() + (options.seconds or float("inf"))
    over = f"{options.seconds or 0:g} s"
    with progress() as report:

        def late() -> bool:
            return time.monotonic() > end

        report(0.0, f"about {texts.size.bytes / 1024**2:.1f} MB to record: {texts.size.sum}")
        try:
            # A signal ends this at once, for nothing is there to be kept, and to import transformers takes seconds.
            model = load_model(folder, Loading(stop=late, report=lambda share, line: report(LOADING * share, line)))
            with stopped_by_signals(*HANG_UP) as stopped:
                begin = time.monotonic()

                def passed(share: float, line: str) -> None:
                    left = (time.monotonic() - begin) / share * (1 - share)
                    report(LOADING + (1 - LOADING) * share, f"{line}, about {time_left(left)}")

                trace, ended = record_texts(
                    *(model, texts, options.max_tokens, options.concurrency, options.ranks, options.text.stem),
                    lambda: stopped() or late(),
                    passed,
                )
                over = "stopped" if stopped() else f"{over} have passed"
        except StoppedError:
            if not late():
                raise
            raise InputError(f"nothing was recorded: {over} passed before the first text was done") from None
    try:
        with replace_atomically(options.output) as draft:
            write_npz(trace, draft)
    except OSError as error:
        raise InputError(f"{options.output} cannot be written: {error.strerror}") from None
    notes = [*([f"ended before the last text: {over}"] if ended else []), *texts.notes(folder)]
    content = {"from": "model", "saved": str(options.output), "prompts": len(texts.ids)}
    content["answered"] = len(np.unique(trace.sequence))
    content |= {"tokens": trace.tokens, "layers": trace.layers, "k": trace.k, "estimated_bytes": texts.size.bytes}
    answer(options, content | {"metrics": {}, "notes": notes}, _answers_as_text)
    return 0


def _notes(recorded: Recorded, experts: np.ndarray) -> list[str]:
    """Notes on the recording: an early end, refused prompts, and missing choices."""
    notes = []
    if recorded.ended:
        notes.append(f"ended before the last prompt: {recorded.ended}")
    if recorded.refused:
        number, reason = next(iter(recorded.refused.items()))
        notes.append(f"{len(recorded.refused)} prompts were refused and left out; prompt {number + 1}: {reason or 'no reason'}")
    dense = next(iter(recorded.rows.values())).shape[1] - experts.shape[1]
    if dense:
        notes.append(f"{dense} layer{'s' * (dense > 1)} without any choice left out, as dense")
    if left := recorded.tokens - len(experts):
        notes.append(f"{left:,} of {recorded.tokens:,} tokens without any choice left out: cached prefixes, or not captured")
    if missing := int((experts < 0).any(axis=(1, 2)).sum()):
        notes.append(f"{missing:,} tokens lack the choices of some layers, which are −1")
    return notes


def _answers_as_text(content: dict[str, Any]) -> str:
    sent = "texts" if content["from"] == "model" else "prompts"
    lines = [
        f"{content['answered']:,} of {content['prompts']:,} {sent}: {content['tokens']:,} tokens × {content['layers']} MoE "
        f"layers × {content['k']} experts"
    ]
    for name, (before, after) in content["metrics"].items():
        lines.append(f"{name}: {after:g}" + ("" if before in (None, after) else f" (before: {before:g})"))
    return "\n".join([*lines, *(f"note: {note}" for note in content["notes"]), f"saved: {content['saved']}"])

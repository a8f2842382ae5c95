"""SGLang over HTTP: its recorder, the files that this writes on the server's machine, copied from a folder that is reachable
here, and requests that return their routing.

Sources: SGLang, srt/entrypoints/http_server.py (`/start_`, `/stop_` and `/dump_expert_distribution_record`, `/server_info`),
srt/eplb/expert_distribution.py (the dump and its place), srt/state_capturer/routed_experts.py (`/generate`).
"""

import shutil
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import InputError
from engine.files import replace_atomically
from engine.formats import packaged
from engine.formats.routed_experts import decode_int32, without_cached
from engine.formats.source import quoted
from engine.model import MoEModel
from engine.recording.per_request import Ask, Prompt, Report, time_left
from engine.recording.server import Server, ServerError
from engine.result import Stop

START, STOP, DUMP = (f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump"))
RECORDER_FLAG = "--expert-distribution-recorder-mode"
ROUTING_FLAG = "--enable-return-routed-experts"
WHOLE = ("stat", "stat_approx")
"""Recorder modes in which rank 0 alone writes one file for all."""

CONTROL_SECONDS = 60.0
"""Limit of the answers to start and stop, which come between two batches."""

_LOOK_SECONDS = 0.2
PATTERN = "expert_distribution_recorder_*.pt"
FOLDER_VARIABLE = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
USUAL_FOLDER = "/tmp"
"""The folder that SGLang writes to without that variable."""
QUIET_SECONDS = 10.0
"""Time without a new byte after which no further file is waited for: ranks on other machines may write elsewhere."""


@dataclass(frozen=True)
class Recorder:
    """A server's recorder, as the server describes itself.

    mode: of its `--expert-distribution-recorder-mode`
    files: number of files that one dump writes; one a rank, or one for all
    metrics: True if it records by itself for its balancedness metrics, which a recording ends
    """

    mode: str
    files: int
    metrics: bool


def read_info(server: Server) -> dict[str, Any]:
    """The server's own account of its arguments and its version. Raises InputError."""
    for path in ("/server_info", "/get_server_info"):  # the second was its name before 2026
        try:
            return server.get_object(path)
        except ServerError as error:
            if error.status != 404:
                raise
    raise InputError(f"{server.url}: has no /server_info; is this an SGLang server?")


def recorder_of(server: Server, info: dict[str, Any]) -> Recorder:
    """The server's recorder, checked before anything is asked of it: without one, SGLang's scheduler raises upon the first
    request to start and takes the server down. Raises InputError."""
    key = "expert_distribution_recorder_mode"
    if key not in info:
        raise InputError(f"{server.url}: does not say whether it can record; name an SGLang server itself, not a router")
    if not info[key]:
        raise InputError(f"{server.url}: its recorder is off; start the server with {RECORDER_FLAG} stat (or per_token)")
    if info.get("enable_eplb"):
        raise InputError(
            f"{server.url}: balances experts by itself, from the same recorder, and moves them while it records; record on a "
            "server without --enable-eplb"
        )
    mode = str(info[key])
    ranks = [info.get(name) for name in ("tp_size", "pp_size")]
    ranks = [number if isinstance(number, int) and number > 0 else 1 for number in ranks]
    return Recorder(mode, 1 if mode in WHOLE else ranks[0] * ranks[1], bool(info.get("enable_expert_distribution_metrics")))


def record_window(server: Server, seconds: float, stop: Stop, report: Report) -> float:
    """Let the recorder run for so many seconds, or until `stop` is true, and have it write its records; returns the seconds
    that it ran. After the request to start, the server is asked to stop in every case. Raises InputError."""
    begin, control = time.monotonic(), replace(server, timeout=min(server.timeout, CONTROL_SECONDS))
    try:
        control.post(START, {})
        while (passed := time.monotonic() - begin) < seconds and not stop():
            report(passed / seconds, f"recording, {time_left(seconds - passed)}")
            time.sleep(min(_LOOK_SECONDS, seconds - passed))
    except BaseException as error:
        with suppress(InputError):  # the fault before is the news
            control.post(STOP, {})
        if isinstance(error, ServerError) and error.status == 404:
            raise InputError(f"{error}: it cannot record; start the server with {RECORDER_FLAG} stat (or per_token)") from None
        raise
    _stop(control)
    report(1.0, "stopped; the server writes what it recorded")
    server.post(DUMP, {})
    return passed


def _stop(server: Server) -> None:
    """Stop the recorder, at a second attempt if need be."""
    try:
        server.post(STOP, {})
    except InputError:
        try:
            server.post(STOP, {})
        except InputError as error:
            raise InputError(f"{error}; the server may still be recording: POST {server.url}{STOP}") from None


def model_served(server: Server, info: dict[str, Any]) -> MoEModel:
    """The model that the server says it serves, if it is a packaged one; else raises InputError that asks for it."""
    served = str(info.get("model_path", ""))
    if packaged.is_packaged(served):
        return packaged.packaged_model(served)
    raise InputError(
        f"{server.url}: serves {quoted(served)}, which no packaged model is called; its answers do not say how many layers and "
        "experts per token they have, so name its config.json with --model"
    )


def asker(server: Server, info: dict[str, Any], model: MoEModel, max_tokens: int) -> Ask:
    """A function that sends one prompt to `/generate` and decodes the routing of its tokens. Raises InputError if the server's
    own arguments say that it returns none."""
    if info.get("enable_return_routed_experts") is False:
        raise InputError(f"{server.url}: returns no routing; start the server with {ROUTING_FLAG}")

    def ask(prompt: Prompt) -> np.ndarray:
        body = {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {"max_new_tokens": max_tokens},
            "return_routed_experts": True,
        }
        answer = server.post_for_json("/generate", body)
        return _routing(server, answer[0] if isinstance(answer, list) and len(answer) == 1 else answer, model)

    return ask


def _routing(server: Server, answer: object, model: MoEModel) -> np.ndarray:
    """The choices in one answer, int16[row, decoder layer, k], -1 for a cached prefix; raises InputError."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    text = meta.get("routed_experts") if isinstance(meta, dict) else None
    if text is None:
        raise InputError(f"{server.url}/generate: answers without routed experts; start the server with {ROUTING_FLAG}")
    experts = decode_int32(text, model.layers, model.experts_per_token, str(meta.get("routed_experts_dtype") or "int32"))
    prompt, completion = meta.get("prompt_tokens"), meta.get("completion_tokens")
    if isinstance(prompt, int) and isinstance(completion, int) and len(experts) != prompt + completion - 1:
        raise InputError(
            f"{server.url}/generate: routing of {len(experts)} tokens for {prompt} + {completion} − 1; {model.name} has "
            f"{model.layers} layers and {model.experts_per_token} experts per token, is that the model it serves?"
        )
    if experts.max() >= model.router_choices:
        raise InputError(
            f"{server.url}/generate: chose expert {experts.max()}, but {model.name} has only {model.router_choices}; are these "
            "slots of redundant experts, or another model?"
        )
    return without_cached(experts, meta)


def dumps_in(folder: Path) -> dict[str, int]:
    """Sizes of the recorder's files in a folder, by name. Raises InputError if there is no such folder."""
    try:
        return {path.name: path.stat().st_size for path in folder.glob(PATTERN) if path.is_file()}
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}") from None


def check_folders(source: Path, target: Path) -> None:
    """Raise InputError unless the source can be read and the target be written, before anything is recorded for it."""
    if not source.is_dir():
        raise InputError(f"--from-folder {source}: there is no such folder; name the server's {FOLDER_VARIABLE}")
    dumps_in(source)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{target} cannot be made a folder: {error.strerror}") from None
    if source.resolve() == target.resolve():
        raise InputError(f"{target} is where the server writes already; name another folder with -o")


def wait_for_dumps(folder: Path, before: set[str], files: int, timeout: float, stop: Stop) -> list[Path]:
    """The files of a dump, once all are complete: as many as the ranks write, or those that came before nothing changed for
    `QUIET_SECONDS`. A file of torch.save is a zip archive, with its directory written last. Raises InputError if none came
    within `timeout` seconds.

    before: names that were there when the recording began
    """
    seen: dict[str, int] = {}
    begin = changed = time.monotonic()
    while True:
        now, look = time.monotonic(), {name: size for name, size in dumps_in(folder).items() if name not in before}
        if look != seen:
            seen, changed = look, now
            time.sleep(_LOOK_SECONDS)
            continue
        complete = [folder / name for name in sorted(seen) if zipfile.is_zipfile(folder / name)]
        if len(complete) >= files or (complete and now - changed > QUIET_SECONDS):
            return complete
        if now - begin > timeout or stop():
            break
        time.sleep(_LOOK_SECONDS)
    if complete:
        return complete
    raise InputError(
        f"{folder}: no file came{' that is complete' if seen else ''} within {timeout:g} s; is it the server's "
        f"{FOLDER_VARIABLE}, on a file system that both see?"
    )


def copy_dumps(dumps: list[Path], target: Path) -> list[Path]:
    """Copies of the files in the folder `target`, each there whole or not at all. Raises InputError."""
    copies = []
    for dump in dumps:
        try:
            with replace_atomically(target / dump.name) as draft:
                shutil.copyfile(dump, draft)
        except OSError as error:
            raise InputError(f"{dump.name} cannot be copied to {target}: {error.strerror}") from None
        copies.append(target / dump.name)
    return copies

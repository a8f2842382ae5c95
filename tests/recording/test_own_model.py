"""Recordings from a model that runs here: the routing of every token as the router chose it, with its place and phase, whatever
the batches; stopped soon; nothing of the texts kept; and the command around it."""

import json
import signal
import tempfile
import threading
import time

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from engine import formats
from engine.cli import main
from engine.errors import StoppedError
from engine.recording.own_model import record_texts, tokenised
from engine.result import never
from engine.runtime.checkpoint import SWITCH, folders, listed
from engine.runtime.weights import load_model
from engine.workload import DECODE, PREFILL
from tests.cases.refusals import refusal
from tests.cases.tiny_models import CONFIGS, saved
from tests.faults import small_files

TEXTS = ["w5 w17 w3", "w8", "w1 w2 w3 w4 w5 w6 w7", "w60 w61"]


def quiet(share: float, line: str) -> None:
    """A report that nobody reads."""


def routed(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """int64[token, layer, k]: the choices of one text alone, as the routers return them, each token's ascending."""
    chosen = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
        for name, module in model.named_modules()
        if type(module).__name__.endswith(("TopkRouter", "TopKRouter"))
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return np.sort(torch.stack(chosen, dim=1).numpy(), axis=2)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("batch", "new"), [(1, 0), (3, 5)])
def test_every_token_is_recorded_as_it_was_routed(tmp_path, family, batch, new):
    folder = saved(tmp_path, family)
    model, texts = load_model(folder), tokenised(folder, TEXTS, new)
    trace, ended = record_texts(model, texts, new, batch, 2, "mine", never, quiet)
    assert not ended and trace.model_layers == texts.model.moe_layers
    at = 0
    for number, ids in enumerate(texts.ids):
        whole = ids if not new else model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)[0, :-1].tolist()
        own = slice(at, at + len(whole))
        assert np.array_equal(np.sort(trace.experts[own], axis=2), routed(model, whole))
        assert (trace.sequence[own] == number).all() and (trace.source_rank[own] == number % 2).all()
        assert trace.phase[own].tolist() == [PREFILL] * len(ids) + [DECODE] * (len(whole) - len(ids))
        at += len(whole)
    assert at == trace.tokens
    assert texts.size.bytes == trace.experts.nbytes  # nothing was left out


def test_a_sequence_that_has_ended_is_recorded_no_further(tmp_path):
    folder = saved(tmp_path)
    model, texts = load_model(folder), tokenised(folder, TEXTS, 6)
    words = model.generate(torch.tensor([texts.ids[0]]), max_new_tokens=6, do_sample=False)[0, len(texts.ids[0]) :].tolist()
    model.generation_config.eos_token_id = words[2]
    trace, _ = record_texts(model, texts, 6, 4, None, "mine", never, quiet)
    assert (trace.sequence == 0).sum() == len(texts.ids[0]) + words.index(words[2])
    assert trace.source_rank is None


def test_stop_keeps_the_passes_so_far_and_ends_within_one(tmp_path):
    folder = saved(tmp_path)
    model, texts = load_model(folder), tokenised(folder, TEXTS * 3, 0)
    asked = iter(range(10**9))
    one_pass = sum(1 for _ in model.modules())
    trace, ended = record_texts(model, texts, 0, 1, None, "mine", lambda: next(asked) > 2.5 * one_pass, quiet)
    assert ended == "stopped" and trace.sources == 2
    with pytest.raises(StoppedError):
        record_texts(model, texts, 0, 1, None, "mine", lambda: True, quiet)
    begin = time.monotonic()
    after = begin + 0.2
    record_texts(model, tokenised(folder, [TEXTS[2]], 100), 100, 1, None, "mine", lambda: time.monotonic() > after, quiet)
    assert time.monotonic() - begin < 2


def test_stop_waits_for_no_single_long_computation(tmp_path):
    folder = saved(tmp_path)
    model, texts = load_model(folder), tokenised(folder, TEXTS, 0)
    waits, goes_on = threading.Event(), threading.Event()

    def long(module, inputs):
        """One that takes as long as the test, from the third pass on."""
        passes.append(len(passes))
        if len(passes) == 3:
            waits.set()
            goes_on.wait(60)

    passes = []
    model.model.layers[-1].register_forward_pre_hook(long)
    begin = time.monotonic()
    trace, ended = record_texts(model, texts, 0, 1, None, "mine", waits.is_set, quiet)
    assert time.monotonic() - begin < 10 and ended == "stopped"
    assert trace.tokens == sum(map(len, texts.ids[:2]))
    goes_on.set()


def test_a_fault_of_the_model_is_not_taken_for_a_stop(tmp_path):
    folder = saved(tmp_path)
    model, texts = load_model(folder), tokenised(folder, TEXTS, 0)
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record_texts(model, texts, 0, 1, None, "mine", never, quiet)


def test_folders_that_can_be_opened(tmp_path, monkeypatch):
    for place in ("cache/models--a/snapshots/b", "cache/x/y/z/deeper", "one", "one/within", "elsewhere"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
    monkeypatch.delenv(SWITCH, raising=False)
    assert folders() == []
    monkeypatch.setenv(SWITCH, f"{tmp_path / 'one'}:{tmp_path / 'cache'}:{tmp_path / 'none'}:{tmp_path / 'one'}")
    assert folders() == [tmp_path / "one", tmp_path / "cache/models--a/snapshots/b"]
    assert [listed(folder) for folder in folders()] == folders()


def test_texts_that_the_model_cannot_take(tmp_path, monkeypatch):
    folder = saved(tmp_path)
    long = " ".join([f"w{number}" for number in range(96)] * 2)
    for new, room in ((0, 128), (1, 128), (29, 100)):  # the last new token takes no position
        texts = tokenised(folder, [long, "w1"], new)
        assert [len(ids) for ids in texts.ids] == [room, 1] and texts.cut == 1
    trace, _ = record_texts(load_model(folder), texts, 29, 1, None, "mine", never, quiet)
    assert (trace.sequence == 0).sum() == 128
    assert tokenised(folder, ["w1"], 128).ids == [[1]]
    assert "129 new tokens of each text do not fit" in refusal(tokenised, folder, ["w1"], 129)
    assert "text 2 has token 96, and the model knows 96" in refusal(tokenised, folder, [[1], [96]], 0)
    assert "the texts have no tokens" in refusal(tokenised, folder, [" "], 0)
    monkeypatch.setattr("engine.recording.own_model.MAX_RECORDED_BYTES", 10)
    assert "larger than a file of 200 MB (3 tokens × 2 layers × 2 experts × 2 bytes" in refusal(
        tokenised, folder, [TEXTS[0]], 0
    )
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: is no tokenizer" in refusal(tokenised, folder, TEXTS, 0)
    (folder / "tokenizer.json").unlink()
    assert "texts have to be lists of token ids" in refusal(tokenised, folder, TEXTS, 0)


# The command.


@pytest.fixture
def record(tmp_path, monkeypatch, capsys):
    """A function that runs the command on a folder and texts, and returns its exit code, standard output and errors."""
    folder = saved(tmp_path / "models" / "tiny")
    monkeypatch.setenv(SWITCH, str(tmp_path / "models"))
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))

    def run(*words: str, output: str = "out.npz") -> tuple[int, str, str]:
        given = ["--text", str(tmp_path / "texts.txt"), "--model", str(folder), "-o", str(tmp_path / output), *words]
        code = main(["record", *given])
        return code, *capsys.readouterr()

    run.folder = folder
    return run


def test_the_command_writes_a_recording_that_can_be_planned_on(record, tmp_path):
    code, said, progress = record("--max-tokens", "3", "--concurrency", "2", "--ranks", "2", "--json")
    assert code == 0
    content = json.loads(said)
    assert content["tokens"] == 13 + 4 * 2 and content["answered"] == 4 and not content["notes"]
    assert "0% about 0.0 MB to record: 21 tokens × 2 layers × 2 experts × 2 bytes, before compression" in progress
    assert "4 of 4 texts" in progress
    trace = formats.read_workload(tmp_path / "out.npz")
    assert trace.tokens == 21 and trace.num_experts == 8 and trace.model_layers == (1, 2)
    assert set(trace.source_rank) == {0, 1} and set(trace.phase) == {PREFILL, DECODE}
    assert b"w17" not in (tmp_path / "out.npz").read_bytes()


def test_the_command_refuses_in_one_line(record, tmp_path, monkeypatch):
    for words, line in (
        (("--prompts", "texts.txt"), "--prompts is of a server; a model that runs here takes --text"),
        (("--ranks", "0"), "--ranks goes with --text, from 1 to 100,000"),
        (("--max-tokens", "-1"), "--max-tokens -1: it cannot be negative"),
        (("-o", str(tmp_path / "out.csv")), "the recording is an .npz"),
        (("--model", str(record.folder.parent / "none")), "none: there is no such folder of a model"),
        (("--model", str(record.folder.parent)), "models: a model's folder has a config.json, and safetensors files"),
        (("--model", str(tmp_path)), "models are opened from the folders that SWITCHYARD_MODELS lists"),
    ):
        code, _, errors = record(*words)
        assert code == 2 and line in errors, words
    for config, line in (
        ({}, "config.json: a model without a model_type has no adapter"),
        ({"model_type": "llama"}, "config.json: the family 'llama' has no adapter"),
        ({"model_type": "mixtral", "quantization_config": {"bits": 4}}, "config.json: the weights are quantised"),
    ):
        (record.folder / "config.json").write_text(json.dumps(config))
        code, _, errors = record()
        assert code == 2 and line in errors, config
    monkeypatch.delenv(SWITCH)
    assert "(none is)" in record()[2]


def test_the_file_of_texts_is_looked_at_before_the_model(record, tmp_path, monkeypatch):
    monkeypatch.delenv(SWITCH)  # which the folder would fail at
    for content, line in (("", "has no prompt"), ("\n  \n", "has no prompt"), (b"\xff\xfe", "is not UTF-8 text")):
        (tmp_path / "texts.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
        code, _, errors = record()
        assert code == 2 and line in errors, content


def test_an_output_that_cannot_be_written_is_found_before_the_model_runs(record):
    # Into which not even root may write.
    code, _, errors = record("-o", "/proc/out.npz")
    assert code == 2 and "/proc/out.npz cannot be written" in errors and "to record" not in errors


@pytest.mark.parametrize("where", ["a folder", "a device"])
def test_a_full_disk_is_one_line_and_nothing_is_left_behind(record, tmp_path, monkeypatch, where):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    if where == "a device":
        (tmp_path / "out.npz").symlink_to("/dev/full")
        code, _, errors = record()
        reason = "No space left on device"
    else:
        with small_files(100):  # less than the recording takes
            code, _, errors = record()
        reason = "File too large"
        assert not (tmp_path / "out.npz").exists()
    assert code == 2 and errors.splitlines()[-1] == f"error: {tmp_path / 'out.npz'} cannot be written: {reason}"
    assert not list((tmp_path / "temporary").iterdir())
    assert not list(tmp_path.glob(".out.npz*"))


def test_the_time_that_was_given_is_named_when_it_is_over(record, tmp_path, monkeypatch):
    code, _, errors = record("--seconds", "1e-6")
    assert code == 2 and "nothing was recorded: 1e-06 s passed before the first text was done" in errors
    assert not (tmp_path / "out.npz").exists()

    def half(model, texts, *rest):
        trace, _ = record_texts(model, texts, *rest[:-2], never, quiet)
        return trace, "stopped"

    monkeypatch.setattr("engine.cli.record.record_texts", half)
    code, said, _ = record("--seconds", "500")
    assert code == 0 and "note: ended before the last text: 500 s have passed" in said


def test_ctrl_c_while_the_model_is_loaded_ends_at_once(record, tmp_path, monkeypatch):
    def load_model(folder, loading):
        """Loading in which the signal arrives, and which does not ask whether it is to stop: an import."""
        signal.raise_signal(signal.SIGINT)
        pytest.fail("went on")

    monkeypatch.setattr("engine.runtime.weights.load_model", load_model)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background begins without it
    try:
        with pytest.raises(KeyboardInterrupt):
            record()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "out.npz").exists()


def test_texts_without_a_token_are_counted(record, tmp_path):
    (tmp_path / "texts.jsonl").write_text('"w1 w2"\n" "\n"w3"\n')
    code, said, _ = record("--text", str(tmp_path / "texts.jsonl"))
    assert code == 0 and "2 of 2 texts: 3 tokens" in said
    assert "note: 1 of the texts without a token for the model's tokenizer, and left out" in said


def test_routing_of_random_weights_says_so(record):
    (record.folder / "model.safetensors").unlink()
    code, said, _ = record()
    assert code == 0 and "the folder has no weights: the routing is of random ones" in said

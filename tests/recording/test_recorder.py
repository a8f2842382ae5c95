"""SGLang's recorder by the command line: start, wait, stop, dump, fetch; its prompts; and the guide that says so."""

import json
import os
import shlex
import signal
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch

from engine.cli import parser
from engine.cli.record import HANG_UP
from engine.model import MoEModel
from engine.recording import GUIDES, per_request, sglang
from engine.recording import sglang as client
from engine.recording.estimate import ESTIMATES, estimate
from engine.recording.guide import as_markdown
from engine.recording.per_request import read_prompts
from engine.recording.server import Server
from engine.units import size
from tests.cases.files import refused, saver
from tests.cases.refusals import refusal
from tests.recording.stand_in import Reply, SGLang, fault

saved = saver("p.txt")
START, STOP, DUMP = (f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump"))


def test_it_starts_waits_stops_dumps_and_fetches(sglang, folder, record, tmp_path):
    (folder / "expert_distribution_recorder_1.5.pt").write_bytes(b"of last week")
    begin = time.monotonic()
    code, out, err = record(
        "--sglang", sglang.url + "/", "--seconds", "0.3", "--from-folder", folder, "-o", tmp_path / "out", "--json"
    )
    assert code == 0 and time.monotonic() - begin >= 0.3
    assert [path for method, path, _ in sglang.requests if method == "POST"] == [START, STOP, DUMP]
    answer = json.loads(out)
    assert answer["mode"] == "stat" and answer["expected_files"] == 1 and answer["copy_from"] is None
    assert 0.3 <= answer["seconds"] < 5
    (file,) = answer["files"]
    assert list((tmp_path / "out").iterdir()) == [Path(file)]
    assert torch.load(file, weights_only=True)["logical_count"].shape == (2, 4, 8)
    assert "recording, " in err and "left" in err


def test_every_rank_s_file_is_fetched(folder, record, tmp_path):
    server = SGLang(folder, ranks=4, mode="per_token")
    code, out, _ = record("--sglang", server.url, "--seconds", "0.1", "--from-folder", folder, "-o", tmp_path / "out")
    assert code == 0 and out.count("saved: ") == 4
    assert sorted(path.name[-5:] for path in (tmp_path / "out").iterdir()) == ["_0.pt", "_1.pt", "_2.pt", "_3.pt"]
    server.close()


def test_without_a_folder_it_says_what_to_copy(sglang, record, tmp_path):
    code, out, _ = record("--sglang", sglang.url, "--seconds", "0.1", "-o", tmp_path / "out")
    assert code == 0 and sglang.dumps == 1 and not (tmp_path / "out").exists()
    assert "127.0.0.1:/tmp/expert_distribution_recorder_*.pt" in out
    assert "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR" in out and "--from-folder" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, *HANG_UP])
@pytest.mark.clock
def test_a_signal_stops_the_server_and_keeps_what_there_is(sglang, folder, record, tmp_path, number):
    def interrupt() -> None:
        while not sglang.asked(START):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    begin = time.monotonic()
    code, out, _ = record("--sglang", sglang.url, "--seconds", "600", "--from-folder", folder, "-o", tmp_path / "out")
    assert time.monotonic() - begin < 10
    assert code == 0 and out.count("saved: ") == 1
    assert not sglang.recording and sglang.dumps == 1


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"enable_eplb": True}, "without --enable-eplb"),
        ({"expert_distribution_recorder_mode": ...}, "not a router"),
        ({"expert_distribution_recorder_mode": None}, "--expert-distribution-recorder-mode stat"),
    ],
)
def test_servers_that_must_not_be_started(sglang, record, tmp_path, change, part):
    sglang.info = {name: value for name, value in (sglang.info | change).items() if value is not ...}
    assert part in fault(record("--sglang", sglang.url, "--seconds", "1", "-o", tmp_path / "out"))
    assert {path for _, path, _ in sglang.requests} == {"/server_info"}


def test_the_older_name_of_server_info_and_metrics_that_share_the_recorder(sglang, record, tmp_path):
    sglang.answers["/get_server_info"] = sglang.answers.pop("/server_info")
    sglang.info["enable_expert_distribution_metrics"] = True
    code, text, _ = record("--sglang", sglang.url, "--seconds", "0.1", "-o", tmp_path / "out")
    assert code == 0 and "metrics use the same recorder" in text


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(500, {"error": {"message": "CUDA error:\nout of memory"}}), [f"{START}: HTTP 500 (CUDA error: out of memory)"]),
        (None, ["HTTP 404 (Not Found)", "--expert-distribution-recorder-mode stat"]),
        (Reply(401, {"detail": "Unauthorized"}), ["HTTP 401 (Unauthorized)"]),  # an endpoint for administrators
    ],
)
def test_a_server_that_fails_to_start_is_stopped_all_the_same(sglang, record, tmp_path, reply, said):
    sglang.answers[START] = lambda body: reply
    message = fault(record("--sglang", sglang.url, "--seconds", "1", "-o", tmp_path / "out"))
    assert all(part in message for part in said)
    assert len(sglang.asked(STOP)) == 1 and not sglang.dumps


def test_a_server_that_does_not_stop_is_asked_twice_and_named(sglang, record, tmp_path):
    sglang.answers[STOP] = lambda body: Reply(503, "busy")
    message = fault(record("--sglang", sglang.url, "--seconds", "0.1", "-o", tmp_path / "out"))
    assert "HTTP 503 (busy)" in message and f"may still be recording: POST {sglang.url}{STOP}" in message
    assert len(sglang.asked(STOP)) == 2


def test_a_folder_in_which_nothing_comes(sglang, record, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    options = ("--seconds", "0.1", "--from-folder", tmp_path / "elsewhere", "--timeout", "0.4", "-o", tmp_path / "out")
    message = fault(record("--sglang", sglang.url, *options))
    assert "no file came within 0.4 s" in message and "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR" in message
    assert not sglang.recording


def test_folders_are_checked_before_anything_starts(sglang, folder, record, tmp_path):
    options = ("--sglang", sglang.url, "--seconds", "1")
    assert "no such folder" in fault(record(*options, "--from-folder", tmp_path / "none", "-o", tmp_path / "out"))
    assert "writes already" in fault(record(*options, "--from-folder", folder, "-o", folder))
    (tmp_path / "file").touch()
    assert "cannot be made a folder" in fault(record(*options, "--from-folder", folder, "-o", tmp_path / "file"))
    assert not sglang.requests


def test_a_file_that_is_still_being_written_is_waited_for(folder):
    whole = folder / "whole"
    torch.save({"logical_count": torch.ones(3, 4, 8)}, whole)
    content, target = whole.read_bytes(), folder / "expert_distribution_recorder_7.0.pt"

    def write() -> None:
        with target.open("wb") as file:
            for at in range(0, len(content), len(content) // 4):
                file.write(content[at : at + len(content) // 4])
                file.flush()
                time.sleep(0.1)

    threading.Thread(target=write).start()
    assert sglang.wait_for_dumps(folder, set(), 1, 10, lambda: False) == [target]
    assert target.stat().st_size == len(content) and zipfile.is_zipfile(target)


def test_files_that_do_not_come_or_stay_cut_short(folder, monkeypatch):
    (folder / "expert_distribution_recorder_7.0.pt").write_bytes(b"PK\x03\x04 cut")
    assert "no file came that is complete within 0.2 s" in refusal(sglang.wait_for_dumps, folder, set(), 1, 0.2, lambda: False)
    assert "no file came" in refusal(sglang.wait_for_dumps, folder, set(), 1, 600, lambda: True)
    monkeypatch.setattr(sglang, "QUIET_SECONDS", 0.3)
    torch.save({}, folder / "expert_distribution_recorder_7.0_0.pt")
    assert len(sglang.wait_for_dumps(folder, set(), 16, 60, lambda: False)) == 1


def test_a_server_that_dies_meanwhile_is_one_line(sglang, record, tmp_path):
    def die(body: object) -> str:
        threading.Thread(target=sglang.close).start()
        return "Start recording the expert distribution.\n"

    sglang.answers[START] = die
    said = refusal(client.record_window, Server(sglang.url, 5), 0.2, lambda: False, lambda done, message: None)
    assert "may still be recording" in said and "connection refused" in said


def test_prompts_as_lines_and_as_json_lines_and_files_that_hold_none(tmp_path, monkeypatch):
    path = saved(tmp_path, 'Explain MoE.\n\n  {"prompt": "taken as it is"}  \r\nletzte\u2028Zeile')
    assert read_prompts(path) == ["Explain MoE.", '{"prompt": "taken as it is"}', "letzte\u2028Zeile"]
    text = '"a"\n{"prompt": "two\\nlines", "max_tokens": 9}\n{"text": "c"}\n[5, 0, 7]\n'
    assert read_prompts(saved(tmp_path, text, "p.jsonl")) == ["a", "two\nlines", "c", [5, 0, 7]]
    refused(tmp_path / "none.txt", "no such file", read=read_prompts)
    refused(saved(tmp_path, " \n"), "has no prompt", read=read_prompts)
    refused(saved(tmp_path, b"\xff\xfe"), "not UTF-8", read=read_prompts)
    monkeypatch.setattr(per_request, "MAX_FILE_BYTES", 1)
    refused(tmp_path / "p.txt", "larger than", read=read_prompts)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "line 2: is not valid JSON"),
        ('{"id": 7}', "line 2: needs 'prompt' or 'text', has 'id'"),
        ('{"messages": []}', "chat template"),
        ('{"prompt": ""}', "a text, or a list of token ids"),
        ("[1, -1]", "a text, or a list of token ids"),
        ("[true]", "a text, or a list of token ids"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_lines_that_are_no_prompt(tmp_path, line, part):
    refused(saved(tmp_path, f'"a"\n{line}\n', "p.jsonl"), part, read=read_prompts)


PAGE = Path(__file__).parents[2] / "docs" / "recording.md"
WAYS = {way.key: way for guide in GUIDES for way in guide.ways}
R1 = MoEModel(name="DeepSeek-R1", layers=61, dense_layers=(0, 1, 2), experts=256, experts_per_token=8, d_model=7168, d_ff=2048)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_the_documentation_has_the_same_words(guide):
    assert as_markdown(guide) in PAGE.read_text(), f"docs/recording.md: put as_markdown of {guide.name} in its place"


def test_the_documentation_and_the_estimates_know_every_way():
    assert sum(len(guide.ways) for guide in GUIDES) == len(WAYS)
    assert set(WAYS) == set(ESTIMATES)
    # Against the length of Python's json for ids that are all equally frequent.
    written = 58 * len(json.dumps([[(token * 8 + choice) % 256 for choice in range(8)] for token in range(256)])) / 256
    assert estimate("megatron", R1, 1).bytes == pytest.approx(written, rel=0.01)
    assert f"{written / 1e3:.1f} kB" in WAYS["megatron"].size
    estimated = estimate("sglang-answers", R1, tokens=100_000)
    assert estimated.sum == "100,000 tokens × 61 layers × 8 experts × 4 bytes × 4/3 in base64"
    assert size(estimated.bytes) == "260 MB"
    wide = R1.model_copy(update={"experts": 384})
    assert estimate("vllm-answers", wide, 1).bytes == 2 * estimate("vllm-answers", R1, 1).bytes


@pytest.mark.parametrize(
    ("way", "figure", "tokens", "passes", "ranks", "by_hand"),
    [
        ("sglang-stat", "62 MB", 0, 1000, 16, 1000 * 61 * 256 * 4),
        ("sglang-per-pass", "62 MB", 0, 1000, 1, 1000 * 61 * 256 * 4),
        ("sglang-per-token", "1952 bytes", 1, 0, 16, 61 * 8 * 4),
        ("sglang-answers", "2.6 kB", 1, 0, 1, 61 * 8 * 4 * 4 / 3),
        ("vllm-answers", "619 bytes", 1, 0, 1, 58 * 8 * 4 / 3),
        ("vllm-ascend-answers", "619 bytes", 1, 0, 1, 58 * 8 * 4 / 3),
        ("vllm-ascend-map", "68 kB", 0, 0, 1, 58 * (10 * 3 + 90 * 4 + 156 * 5)),
        ("tensorrt-llm", "95 MB", 0, 100, 8, 100 * 8 * 58 * 256 * 8),
        ("pytorch", "928 bytes", 1, 0, 1, 58 * 8 * 2),
    ],
)
def test_the_figures_are_the_estimate_s(way, figure, tokens, passes, ranks, by_hand):
    estimated = estimate(way, R1, tokens, passes, ranks)
    assert estimated.bytes == pytest.approx(by_hand)
    number, unit = figure.split()
    assert estimated.bytes == pytest.approx(float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[unit], rel=0.02)
    assert figure in " ".join(WAYS[way].size.split())


def test_our_commands_can_be_typed():
    for words in (shlex.split(way.ours) for way in WAYS.values() if way.ours):
        assert words[:3] == ["python", "-m", "engine"]
        options = parser().parse_args(words[3:])
        assert bool(options.sglang) != bool(options.vllm)

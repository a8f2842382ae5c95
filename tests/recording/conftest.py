"""Servers for a test, the model that they serve, and the command line."""

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.cli import main
from engine.recording import per_request
from engine.recording import sglang as sglang_client
from tests.recording.stand_in import SGLang, StandIn, Vllm


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWITCHYARD_API_KEY", raising=False)


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no test waits for the next look."""
    for module in (per_request, sglang_client):
        monkeypatch.setattr(module, "_LOOK_SECONDS", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder into which SGLang's recorder writes."""
    (tmp_path / "server").mkdir()
    return tmp_path / "server"


@pytest.fixture
def sglang(folder: Path) -> Iterator[SGLang]:
    server = SGLang(folder)
    yield server
    server.close()


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    server = Vllm()
    yield server
    server.close()


@pytest.fixture
def other() -> Iterator[StandIn]:
    """A server that nobody named."""
    server = StandIn()
    yield server
    server.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    sizes = {"layers": 4, "dense_layers": [0], "experts": 8, "experts_per_token": 2, "d_model": 64, "d_ff": 64}
    path.write_text(json.dumps({"name": "tiny"} | sizes))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("one two three\n\nfour five\nsix seven eight nine\n")
    return path


Record = Callable[..., tuple[int, str, str]]


@pytest.fixture
def record(capsys: pytest.CaptureFixture[str]) -> Record:
    """Runs `record` with the options: (exit code, standard output, standard error)."""

    def run(*options: object) -> tuple[int, str, str]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        code = main(["record", *map(str, options)])
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "r.npz"


@pytest.fixture
def from_vllm(vllm: Vllm, prompts: Path, out: Path, record: Record) -> Record:
    """Records the answers of vLLM to `prompts` in `out`."""
    return partial(record, "--vllm", vllm.url, "--prompts", prompts, "-o", out)


@pytest.fixture
def from_sglang(sglang: SGLang, prompts: Path, model: Path, out: Path, record: Record) -> Record:
    """Records the answers of SGLang to `prompts` in `out`."""
    return partial(record, "--sglang", sglang.url, "--prompts", prompts, "--model", model, "-o", out)

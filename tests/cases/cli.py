"""The command line called in this process, and the sample as its inputs."""

import json
import signal
from pathlib import Path

import pytest

from engine.cli import main
from tests.cases.files import config

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"
CLUSTER, MODEL = SAMPLES / "mixed-8.json", SAMPLES / "tiny-moe-alpha.json"
RECORDING = SAMPLES / "tiny-moe" / "alpha-code.npz"
INPUTS = ["--workload", RECORDING, "--cluster", CLUSTER, "--model", MODEL]
ALPHA = config("tiny", 128, 512, 8, 1, num_experts=16, moe_intermediate_size=512, num_attention_heads=4, vocab_size=1000)
"""The `config.json` of Hugging Face that fits the sample's model."""


class CommandLine:
    """Calls `python -m engine` in this process: (exit code, standard output, standard error)."""

    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        code = main([str(argument) for argument in arguments])
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
        printed = self.capsys.readouterr()
        return code, printed.out, printed.err

    def json(self, *arguments: object) -> dict:
        """The answer of a command that must succeed, as its one JSON object."""
        code, out, _ = self(*arguments, "--json")
        assert code == 0 and out.endswith("\n") and out.count("\n") == 1
        answer = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(answer, dict)
        return answer

    def text(self, *arguments: object) -> str:
        """Return the standard output of a command that must succeed."""
        code, out, _ = self(*arguments)
        assert code == 0 and not out.startswith("{")
        return out

    def refused(self, *arguments: object) -> str:
        """The one line with which a command must refuse its input."""
        code, out, errors = self(*arguments)
        assert (code, out) == (2, "")
        return error_line(errors)


def error_line(errors: str) -> str:
    """The only line that begins with `error:`; it is the last, and nothing but progress comes before it."""
    lines = errors.splitlines()
    assert [line.startswith("error: ") for line in lines] == [False] * (len(lines) - 1) + [True], errors
    assert "Traceback" not in errors
    assert all("%" in line or not line.strip() for line in lines[:-1]), errors
    return lines[-1]

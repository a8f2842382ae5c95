"""The command line's `solve`, called in this process."""

import io
import json

import pytest

from engine.cli import main


class Solver:
    """Calls `solve` in this process: (exit code, answer or None, what was printed on standard error)."""

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, kernel: str, instance, options: str = "{}"):
        text = instance if isinstance(instance, str) else json.dumps(instance)
        self.monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code = main(["solve", kernel, "--options", options])
        printed = self.capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else None, printed.err

    def answer(self, kernel: str, instance, options: str = "{}"):
        code, answer, errors = self(kernel, instance, options)
        assert (code, errors) == (0, "")
        return answer

    def refused(self, kernel: str, instance, *parts: str, options: str = "{}") -> None:
        code, answer, errors = self(kernel, instance, options)
        assert code == 2 and answer is None
        assert errors.startswith("error: ") and errors.count("\n") == 1 and errors.endswith("\n")
        for part in parts:
            assert part in errors, errors


@pytest.fixture
def solver(monkeypatch, capsys) -> Solver:
    return Solver(monkeypatch, capsys)

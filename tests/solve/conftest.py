"""The command line's `solve`, called in this process."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from engine.cli import main
from tests.oracles.recomputed import held_against_the_rules

COMMON = {"status", "objective", "bound", "runtime"}
KEYS = {
    "order": {"phases"},
    "two-tier": {"phases", "relays", "steps"},
    "assign": {"gpu_of_expert"},
    "colocate": {"partner"},
    "colocate-heterogeneous": {"assignment"},
    "affinity": {"gpu_of_expert", "node_hops", "gpu_hops"},
    "coactivation": {"gpu_of_expert", "rows", "imbalance"},
    "replicate": {"physical_to_logical", "balancedness"},
    "replicate-devices": {"experts_of_device"},
    "popularity": {"devices_of_expert"},
    "pipeline-degree": {"degree", "time_of_degree"},
    "weight-gradients": {"alltoall_of_dw"},
    "partition": {"ranges"},
    "partition-axes": {"satisfiable", "axis_of_tensor"},
    "priority": {"finish", "events"},
    "travel": {"fabric", "links"},
}
WHOLE = {
    *("gpu_of_expert", "partner", "assignment", "rows", "physical_to_logical", "experts_of_device", "degree"),
    *("alltoall_of_dw", "src", "dst", "first", "last", "parts", "index", "piece", "solutions"),
}
"""Keys of whole numbers in JSON."""


def whole_numbers(data: Any, key: str = "") -> Iterator[Any]:
    """All values under the keys of `WHOLE`."""
    if isinstance(data, dict | list):
        for name, part in data.items() if isinstance(data, dict) else enumerate(data):
            yield from whole_numbers(part, key if isinstance(data, list) else name)
    elif key in WHOLE and data is not None:
        yield data


class Solver:
    """Calls `solve` in this process: (exit code, answer or None, text on standard error)."""

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

    def checked(self, kernel: str, instance: dict, options: str = "{}", **wanted: Any) -> dict:
        """The answer of a kernel, after checking its keys and the rules. wanted: values that some keys must have"""
        answer = self.answer(kernel, instance, options)
        assert set(answer) == COMMON | KEYS[kernel] | ({"solutions"} if instance.get("count") else set())
        assert all(type(number) is int for number in whole_numbers(answer))
        assert answer["runtime"] >= 0
        held_against_the_rules(kernel, instance, answer, 1e-6 if kernel == "replicate" else 1e-9)
        assert {name: answer[name] for name in wanted} == {
            name: pytest.approx(value) if isinstance(value, float) else value for name, value in wanted.items()
        }
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

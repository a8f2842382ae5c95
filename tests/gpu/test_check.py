"""The script for machines with a GPU: what it says without one, and that no check hides another."""

import os

import pytest
import torch

from tests.gpu import check


def test_without_a_gpu_it_says_so_kindly(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main({"never": lambda: pytest.fail("there is no GPU")}) == 0
    assert "no GPU here" in capsys.readouterr().out


def test_every_check_has_its_own_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    folders = []

    def good() -> str:
        print("what a rank prints")
        folders.append(os.environ["SWITCHYARD_DATA"])
        return "3 ms"

    def broken() -> str:
        print("the last words of a rank")
        raise ZeroDivisionError

    before = os.environ["SWITCHYARD_DATA"]
    checks = {"first": broken, "second": good, "third": lambda: check.needs(False, "3 is not\n 4")}
    assert check.main(checks) == 1
    printed = capsys.readouterr()
    assert [line.split(None, 2) for line in printed.out.splitlines()] == [
        ["FAIL", "first", "ZeroDivisionError"],
        ["ok", "second", "3 ms"],
        ["FAIL", "third", "3 is not 4"],
    ]
    assert "the last words of a rank" in printed.err and "what a rank prints" not in printed.err
    assert os.environ["SWITCHYARD_DATA"] == before != folders[0], "it leaves nothing in the data folder"
    assert check.main({"second": good}) == 0


def test_shapes_are_those_of_the_catalogues_models():
    shapes = check.model_shapes()
    assert (28672, 4096) in shapes and (4096, 14336) in shapes, "Mixtral's experts"
    assert (256, 7168) in shapes, "DeepSeek's router"

"""Ranks compute with no more threads than they get."""

import os

import pytest
import torch

from engine.launch.rank.settings import threads


@pytest.mark.parametrize(
    ("limit", "ranks", "wanted"), [(None, 1, 8), ("3", 1, 3), ("3", 4, 2), ("0", 1, 8), ("", 2, 4), ("x", 16, 1)]
)
def test_as_many_as_there_are_processors_and_openmp_allows(monkeypatch, limit, ranks, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    if limit is not None:
        monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    assert threads(ranks) == wanted


def test_products_are_whole():
    """Told to take two threads where OpenMP gives one, oneDNN leaves half of this product as it was in memory."""
    assert os.environ["OMP_THREAD_LIMIT"] == "1", "as in all tests"
    before = torch.get_num_threads()
    torch.set_num_threads(threads())
    try:
        for _ in range(20):
            torch.full((1, 5000), float("nan"), dtype=torch.bfloat16)  # leaves NaN behind in the memory that comes next
            product = torch.zeros((1, 64), dtype=torch.bfloat16) @ torch.zeros((64, 5000), dtype=torch.bfloat16)
            assert not product.isnan().any()
    finally:
        torch.set_num_threads(before)

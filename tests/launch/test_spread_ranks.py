"""Tokens that spread inside nodes, sent by real ranks in slices: all arrive, and come back summed up at every stop."""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine.communication.travel import rows_of_tokens
from engine.network import off_diagonal
from tests import warm
from tests.launch.spread_ranks import cases_of

ROOT, RANKS = Path(__file__).parents[2], 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, warm_process) -> list[list[dict]]:
    """What every rank has got."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [str(warm.PYTHON), "-m", "tests.launch.spread_ranks"]
    environment = os.environ | {warm.ADDRESS: str(warm_process)}
    processes = [
        subprocess.Popen([*command, str(rank), str(RANKS), str(folder)], cwd=ROOT, env=environment)
        for rank in range(RANKS)
    ]
    try:
        assert [process.wait(60) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(RANKS)]


def test_every_rank_gets_the_tokens_of_its_experts(outcomes):
    for rank, exchanges in enumerate(outcomes):
        for (hosts, source, *_), exchange in zip(cases_of(RANKS), exchanges, strict=True):
            wanted = np.flatnonzero((hosts == rank).any(axis=1))
            assert exchange["came"] == [[token, source[token]] for token in wanted.tolist()]


def test_what_the_ranks_made_of_a_token_comes_home_summed_up(outcomes):
    for rank, exchanges in enumerate(outcomes):
        for (hosts, source, *_), exchange in zip(cases_of(RANKS), exchanges, strict=True):
            for token, summed in enumerate(exchange["summed"]):
                ranks = {int(host) for host in hosts[token] if host >= 0} if source[token] == rank else set()
                assert summed == [token * len(ranks), sum(2**host for host in ranks)]


def test_both_ends_log_the_rows_that_are_simulated(outcomes):
    for number, (hosts, source, stops, slices) in enumerate(cases_of(RANKS)):
        wanted = off_diagonal(rows_of_tokens(hosts, source, stops, "node"))
        for rank, exchanges in enumerate(outcomes):
            rows = Counter()
            for phase, src, dst, count in exchanges[number]["logged"]:
                assert 0 <= phase <= slices and rank in (src, dst)
                rows[src, dst] += count
            both_ways = wanted + wanted.T
            assert rows == {
                (src, dst): both_ways[src, dst] for src, dst in np.argwhere(both_ways).tolist() if rank in (src, dst)
            }

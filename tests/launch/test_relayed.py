"""Two-tier exchanges between real ranks: every row arrives in its place, and what was relayed is logged by both ends."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.launch.relayed_ranks import NODES, cases_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=NODES, ids="{} ranks".format)
def outcomes(request, tmp_path_factory, warm_process) -> list[list[dict]]:
    """What every rank has found."""
    ranks, folder = request.param, tmp_path_factory.mktemp("ranks")
    command = [str(warm.PYTHON), "-m", "tests.launch.relayed_ranks"]
    environment = os.environ | {warm.ADDRESS: str(warm_process)}
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), str(folder)], cwd=ROOT, env=environment)
        for rank in range(ranks)
    ]
    try:
        assert [process.wait(60) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"outcome-{rank}.json").read_text()) for rank in range(ranks)]


def test_every_row_arrives_in_its_place(outcomes):
    cases = cases_of(len(outcomes))
    for rank, exchanges in enumerate(outcomes):
        assert len(exchanges) == len(cases)
        for number, ((counts, _), exchange) in enumerate(zip(cases, exchanges, strict=True)):
            wanted = [[src, rank, row] for src in range(len(counts)) for row in range(counts[src, rank])]
            assert exchange["incoming"] == wanted, number


def test_every_hop_is_logged_once_by_each_of_its_ends(outcomes):
    for number, (_, done) in enumerate(cases_of(len(outcomes))):
        order = [[piece.phase, piece.src, piece.dst, piece.begin, piece.end] for piece in done.order]
        for rank, exchanges in enumerate(outcomes):
            mine = [piece for piece in order if rank in piece[1:3]]
            assert sorted(exchanges[number]["logged"]) == sorted(mine)

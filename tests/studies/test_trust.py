"""Predictions held against public measurements: held-out points are not fitted, and the errors are the product's."""

import json
from contextlib import redirect_stdout
from io import StringIO
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from engine.cli import main
from engine.compare.trust import Prediction, summaries
from engine.compare.trust.whole_steps import leave_one_out
from engine.costs import Datasheet, DeepEP, Silicon, choice
from engine.costs.deepep import FOLDER, measured_exchanges
from engine.reproduce.measured_steps import BY_LINES, LAYER, WHOLE, errors_on_slower_networks, layer_seconds
from engine.reproduce.pipemoe.testbed import model_step
from engine.systems import TRAINING, run
from engine.units import share

pytestmark = [pytest.mark.skipif(not measured_exchanges(FOLDER), reason="aiconfigurator-core is not installed")]


@pytest.fixture(scope="module")
def printed() -> str:
    """The predictions of the command as JSON, made once because they take a while."""
    with redirect_stdout(StringIO()) as output:
        assert main(["trust", "--json"]) == 0
    return output.getvalue()


@pytest.fixture(scope="module")
def held(printed) -> list[Prediction]:
    return [Prediction(**row) for row in json.loads(printed)]


def test_deepep_over_two_to_eight_nodes_is_met_within_the_promise(held):
    """On sizes that were not fitted: 15 % in the mean and 30 % at worst; as copies at whole rates it is several times that."""
    rows = {(row.of, row.nodes): row for row in summaries(held)}
    promised = [row for row in rows.values() if row.of in ("DeepEP normal dispatch", "DeepEP normal combine") and row.nodes > 1]
    assert len(promised) == 6
    for row in promised:
        assert row.mean <= 0.15 and row.worst <= 0.30 and row.points >= 11, row
        assert rows[f"{row.of}, every copy at full rate", row.nodes].mean > 5 * row.mean


def test_every_second_point_is_held_out_and_meets_nothing_by_construction(held):
    exchange = [point for point in held if point.of == "DeepEP normal dispatch" and point.nodes == 2]
    fitted = [point for point in exchange if point.fitted]
    assert len(fitted) == len(exchange) - len(fitted) + 1
    assert max(abs(point.error) for point in fitted) < 1e-6
    assert min(abs(point.error) for point in exchange if not point.fitted) > 1e-5
    assert all(point.measured > 0 and point.predicted > 0 for point in held)


def test_numbers_of_nodes_that_were_not_measured_are_honestly_worse(held):
    """Four nodes from two and eight: the error of an estimate between measured numbers of nodes."""
    left_out = next(row for row in summaries(held) if row.of == "DeepEP normal dispatch, from other numbers of nodes")
    known = next(row for row in summaries(held) if row.of == "DeepEP normal dispatch" and row.nodes == left_out.nodes)
    assert left_out.fitted == 0 and left_out.mean > 5 * known.mean


def test_summaries_leave_out_what_was_fitted():
    points = [Prediction("x", "y", 1, "a", 1.0, 9.0, True), Prediction("x", "y", 1, "b", 2.0, 3.0, False)]
    (row,) = summaries(points)
    assert (row.mean, row.worst, row.points, row.fitted) == (0.5, 0.5, 1, 1)
    assert summaries(points[:1]) == []


def test_the_table_in_the_documentation_is_this_one(held):
    page = (Path(__file__).parents[2] / "docs" / "trust-data.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("| ") and line.count("|") == 8)
    rows = list(takewhile(lambda line: line.startswith("| "), lines[begin + 2 :]))
    wanted = [
        f"| {row.of} | {row.hardware} | {row.nodes} | {share(row.mean)} | {share(row.worst)} | {row.points} | {row.fitted} |"
        for row in summaries(held)
    ]
    assert rows == wanted


def test_the_errors_that_pages_name_beside_the_costs_are_these(held):
    def median(nodes, *of: str) -> str:
        return share(np.median([abs(row.error) for row in held if row.of in of and nodes(row.nodes) and not row.fitted]))

    deepep = [f"DeepEP {kind} {way}" for kind in ("normal", "low latency") for way in ("dispatch", "combine")]
    assert choice.OFF["deepep"][1] == median(lambda nodes: nodes > 1, *deepep)
    assert choice.OFF["silicon"][1] == median(lambda nodes: nodes == 1, "NCCL all-to-all")
    page = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")
    gemm, exchange = choice.OFF["datasheet"]
    assert f"24 to {gemm} off for a GEMM on average, 44 to {exchange} for an all-to-all" in page
    assert f"| GEMM | {choice.OFF['silicon'][0]} |" in page and f"| Exchange across nodes | {choice.OFF['deepep'][1]} |" in page


@pytest.mark.parametrize(
    "cost, said",
    [
        (Datasheet(), "datasheet, typically 25 % off for a GEMM and 47 % for an exchange"),
        (Datasheet(launch=0.0), "datasheet; how far off is not known before a launch"),
        (choice.Combined(Silicon(), DeepEP()), "network by DeepEP's tables, typically 5.1 % off for a GEMM and 1.7 % for an"),
        (choice.Combined(Silicon(), Datasheet()), "network by datasheet, typically 5.1 % off for a GEMM and 47 % for an"),
        (DeepEP(), "DeepEP's tables; how far off is not known before a launch"),
    ],
)
def test_how_far_off_a_source_is_in_words(cost, said):
    assert said in choice.how_far_off(cost) and choice.how_far_off(cost) in choice.how_far_off(cost, training=True)


def test_training_steps_are_held_against_all_that_papers_measured(held):
    """42 whole steps and a layer, by the datasheet far shorter than they were: the pages name that error for training plans."""
    whole = [row for row in held if row.of in WHOLE]
    assert len(whole) == 36 + 6 and sum(row.of == BY_LINES for row in held) == 2
    assert not any(row.fitted for row in (*whole, *held[-2:])) and all(row.error < 0 for row in whole)
    middle = share(np.median([abs(row.error) for row in whole]))
    assert middle == choice.OFF_IN_A_STEP
    assert f"an exchange; {middle} for training steps that papers measured" in choice.how_far_off(Datasheet(), training=True)
    combined = choice.how_far_off(choice.Combined(Silicon(), Datasheet()), training=True)
    assert combined.endswith("unknown for a whole step")
    page = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")
    worst = share(max(abs(row.error) for row in whole))
    assert f"| Training step | {middle} | {worst} | {len(whole)} | " in page and "3.83 %" in page
    # One of each source again: the paper's own seconds, and ours as the plan of that system is simulated.
    of = {row.setting: row for row in whole}
    assert of[f"RM-2 by {TRAINING['fastermoe'].title}, 64 GPUs"].measured == 1.158
    problem = model_step("RM-2", 64)
    assert (
        of[f"RM-2 by {TRAINING['fastermoe'].title}, 64 GPUs"].predicted == run(TRAINING["fastermoe"], problem).result.objective
    )
    assert of["Transformer-XL of 12 layers by DeepSpeed, 16 GPUs"].measured == pytest.approx(0.333 / 0.395)


def test_why_lancets_own_error_is_far_smaller(held):
    """The reasons of its Figure 14: slower networks and one expert a token explain much, not all."""
    whole = np.abs([row.error for row in held if row.of in WHOLE])
    slower = errors_on_slower_networks()
    assert len(slower) == len(whole) and 0.0383 < slower.mean() < 0.55 * whole.mean()
    two, one = (np.abs(np.array(layer_seconds(choices)) / list(LAYER.values()) - 1).mean() for choices in (2, 1))
    assert one < 0.2 < two


@pytest.mark.everything
def test_what_is_left_out_of_the_fit_is_met_as_the_documentation_says():
    page = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")
    rows = leave_one_out().itertuples()
    wanted = [
        f"| {row.left_out} | {row.steps} | {share(row.token)} | {share(row.token_mean)} | {share(row.first_token)} |"
        for row in rows
    ]
    assert [line for line in page.splitlines() if line in wanted] == wanted


def test_the_command(capsys, monkeypatch, printed, held):
    rows = json.loads(printed)
    assert [set(row) for row in rows[:1]] == [{"of", "hardware", "nodes", "setting", "measured", "predicted", "fitted"}]
    monkeypatch.setattr("engine.cli.judgement.predictions", lambda: iter(held))
    assert main(["trust"]) == 0
    table = capsys.readouterr().out
    assert "DeepEP normal dispatch" in table and "points held out" in table
